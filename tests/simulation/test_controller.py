"""The production controller and queue against in-process workers, scorers and learner."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from rlhf_cluster import run_state
from rlhf_cluster.clock import SystemClock
from rlhf_cluster.controller import Controller, ControllerSettings, RunFailed
from rlhf_cluster.data.cursor import PromptCursor
from rlhf_cluster.experience_queue import ExperienceQueue
from rlhf_cluster.metrics.recorder import MetricsRecorder
from rlhf_cluster.protocols import PublishReport, ScorersBusy, WorkerFailed
from rlhf_cluster.types import Prompt
from tests.fakes import FakeLearner, FakeScorer, FakeWorkers

SETTINGS = ControllerSettings(
    seed=0,
    steps=5,
    groups_per_batch=4,
    samples_per_prompt=2,
    max_new_tokens=8,
    temperature=1.0,
    max_attempts=5,
    max_unscorable_fraction=0.1,
)
PROMPTS = [Prompt(f"p{index}", (1, 2, index), "text") for index in range(20)]


class Run:
    """A whole run out of fakes; parts can be handed in, the rest is made."""

    def __init__(
        self,
        *,
        settings: ControllerSettings = SETTINGS,
        max_staleness: int = 1,
        workers: FakeWorkers | None = None,
        scorer: FakeScorer | None = None,
        learner: FakeLearner | None = None,
        deadline_s: float = 5.0,
        state: dict[str, Any] | None = None,
        after_step: Callable[[int], Any] | None = None,
        after_first_publication: Callable[[], Any] | None = None,
    ) -> None:
        clock = SystemClock()
        self.workers = workers or FakeWorkers()
        self.learner = learner or FakeLearner()
        self.cursor = PromptCursor(PROMPTS, seed=0)
        self.queue = ExperienceQueue(
            groups_per_batch=settings.groups_per_batch,
            max_staleness=max_staleness,
            clock=clock,
            group_deadline_s=deadline_s,
        )
        self.recorder = MetricsRecorder(max_staleness=max_staleness, total_steps=settings.steps, clock=clock, sinks=[])
        step = 0
        if state is not None:
            step = run_state.restore(state, cursor=self.cursor, queue=self.queue)
            self.recorder.load_state_dict(state["metrics"])
        self.controller = Controller(
            settings,
            cursor=self.cursor,
            queue=self.queue,
            generator=self.workers,
            scorer=scorer or FakeScorer(),
            learner=self.learner,
            sink=self.workers,
            clock=clock,
            recorder=self.recorder,
            step=step,
            after_step=after_step,
            after_first_publication=after_first_publication,
        )

    def __call__(self, timeout_s: float = 10.0) -> Run:
        asyncio.run(asyncio.wait_for(self.controller.run(), timeout_s))
        return self

    def trained(self) -> list[str]:
        return [group.group_id for batch in self.learner.batches for group in batch.groups]

    def lags(self) -> list[int]:
        return [
            batch.learner_version - span.version
            for batch in self.learner.batches
            for member in batch.rollouts
            for span in member.rollout.version_spans
        ]


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_a_run_takes_exactly_its_steps_and_leaves_nothing_outstanding(max_staleness: int) -> None:
    run = Run(max_staleness=max_staleness)()
    assert run.learner.version == 5
    assert run.workers.published == [1, 2, 3, 4, 5]
    assert run.queue.outstanding == 0
    assert run.queue.ledger.counts["trained"].groups == 20
    assert len(run.workers.requests) == 20, "no work was generated that no step needed"


def test_one_step_with_a_wide_bound_neither_deadlocks_nor_overproduces() -> None:
    run = Run(settings=replace(SETTINGS, steps=1), max_staleness=3)()
    assert run.learner.version == 1
    assert len(run.workers.requests) == 4


def test_no_bound_of_zero_trains_the_order_of_a_plain_loop() -> None:
    run = Run(max_staleness=0, workers=FakeWorkers(seconds=lambda r: 0.001 * (r.sampling[0].seed % 7)))()
    plain = PromptCursor(PROMPTS, seed=0)
    assert run.trained() == [plain.next().group_id for _ in range(20)]  # type: ignore[union-attr]
    assert set(run.lags()) == {0}


@pytest.mark.parametrize("max_staleness", [1, 2])
def test_lag_stays_within_the_bound_when_the_learner_outruns_the_workers(max_staleness: int) -> None:
    workers = FakeWorkers(seconds=lambda r: 0.004 if r.sampling[0].seed % 3 else 0.02, publish_seconds=0.003)
    run = Run(max_staleness=max_staleness, workers=workers, learner=FakeLearner(seconds=0.001))()
    assert 0 < max(run.lags()) <= max_staleness
    assert min(run.lags()) >= 0


def test_every_prompt_is_trained_once_an_epoch_although_workers_and_scorers_fail() -> None:
    failed: set[str] = set()

    def fault(request: Any) -> BaseException | None:
        if request.attempt == 0 and request.sampling[0].seed % 2:
            failed.add(request.group_id)
            return WorkerFailed("rollout worker 0: process died")
        return None

    run = Run(workers=FakeWorkers(fault=fault), scorer=FakeScorer(fail_first=3))()
    assert failed
    assert Counter(run.trained()) == Counter(f"0:{prompt.prompt_id}" for prompt in PROMPTS)
    assert run.queue.ledger.counts["failed"].groups == len(failed) + 3


def test_a_group_that_came_back_one_sample_short_is_issued_again_and_never_trained_short() -> None:
    run = Run(workers=FakeWorkers(lose_sample=lambda r: r.attempt == 0 and r.prompt.prompt_id in {"p2", "p9"}))()
    sizes = {len(group.rollouts) for batch in run.learner.batches for group in batch.groups}
    assert sizes == {SETTINGS.samples_per_prompt}
    assert run.queue.ledger.counts["failed"].groups == 2


def test_a_prompt_that_always_fails_ends_the_run_and_is_named() -> None:
    workers = FakeWorkers(fault=lambda r: WorkerFailed("boom") if r.prompt.prompt_id == "p7" else None)
    with pytest.raises(RunFailed, match=r"prompt p7 was issued 5 times.*max_attempts 5"):
        Run(workers=workers)()


def test_unscorable_groups_are_left_out_whole_and_counted() -> None:
    scorer = FakeScorer(lambda prompt: float("nan") if prompt.prompt_id == "p3" else 1.0)
    run = Run(settings=replace(SETTINGS, steps=4, max_unscorable_fraction=0.5), scorer=scorer)()
    assert "0:p3" not in run.trained()
    assert run.learner.version == 4


def test_a_group_that_is_left_out_leaves_nothing_behind_in_the_controller() -> None:
    scorer = FakeScorer(lambda prompt: float("nan") if prompt.prompt_id == "p3" else 1.0)
    run = Run(settings=replace(SETTINGS, steps=4, max_unscorable_fraction=0.5), scorer=scorer)()
    assert run.controller._overlapped == {}


def test_the_reason_that_a_scorer_gives_is_the_one_that_is_counted() -> None:
    class TooLong(FakeScorer):
        async def score(self, prompt: Any, rollouts: Any) -> Any:
            members = await super().score(prompt, rollouts)
            if prompt.prompt_id != "p3":
                return members
            return [replace(member, score=float("nan"), unscorable="too_long") for member in members]

    run = Run(settings=replace(SETTINGS, steps=4, max_unscorable_fraction=0.5), scorer=TooLong())()
    counters = run.recorder.state_dict()["counters"]
    assert counters['rlhf_unscorable_total{reason="too_long"}'] == 2
    assert counters['rlhf_unscorable_total{reason="score"}'] == 0


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (WorkerFailed("reward scorer 0: RuntimeError"), "scorer_error"),
        (TimeoutError("reward scorer 0"), "scorer_timeout"),
    ],
)
def test_f12_a_prompt_that_scorers_fail_on_twice_is_left_out_and_counted(error: Exception, reason: str) -> None:
    calls: list[int] = []

    class Failing(FakeScorer):
        async def score(self, prompt: Any, rollouts: Any) -> Any:
            if prompt.prompt_id != "p3":
                return await super().score(prompt, rollouts)
            calls.append(rollouts[0].attempt)
            raise error

    run = Run(settings=replace(SETTINGS, steps=4, max_unscorable_fraction=0.5), scorer=Failing())()
    assert run.learner.version == 4
    assert calls == [0, 1]
    assert "0:p3" not in run.trained()
    counters = run.recorder.state_dict()["counters"]
    assert counters[f'rlhf_unscorable_total{{reason="{reason}"}}'] == 2
    assert run.queue.ledger.counts["filtered"].groups == 1


def test_a_prompt_that_no_scorer_had_room_for_is_not_the_prompts_fault() -> None:
    away = iter(range(3))

    class AwayForThree(FakeScorer):
        async def score(self, prompt: Any, rollouts: Any) -> Any:
            if prompt.prompt_id == "p3" and next(away, None) is not None:
                raise ScorersBusy("no scorer had room for score within 300 s: reward scorer 0")
            return await super().score(prompt, rollouts)

    run = Run(settings=replace(SETTINGS, steps=4), scorer=AwayForThree())()
    assert "0:p3" in run.trained()
    assert run.queue.ledger.counts["filtered"].groups == 0


def test_f12_a_prompt_that_was_scored_in_between_may_fail_once_more() -> None:
    calls: list[int] = []

    class NowAndThen(FakeScorer):
        async def score(self, prompt: Any, rollouts: Any) -> Any:
            if prompt.prompt_id == "p3":
                calls.append(rollouts[0].attempt)
                if len(calls) % 2:
                    raise WorkerFailed("reward scorer 0: RuntimeError")
            return await super().score(prompt, rollouts)

    class SkipsOnce(FakeLearner):
        async def train(self, batch: Any) -> Any:
            if len(calls) == 2 and "0:p3" in {group.group_id for group in batch.groups}:
                self._skip = {self._calls}
            return await super().train(batch)

    run = Run(scorer=NowAndThen(), learner=SkipsOnce())()
    assert calls == [0, 1, 2, 3]
    assert run.trained().count("0:p3") == 1


def test_f12_scorers_that_fail_on_too_many_prompts_end_the_run_with_the_reason() -> None:
    class Failing(FakeScorer):
        async def score(self, prompt: Any, rollouts: Any) -> Any:
            raise TimeoutError("reward scorer 0 did not finish score within 300 s")

    with pytest.raises(RunFailed, match=r"8 of the last 8 rollouts could not be scored.*last reason is scorer_timeout"):
        Run(scorer=Failing())()


def test_a_publication_that_no_worker_takes_ends_the_run_with_its_cause_and_not_with_a_deadline() -> None:
    class Refusing(FakeWorkers):
        async def publish(self, snapshot: Any) -> Any:
            return PublishReport(snapshot.version, (), {0: "checksum of lm_head differs"}, 0.0, 0.0)

    started = time.monotonic()
    with pytest.raises(RunFailed, match=r"no rollout worker took version 1.*checksum of lm_head differs"):
        Run(workers=Refusing(), deadline_s=8.0, max_staleness=0)()
    assert time.monotonic() - started < 5


def test_too_many_unscorable_rollouts_end_the_run_with_the_reason() -> None:
    scorer = FakeScorer(lambda prompt: float("nan") if int(prompt.prompt_id[1:]) % 2 else 1.0)
    with pytest.raises(RunFailed, match=r"of the last 8 rollouts could not be scored.*the last reason is score"):
        Run(scorer=scorer)()


def test_a_skipped_step_publishes_nothing_and_its_prompts_are_trained_later() -> None:
    run = Run(learner=FakeLearner(skip=[1]))()
    assert run.workers.published == [1, 2, 3, 4, 5]
    assert Counter(run.trained()) == Counter(f"0:{prompt.prompt_id}" for prompt in PROMPTS)
    assert run.queue.ledger.counts["failed"].groups == 4


def test_attempts_that_a_resume_took_back_count_no_failure_and_are_sampled_with_the_same_seeds() -> None:
    state: dict[str, Any] | None = None
    settings = replace(SETTINGS, max_attempts=1)
    for _ in range(2):
        stopped = Run(settings=settings, state=state)
        for _ in range(4):
            issue = stopped.cursor.next()
            stopped.queue.admit(issue.prompt, 0, group_id=issue.group_id)  # type: ignore[union-attr]
        saved = run_state.snapshot(0, cursor=stopped.cursor, queue=stopped.queue, recorder=stopped.recorder)
        state = json.loads(json.dumps(saved))
    requests = Run(settings=settings, state=state)().workers.requests
    assert max(request.attempt for request in requests) == 2
    plain = Run()().workers.requests
    assert {request.group_id: request.sampling for request in requests} == {
        request.group_id: request.sampling for request in plain
    }


def test_a_straggler_past_the_deadline_is_issued_again_and_its_late_answer_is_not_trained() -> None:
    workers = FakeWorkers(seconds=lambda r: 30.0 if r.prompt.prompt_id == "p5" and r.attempt == 0 else 0.001)
    run = Run(workers=workers, deadline_s=0.2)()
    assert Counter(run.trained()) == Counter(f"0:{prompt.prompt_id}" for prompt in PROMPTS)
    assert [r.attempt for r in workers.requests if r.prompt.prompt_id == "p5"] == [0, 1]


def test_a_learner_error_ends_the_run_with_that_error() -> None:
    with pytest.raises(RuntimeError, match="rank 1 ran out of memory"):
        Run(learner=FakeLearner(error=RuntimeError("rank 1 ran out of memory")))()


def test_a_bug_in_a_worker_is_not_tolerated_as_a_fault() -> None:
    with pytest.raises(KeyError, match="bug"):
        Run(workers=FakeWorkers(fault=lambda r: KeyError("bug")))()


def test_stop_ends_after_the_step_in_progress() -> None:
    async def after(step: int) -> None:
        if step == 2:
            run.controller.stop()

    run = Run(after_step=after)
    run()
    assert run.controller.step == 2
    assert run.learner.version == 2


def test_the_first_step_is_saved_before_its_publication_is_waited_for_and_checked() -> None:
    events: list[tuple[str, int]] = []

    async def after(step: int) -> None:
        events.append(("saved, published", len(run.workers.published)))

    async def check() -> None:
        events.append(("checked, published", len(run.workers.published)))

    settings = replace(SETTINGS, steps=2)
    workers = FakeWorkers(publish_seconds=0.01)
    run = Run(settings=settings, workers=workers, max_staleness=0, after_step=after, after_first_publication=check)
    run()
    assert events == [("saved, published", 0), ("checked, published", 1), ("saved, published", 1)]


def test_a_resumed_run_trains_each_prompt_of_the_epoch_once() -> None:
    saved: dict[str, Any] = {}

    async def after(step: int) -> None:
        if step == 2:
            state = run_state.snapshot(step, cursor=first.cursor, queue=first.queue, recorder=first.recorder)
            saved.update(json.loads(json.dumps(state)))
            first.controller.stop()

    first = Run(after_step=after)
    first()
    learner = FakeLearner()
    learner.version = 2
    workers = FakeWorkers()
    workers.versions = [2]
    second = Run(state=saved, learner=learner, workers=workers)()
    assert second.controller.step == 5
    assert Counter(first.trained() + second.trained()) == Counter(f"0:{prompt.prompt_id}" for prompt in PROMPTS)
    assert second.queue.ledger.counts["trained"].groups == 20


def test_batches_count_the_rollouts_that_overlapped_an_update() -> None:
    rows: list[dict[str, float]] = []

    class Rows:
        def step(self, step: int, version: int, row: Any) -> None:
            rows.append(dict(row))

        def live(self, values: Any) -> None: ...
        def evaluation(self, *args: Any) -> None: ...
        def close(self) -> None: ...

    slow_learner = FakeLearner(seconds=0.05)
    run = Run(max_staleness=1, workers=FakeWorkers(seconds=lambda r: 0.02, capacity=4), learner=slow_learner)
    run.recorder._sinks = (Rows(),)
    run()
    overlapping = [row["rlhf_batch_overlapping_rollouts"] for row in rows]
    assert overlapping[0] == 0
    assert all(count > 0 for count in overlapping[1:])

    rows.clear()
    synchronous = Run(max_staleness=0)
    synchronous.recorder._sinks = (Rows(),)
    synchronous()
    assert [row["rlhf_batch_overlapping_rollouts"] for row in rows] == [0] * 5
