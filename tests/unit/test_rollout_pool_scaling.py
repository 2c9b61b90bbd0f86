"""Scaling a pool while its workers generate, take weights or are dead; the workers are stand-ins without actors."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from actors import rollout_pool
from actors.engine_weights import UpdateTiming
from actors.rollout_member import RolloutMember
from actors.rollout_pool import NoWorkersLeft, RolloutPool
from rlhf_cluster.broadcast_sink import BroadcastSink
from rlhf_cluster.config_io import load_config
from rlhf_cluster.protocols import RolloutRequest, WeightSnapshot, WorkerFailed, WorkerSlot
from rlhf_cluster.supervision import SupervisedSlot, SupervisionSettings
from rlhf_cluster.types import Prompt, Sampling
from tests.unit.builders import async_test

NO_RESTARTS = SupervisionSettings(heartbeat_s=0.02, restarts=0)
REQUEST = RolloutRequest("g", 1, Prompt("p", (1,), "x"), (Sampling(1.0, 4, 0),))


class StandIn(RolloutMember):
    """Generates and takes weights for as long as the test holds it."""

    def __init__(self, name: str, incarnation: int, bring_up: Any) -> None:
        super().__init__(name, incarnation, None, bring_up)
        self.may_generate, self.may_update = asyncio.Event(), asyncio.Event()
        self.may_update.set()
        self.killed = False
        self.closed_while_updating = False
        self.refuses_to_start = False

    async def call(self, method: str, *args: Any, timeout_s: float, what: str) -> Any:
        self._check_alive(what)
        if method == "start" and self.refuses_to_start:
            raise WorkerFailed(f"{self.name}, start: no memory")
        if method == "close":
            self.closed_while_updating = self.updating
        held = {"generate": self.may_generate, "update_weights": self.may_update}.get(method)
        if held is not None:
            answer = asyncio.ensure_future(held.wait())
            try:
                await asyncio.wait([answer, self.life.told], return_when=asyncio.FIRST_COMPLETED)
            finally:
                answer.cancel()
            self._check_alive(what)
        return UpdateTiming(0.0, 0.0)

    async def ping(self) -> None:
        await asyncio.sleep(0)

    def kill(self) -> None:
        self.killed = True


class Pool(RolloutPool):
    """``made``: every worker there ever was. ``prepare`` is told of each before it starts."""

    def __init__(self, workers: int, *, broadcast: bool = False) -> None:
        config = load_config(Path("configs/tiny_test.yaml"), [f"rollout.workers={workers}"])
        if broadcast:
            config = config.model_copy(update={"publish": config.publish.model_copy(update={"backend": "nccl"})})
        super().__init__(config, supervision=NO_RESTARTS)
        self.made: list[StandIn] = []
        self.prepare: Callable[[StandIn], None] = lambda worker: None

    def _new_slot(self, index: int) -> SupervisedSlot[RolloutMember]:
        def create(incarnation: int) -> RolloutMember:
            worker = StandIn(f"rollout worker {index}", incarnation, self._bring_up)
            self.prepare(worker)
            self.made.append(worker)
            return worker

        slot = super()._new_slot(index)
        slot._create = create
        return slot

    def worker(self, index: int) -> StandIn:
        worker = self._slots[index].serving
        assert isinstance(worker, StandIn)
        return worker

    def up(self) -> list[int]:
        return [status.index for status in self.status() if status.up]

    async def lose(self, *indices: int) -> None:
        """Kill workers and wait until their slots are exhausted."""
        for index in indices:
            self.worker(index).life.end("killed")
        async with asyncio.timeout(5):
            while any(self._slots[index].state != "exhausted" for index in indices):
                await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def running(workers: int, *, broadcast: bool = False) -> AsyncIterator[Pool]:
    pool = Pool(workers, broadcast=broadcast)
    await pool.start(5)
    try:
        yield pool
    finally:
        await pool.close()


@pytest.fixture(autouse=True)
def cluster_with_room_for_four(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_pool.ray, "available_resources", lambda: {"CPU": 4.0})


def snapshot(version: int, **transport: Any) -> WeightSnapshot:
    return WeightSnapshot(version, Path("x"), {"tensors": {}}, transport)


async def briefly() -> None:
    await asyncio.sleep(0.02)


@async_test
async def test_a_worker_in_an_update_is_scaled_away_only_after_it_whatever_the_drain() -> None:
    async with running(2) as pool:
        leaving = pool.worker(1)
        leaving.may_update.clear()
        publishing = asyncio.ensure_future(pool.publish(snapshot(1)))
        await briefly()
        scaling = asyncio.ensure_future(pool.scale(1, drain_s=0))
        await briefly()
        assert not scaling.done()
        leaving.may_update.set()
        report = await publishing
        assert await scaling == "2 -> 1 rollout workers"
        assert (report.applied, leaving.closed_while_updating, leaving.killed) == ((0, 1), False, True)


class Sender:
    """A learner whose broadcast ends when every member has received it, and is lost when one left."""

    version, training = 1, False

    def __init__(self, members: list[StandIn]) -> None:
        self._members = members

    async def regroup(self, members: Any) -> dict[str, Any]:
        return {"members": members}

    def hold_for(self, publication: Any) -> None: ...

    async def broadcast(self, version: int, *, timeout_s: float) -> None:
        await briefly()
        await briefly()
        if not all(member.updating for member in self._members):
            raise TimeoutError("learner rank 0 waits for a party that left the collective")
        for member in self._members:
            member.may_update.set()


@async_test
async def test_scaling_down_in_a_broadcast_does_not_cost_the_learner() -> None:
    async with running(2, broadcast=True) as pool:
        for worker in pool.made:
            worker.may_update.clear()
        sink = BroadcastSink(pool, Sender(list(pool.made)), timeout_s=5)
        publishing = asyncio.ensure_future(sink.publish(snapshot(1)))
        await briefly()
        assert await pool.scale(1) == "2 -> 1 rollout workers"
        assert (await publishing).applied == (0, 1)
        sink.stop_readmitting()


@async_test
async def test_a_scale_down_that_is_cancelled_while_it_drains_leaves_no_worker_that_nobody_knows() -> None:
    async with running(2) as pool:
        leaving = pool.worker(1)
        generating = asyncio.ensure_future(pool.generate(WorkerSlot(1, 0), REQUEST))
        await briefly()
        scaling = asyncio.ensure_future(pool.scale(1))
        await briefly()
        scaling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await scaling
        assert (leaving.killed, pool.up()) == (True, [0])
        with pytest.raises(WorkerFailed, match="rollout worker 1 died during group g: it was scaled away"):
            await generating


@async_test
async def test_scaling_down_keeps_the_living_and_lets_exhausted_slots_go() -> None:
    async with running(3) as pool:
        await pool.lose(0, 1)
        survivor = pool.worker(2)
        assert await pool.scale(1) == "there are 1 rollout workers already"
        assert pool.choose() == WorkerSlot(2, 0)
        assert not survivor.killed
        assert [status.index for status in pool.status()] == [2]


@async_test
async def test_scaling_to_the_number_configured_replaces_exhausted_slots() -> None:
    async with running(3) as pool:
        await pool.lose(0, 2)
        assert await pool.scale(3) == "1 -> 3 rollout workers"
        assert sorted(pool.up()) == [0, 1, 2]
        assert len(pool.made) == 5


@async_test
async def test_exhausted_slots_stay_when_no_other_worker_starts_in_their_place() -> None:
    async with running(1) as pool:
        await pool.lose(0)
        pool.prepare = lambda worker: setattr(worker, "refuses_to_start", True)
        with pytest.raises(WorkerFailed, match="no memory"):
            await pool.scale(1)
        with pytest.raises(NoWorkersLeft, match="the first cause: rollout worker 0: killed"):
            pool.choose()


@async_test
async def test_a_slot_that_is_filled_again_goes_on_counting_incarnations() -> None:
    # A transfer group is told by slots and incarnations: a new worker must not pass for a member of an old group.
    async with running(2) as pool:
        before = pool.receivers()
        await pool.scale(1)
        await pool.scale(2)
        assert before == {0: 1, 1: 1}
        assert pool.receivers() == {0: 1, 1: 2}
