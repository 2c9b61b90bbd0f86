"""Composition root: the only module that imports ``actors`` and ``learner``.

checks -> Ray -> workers, scorers and learner side by side -> TrainingRun -> everything closed, whatever happened
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import secrets
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_cluster.broadcast_sink import BroadcastSink
from rlhf_cluster.clock import SystemClock
from rlhf_cluster.config import Config
from rlhf_cluster.config_io import ConfigError
from rlhf_cluster.data.preferences import load_preferences
from rlhf_cluster.diagnosis.preflight import PreflightError
from rlhf_cluster.ending import Signals, Stopped, hold_signals, run_async
from rlhf_cluster.evaluation import Sampler, evaluate
from rlhf_cluster.inputs import read_inputs
from rlhf_cluster.metrics.console import ConsoleView
from rlhf_cluster.progress import ProgressView
from rlhf_cluster.protocols import WeightSink
from rlhf_cluster.run_folder import RunFolder
from rlhf_cluster.supervision import Event, SupervisionSettings
from rlhf_cluster.training_run import TrainingRun
from rlhf_cluster.types import Prompt, Rollout
from rlhf_cluster.watchdog import Wait

log = logging.getLogger(__name__)

# Where Linux keeps files in memory: the learner writes each version there once a node.
_SHARED_MEMORY = Path("/dev/shm")


@contextlib.contextmanager
def ray_session(config: Config) -> Iterator[None]:
    """Ray for the length of a run: joins ``cluster.address`` or the job's own cluster, else starts Ray here.

    Raises:
        PreflightError: the actors want more CPUs, GPUs or memory than there are.
        Stopped: a signal came while Ray started or ended; Ray is closed.
    """
    import ray

    from actors import placement

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    address = config.cluster.address or os.environ.get("RAY_ADDRESS")
    wanted = placement.wanted(config)
    where: dict[str, Any] = {"address": address}
    if address is None:
        # Logical CPUs only book actors in; on a small machine they share the real cores.
        cpus = max(os.cpu_count() or 1, placement.total(wanted).get("CPU", 0))
        where = {"address": "local", "num_cpus": cpus, "include_dashboard": False}
    late: list[signal.Signals] = []
    try:
        _start_ray(where)
        try:
            placement.check_fits(wanted, ray.cluster_resources())
        except ValueError as error:
            raise PreflightError(str(error)) from None
        yield
    finally:
        with hold_signals() as late:
            ray.shutdown()
    if late:
        raise Stopped(late[0])


def _start_ray(where: Mapping[str, Any]) -> None:
    """``ray.init``, which puts its own handler of SIGTERM in place: it closes what has started, and exits."""
    import ray

    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(**where, log_to_driver=False, configure_logging=False)
    except SystemExit:
        raise Stopped(signal.SIGTERM) from None
    finally:
        if handler is not None:  # None: not set from Python, and Python cannot put it back
            signal.signal(signal.SIGTERM, handler)


def snapshot_folder(config: Config) -> Path:
    """A new folder in memory for the weights that this driver publishes: ``rlhf-NAME-RUN.DRIVER``.

    The part before the dot is the same for every driver of a run folder, so that one finds what a dead one left.
    """
    run = hashlib.sha256(str((Path(config.run.dir) / config.run.name).resolve()).encode()).hexdigest()[:8]
    return _SHARED_MEMORY / f"rlhf-{config.run.name}-{run}.{secrets.token_hex(4)}"


class Fleet:
    """Workers, scorers and learner of one run, started side by side and each awaited when it is needed.

    ``on_event`` is told of every death, restart, fence and missed heartbeat of workers and scorers.
    """

    def __init__(
        self,
        config: Config,
        *,
        with_scorers: bool = True,
        with_learner: bool = True,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        from actors import placement
        from actors.rollout_pool import RolloutPool
        from actors.scorer_pool import ScorerPool
        from actors.scorer_replicas import Retries
        from actors.weight_sender import NcclBroadcast
        from learner.learner_group import LearnerGroup
        from learner.spec import LearnerSpec

        timeout_s = config.cluster.start_timeout_s
        supervision = SupervisionSettings(**config.supervision.model_dump())
        self.pool = RolloutPool(config, supervision=supervision, on_event=on_event)
        self.scorers = ScorerPool(
            config.model,
            config.reward,
            config.scorers,
            device=config.cluster.device,
            actor_options=placement.scorer_options(config),
            supervision=supervision,
            retries=Retries(config.scorers.attempts, config.scorers.retry_backoff_s, config.scorers.max_in_flight),
            on_event=on_event,
        )
        weight_broadcast = NcclBroadcast.from_config(config)
        self.learner = LearnerGroup(
            LearnerSpec.from_config(config, snapshot_folder(config)),
            actor_options=[placement.learner_options(config)] * config.learner.ranks,
            start_timeout_s=timeout_s,
            weight_broadcast=weight_broadcast,
        )
        self.sink: WeightSink = (
            self.pool
            if weight_broadcast is None
            else BroadcastSink(self.pool, self.learner, timeout_s=config.publish.timeout_s)
        )
        self._parts: dict[str, Any] = {"rollout workers": self.pool}
        self._starting = {"rollout workers": asyncio.create_task(self.pool.start(timeout_s))}
        if with_scorers:
            self._parts["scorers"] = self.scorers
            self._starting["scorers"] = asyncio.create_task(self.scorers.start(timeout_s))
        if with_learner:
            self._parts["learner"] = self.learner
            self._starting["learner"] = asyncio.create_task(self.learner.start())

    async def ready(self, *names: str) -> None:
        """Wait until the named parts run. A part that cannot start ends the wait at once, whoever is waited for."""
        wanted = {self._starting[name] for name in names}
        while not all(task.done() for task in wanted):
            done, _ = await asyncio.wait(
                [task for task in self._starting.values() if not task.done()], return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                task.result()
        for task in wanted:
            task.result()

    async def watch(self) -> None:
        """Returns never; raises what no call of the control loop would tell (``BroadcastSink.watch``)."""
        if isinstance(self.sink, BroadcastSink):
            await self.sink.watch()
        await asyncio.Event().wait()

    def waits(self) -> list[Wait]:
        """Who waits for which worker or scorer, for the watchdog."""
        return [*self.pool.waits(), *self.scorers.waits()]

    async def dump_stacks(self) -> dict[str, str]:
        """Stacks of every worker, scorer and learner rank that is alive, by name."""
        found = await asyncio.gather(self.pool.dump_stacks(), self.scorers.dump_stacks(), self.learner.dump_stacks())
        return {name: text for stacks in found for name, text in stacks.items()}

    async def close(self) -> None:
        """End every part, started or not."""
        if isinstance(self.sink, BroadcastSink):
            self.sink.stop_readmitting()
        for task in self._starting.values():
            task.cancel()
        await asyncio.gather(*self._starting.values(), return_exceptions=True)
        results = await asyncio.gather(*(part.close() for part in self._parts.values()), return_exceptions=True)
        for name, result in zip(self._parts, results, strict=True):
            if isinstance(result, Exception):
                log.warning("%s did not close cleanly: %s", name, result)


def train(config: Config, *, resume: str) -> None:
    """Train ``config.run.steps`` learner steps, or go on from the newest checkpoint of the run folder."""
    view = ConsoleView()
    try:
        view.phase("reading prompts")
        inputs = read_inputs(config)
        folder = RunFolder.open(config, resume=resume)
        view.message(
            f"run {folder.path}: "
            + (f"resuming from {folder.checkpoint.name}" if folder.checkpoint else "starting fresh, no checkpoint here")
        )
        run = TrainingRun(config, inputs, folder, view)
        run.read_checkpoint()
        for change in folder.begin(config):
            view.message(f"set otherwise than before the resume: {change}")
        view.phase("starting Ray")
        with ray_session(config):
            run_async(
                lambda signals: run.run(signals, lambda on_event: Fleet(config, on_event=on_event)),
                grace_s=config.run.stop_grace_s,
            )
    finally:
        view.close()


def evaluate_folder(config: Config, policy: Path | None) -> None:
    """Evaluate ``policy`` (``model.policy`` when None) on the held-out prompts and print the summary."""
    evaluation = config.evaluation
    if evaluation is None:
        raise ConfigError("evaluation: the section is missing; add it and data.eval_prompts to evaluate a policy")
    if policy is not None:
        model = config.model.model_copy(update={"policy": str(policy), "reference": config.model.reference_path})
        config = config.model_copy(update={"model": model})
    answers = evaluation.samples_per_prompt
    view = ConsoleView()
    try:
        view.phase("reading prompts")
        inputs = read_inputs(config)

        async def body(signals: Signals) -> None:
            fleet = Fleet(config, with_learner=False)
            try:
                await fleet.ready("rollout workers", "scorers")
                view.phase("evaluating")
                sampler = Sampler(fleet.pool, SystemClock(), config.rollout, seed=config.run.seed)
                result = await evaluate(
                    inputs.held_out, sampler=sampler, scorer=fleet.scorers, samples_per_prompt=answers
                )
                view.evaluation(config.model.policy, 0, result.version, result.summary())
            finally:
                await fleet.close()

        view.phase("starting rollout workers and scorers")
        with ray_session(config):
            run_async(body)
    finally:
        view.close()


def sample_answers(
    config: Config, prompts: Sequence[Prompt], *, samples_per_prompt: int, progress: Callable[[str, int, int], None]
) -> list[list[Rollout]]:
    """Answers of ``model.policy`` from vLLM workers alone; ``progress(stage, done, total)`` follows the prompts."""

    async def body(signals: Signals) -> list[list[Rollout]]:
        fleet = Fleet(config, with_scorers=False, with_learner=False)
        try:
            await fleet.ready("rollout workers")
            sampler = Sampler(fleet.pool, SystemClock(), config.rollout, seed=config.run.seed)

            answered = 0

            async def one(prompt: Prompt) -> list[Rollout]:
                nonlocal answered
                group = await sampler.sample(prompt, samples_per_prompt, label="preference pairs")
                answered += 1
                progress("prompts answered", answered, len(prompts))
                return group

            return list(await asyncio.gather(*(one(prompt) for prompt in prompts)))
        finally:
            await fleet.close()

    with ray_session(config):
        groups: list[list[Rollout]] = run_async(body)
        return groups


def fit_reward_model(
    base: Path, pairs: Path, out: Path, *, dtype: str, attention: str, threads: int, seed: int
) -> None:
    """Fit a reward head on frozen features of ``base`` to the pairs in a JSONL file, and say how well it ranks."""
    preferences = load_preferences(pairs)
    if not (base / "config.json").is_file():
        raise PreflightError(f"base: {base} is no Hugging Face model folder (no config.json)")

    import torch

    from learner.reward_model import fit_reward_head

    torch.set_num_threads(threads)
    with ProgressView() as view:
        fit = fit_reward_head(base, preferences, out, dtype=dtype, attention=attention, seed=seed, progress=view.update)
    print(
        f"reward model {out}: {fit.held_out_accuracy:.3f} of {fit.pairs} pairs ranked right when their "
        f"prompt was held out, {fit.train_accuracy:.3f} after training on all"
    )
    report = {
        "held_out_accuracy": fit.held_out_accuracy,
        "train_accuracy": fit.train_accuracy,
        "pairs": fit.pairs,
        "l2": fit.l2,
    }
    (out / "pair_accuracy.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
