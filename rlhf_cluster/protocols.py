"""What the control loop needs from the world. Numpy and the standard library only.

The controller talks to these protocols and to nothing else, so it runs unchanged against Ray handles, in-process
fakes and modelled actors in simulated time. Every implementation owns its deadlines: a call that cannot finish
raises ``TimeoutError`` naming the party it waited for, and never blocks for ever.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rlhf_cluster.types import Floats, Prompt, Rollout, Sampling, ScoredRollout, TrainBatch, UpdateResult


class Clock(Protocol):
    """Monotonic seconds. Simulations inject their own."""

    def now(self) -> float: ...

    async def sleep(self, seconds: float) -> None: ...


@dataclass(frozen=True, slots=True)
class WorkerSlot:
    """A routable rollout worker as the router saw it: its stable slot index and the version it has applied."""

    index: int
    version: int


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """One dispatch of one prompt: ``len(seeds)`` samples that share group id and attempt."""

    group_id: str
    attempt: int
    prompt: Prompt
    sampling: tuple[Sampling, ...]
    """One entry a sample; each has its own seed."""


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A worker slot as metrics show it: whether it takes requests, what it serves, groups it is working on."""

    index: int
    up: bool
    version: int
    in_flight: int


class WorkerFailed(RuntimeError):
    """A worker or scorer died or answered with an error; its attempts are to be re-issued."""


class ScorersBusy(TimeoutError):
    """No scorer took the call in time, which says nothing about what was to be scored."""


class LearnerLost(RuntimeError):
    """A learner rank died or hangs: the group is to be rebuilt and goes on from the newest checkpoint."""


class Generator(Protocol):
    """The rollout workers behind one router."""

    def choose(self) -> WorkerSlot | None:
        """The routable worker with the most free room, or None when every worker is full or fenced."""
        ...

    def status(self) -> Sequence[WorkerStatus]:
        """Every worker slot, dead ones too."""
        ...

    async def generate(self, worker: WorkerSlot, request: RolloutRequest) -> list[Rollout]:
        """Samples of one group, one Rollout per entry of ``request.sampling`` in that order.

        Raises:
            WorkerFailed: the worker died or refused. TimeoutError: names the worker.
        """
        ...


class Scorer(Protocol):
    """Reward and reference scoring of one group."""

    async def score(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[ScoredRollout]:
        """One record per rollout, same order. A rollout that cannot be scored has score NaN, never 0.

        Raises:
            WorkerFailed: a scorer died or refused. TimeoutError: names the scorer.
        """
        ...


@dataclass(frozen=True, slots=True)
class WeightSnapshot:
    """The learner's weights of one version, written once a node; metadata only.

    ``manifest`` describes the flat buffer at ``path`` (tensor names, dtypes, shapes, offsets, checksums);
    ``transport`` carries what another node or another backend needs to fetch the bytes. With ``transport["nccl"]``
    nothing lies at ``path``: the learner broadcasts its live weights, in the manifest's order.
    """

    version: int
    path: Path
    manifest: Mapping[str, Any] = field(repr=False)
    transport: Mapping[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class PublishReport:
    """Which worker slots now serve ``version``, which failed and are fenced, and how long generation stood still.

    ``died``: those of ``failed`` whose process is gone. What replaces them holds the newest version before it serves.
    """

    version: int
    applied: tuple[int, ...]
    failed: Mapping[int, str]
    paused_s: float
    total_s: float
    died: frozenset[int] = frozenset()


class WeightSink(Protocol):
    """Everything that must hold the newest weights before it may serve."""

    async def publish(self, snapshot: WeightSnapshot) -> PublishReport:
        """Apply and verify ``snapshot`` on every worker; a worker that fails is fenced and named in the report."""
        ...


class WeightChannel(Protocol):
    """An open connection to the engines of one group, in learner rank 0's process."""

    def __call__(self, weights: Iterator[tuple[str, Any]]) -> None:
        """Send (name, tensor) of all weights, in the manifest's order."""
        ...

    def close(self) -> None:
        """Leave the group; a new one can be met after it."""
        ...


class WeightBroadcast(Protocol):
    """How learner rank 0 sends weights straight to the engines; picklable, and opened in that rank's process."""

    def transport(self, host: str, port: int, members: Sequence[int] | None = None) -> Mapping[str, Any]:
        """The part of ``WeightSnapshot.transport`` that tells every party to meet at ``host:port``.

        ``members``: slots of the workers in the group; None: all that the configuration names.
        """
        ...

    def connect(self, transport: Mapping[str, Any], manifest: Mapping[str, Any]) -> WeightChannel:
        """Meet the engines; what it returns sends to them until it is closed."""
        ...


class Learner(Protocol):
    """Policy and critic training."""

    @property
    def version(self) -> int: ...

    async def train(self, batch: TrainBatch) -> UpdateResult:
        """One learner step on a batch for the current version.

        Raises:
            LearnerLost: naming the rank that died or hangs. Anything else is an error that would come again.
        """
        ...

    async def snapshot(self) -> WeightSnapshot:
        """The current policy weights in engine dtype, ready to publish as the current version."""
        ...

    async def logprobs(self, rollouts: Sequence[Rollout]) -> list[Floats]:
        """(T,) log-probs of each rollout's tokens under the current policy, nats, temperature applied."""
        ...

    async def save(self, folder: Path) -> None:
        """Tensor state (weights, optimizers, schedulers, RNGs) under ``folder``."""
        ...
