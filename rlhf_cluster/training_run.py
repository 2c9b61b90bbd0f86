"""One training run, from parts that are still starting to the last checkpoint and the evaluation after it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlhf_cluster import run_state
from rlhf_cluster.beside import run_beside
from rlhf_cluster.checkpoint_writer import CheckpointFailed, SaveReport
from rlhf_cluster.clock import SystemClock
from rlhf_cluster.config import Config
from rlhf_cluster.control import ControlServer, scale_handler
from rlhf_cluster.controller import Controller, ControllerSettings, RunFailed
from rlhf_cluster.data.cursor import PromptCursor
from rlhf_cluster.diagnosis.preflight import PreflightError, check_learner_layout
from rlhf_cluster.diagnosis.self_check import SelfCheckFailed
from rlhf_cluster.ending import Signals
from rlhf_cluster.experience_queue import ExperienceQueue
from rlhf_cluster.fleet import Fleet
from rlhf_cluster.inputs import Inputs
from rlhf_cluster.metrics.console import ConsoleView
from rlhf_cluster.metrics.samples import SampleWriter
from rlhf_cluster.model_fingerprint import fingerprint
from rlhf_cluster.protocols import LearnerLost
from rlhf_cluster.published_version import PublishedVersion
from rlhf_cluster.run_checkpoints import RunCheckpoints
from rlhf_cluster.run_checks import RunChecks
from rlhf_cluster.run_folder import PUBLISHED_VERSION, RunFolder
from rlhf_cluster.run_sinks import open_recorder
from rlhf_cluster.supervision import Event
from rlhf_cluster.types import TrainBatch
from rlhf_cluster.watchdog import Watchdog, own_stacks

log = logging.getLogger(__name__)

_SECONDS_FOR_THE_LAST_SET = 30.0


class TrainingRun:
    """One training run from parts that are being started to the last checkpoint."""

    def __init__(self, config: Config, inputs: Inputs, folder: RunFolder, view: ConsoleView) -> None:
        self._config = config
        self._inputs = inputs
        self._folder = folder
        self._view = view
        self._clock = SystemClock()
        self._cursor = PromptCursor(inputs.train, seed=config.run.seed)
        self._queue = ExperienceQueue(
            groups_per_batch=config.queue.groups_per_batch,
            max_staleness=config.queue.max_staleness,
            clock=self._clock,
            group_deadline_s=config.queue.group_deadline_s,
        )
        self._fleet: Fleet | None = None
        self._saved: dict[str, Any] | None = None
        self._reference = fingerprint(Path(config.model.reference_path))
        self._learner_restarts = 0
        self._baseline_due = config.evaluation is not None and folder.checkpoint is None
        try:
            self._published = PublishedVersion(folder.path / PUBLISHED_VERSION, fresh=folder.checkpoint is None)
        except ValueError as error:
            raise PreflightError(str(error)) from None
        self._checkpoints = RunCheckpoints(
            folder.checkpoints, config.checkpoint, forget=self._forget, on_report=self._checkpoint_reported
        )

    def read_checkpoint(self) -> None:
        """Put prompts and queue of the checkpoint to resume from back, if there is one; without Ray.

        Raises:
            PreflightError: it belongs to a run with other settings (named).
        """
        checkpoint = self._folder.checkpoint
        if checkpoint is None:
            return
        try:
            check_learner_layout(checkpoint / run_state.LEARNER, self._config)
            self._saved = run_state.load_state(checkpoint)
            if self._saved.get("reference", self._reference) != self._reference:
                raise PreflightError(
                    f"model.reference: {self._config.model.reference_path} is not the model that the run of "
                    f"{checkpoint} was held to, and a reference that moves lets the policy drift; give that one, or "
                    "start a new run"
                )
            version = self._published.above(int(self._saved["queue"]["learner_version"]))
            step = run_state.restore(self._saved, cursor=self._cursor, queue=self._queue, version=version)
            self._checkpoints.resumed_from(step)
        except PreflightError:
            raise
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise PreflightError(f"cannot resume from {checkpoint}: {type(error).__name__}: {error}") from None

    async def run(self, signals: Signals, start_fleet: Callable[[Callable[[Event], None]], Fleet]) -> None:
        """Train to the last step or the first signal; whatever happens, every part is closed.

        ``start_fleet`` takes what is to be told of deaths and restarts.
        """
        view = self._view
        with contextlib.ExitStack() as stack:
            self._recorder = open_recorder(self._config, self._folder, self._clock, view, stack)
            view.phase("starting rollout workers, scorers and learner")
            fleet = start_fleet(self._member_event)
            self._fleet = fleet
            self._checks = RunChecks(self._config, self._inputs, self._folder, fleet, self._clock, self._recorder, view)
            try:
                controller = await self._train(fleet, signals, self._sample_writer(stack))
                # What follows can be done again from the checkpoint, so a signal ends it at once.
                signals.on_first = signals.cancel
                if not controller.stopped:
                    view.phase("evaluating the trained policy")
                    await self._checks.evaluate("after")
                view.phase("closing")
            finally:
                try:
                    # A set in the making is worth its last seconds; whatever ended the run stays the first cause.
                    with contextlib.suppress(CheckpointFailed):
                        await self._checkpoints.finish(timeout_s=0.0 if signals.expired else _SECONDS_FOR_THE_LAST_SET)
                finally:
                    await _close(fleet)

    async def _prepare(self, fleet: Fleet) -> int:
        """Bring the parts to the same version and return the step to go on from.

        A fresh run samples its baseline while the learner is still loading: all hold the same folder as version 0.
        """
        if self._folder.checkpoint is None or self._saved is None:
            if self._baseline_due:
                await fleet.ready("rollout workers", "scorers")
                await self._baseline()
            await fleet.ready("rollout workers", "scorers", "learner")
            await self._verify_start(fleet)
            step = 0
        else:
            step = await self._resume(fleet, self._folder.checkpoint, self._saved)
        return step

    async def _baseline(self) -> None:
        """The evaluation before training, once, of weights that nothing trained."""
        if self._baseline_due:
            self._view.phase("evaluating the untrained policy")
            await self._checks.evaluate("before")
            self._baseline_due = False

    async def _resume(self, fleet: Fleet, checkpoint: Path, saved: Mapping[str, Any]) -> int:
        self._recorder.load_state_dict(saved["metrics"])
        # The totals in a set were taken before its own save had ended.
        self._recorder.checkpoint(saved=True)
        await fleet.ready("rollout workers", "scorers", "learner")
        self._view.phase("loading the checkpoint")
        await fleet.learner.load(checkpoint / run_state.LEARNER, version=self._queue.learner_version)
        # The engines hold the base weights: nothing may be sampled before they hold those of the checkpoint.
        if fleet.learner.version > 0:
            await self._publish_restored(fleet)
        return self._checkpoints.saved_step

    async def _verify_start(self, fleet: Fleet) -> None:
        """Every worker must hold the learner's version 0, to the bit, before anything is sampled for training."""
        report = await fleet.sink.publish(await fleet.learner.snapshot())
        # One that died is replaced, and its successor verified before it serves.
        if refused := {slot: cause for slot, cause in report.failed.items() if slot not in report.died}:
            raise RunFailed(f"rollout workers do not hold the learner's version 0: {refused}")

    async def _publish_restored(self, fleet: Fleet) -> None:
        snapshot = await fleet.learner.snapshot()
        # Nobody has compared engines with these weights yet, whatever number of publications that is due after.
        snapshot = replace(snapshot, manifest={**snapshot.manifest, "verify": True})
        self._published.note(snapshot.version)
        report = await fleet.sink.publish(snapshot)
        if not report.applied:
            raise RunFailed(f"no rollout worker took version {report.version}: {dict(report.failed)}")
        self._recorder.weights_published(report)

    async def _train(
        self,
        fleet: Fleet,
        signals: Signals,
        on_batch: Callable[[int, TrainBatch], None] | None,
    ) -> Controller:
        """Bring the parts up, run the control loop to its end and save; with a new loop each time the learner had to be
        rebuilt."""
        first: LearnerLost | None = None
        lost: LearnerLost | None = None
        checked = False
        while True:
            controller: Controller | None = None
            try:
                signals.on_first = signals.cancel
                step = await (self._prepare(fleet) if lost is None else self._rebuild_learner(fleet, lost))
                if not checked:
                    # Also when the learner was lost before it came to that.
                    await self._baseline()
                    await self._checks.self_check()
                    checked = True
                controller = self._controller(fleet, step, on_batch)
                signals.on_first = controller.stop
                self._view.phase("training")
                await run_beside(
                    controller.run(),
                    self._control(fleet).serve(),
                    self._watchdog(fleet, controller).run(),
                    fleet.watch(),
                )
                self._view.phase("saving")
                await self._save(fleet, controller.step)
                await self._checkpoints.finish()
                return controller
            except (CheckpointFailed, SelfCheckFailed):
                raise
            except Exception as error:
                if signals.received is not None:
                    # Whoever stops a whole cluster stops workers and learner too: no failure, and nothing to rebuild.
                    await self._save_what_is_whole(fleet, controller, signals.received, error)
                    raise asyncio.CancelledError from error
                if not isinstance(error, LearnerLost):
                    raise
                first = first or error
                if self._learner_restarts >= self._config.guardrails.max_learner_restarts:
                    if first is error:
                        raise
                    raise LearnerLost(
                        f"{first}; it was rebuilt {self._learner_restarts} times (guardrails.max_learner_restarts), "
                        f"then: {error}"
                    ) from error
                lost = error

    async def _save_what_is_whole(
        self, fleet: Fleet, controller: Controller | None, received: signal.Signals, error: Exception
    ) -> None:
        """A part failed after the signal that stops the run: save, when the learner lives and is between two steps."""
        self._view.message(f"stopped by {received.name}; meanwhile {type(error).__name__}: {error}")
        if controller is None or isinstance(error, LearnerLost) or self._queue.in_training:
            self._view.message("the newest checkpoint stays what it is")
            return
        self._view.phase("saving")
        try:
            await self._save(fleet, controller.step)
        except CheckpointFailed:
            raise
        except Exception as second:
            self._view.message(f"the newest checkpoint stays what it is: {type(second).__name__}: {second}")

    def _control(self, fleet: Fleet) -> ControlServer:
        """What `rlhf scale` talks to."""
        return ControlServer(self._folder.path, {"scale": scale_handler(fleet.pool.scale)}, clock=self._clock)

    def _watchdog(self, fleet: Fleet, controller: Controller) -> Watchdog:
        async def dump_stacks() -> dict[str, str]:
            return {"driver": own_stacks(), **await fleet.dump_stacks()}

        return Watchdog(
            progress=lambda: self._recorder.events,
            waits=lambda: [*controller.waits(), *fleet.waits()],
            deadline_s=self._config.guardrails.no_progress_s,
            clock=self._clock,
            dump_stacks=dump_stacks,
            on_look=self._recorder.no_progress,
        )

    def _member_event(self, event: Event) -> None:
        """A worker or scorer died, came back, was fenced or missed a heartbeat; the event itself is logged already."""
        if event.kind == "restart":
            self._recorder.restarted(event.role)
        self._recorder.supervision_event(event.role, event.kind)
        if self._fleet is not None:
            self._recorder.workers(self._fleet.pool.status())

    async def _rebuild_learner(self, fleet: Fleet, lost: LearnerLost) -> int:
        """A new learner group with the weights of the newest checkpoint, under a version above every one so far.

        The step count goes back to the checkpoint and so does the cursor: what was trained since comes again. Every
        outstanding attempt is aborted. Returns the step to go on from.
        """
        self._learner_restarts += 1
        self._recorder.restarted("learner")
        self._view.message(
            f"the learner is lost ({lost}); rebuilding it from the newest checkpoint, time {self._learner_restarts} of "
            f"at most {self._config.guardrails.max_learner_restarts} (guardrails.max_learner_restarts)"
        )
        self._view.phase("rebuilding the learner")
        await fleet.ready("rollout workers", "scorers")
        with contextlib.suppress(CheckpointFailed):
            await self._checkpoints.finish(timeout_s=_SECONDS_FOR_THE_LAST_SET)
        try:
            newest = await self._checkpoints.newest()
        except CheckpointFailed as error:
            raise RunFailed(f"the learner cannot be rebuilt: {error}") from None
        version = max(self._queue.learner_version, self._published.highest) + 1
        self._queue.fail_over(version)
        self._cursor = PromptCursor(self._inputs.train, seed=self._config.run.seed)
        await fleet.learner.restart(version=version)
        await self._checkpoints.clear()
        step = 0
        if newest is not None:
            saved = run_state.load_state(newest)
            self._cursor.load_state_dict(saved["cursor"], outstanding=())
            await fleet.learner.load(newest / run_state.LEARNER, version=version)
            step = int(saved["step"])
        self._checkpoints.go_back(step)
        await self._publish_restored(fleet)
        return step

    def _controller(self, fleet: Fleet, step: int, on_batch: Callable[[int, TrainBatch], None] | None) -> Controller:
        config = self._config

        async def after_step(done: int) -> None:
            if done % config.checkpoint.every_steps == 0 and done < config.run.steps:
                await self._save(fleet, done)

        return Controller(
            ControllerSettings(
                seed=config.run.seed,
                steps=config.run.steps,
                groups_per_batch=config.queue.groups_per_batch,
                samples_per_prompt=config.rollout.samples_per_prompt,
                max_new_tokens=config.rollout.max_new_tokens,
                temperature=config.rollout.temperature,
                max_attempts=config.guardrails.max_attempts,
                max_unscorable_fraction=config.guardrails.max_unscorable_fraction,
            ),
            cursor=self._cursor,
            queue=self._queue,
            generator=fleet.pool,
            scorer=fleet.scorers,
            learner=fleet.learner,
            sink=fleet.sink,
            clock=self._clock,
            recorder=self._recorder,
            step=step,
            after_step=after_step,
            after_first_publication=self._checks.self_check,
            on_batch=on_batch,
            before_publication=self._published.note,
        )

    def _sample_writer(self, stack: contextlib.ExitStack) -> Callable[[int, TrainBatch], None] | None:
        per_step = self._config.metrics.samples_per_step
        if not per_step:
            return None
        self._view.message(f"answers in clear go to {self._folder.samples} (metrics.samples_per_step {per_step})")
        writer = SampleWriter(self._folder.samples, per_step=per_step, decode=self._inputs.decode)
        stack.callback(writer.close)
        return writer.write

    async def _save(self, fleet: Fleet, step: int) -> None:
        if step == self._checkpoints.saved_step:
            return
        state = run_state.snapshot(
            step, cursor=self._cursor, queue=self._queue, recorder=self._recorder, reference=self._reference
        )
        best = self._config.checkpoint.best_metric
        metric = None if best is None else self._recorder.last(best)
        if best is not None and metric is None:
            self._view.message(f"checkpoint.best_metric {best} is not in the newest row of metrics.jsonl")
        await self._checkpoints.save(step, state, fleet.learner.save, metric=metric)

    def _forget(self, frontier: int) -> None:
        cursor = self._cursor
        self._queue.forget(lambda group_id: cursor.passed(group_id, frontier))

    def _checkpoint_reported(self, report: SaveReport) -> None:
        self._recorder.checkpoint(saved=report.path is not None, blocked_s=report.blocked_s)
        if report.path is None:
            self._view.message(f"checkpoint of step {report.step} FAILED: {report.error}")
            return
        self._view.message(
            f"checkpoint {report.path} ({report.bytes / 2**20:.0f} MiB in {report.total_s:.1f} s, of which training "
            f"waited {report.blocked_s:.1f} s)"
        )


async def _close(fleet: Fleet) -> None:
    """What ended the run says more than what its parts say on their way out."""
    try:
        await fleet.close()
    except Exception as error:
        log.warning("closing: %s: %s", type(error).__name__, error)
