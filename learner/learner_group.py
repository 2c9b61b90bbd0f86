"""The Ray shell around the learner: one actor a rank, one process group, one deadline for every call.

    LearnerGroup (driver) --ray.put(batch) once--> RankActor 0..N-1 --delegates--> LearnerRank
                                                        \\__ gloo or nccl __/

Work goes to all ranks or to none; the first rank that fails ends the call with its own error, and a rank that does not
answer is named. While a batch is trained a second thread of every rank says how far it is: when none of them moves for
``learner.stall_timeout_s`` the collective has stalled, and the ranks print their stacks before the call ends. A group
that failed is rebuilt with ``restart`` and goes on from a checkpoint with ``load``.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import socket
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
from ray.exceptions import (
    ActorUnschedulableError,
    LocalRayletDiedError,
    NodeDiedError,
    OutOfMemoryError,
    RayActorError,
    RuntimeEnvSetupError,
    WorkerCrashedError,
)

from learner.host_memory import return_freed_memory
from learner.spec import LearnerSpec
from rlhf_cluster.causes import death_cause
from rlhf_cluster.protocols import LearnerLost, WeightBroadcast, WeightSnapshot
from rlhf_cluster.stale_snapshots import remove_stale_snapshots
from rlhf_cluster.types import Floats, Rollout, TrainBatch, UpdateResult
from rlhf_cluster.watchdog import own_stacks

if TYPE_CHECKING:
    from learner.learner import LearnerRank

logger = logging.getLogger(__name__)

# The process is gone, whatever took it: only some of these are Ray's errors about actors.
_DEATHS = (
    RayActorError,
    WorkerCrashedError,
    OutOfMemoryError,
    NodeDiedError,
    LocalRayletDiedError,
    ActorUnschedulableError,
    RuntimeEnvSetupError,
)
# When one rank fails its peers fail too, on the broken connection, and may be heard first.
_SECONDS_FOR_OTHER_FAILURES = 3.0
_PEER_FAILURE_MARKS = ("Connection closed by peer", "Connection reset by peer", "gloo", "NCCL", "ProcessGroup")
_CLOSE_TIMEOUT_S = 20.0
# How often the ranks are asked how far they are.
_POLL_S = 2.0
_LOOPBACK = "127.0.0.1"


class LearnerFailed(RuntimeError):
    """A learner rank died or raised; the message names the rank and carries its error."""


class LearnerDied(LearnerFailed, LearnerLost):
    """The process of a learner rank is gone."""


class LearnerDisconnected(LearnerFailed, LearnerLost):
    """Ranks lost the connection to a peer, and nobody says why: Ray may notice the death of a node much later."""


class LearnerStalled(LearnerFailed, LearnerLost):
    """No rank ran a micro-batch for ``learner.stall_timeout_s``."""


class LearnerSilent(TimeoutError, LearnerLost):
    """A learner rank did not answer within the deadline of a call."""


class RankActor:
    """One rank in a Ray actor process. torch, transformers and deepspeed are imported in ``setup``."""

    def __init__(self, rank: int, world_size: int, cpu_threads: int) -> None:
        self._rank = rank
        self._world_size = world_size
        # Before torch is imported, or its thread pool has the size of the machine.
        os.environ["OMP_NUM_THREADS"] = str(cpu_threads)
        self._cpu_threads = cpu_threads
        self._learner: LearnerRank | None = None

    def address(self, loopback: bool) -> tuple[str, int]:
        """An address of this node and a free port on it, for the ranks to meet at."""
        host = _LOOPBACK if loopback else ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((host, 0))
            return host, probe.getsockname()[1]

    def setup(self, spec: LearnerSpec, host: str, port: int) -> str:
        """Join the group and load the models; returns this node's id."""
        if self._rank == 0:
            remove_stale_snapshots(spec.snapshot_dir)
        self._learner = self.build(spec, host, port)
        return ray.get_runtime_context().get_node_id()

    def build(self, spec: LearnerSpec, host: str, port: int) -> LearnerRank:
        """The rank that this process holds, connected to its peers."""
        import torch

        from learner.engine import init_distributed
        from learner.learner import LearnerRank

        if spec.device == "cpu":
            torch.set_num_threads(self._cpu_threads)
        init_distributed(
            backend="gloo" if spec.device == "cpu" else "nccl",
            rank=self._rank,
            world_size=self._world_size,
            host=host,
            port=port,
            timeout_s=spec.learner.timeout_s,
        )
        return LearnerRank(spec, rank=self._rank, world_size=self._world_size)

    def train(self, batch: TrainBatch) -> UpdateResult:
        result = self._ready().train(batch)
        return_freed_memory()
        return result

    def logprobs(self, rollouts: Sequence[Rollout]) -> list[Floats]:
        return self._ready().logprobs(rollouts)

    def snapshot(self, with_bytes: bool) -> tuple[WeightSnapshot | None, Any]:
        """The snapshot and, if asked for, its bytes in the object store for other nodes (rank 0 only)."""
        snapshot = self._ready().snapshot()
        if snapshot is None or not with_bytes:
            return snapshot, None
        return snapshot, ray.put(np.fromfile(snapshot.path, dtype=np.uint8))

    def announce(self) -> WeightSnapshot:
        return self._ready().announce()

    def broadcast(self, version: int, broadcast: WeightBroadcast, transport: Mapping[str, Any]) -> None:
        self._ready().broadcast(version, broadcast, transport)

    def save(self, folder: Path) -> None:
        self._ready().save(folder)

    def load(self, folder: Path, version: int | None) -> int:
        """Restore; returns the version."""
        learner = self._ready()
        learner.load(folder, version=version)
        return learner.version

    def renumber(self, version: int) -> int:
        """Call the weights that are loaded ``version``."""
        self._ready().version = version
        return version

    @ray.method(concurrency_group="health")
    def progress(self) -> int:
        """Micro-batches run so far, also while another thread trains."""
        return self._learner.progress if self._learner is not None else 0

    @ray.method(concurrency_group="health")
    def dump_stacks(self) -> str:
        """What every thread is doing, also while one trains."""
        return own_stacks()

    def close(self) -> None:
        if self._learner is not None:
            self._learner.close()

    def _ready(self) -> LearnerRank:
        if self._learner is None:
            raise RuntimeError(f"learner rank {self._rank} was not set up")
        return self._learner


class LearnerGroup:
    """Implements ``protocols.Learner`` over ``spec.learner.ranks`` Ray actors.

    Args:
        spec: what every rank needs.
        actor_options: Ray actor options of each rank (resources, scheduling strategy, runtime_env), one entry a rank.
        start_timeout_s: seconds for all ranks to come up; every other call has ``spec.learner.timeout_s``.
        weight_broadcast: how rank 0 sends weights straight to the engines; None: snapshots are written.
        rank_class: the class that becomes each actor; tests put a rank without torch here.

    Raises:
        ValueError: not one entry of options a rank.
    """

    def __init__(
        self,
        spec: LearnerSpec,
        *,
        actor_options: Sequence[Mapping[str, Any]],
        start_timeout_s: float,
        weight_broadcast: WeightBroadcast | None = None,
        rank_class: type[RankActor] = RankActor,
    ) -> None:
        if len(actor_options) != spec.learner.ranks:
            raise ValueError(
                f"learner.ranks is {spec.learner.ranks}, but {len(actor_options)} actor options were given"
            )
        self._spec = spec
        self._start_timeout_s = start_timeout_s
        self._options = [dict(options) for options in actor_options]
        self._actors: list[Any] = []
        self._node_id = ""
        self._version = 0
        self._weight_broadcast = weight_broadcast
        self._rank_class = rank_class
        self._transport: Mapping[str, Any] | None = None
        self._publication: asyncio.Future[Any] | None = None
        self._training = False

    @property
    def version(self) -> int:
        return self._version

    async def start(self) -> None:
        """Create the ranks and load the models.

        Raises:
            LearnerFailed, TimeoutError: naming the rank.
        """
        remote = ray.remote(concurrency_groups={"health": 1})(self._rank_class)
        size = self._spec.learner.ranks
        self._actors = [
            remote.options(**options).remote(rank, size, self._spec.learner.cpu_threads)
            for rank, options in enumerate(self._options)
        ]
        deadline = asyncio.get_running_loop().time() + self._start_timeout_s
        meeting = self._actors[0].address.remote(not _several_nodes())
        first = await _answers({0: meeting}, "address", self._start_timeout_s)
        host, port = first[0]
        left = max(1.0, deadline - asyncio.get_running_loop().time())
        nodes = await self._call("setup", self._spec, host, port, timeout_s=left)
        self._node_id = nodes[0]

    async def train(self, batch: TrainBatch) -> UpdateResult:
        """One learner step on all ranks.

        Raises:
            LearnerFailed, TimeoutError: naming the rank.
        """
        await self._published()
        self._training = True
        try:
            results = await self._watched(self._call("train", ray.put(batch)))
        finally:
            self._training = False
        versions = {result.version for result in results}
        if len(versions) != 1:
            raise LearnerFailed(f"learner ranks disagree on the version after a step: {sorted(versions)}")
        self._version = results[0].version
        return results[0]

    async def logprobs(self, rollouts: Sequence[Rollout]) -> list[Floats]:
        """(T,) log-probs of each rollout's tokens under the current policy, nats, temperature applied."""
        answers: list[list[Floats]] = await self._call("logprobs", ray.put(list(rollouts)))
        return answers[0]

    async def snapshot(self) -> WeightSnapshot:
        """The current weights on rank 0's node, with several nodes also in the object store; or, with a
        ``weight_broadcast``, only what ``broadcast`` will send and where the engines meet rank 0."""
        if self._weight_broadcast is not None:
            return await self._announce(self._weight_broadcast)
        answers = await self._call("snapshot", _several_nodes())
        snapshot, stored = answers[0]
        transport: dict[str, Any] = {"node_id": self._node_id}
        if stored is not None:
            transport["object"] = stored
        return replace(snapshot, transport=transport)

    async def broadcast(self, version: int, *, timeout_s: float) -> None:
        """Send the weights that ``snapshot`` announced as ``version`` to the engines, which must be receiving.

        Raises:
            LearnerFailed, TimeoutError: naming the rank.
        """
        await self._call("broadcast", version, self._weight_broadcast, self._transport, timeout_s=timeout_s)

    @property
    def training(self) -> bool:
        """Whether the live weights are changing now."""
        return self._training

    def hold_for(self, publication: asyncio.Future[Any]) -> None:
        """Do not train or save before ``publication``, which reads the live weights, is over; raise what it raised."""
        self._publication = publication

    async def save(self, folder: Path) -> None:
        """All tensor state under ``folder``, which every rank's node must reach."""
        await self._published()
        await self._call("save", folder)

    async def load(self, folder: Path, *, version: int | None = None) -> None:
        """Go on where ``save`` stood; ``version`` is the saved one afterwards, unless another is given."""
        self._version = (await self._call("load", folder, version))[0]

    async def restart(self, *, version: int) -> None:
        """End every rank, whatever it is doing, and start new ones from the model folders, as ``version``.

        Snapshots stay: a worker may be reading one.

        Raises:
            LearnerFailed, TimeoutError: naming the rank that did not come up.
        """
        # Nobody is sent the weights of ranks that are being replaced.
        self._training = True
        try:
            self._kill()
            self._publication = self._transport = None
            await self.start()
            self._version = (await self._call("renumber", version))[0]
        finally:
            self._training = False

    async def close(self) -> None:
        """Free the ranks and end their processes, also those that do not answer; snapshots are removed."""
        if not self._actors:
            return
        try:
            await self._call("close", timeout_s=_CLOSE_TIMEOUT_S)
        except (LearnerFailed, TimeoutError) as error:
            logger.warning("closing the learner: %s", error)
        finally:
            self._kill()
            # A rank that died could not remove its own.
            shutil.rmtree(self._spec.snapshot_dir, ignore_errors=True)

    def _kill(self) -> None:
        for actor in self._actors:
            ray.kill(actor)
        self._actors.clear()

    async def _watched(self, call: Coroutine[Any, Any, list[Any]]) -> list[Any]:
        """The answers of ``call``, unless no rank runs a micro-batch for ``learner.stall_timeout_s``."""
        answer = asyncio.ensure_future(call)
        clock = asyncio.get_running_loop().time
        stall_s = self._spec.learner.stall_timeout_s
        look_s = min(_POLL_S, stall_s / 4)
        seen: dict[int, int] = {}
        idle_s = 0.0
        try:
            while not (await asyncio.wait([answer], timeout=look_s))[0]:
                asked = clock()
                # A rank that does not answer now stands where it last was.
                current = seen | await self._progress(look_s)
                # A machine that was frozen, and every rank on it, has not watched: one look counts what it may take.
                idle_s += look_s + min(clock() - asked, look_s)
                if current != seen:
                    seen, idle_s = current, 0.0
                elif idle_s > stall_s and not answer.done():
                    for name, stacks in (await self.dump_stacks()).items():
                        logger.error("%s ran no micro-batch for %g s; its stacks:\n%s", name, stall_s, stacks)
                    ranks = list(range(len(self._actors)))
                    raise LearnerStalled(
                        f"learner ranks {ranks} ran no micro-batch for {stall_s:g} s (learner.stall_timeout_s) in "
                        "'train': a rank hangs, or waits for one in a collective; their stacks are in the log"
                    )
            return answer.result()
        finally:
            answer.cancel()

    async def _progress(self, timeout_s: float) -> dict[int, int]:
        """Rank -> micro-batches it has run, of those that answer within ``timeout_s``."""
        answers = [asyncio.ensure_future(_value(actor.progress.remote())) for actor in self._actors]
        _, silent = await asyncio.wait(answers, timeout=timeout_s)
        for task in silent:
            task.cancel()
        return {
            rank: task.result() for rank, task in enumerate(answers) if task not in silent and task.exception() is None
        }

    async def dump_stacks(self) -> dict[str, str]:
        """ "learner rank 0" -> what its threads do, or why it does not say, within ``_POLL_S``."""
        dumps = {
            f"learner rank {rank}": asyncio.ensure_future(_value(actor.dump_stacks.remote()))
            for rank, actor in enumerate(self._actors)
        }
        if dumps:
            await asyncio.wait(dumps.values(), timeout=_POLL_S)
        found = {}
        for name, task in dumps.items():
            if not task.done():
                task.cancel()
                found[name] = f"it does not answer within {_POLL_S:g} s"
            else:
                error = task.exception()
                found[name] = str(task.result()) if error is None else death_cause(error)
        return found

    async def regroup(self, members: Sequence[int]) -> Mapping[str, Any]:
        """Form another transfer group, of rank 0 and the rollout workers in ``members``, for the next ``broadcast``;
        returns what tells the workers where to meet it.

        Raises:
            LearnerFailed, TimeoutError: naming the rank. ValueError: no member, or nothing to broadcast with.
        """
        if self._weight_broadcast is None:
            raise ValueError("this learner writes snapshots and broadcasts nothing")
        return await self._meet(self._weight_broadcast, members)

    async def _meet(self, broadcast: WeightBroadcast, members: Sequence[int] | None) -> Mapping[str, Any]:
        meeting = self._actors[0].address.remote(not _several_nodes())
        host, port = (await _answers({0: meeting}, "address", self._spec.learner.timeout_s))[0]
        self._transport = transport = broadcast.transport(host, port, members)
        return transport

    async def _announce(self, broadcast: WeightBroadcast) -> WeightSnapshot:
        rank_0, timeout_s = self._actors[0], self._spec.learner.timeout_s
        transport = self._transport or await self._meet(broadcast, None)
        snapshot: WeightSnapshot = (await _answers({0: rank_0.announce.remote()}, "announce", timeout_s))[0]
        return replace(snapshot, transport=transport)

    async def _published(self) -> None:
        # The next one may begin while this waits: a worker that came back is sent the weights again.
        while (publication := self._publication) is not None:
            if publication.done():
                if not publication.cancelled():
                    publication.result()
                return
            await asyncio.wait([publication])

    async def _call(self, method: str, *args: Any, timeout_s: float | None = None) -> list[Any]:
        """Answers of all ranks, in rank order."""
        refs = {rank: getattr(actor, method).remote(*args) for rank, actor in enumerate(self._actors)}
        answers = await _answers(refs, method, self._spec.learner.timeout_s if timeout_s is None else timeout_s)
        return [answers[rank] for rank in sorted(answers)]


async def _answers(refs: Mapping[int, Any], method: str, timeout_s: float) -> dict[int, Any]:
    tasks = {rank: asyncio.ensure_future(_value(ref)) for rank, ref in refs.items()}
    try:
        done, waiting = await asyncio.wait(tasks.values(), timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
        failed = any(task.exception() is not None for task in done)
        if failed and waiting:
            await asyncio.wait(waiting, timeout=_SECONDS_FOR_OTHER_FAILURES)
        if failed:
            raise _first_cause(tasks, method)
        if waiting:
            silent = [rank for rank, task in tasks.items() if not task.done()]
            raise LearnerSilent(f"learner rank {silent} did not answer {method!r} within {timeout_s:g} s")
        return {rank: task.result() for rank, task in tasks.items()}
    finally:
        for task in tasks.values():
            task.cancel()


def _several_nodes() -> bool:
    return sum(node["Alive"] for node in ray.nodes()) > 1


async def _value(ref: Any) -> Any:
    return await ref


def _first_cause(tasks: Mapping[int, asyncio.Future[Any]], method: str) -> LearnerFailed:
    """The error that explains the others: a dead process, else an error that is no broken connection, else any."""
    errors = {rank: error for rank, task in tasks.items() if task.done() and (error := task.exception()) is not None}

    def weight(item: tuple[int, BaseException]) -> int:
        if isinstance(item[1], _DEATHS):
            return 0
        return 2 if _is_broken_connection(item[1]) else 1

    rank, error = min(errors.items(), key=weight)
    raised = _raised(error)
    if isinstance(error, _DEATHS):
        failure: LearnerFailed = LearnerDied(f"learner rank {rank} failed in {method!r}: {death_cause(error)}")
    elif _is_broken_connection(error) and method != "setup":
        # While ranks meet, a backend that refuses its settings says the same words.
        silent = [rank for rank, task in tasks.items() if not task.done()]
        others = f", rank {silent} says nothing" if silent else ""
        failure = LearnerDisconnected(
            f"learner rank {sorted(errors)} lost the connection to a peer in {method!r}{others}: "
            f"{type(raised).__name__}: {raised}"
        )
    else:
        failure = LearnerFailed(f"learner rank {rank} failed in {method!r}: {type(raised).__name__}: {raised}")
    failure.__cause__ = error
    return failure


def _is_broken_connection(error: BaseException) -> bool:
    # Not the text of ``error``: the traceback in it names gloo and NCCL in whatever torch.distributed raises.
    return any(mark in str(_raised(error)) for mark in _PEER_FAILURE_MARKS)


def _raised(error: BaseException) -> BaseException:
    """What the rank raised; Ray wraps it in a message with the whole remote traceback."""
    return getattr(error, "cause", None) or error
