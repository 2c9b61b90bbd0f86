"""Known faults of other systems, replayed against the production controller and queue in virtual time.

Case numbers are those of the known-faults list; each test's values are the case's own where it gives any.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from typing import Any

import pytest

from rlhf_cluster.data.cursor import PromptCursor
from rlhf_cluster.protocols import RolloutRequest, WeightSnapshot, WorkerSlot
from rlhf_cluster.simulation.engine import Engine
from rlhf_cluster.simulation.fault_run import FaultRun
from rlhf_cluster.simulation.faulty_actors import FaultyWorkers
from rlhf_cluster.simulation.report import SimulationReport
from rlhf_cluster.simulation.virtual_time import VirtualTimeLoop, run_virtual
from rlhf_cluster.types import Prompt, Sampling, VersionSpan
from tests.simulation.worlds import scripted


def done(run: FaultRun) -> SimulationReport:
    report = run.run()
    assert report.ok, "\n".join(report.trace[-30:])
    return report


def counts(run: FaultRun) -> dict[str, int]:
    """Non-zero states of the ledger in groups."""
    assert run.queue is not None
    return {state: count.groups for state, count in run.queue.ledger.counts.items() if count.groups}


def times(report: SimulationReport, event: str) -> list[float]:
    """When events whose text begins with ``event`` happened."""
    lines = [line.split(" ", 1) for line in report.trace]
    return [float(time) for time, text in lines if text.startswith(event)]


def texts(report: SimulationReport, event: str) -> list[str]:
    return [text for line in report.trace if (text := line.split(" ", 1)[1]).startswith(event)]


def first_issues(run: FaultRun, number: int) -> list[str]:
    """Group ids in the order in which the cursor issues them."""
    plain = PromptCursor(run._prompts, seed=0)
    return [issue.group_id for _ in range(number) if (issue := plain.next()) is not None]


def batches(report: SimulationReport) -> list[list[str]]:
    return [[name.partition("/")[0] for name in text.split(": ")[1].split()] for text in texts(report, "batch for")]


# -- staleness and asynchrony ----------------------------------------------------------------------------------------


def test_s01_without_staleness_the_simulated_run_trains_the_batches_of_a_plain_loop() -> None:
    run = scripted(max_staleness=0, workers=3, steps=4)
    report = done(run)
    order = first_issues(run, 8)
    assert batches(report) == [order[0:2], order[2:4], order[4:6], order[6:8]]
    assert set(report.lag_tokens) == {0}


@pytest.mark.parametrize("staleness", [1, 2, 3])
def test_s01_the_lag_reaches_the_bound_and_never_passes_it(staleness: int) -> None:
    report = done(scripted(max_staleness=staleness, steps=7, prompts=20, capacity=8))
    assert max(report.lag_tokens) == staleness
    assert min(report.lag_tokens) == 0


def test_s02_each_token_keeps_the_version_that_sampled_it_whatever_is_live_at_the_end() -> None:
    """One token a second; version 8 comes after two tokens, version 9 after the last one."""
    loop = VirtualTimeLoop()
    engine = Engine(loop, lambda sequences: 1.0, version=7)
    request = RolloutRequest("g", 0, Prompt("p", (1,), ""), (Sampling(1.0, 8, 0),))

    async def play() -> None:
        run = engine.start(request, [4])
        await asyncio.sleep(2.0)
        engine.resume(8)
        await run.done
        await asyncio.sleep(0.5)
        engine.resume(9)
        (rollout,) = engine.rollouts(run, ["stop"])
        assert rollout.token_versions().tolist() == [7, 7, 8, 8]
        assert rollout.version_spans == (VersionSpan(7, 0, 2), VersionSpan(8, 2, 4))
        assert rollout.min_version == 7

    run_virtual(play(), loop)


def test_s07_two_of_eight_that_never_answer_are_named_and_issued_again_within_twice_the_deadline() -> None:
    probe = scripted(groups_per_batch=8, max_staleness=0, steps=1, capacity=8)
    lost = first_issues(probe, 8)[2:4]
    run = scripted(
        *(("lost_reply", group, 0) for group in lost),
        groups_per_batch=8,
        max_staleness=0,
        steps=1,
        capacity=8,
        rollout_timeout_s=1000.0,  # the worker's own deadline does not help
    )
    report = done(run)
    assert texts(report, "retire") == [f"retire {group}/0 as failed: True" for group in lost]
    assert times(report, "retire") == pytest.approx([20.0, 20.0], abs=0.01)
    assert report.seconds < 2 * 20.0
    assert counts(run) == {"trained": 8, "failed": 2}


def test_s08_what_a_filter_drops_makes_room_at_once() -> None:
    """Capacity 4 = (1+1)*2; the first four groups cannot be scored and leave before any step."""
    probe = scripted(scorer_replicas=4)
    dropped = first_issues(probe, 4)
    run = scripted(*(("unscorable", group, 0) for group in dropped), scorer_replicas=4, prompts=20)
    report = done(run)
    filtered = times(report, "retire")
    admitted = times(report, "admit")
    assert len(filtered) == 4
    assert admitted[:4] == [0.0] * 4
    assert admitted[4:8] == filtered, "each slot was taken again in the instant it came free"
    assert counts(run) == {"trained": 8, "filtered": 4}


def test_s08_late_callbacks_carry_their_attempt_and_change_nothing() -> None:
    group = first_issues(scripted(), 1)[0]
    run = scripted(("late_score", group, 0), ("repeated_put", group, 1), moment=0.02)
    report = done(run)
    assert texts(report, f"put {group}/0")[0].endswith("duplicate")
    assert texts(report, f"put {group}/1")[1].endswith("duplicate")
    assert counts(run) == {"trained": 8, "failed": 1, "duplicate": 2}


@pytest.mark.parametrize(
    ("steps", "staleness", "prompts"), [(5, 1, 100), (1, 3, 100), (5, 2, 3)], ids=["five", "one", "mid-epoch"]
)
def test_s10_a_run_ends_after_its_steps_with_the_last_weights_out_and_nothing_left(
    steps: int, staleness: int, prompts: int
) -> None:
    run = scripted(steps=steps, max_staleness=staleness, prompts=prompts, learner_s=5.0)
    report = done(run)
    assert run.workers is not None
    assert counts(run) == {"trained": 2 * steps}, "no surplus and no failure"
    assert run.workers.latest == steps
    assert report.seconds - times(report, "advance")[-1] < 10


def test_s11_a_worker_that_missed_two_versions_goes_on_with_the_newest() -> None:
    run = scripted(("update_failed", 1, 1), ("update_failed", 2, 1), workers=2, steps=6, prompts=20, capacity=2)
    report = done(run)
    assert texts(report, "worker 1 is fenced") == ["worker 1 is fenced: refused tensor 50 of 100"] * 2
    assert texts(report, "worker 1 serves") == ["worker 1 serves version 3"]


def test_s11_after_a_resume_the_version_is_published_before_anything_is_asked() -> None:
    run = scripted(crash_at_event=22, steps=6, prompts=20)
    report = done(run)
    assert report.lives == 2
    second = report.trace[next(i for i, line in enumerate(report.trace) if line.endswith("life 2 begins")) :]
    spoken = [line.split(" ", 2)[1] for line in second]
    version = texts(report, "publish")[-1]
    assert int(version.rpartition(" ")[2]) == 6
    assert spoken.index("publish") < spoken.index("admit")


def test_s12_a_group_of_four_with_one_aborted_sample_is_issued_again_whole() -> None:
    probe = scripted(groups_per_batch=3)
    group = first_issues(probe, 3)[1]
    run = scripted(("aborted_sample", group, 0), samples_per_prompt=4, groups_per_batch=3, steps=2)
    done(run)
    assert counts(run) == {"trained": 6, "failed": 1}
    assert run.queue is not None
    assert run.queue.ledger.counts["trained"].rollouts == 6 * 4


def test_s12_a_group_one_sample_short_never_reaches_the_scorers() -> None:
    group = first_issues(scripted(), 1)[0]
    run = scripted(("short_group", group, 0), samples_per_prompt=4)
    report = done(run)
    assert [text for text in texts(report, "put") if f"{group}/0" in text] == []
    assert counts(run)["failed"] == 1


# -- weight synchronisation ------------------------------------------------------------------------------------------


def test_w06_a_worker_whose_update_failed_serves_nothing_until_a_whole_update_succeeds() -> None:
    reports: list[Any] = []
    run = scripted(("update_failed", 1, 2), workers=3, capacity=1, groups_per_batch=6, steps=4, prompts=30)
    served: list[tuple[float, int, int]] = []
    original = run.invariants.serving

    def serving(worker: int, claimed: int, held: int) -> None:
        served.append((run._loop.time(), worker, held))
        original(worker, claimed, held)

    run.invariants.serving = serving  # type: ignore[method-assign]
    publish = FaultyWorkers.publish

    async def recorded(self: FaultyWorkers, snapshot: WeightSnapshot) -> Any:
        reports.append(await publish(self, snapshot))
        return reports[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FaultyWorkers, "publish", recorded)
        report = done(run)
    assert reports[0].applied == (0, 1)
    assert dict(reports[0].failed) == {2: "rollout worker 2: refused tensor 50 of 100"}
    (fenced,), (opened,) = times(report, "worker 2 is fenced"), times(report, "worker 2 serves")
    assert not [at for at, worker, _ in served if worker == 2 and fenced <= at < opened - 1e-6]
    assert {held for at, worker, held in served if worker < 2 and fenced < at < opened} == {1}
    assert {held for at, worker, held in served if worker == 2 and at > fenced} <= {2, 3, 4}


def test_w07_a_worker_that_dies_in_an_update_costs_no_more_than_the_timeout() -> None:
    run = scripted(("update_timeout", 1, 1), workers=2, steps=4, prompts=20)
    report = done(run)
    published = times(report, "publish version 1")[0]
    assert times(report, "worker 1 is fenced")[0] - published == pytest.approx(0.1 + 5.0)
    # The next publication waits for this one, and the learner for nothing else.
    assert times(report, "publish version 2")[0] - published < 0.1 + 5.0 + 2.0


def test_w08_a_replacement_is_not_asked_before_it_holds_the_current_version() -> None:
    probe = done(scripted(workers=2, steps=14, prompts=100, capacity=1))
    admitted = [text.split()[1] for text in texts(probe, "admit") if text.endswith("from version 12")]
    group, attempt = admitted[0].split("/")
    run = scripted(("crash_during", group, int(attempt)), workers=2, steps=14, prompts=100, capacity=1, moment=0.1)
    served: list[tuple[int, int]] = []
    original = run.invariants.serving
    run.invariants.serving = lambda worker, claimed, held: (  # type: ignore[method-assign]
        served.append((worker, held)),
        original(worker, claimed, held),
    )[1]
    report = done(run)
    (died,) = [text for text in texts(report, "worker") if text.endswith("dies")]
    index = int(re.findall(r"\d+", died)[0])
    (back,) = texts(report, f"worker {index} serves version")
    assert int(back.rpartition(" ")[2]) >= 12
    assert 0 not in [held for worker, held in served[-8:] if worker == index]


def test_w08_after_a_resume_the_first_samples_carry_the_version_of_the_checkpoint() -> None:
    report = done(scripted(crash_at_event=30, steps=7, prompts=30))
    second = report.trace[next(i for i, line in enumerate(report.trace) if line.endswith("life 2 begins")) :]
    published = next(line for line in second if " publish version " in line).rpartition(" ")[2]
    admitted = next(line for line in second if " admit " in line).rpartition(" ")[2]
    assert int(published) > 0
    assert admitted == published


def test_the_only_worker_comes_back_without_an_event_and_is_asked_within_a_second() -> None:
    group = first_issues(scripted(), 1)[0]
    report = done(scripted(("crash_before", group, 0), groups_per_batch=1, max_staleness=0, steps=1))
    (back,) = times(report, "worker 0 serves") or [1.0]
    again = next(at for at in times(report, "admit") if at > 0)
    assert 1.0 <= again <= max(back, 1.0) + 1.0


# -- faults, retries, resume -----------------------------------------------------------------------------------------


def test_f02_every_put_repeated_after_a_lost_reply_is_stored_once() -> None:
    probe = scripted(steps=4)
    run = scripted(*(("repeated_put", group, 0) for group in first_issues(probe, 5)), moment=0.01)
    done(run)
    assert counts(run) == {"trained": 8, "duplicate": 5}


@pytest.mark.parametrize("moment", [0.01, 0.9], ids=["old one first", "old one last"])
def test_f03_of_two_attempts_that_both_finish_one_is_trained(moment: float) -> None:
    group = first_issues(scripted(), 1)[0]
    run = scripted(("late_score", group, 0), moment=moment, learner_s=8.0)
    report = done(run)
    order = [text.split(" ")[1] for text in texts(report, f"put {group}")]
    assert order == ([f"{group}/0", f"{group}/1"] if moment < 0.5 else [f"{group}/1", f"{group}/0"])
    assert counts(run) == {"trained": 8, "failed": 1, "duplicate": 1}
    assert Counter(run.learner.trained)[group] == 1


def test_f04_after_a_resume_each_prompt_of_the_epoch_is_trained_once() -> None:
    """Prompts 0..7, batches of 2, 4 generated ahead; the driver dies after the first step."""
    report = done(scripted(crash_at_event=13))
    assert report.lives == 2
    assert texts(report, "checkpoint of step")[0] == "checkpoint of step 1"
    run = scripted(crash_at_event=13)
    done(run)
    order = first_issues(run, 8)
    assert sorted(run.learner.trained) == sorted(order)
    assert sorted(run.learner.trained[:2]) == sorted(order[:2])
    assert run._saved is not None
    assert json.loads(run._saved.state)["cursor"]["n_prompts"] == 8


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_f04_a_crash_at_any_event_loses_and_repeats_no_prompt(staleness: int) -> None:
    events = done(scripted(max_staleness=staleness)).events
    assert events == 8 + 8 + 4 + 4, "admissions, puts, batches, steps"
    for event in range(events):
        run = scripted(max_staleness=staleness, crash_at_event=event)
        report = done(run)
        assert report.lives == 2, f"crash at event {event}"
        assert Counter(run.learner.trained) == Counter(first_issues(run, 8)), f"crash at event {event}"


@pytest.mark.parametrize("call", [1, 2, 3, 4])
def test_after_a_learner_failover_versions_go_on_and_each_prompt_counts_once(call: int) -> None:
    run = scripted(("learner_crash", call - 1, call))
    report = done(run)
    assert report.lives == 2
    assert Counter(run.learner.trained) == Counter(first_issues(run, 8))
    published = [int(text.rpartition(" ")[2]) for text in texts(report, "publish")]
    assert published == sorted(set(published)), "no version is published twice"
    assert counts(run)["failed"] == 2, "the batch that the learner died with"
    assert counts(run).get("aborted", 0) == {1: 2, 2: 2, 3: 2, 4: 0}[call], "what was ahead of it"
    assert counts(run)["trained"] == 8


def test_a_learner_that_comes_back_with_an_older_version_is_refused() -> None:
    report = done(scripted(("version_goes_back", 2, 3), steps=5))
    assert texts(report, "refused") == ["refused: learner version cannot go back from 2 to 1"]


def test_a_stop_is_resumed_with_nothing_lost() -> None:
    run = scripted(("stop", 1, 1), moment=0.6)
    report = done(run)
    assert report.lives == 2
    assert Counter(run.learner.trained) == Counter(first_issues(run, 8))


@pytest.mark.parametrize("moment", [0.2, 0.34, 0.6, 0.99])
def test_a_clock_that_jumps_past_every_deadline_ends_no_run(moment: float) -> None:
    """0.34 is one deadline: nothing was admitted for so long by the clock, and yet nobody is at fault."""
    done(scripted(("clock_jump", 1, 1), ("clock_jump", 1, 3), max_staleness=0, moment=moment))


# -- seeds -----------------------------------------------------------------------------------------------------------


def asked(run: FaultRun) -> list[tuple[str, int, int, tuple[int, ...]]]:
    """(group id, attempt, worker, sampling seeds) of every request of a run."""
    requests: list[tuple[str, int, int, tuple[int, ...]]] = []
    generate = FaultyWorkers.generate

    async def recorded(self: FaultyWorkers, worker: WorkerSlot, request: RolloutRequest) -> Any:
        seeds = tuple(sampling.seed for sampling in request.sampling)
        requests.append((request.group_id, request.attempt, worker.index, seeds))
        return await generate(self, worker, request)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FaultyWorkers, "generate", recorded)
        done(run)
    return requests


def test_c11_no_two_answers_share_a_seed_on_any_engine_and_a_restart_replays_none() -> None:
    """4 engines, one prompt issued once an epoch, 8 samples, and two attempts that die and are issued again."""
    world = {"workers": 4, "prompts": 1, "samples_per_prompt": 8, "groups_per_batch": 2, "steps": 4}
    requests = asked(scripted(("crash_during", "1:p0", 0), ("crash_after", "2:p0", 0), **world))
    seeds = [seed for *_, group in requests for seed in group]
    assert len({worker for _, _, worker, _ in requests}) == 4
    assert max(attempt for _, attempt, _, _ in requests) >= 1
    assert len(seeds) == len(set(seeds)) == 8 * len(requests)


def test_c11_the_same_run_seed_asks_for_the_same_samples() -> None:
    world = {"workers": 4, "prompts": 1, "samples_per_prompt": 8}
    assert asked(scripted(**world)) == asked(scripted(**world))
