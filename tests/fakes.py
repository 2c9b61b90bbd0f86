"""In-process stand-ins for the world beyond ``protocols.py``, with faults that a test switches on by name.

They let the production controller and queue run without Ray in milliseconds. Everything they do is deterministic in
what they are given: answers depend on the sampling seed only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_cluster.protocols import (
    PublishReport,
    RolloutRequest,
    WeightSnapshot,
    WorkerFailed,
    WorkerSlot,
    WorkerStatus,
)
from rlhf_cluster.types import Prompt, Ratio, Rollout, ScoredRollout, TrainBatch, UpdateResult, VersionSpan

Fault = Callable[[RolloutRequest], BaseException | None]


class FakeWorkers:
    """Generator and WeightSink. ``seconds(request)`` says how long a group takes; ``fault(request)`` what it raises."""

    def __init__(
        self,
        *,
        workers: int = 1,
        capacity: int = 100,
        seconds: Callable[[RolloutRequest], float] = lambda request: 0.001,
        fault: Fault = lambda request: None,
        publish_seconds: float = 0.0,
        lose_sample: Callable[[RolloutRequest], bool] = lambda request: False,
    ) -> None:
        self._lose_sample = lose_sample
        self.versions = [0] * workers
        self.in_flight = [0] * workers
        self.requests: list[RolloutRequest] = []
        self.published: list[int] = []
        self._capacity = capacity
        self._seconds = seconds
        self._fault = fault
        self._publish_seconds = publish_seconds

    def choose(self) -> WorkerSlot | None:
        index = min(range(len(self.versions)), key=lambda i: self.in_flight[i])
        return WorkerSlot(index, self.versions[index]) if self.in_flight[index] < self._capacity else None

    def status(self) -> list[WorkerStatus]:
        return [WorkerStatus(i, True, self.versions[i], self.in_flight[i]) for i in range(len(self.versions))]

    async def generate(self, worker: WorkerSlot, request: RolloutRequest) -> list[Rollout]:
        self.in_flight[worker.index] += 1
        self.requests.append(request)
        start = self.versions[worker.index]
        try:
            await asyncio.sleep(self._seconds(request))
            fault = self._fault(request)
            if fault is not None:
                raise fault
        finally:
            self.in_flight[worker.index] -= 1
        samples = len(request.sampling) - int(self._lose_sample(request))
        return [self._rollout(request, index, start, self.versions[worker.index]) for index in range(samples)]

    @staticmethod
    def _rollout(request: RolloutRequest, index: int, start: int, end: int) -> Rollout:
        """Six tokens: the first under the start version, the rest under the version that is live at the end."""
        tokens = np.random.default_rng(request.sampling[index].seed).integers(0, 100, 6)
        spans = [VersionSpan(start, 0, 6)] if start == end else [VersionSpan(start, 0, 1), VersionSpan(end, 1, 6)]
        return Rollout(
            rollout_id=f"{request.group_id}/{request.attempt}/{index}",
            attempt=request.attempt,
            group_id=request.group_id,
            prompt_token_ids=np.array(request.prompt.token_ids),
            token_ids=tokens,
            behaviour_logprobs=np.full(6, -1.0),
            version_spans=tuple(spans),
            finish_reason="stop",
            sampling=request.sampling[index],
        )

    async def publish(self, snapshot: WeightSnapshot) -> PublishReport:
        await asyncio.sleep(self._publish_seconds)
        self.versions = [snapshot.version] * len(self.versions)
        self.published.append(snapshot.version)
        return PublishReport(snapshot.version, tuple(range(len(self.versions))), {}, 0.0, self._publish_seconds)


class FakeScorer:
    """Scores every rollout 1.0, or what ``score(prompt)`` says; ``fail_first`` calls raise WorkerFailed."""

    def __init__(self, score: Callable[[Prompt], float] = lambda prompt: 1.0, *, fail_first: int = 0) -> None:
        self._score = score
        self._failures_left = fail_first

    async def score(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[ScoredRollout]:
        await asyncio.sleep(0)
        if self._failures_left:
            self._failures_left -= 1
            raise WorkerFailed("reward scorer 0: process died")
        value = self._score(prompt)
        return [ScoredRollout(r, value, {"model": value}, np.full(r.n_tokens, -1.1)) for r in rollouts]


class FakeLearner:
    """Keeps the batches it trained. ``skip`` names calls (from 0) whose step is skipped; ``error`` one that raises."""

    def __init__(self, *, seconds: float = 0.002, skip: Sequence[int] = (), error: BaseException | None = None) -> None:
        self.version = 0
        self.batches: list[TrainBatch] = []
        self._seconds = seconds
        self._skip = set(skip)
        self._calls = 0
        self._error = error

    async def train(self, batch: TrainBatch) -> UpdateResult:
        await asyncio.sleep(self._seconds)
        if self._error is not None:
            raise self._error
        call, self._calls = self._calls, self._calls + 1
        if call in self._skip:
            return UpdateResult(self.version, False, {})
        self.batches.append(batch)
        self.version += 1
        return UpdateResult(self.version, True, {"policy_loss": Ratio(0.0, 1.0)})

    async def snapshot(self) -> WeightSnapshot:
        return WeightSnapshot(self.version, Path("nowhere"), {})

    async def logprobs(self, rollouts: Sequence[Rollout]) -> list[np.ndarray]:
        return [rollout.behaviour_logprobs for rollout in rollouts]

    async def save(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "learner.json").write_text(f'{{"version": {self.version}}}')


class RecordingBroadcast:
    """A WeightBroadcast to nobody: keeps what it was connected with and the names of every version sent."""

    def __init__(self) -> None:
        self.connected: list[tuple[Mapping[str, Any], Mapping[str, Any]]] = []
        self.sent: list[list[str]] = []

        self.closed = 0

    def transport(self, host: str, port: int, members: Sequence[int] | None = None) -> dict[str, Any]:
        group = {"nccl": {"master_address": host, "master_port": port}}
        return group if members is None else {**group, "members": list(members)}

    def connect(self, transport: Mapping[str, Any], manifest: Mapping[str, Any]) -> RecordingBroadcast:
        self.connected.append((transport, manifest))
        return self

    def __call__(self, weights: Iterator[tuple[str, Any]]) -> None:
        self.sent.append([name for name, _ in weights])

    def close(self) -> None:
        self.closed += 1
