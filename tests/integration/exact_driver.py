"""A driver with the real DeepSpeed learner and a deterministic engine: everything but the ranks in one process.

The ranks are processes forked from the driver and joined by gloo. When the driver is killed, its ranks see their pipes
close and end by themselves, in whatever they were doing, as ranks of a killed Ray driver do.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import socket
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from learner.spec import LearnerSpec
from rlhf_cluster import launch
from rlhf_cluster.config import Config
from rlhf_cluster.ending import guard
from rlhf_cluster.protocols import WeightSnapshot
from rlhf_cluster.types import Rollout, TrainBatch, UpdateResult
from tests.deterministic_engine import DeterministicScorer, DeterministicWorker
from tests.toy_run import Hold, Phases, Report


class ForkedRanks:
    """``protocols.Learner`` over ``LearnerRank`` in forked processes."""

    def __init__(self, spec: LearnerSpec, phases: Phases) -> None:
        self._spec = spec
        self._phases = phases
        self._version = 0
        self._pipes: list[Connection] = []

    async def start(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        context = multiprocessing.get_context("fork")
        for rank in range(self._spec.learner.ranks):
            ours, theirs = context.Pipe()
            context.Process(target=_serve, args=(self._spec, rank, port, theirs, [*self._pipes, ours])).start()
            theirs.close()
            self._pipes.append(ours)
        await self._call("state")

    @property
    def version(self) -> int:
        return self._version

    async def train(self, batch: TrainBatch) -> UpdateResult:
        result: UpdateResult = await self._call("train", batch)
        self._version = result.version
        return result

    async def snapshot(self) -> WeightSnapshot:
        snapshot: WeightSnapshot = await self._call("snapshot")
        return snapshot

    async def logprobs(self, rollouts: Sequence[Rollout]) -> list[Any]:
        answer: list[Any] = await self._call("logprobs", rollouts)
        return answer

    async def save(self, folder: Path) -> None:
        await self._call("save", folder)
        await self._phases.enter("tensors written")

    async def load(self, folder: Path, *, version: int | None = None) -> None:
        await self._call("load", folder, version=version)
        self._version = int((await self._call("state"))["version"])

    async def close(self) -> None:
        with contextlib.suppress(OSError, EOFError):
            await self._call("close")
        for pipe in self._pipes:
            pipe.close()

    async def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        for pipe in self._pipes:
            pipe.send((method, args, kwargs))
        answers = [await asyncio.to_thread(pipe.recv) for pipe in self._pipes]
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers[0]


def _serve(spec: LearnerSpec, rank: int, port: int, pipe: Connection, others: Sequence[Connection]) -> None:
    import torch

    from learner.engine import init_distributed
    from learner.learner import LearnerRank

    for other in others:
        other.close()
    torch.set_num_threads(1)
    size = spec.learner.ranks
    init_distributed(backend="gloo", rank=rank, world_size=size, host="127.0.0.1", port=port, timeout_s=60)
    learner = LearnerRank(spec, rank=rank, world_size=size)
    with contextlib.suppress(EOFError, OSError):
        while True:
            method, args, kwargs = pipe.recv()
            try:
                pipe.send(getattr(learner, method)(*args, **kwargs))
            except Exception as error:
                pipe.send(error)
    os._exit(0)


class ExactFleet:
    """What ``TrainingRun`` needs of ``launch.Fleet``."""

    def __init__(self, config: Config, phases: Phases) -> None:
        folder = Path(config.model.policy)
        self.learner = ForkedRanks(
            LearnerSpec.from_config(config, Path(config.run.dir) / f"weights_{os.getpid()}"), phases
        )
        self._starting = asyncio.ensure_future(self.learner.start())
        self._folder = folder
        self._slots = config.queue.groups_per_batch * 2
        self.pool: Any = None
        self.sink: Any = None
        self.scorers = DeterministicScorer(Path(config.model.reference_path))

    async def ready(self, *names: str) -> None:
        await self._starting
        if self.pool is None:
            self.pool = self.sink = DeterministicWorker(self._folder, slots=self._slots)
            self.pool.scale = None

    async def watch(self) -> None:
        await asyncio.Event().wait()

    def waits(self) -> list[Any]:
        return []

    async def dump_stacks(self) -> dict[str, str]:
        return {}

    async def close(self) -> None:
        await self.learner.close()


def train(report: Report, config: Config, hold: Hold | None = None) -> int:
    """`rlhf train`; reports every learner step that begins, and a held `tensors written`."""
    import torch

    # Two cores are shared with the ranks: a second thread would mostly wait for them.
    torch.set_num_threads(1)
    phases = Phases(report, hold)
    launch.Fleet = lambda config, **_: ExactFleet(config, phases)  # type: ignore[assignment,misc]
    launch.ray_session = lambda _: contextlib.nullcontext()  # type: ignore[assignment,misc]
    launch.TrainingRun._sample_writer = lambda self, stack: lambda step, batch: report(step)  # type: ignore[method-assign]
    return guard(lambda: launch.train(config, resume="auto"))
