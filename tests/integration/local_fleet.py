"""A run on local Ray with the real learner; engine and scorers are deterministic and live in this process."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from learner.learner_group import LearnerGroup
from learner.spec import LearnerSpec
from rlhf_cluster.config import Config
from rlhf_cluster.config_io import load_config
from rlhf_cluster.ending import Signals
from rlhf_cluster.inputs import read_inputs
from rlhf_cluster.metrics.console import ConsoleView
from rlhf_cluster.run_folder import RunFolder
from rlhf_cluster.training_run import TrainingRun
from rlhf_cluster.types import Rollout, TrainBatch
from tests.deterministic_engine import DeterministicScorer, DeterministicWorker
from tests.tiny_models import build_tiny_policy, build_tiny_reward_model


class SlowWorker(DeterministicWorker):
    """Answers take a moment, so that a kill finds work in progress."""

    def __init__(self, folder: Path, *, slots: int, seconds: float) -> None:
        super().__init__(folder, slots=slots)
        self._seconds = seconds

    async def scale(self, workers: int) -> str:
        raise ValueError("there is one worker")

    async def generate(self, worker: Any, request: Any) -> list[Rollout]:
        self._busy += 1
        try:
            await asyncio.sleep(self._seconds)
        finally:
            self._busy -= 1
        return await super().generate(worker, request)


class LocalFleet:
    """What ``TrainingRun`` needs of ``launch.Fleet``."""

    def __init__(self, config: Config, spec: LearnerSpec, *, seconds: float) -> None:
        folder = Path(config.model.policy)
        self.pool = self.sink = SlowWorker(folder, slots=config.queue.groups_per_batch * 2, seconds=seconds)
        self.scorers = DeterministicScorer(folder)
        options = [{"num_cpus": 0.1}] * config.learner.ranks
        self.learner = LearnerGroup(spec, actor_options=options, start_timeout_s=120)
        self._started = asyncio.ensure_future(self.learner.start())

    async def ready(self, *names: str) -> None:
        if "learner" in names:
            await self._started

    def waits(self) -> list[Any]:
        return []

    async def dump_stacks(self) -> dict[str, str]:
        return {}

    async def close(self) -> None:
        self._started.cancel()
        await self.learner.close()

    async def rank_pids(self) -> list[int]:
        return [await actor.__ray_call__.remote(lambda rank: os.getpid()) for actor in self.learner._actors]


def make_config(folder: Path, *overrides: str) -> Config:
    """The tiny config over models under ``folder``, which are built once."""
    if not (folder / "policy").is_dir():
        build_tiny_policy(folder / "policy")
        build_tiny_reward_model(folder / "reward")
    return load_config(
        Path("configs/tiny_test.yaml"),
        [
            f"model.policy={folder / 'policy'}",
            f"model.reward={folder / 'reward'}",
            f"run.dir={folder / 'runs'}",
            "rollout.max_new_tokens=6",
            "learner.critic_pretrain_steps=0",
            "learner.minibatches=1",
            "metrics.prometheus=null",
            *overrides,
        ],
    )


class Harness:
    """One ``TrainingRun`` and what it trained, step by step."""

    def __init__(self, config: Config, *, seconds: float = 0.02, resume: str = "auto") -> None:
        self.config = config
        self.view = ConsoleView()
        self.folder = RunFolder.open(config, resume=resume)
        self.run = TrainingRun(config, read_inputs(config), self.folder, self.view)
        self.run.read_checkpoint()
        self.fleet: LocalFleet | None = None
        self._seconds = seconds
        self.trained: dict[int, list[str]] = {}
        """The group ids of each step, as it was last trained."""
        self.versions: list[int] = []

    async def go(self) -> None:
        spec = LearnerSpec.from_config(self.config, Path("/dev/shm") / f"rlhf-test-{os.getpid()}")

        def start(on_event: Any) -> LocalFleet:
            self.fleet = LocalFleet(self.config, spec, seconds=self._seconds)
            return self.fleet

        def keep(step: int, batch: TrainBatch) -> None:
            self.trained[step] = [group.group_id for group in batch.groups]
            self.versions.append(batch.learner_version)

        self.run._sample_writer = lambda stack: keep  # type: ignore[method-assign]
        task = asyncio.current_task()
        assert task is not None
        await self.run.run(Signals(task), start)
