"""The control loop: pure asyncio over ``protocols.py``, so it runs against Ray, fakes and simulated time alike.

    cursor --feed--> admission --rollout--> worker --score--> scorers --put--> queue --train--> learner
              ^          ^                     ^                                 |                 |
              |          |                     +------------- weights -----------+-----------------+
              |          +------- capacity: a batch closed, a worker updated, a group retired -----+
              +------- the same prompt again: its worker died, or it missed the deadline

Four loops, each a task:

=======  ========================  =========================  =============================================
loop     consumes                  produces                   waits for
=======  ========================  =========================  =============================================
feed     prompts (cursor, again)   dispatches                 a free worker whose version may be admitted
rollout  dispatches                generated groups           the worker (its own deadline)
score    generated groups          groups in the queue        the scorers (their own deadline)
train    batches from the queue    versions, published        B due groups (queue deadline), the learner
=======  ========================  =========================  =============================================

Feed is unblocked by every event that can free room (``_changed``), and once a second in case a worker came back without
one; it stops admitting once the remaining steps have all the groups they need, so a run ends with nothing left over.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlhf_cluster.data.cursor import Issue, PromptCursor
from rlhf_cluster.experience_queue import Attempt, BatchTimeout, ExperienceQueue, PutResult
from rlhf_cluster.metrics.recorder import MetricsRecorder
from rlhf_cluster.protocols import (
    Clock,
    Generator,
    Learner,
    RolloutRequest,
    Scorer,
    ScorersBusy,
    WeightSink,
    WeightSnapshot,
    WorkerFailed,
    WorkerSlot,
)
from rlhf_cluster.seeds import sample_seed
from rlhf_cluster.types import Rollout, Sampling, ScoredGroup, ScoredRollout, TrainBatch
from rlhf_cluster.watchdog import Wait

log = logging.getLogger(__name__)

# A worker may come back without an event of ours, so feed also looks by itself.
_POLL_S = 1.0


class RunFailed(RuntimeError):
    """The run cannot go on; the message names the first cause."""


@dataclass(frozen=True, slots=True)
class ControllerSettings:
    """The few numbers of the config that the loops need."""

    seed: int
    steps: int
    groups_per_batch: int
    samples_per_prompt: int
    max_new_tokens: int
    temperature: float
    max_attempts: int
    max_unscorable_fraction: float


@dataclass(frozen=True, slots=True)
class _Dispatch:
    """An admitted attempt on its way to a worker."""

    attempt: Attempt
    issue: Issue
    worker: WorkerSlot
    updates_started: int
    update_active: bool


@dataclass(frozen=True, slots=True)
class _Generated:
    """A generated group on its way to the scorers."""

    dispatch: _Dispatch
    rollouts: list[Rollout]


class Controller:
    """Runs the loops until ``settings.steps`` learner steps are done or ``stop`` is set.

    ``after_step(step)`` is awaited after each closed batch (checkpoints); ``after_first_publication()`` after the first
    one that carries trained weights (the self-check); ``on_batch(step, batch)`` sees every batch that is trained;
    ``before_publication(version)`` is called before any worker hears of a version.
    """

    def __init__(
        self,
        settings: ControllerSettings,
        *,
        cursor: PromptCursor,
        queue: ExperienceQueue,
        generator: Generator,
        scorer: Scorer,
        learner: Learner,
        sink: WeightSink,
        clock: Clock,
        recorder: MetricsRecorder,
        step: int = 0,
        after_step: Callable[[int], Awaitable[None]] | None = None,
        after_first_publication: Callable[[], Awaitable[None]] | None = None,
        on_batch: Callable[[int, TrainBatch], None] | None = None,
        before_publication: Callable[[int], None] | None = None,
    ) -> None:
        self._settings = settings
        self._cursor = cursor
        self._queue = queue
        self._generator = generator
        self._scorer = scorer
        self._learner = learner
        self._sink = sink
        self._clock = clock
        self._recorder = recorder
        self._after_step = after_step
        self._after_first_publication = after_first_publication
        self._on_batch = on_batch
        self._before_publication = before_publication

        self.step = step
        self._train_waits: Wait | None = None
        self._stop = asyncio.Event()
        self._changed = asyncio.Event()
        self._again: deque[Issue] = deque()
        self._to_generate: asyncio.Queue[_Dispatch] = asyncio.Queue()
        self._to_score: asyncio.Queue[_Generated] = asyncio.Queue()
        self._working: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._overlapped: dict[tuple[str, int], bool] = {}
        self._unscored: set[str] = set()  # group ids that scorers failed on once
        self._updates_started = 0
        self._update_active = False
        self._failure: asyncio.Future[None] | None = None
        self._publication: asyncio.Task[None] | None = None
        window = settings.groups_per_batch * settings.samples_per_prompt
        self._last_unscorable = "none"
        self._recent_unscorable: deque[int] = deque(maxlen=window)
        self._n_recent_unscorable = 0

    def stop(self) -> None:
        """Ask the run to end after the learner step in progress. Safe to call more than once."""
        self._stop.set()
        self._changed.set()

    @property
    def stopped(self) -> bool:
        return self._stop.is_set()

    def waits(self) -> list[Wait]:
        """What the train loop waits for, for the watchdog; workers and scorers are known to their pools."""
        return [] if self._train_waits is None else [self._train_waits]

    async def run(self) -> None:
        """Train until the last step or ``stop()``.

        Raises:
            RunFailed: a rule of the run ended it (named).
            LearnerLost: the learner is to be rebuilt; a new controller goes on from the checkpoint.
            Anything else that a learner or a whole pool raises passes through.
        """
        stages = [
            asyncio.create_task(loop(), name=name)
            for name, loop in (
                ("feed", self._feed),
                ("poll", self._poll),
                ("rollout", self._rollout),
                ("score", self._score),
            )
        ]
        train = asyncio.create_task(self._train(), name="train")
        self._failure = asyncio.get_running_loop().create_future()
        try:
            done, _ = await asyncio.wait([self._failure, *stages, train], return_when=asyncio.FIRST_COMPLETED)
            for ended in (self._failure, *stages, train):
                if ended in done:
                    ended.result()
        finally:
            await _cancel([train, *stages, *self._working.values(), self._failure])
            self._retire_leftovers()
            if self._publication is not None:
                await _cancel([self._publication])

    # -- feed ----------------------------------------------------------------------------------------------------

    async def _feed(self) -> None:
        """Consumes prompts, produces dispatches; waits for a free worker whose version may be admitted."""
        while not self._stop.is_set():
            worker = self._generator.choose() if self._wants_more() else None
            if worker is None or not self._queue.can_admit(worker.version):
                await self._wait_for_change()
                continue
            issue = self._again.popleft() if self._again else self._cursor.next()
            if issue is None:
                await self._wait_for_change()
                continue
            attempt = self._queue.admit(issue.prompt, worker.version, group_id=issue.group_id)
            if attempt.draw >= self._settings.max_attempts:
                raise RunFailed(
                    f"prompt {issue.prompt.prompt_id} was issued {attempt.draw} times in one epoch without a result "
                    f"(guardrails.max_attempts {self._settings.max_attempts}); see the warnings above for the causes"
                )
            self._to_generate.put_nowait(_Dispatch(attempt, issue, worker, self._updates_started, self._update_active))
            # The router must have counted this dispatch before it is asked again.
            await self._to_generate.join()
        # The train loop ends the run; a feed that returned early would look like a finished stage.
        await asyncio.Event().wait()

    def _wants_more(self) -> bool:
        """Whether the steps that remain lack groups."""
        remaining = (self._settings.steps - self.step) * self._settings.groups_per_batch
        return self._queue.outstanding + self._queue.in_training < remaining

    async def _wait_for_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def _poll(self) -> None:
        """Let feed look again every ``_POLL_S`` seconds."""
        while True:
            await self._clock.sleep(_POLL_S)
            self._changed.set()

    # -- rollout -------------------------------------------------------------------------------------------------

    async def _rollout(self) -> None:
        """Consumes dispatches, produces generated groups, each in a task of its own."""
        while True:
            dispatch = await self._to_generate.get()
            self._spawn(dispatch.attempt, self._generate(dispatch))
            await asyncio.sleep(0)
            self._to_generate.task_done()

    async def _generate(self, dispatch: _Dispatch) -> None:
        started = self._clock.now()
        attempt = dispatch.attempt
        request = RolloutRequest(attempt.group_id, attempt.attempt, dispatch.issue.prompt, self._sampling(attempt))
        try:
            rollouts = await self._generator.generate(dispatch.worker, request)
        except (WorkerFailed, TimeoutError) as error:
            self._issue_again(attempt, f"rollout worker {dispatch.worker.index}: {error}")
            return
        self._recorder.rollouts_generated(dispatch.worker.index, rollouts, self._clock.now() - started)
        self._overlapped[attempt.group_id, attempt.attempt] = (
            dispatch.update_active or self._updates_started > dispatch.updates_started
        )
        self._to_score.put_nowait(_Generated(dispatch, rollouts))
        self._changed.set()

    def _sampling(self, attempt: Attempt) -> tuple[Sampling, ...]:
        settings = self._settings
        return tuple(
            Sampling(
                settings.temperature,
                settings.max_new_tokens,
                sample_seed(settings.seed, attempt.group_id, attempt.draw, index),
            )
            for index in range(settings.samples_per_prompt)
        )

    # -- score ---------------------------------------------------------------------------------------------------

    async def _score(self) -> None:
        """Consumes generated groups, produces groups in the queue, each in a task of its own."""
        while True:
            generated = await self._to_score.get()
            self._spawn(generated.dispatch.attempt, self._score_group(generated))

    async def _score_group(self, generated: _Generated) -> None:
        started = self._clock.now()
        attempt = generated.dispatch.attempt
        finished = [rollout for rollout in generated.rollouts if rollout.finish_reason != "abort"]
        if len(finished) != self._settings.samples_per_prompt:
            cause = f"{len(finished)} of {self._settings.samples_per_prompt} samples finished"
            self._issue_again(attempt, f"rollout worker {generated.dispatch.worker.index}: {cause}")
            return
        try:
            members = await self._scorer.score(generated.dispatch.issue.prompt, generated.rollouts)
        except (WorkerFailed, TimeoutError) as error:
            busy = isinstance(error, ScorersBusy)
            if busy or attempt.group_id not in self._unscored:
                # Another answer may be scorable, and another scorer in time.
                if not busy:
                    self._unscored.add(attempt.group_id)
                self._issue_again(attempt, f"scorer: {error}")
                return
            log.warning("group %s is left out, it could not be scored again: %s", attempt.group_id, error)
            reason = "scorer_timeout" if isinstance(error, TimeoutError) else "scorer_error"
            members = [_without_a_score(rollout, reason) for rollout in generated.rollouts]
        self._unscored.discard(attempt.group_id)
        group = ScoredGroup(attempt.group_id, tuple(members))
        self._recorder.group_scored(group, self._clock.now() - started)
        if self._count_unscorable(group):
            self._finish_without_training(attempt)
            return
        result = self._queue.put(group)
        if result is PutResult.STALE:
            self._issue_again(attempt, "came back staler than the bound", retire=False)
        self._changed.set()

    def _count_unscorable(self, group: ScoredGroup) -> bool:
        """Count what cannot be trained; True when the group is excluded. Ends the run above the allowed share."""
        bad = [_unusable(member) for member in group.rollouts]
        window = self._recent_unscorable
        for reason in bad:
            # Counted on the way in and out: a sum over the window would cost every group a whole batch.
            leaves = window[0] if len(window) == window.maxlen else 0
            window.append(int(reason is not None))
            self._n_recent_unscorable += window[-1] - leaves
        for reason in filter(None, bad):
            self._last_unscorable = reason
            self._recorder.unscorable(1, reason)
        allowed = self._settings.max_unscorable_fraction * len(window)
        if len(window) == window.maxlen and self._n_recent_unscorable > allowed:
            raise RunFailed(
                f"{self._n_recent_unscorable} of the last {len(window)} rollouts could not be scored "
                f"(guardrails.max_unscorable_fraction {self._settings.max_unscorable_fraction}); "
                f"the last reason is {self._last_unscorable}"
            )
        return any(reason is not None for reason in bad)

    def _finish_without_training(self, attempt: Attempt) -> None:
        """An unusable group leaves with its prompt: another sample would not make the prompt scorable."""
        self._overlapped.pop((attempt.group_id, attempt.attempt), None)
        if self._queue.retire(attempt.group_id, attempt.attempt, "filtered"):
            self._cursor.consumed(attempt.group_id)
        self._changed.set()

    # -- train ---------------------------------------------------------------------------------------------------

    async def _train(self) -> None:
        """Consumes batches, produces versions and publishes them; waits for due groups and for the learner."""
        first_publication = True
        while self.step < self._settings.steps:
            self._train_waits = Wait("train", f"a batch for version {self._queue.learner_version}", self._clock.now())
            batch, waited_s = await self._next_batch()
            if batch is None:
                break
            started = self._clock.now()
            self._train_waits = Wait("train", "the learner", started)
            overlapping = self._take_overlap(batch)
            self._recorder.batch_consumed(batch, waited_s=waited_s, overlapping_rollouts=overlapping)
            if self._on_batch is not None:
                self._on_batch(self.step + 1, batch)
            self._updates_started += 1
            self._update_active = True
            self._changed.set()
            try:
                result = await self._learner.train(batch)
            finally:
                self._update_active = False
            self._recorder.step_done(result, seconds=self._clock.now() - started)
            if not result.stepped:
                self._reopen(batch)
                continue
            snapshot = await self._learner.snapshot()
            self._close(batch, result.version)
            try:
                await self._finish_publication()
            finally:
                # Whatever ends the run here, the step is done and may be saved.
                self._recorder.queue_state(self._queue)
                self._recorder.workers(self._generator.status())
                self._recorder.close_step(result.version, self.step)
            self._publication = asyncio.create_task(self._publish(snapshot), name="publish")
            self._publication.add_done_callback(self._note_failure)
            # A publication that needs the learner (a broadcast) must have claimed it before a save or the next batch.
            await asyncio.sleep(0)
            # Before the publication is waited for: with max_staleness 0 nothing of the next version is out yet.
            if self._after_step is not None:
                await self._after_step(self.step)
            if first_publication and self._after_first_publication is not None:
                await self._finish_publication()
                await self._after_first_publication()
            first_publication = False
        await self._finish_publication()

    async def _next_batch(self) -> tuple[TrainBatch | None, float]:
        """The next batch and the seconds waited for it; None when the run is to stop."""
        started = self._clock.now()
        while not self._stop.is_set():
            batch = asyncio.ensure_future(self._queue.next_batch())
            stop = asyncio.ensure_future(self._stop.wait())
            try:
                await asyncio.wait([batch, stop], return_when=asyncio.FIRST_COMPLETED)
                if not batch.done():
                    return None, 0.0
                groups = batch.result()
            except BatchTimeout as timeout:
                self._evict(timeout)
                continue
            finally:
                await _cancel([batch, stop])
            return TrainBatch(self._queue.learner_version, tuple(groups)), self._clock.now() - started
        return None, 0.0

    def _evict(self, timeout: BatchTimeout) -> None:
        """Re-issue every group the batch waited for past its deadline."""
        if not timeout.group_ids:
            raise RunFailed(
                f"version {timeout.version}: nothing was admitted for a whole queue.group_deadline_s; "
                "no rollout worker is free and up to date (see rlhf_worker_up and rlhf_worker_policy_version)"
            )
        current = {attempt.group_id: attempt for attempt in self._queue.dispatched()}
        for group_id in timeout.group_ids:
            if group_id in current:
                self._issue_again(current[group_id], "missed queue.group_deadline_s")

    def _close(self, batch: TrainBatch, version: int) -> None:
        overtaken = self._queue.advance(version)
        self.step += 1
        for group in batch.groups:
            self._cursor.consumed(group.group_id)
        for attempt in overtaken:
            self._issue_again(attempt, "overtaken by a jump of the version", retire=False)
        self._changed.set()

    def _reopen(self, batch: TrainBatch) -> None:
        """A skipped step trained nothing: its groups are failed and their prompts issued again."""
        log.warning("version %d: the optimizer step was skipped; its prompts are issued again", batch.learner_version)
        skipped = self._queue.advance(batch.learner_version)
        for attempt in skipped:
            self._again.append(self._cursor.issue(attempt.group_id))
        self._changed.set()

    def _take_overlap(self, batch: TrainBatch) -> int:
        return sum(
            len(group.rollouts)
            for group in batch.groups
            if self._overlapped.pop((group.group_id, group.attempt), False)
        )

    async def _publish(self, snapshot: WeightSnapshot) -> None:
        if self._before_publication is not None:
            self._before_publication(snapshot.version)
        report = await self._sink.publish(snapshot)
        for index, cause in report.failed.items():
            log.warning("rollout worker %d did not take version %d: %s", index, report.version, cause)
        if not report.applied:
            raise RunFailed(f"no rollout worker took version {report.version}: {dict(report.failed)}")
        self._recorder.weights_published(report)
        self._changed.set()

    async def _finish_publication(self) -> None:
        """Wait for the publication in progress; its failure ends the run."""
        if self._publication is not None:
            publication, self._publication = self._publication, None
            await publication

    # -- attempts ------------------------------------------------------------------------------------------------

    def _spawn(self, attempt: Attempt, work: Awaitable[None]) -> None:
        """Run one attempt's stage; a failure that is nobody's to tolerate ends the run through the train loop."""
        key = attempt.group_id, attempt.attempt
        task = asyncio.ensure_future(work)
        self._working[key] = task
        task.add_done_callback(lambda done: self._finished(key, done))

    def _finished(self, key: tuple[str, int], task: asyncio.Task[None]) -> None:
        if self._working.get(key) is task:
            del self._working[key]
        self._note_failure(task)

    def _note_failure(self, task: asyncio.Task[None]) -> None:
        """End the run with the error of a task that nobody waits for."""
        if task.cancelled() or task.exception() is None:
            return
        if self._failure is not None and not self._failure.done():
            self._failure.set_exception(task.exception())  # type: ignore[arg-type]

    def _issue_again(self, attempt: Attempt, cause: str, *, retire: bool = True) -> None:
        """Retire the attempt as failed and issue its prompt again; a late reply is nobody's loss."""
        if retire and not self._queue.retire(attempt.group_id, attempt.attempt, "failed"):
            return
        log.warning("group %s attempt %d is issued again: %s", attempt.group_id, attempt.attempt, cause)
        self._overlapped.pop((attempt.group_id, attempt.attempt), None)
        self._again.append(self._cursor.issue(attempt.group_id))
        task = self._working.get((attempt.group_id, attempt.attempt))
        if task is not None and task is not asyncio.current_task():
            task.cancel()
        self._changed.set()

    def _retire_leftovers(self) -> None:
        """At the end, what is still out is surplus when the run is complete."""
        if self.step < self._settings.steps:
            return
        for attempt in self._queue.dispatched():
            self._queue.retire(attempt.group_id, attempt.attempt, "surplus")


def _without_a_score(rollout: Rollout, reason: str) -> ScoredRollout:
    return ScoredRollout(rollout, math.nan, {}, np.zeros(rollout.n_tokens, np.float32), reason)


def _unusable(member: ScoredRollout) -> str | None:
    """Why a scored rollout may not reach a gradient, or None."""
    if not np.isfinite(member.rollout.behaviour_logprobs).all():
        return "behaviour_logprobs"
    if not np.isfinite(member.ref_logprobs).all():
        return "ref_logprobs"
    return None if np.isfinite(member.score) else member.unscorable or "score"


async def _cancel(tasks: list[asyncio.Future[Any]]) -> None:
    """Cancel ``tasks`` and wait until they have ended; being cancelled meanwhile passes through."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.exception()
