"""A rollout worker that is closed stays closed, also when an update was under way; the engine is a stand-in."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from actors.engine_weights import EngineWeights, UpdateTiming
from actors.rollout_worker import RolloutWorker, WorkerFenced
from rlhf_cluster.config import EngineConfig, PublishConfig
from rlhf_cluster.protocols import RolloutRequest, WeightSnapshot
from rlhf_cluster.types import Prompt, Sampling

SNAPSHOT: Any = WeightSnapshot(1, None, {"tensors": {}})  # type: ignore[arg-type]
REQUEST = RolloutRequest("g", 1, Prompt("p", (1,), "x"), (Sampling(1.0, 4, 0),))


class StandIn:
    errored = False

    def shutdown(self) -> None: ...


class SlowWeights(EngineWeights):
    """Loading ends well, when the test says so."""

    def __init__(self) -> None:
        super().__init__(
            StandIn(),
            name="rollout worker 2",
            index=2,
            weight_shapes={},
            dtype="float32",
            publish=PublishConfig(),
            tensor_parallel=1,
            max_model_len=64,
        )
        self.begun, self.may_end = asyncio.Event(), asyncio.Event()

    async def load(self, snapshot: WeightSnapshot) -> UpdateTiming:
        self.begun.set()
        await self.may_end.wait()
        return UpdateTiming(0.1, 0.2)


def worker() -> RolloutWorker:
    return RolloutWorker(2, "folder", "float32", EngineConfig(), 64, 0, "cpu", PublishConfig())


def test_an_update_that_ends_after_the_worker_was_closed_does_not_open_it_again() -> None:
    async def scenario() -> None:
        closed, weights = worker(), SlowWeights()
        closed._engine, closed._weights, closed._fenced = StandIn(), weights, None
        update = asyncio.ensure_future(closed.update_weights(SNAPSHOT))
        await weights.begun.wait()
        await closed.close()
        weights.may_end.set()
        with pytest.raises(RuntimeError, match="rollout worker 2 was closed during the update to version 1"):
            await update
        assert (closed.fenced, closed.version) == ("it was closed", 0)
        with pytest.raises(WorkerFenced, match="it was closed"):
            await closed.generate(REQUEST)

    asyncio.run(scenario())


def test_weights_for_a_worker_that_was_closed_are_refused_with_the_reason() -> None:
    async def scenario() -> None:
        closed = worker()
        await closed.close()
        with pytest.raises(RuntimeError, match="rollout worker 2 takes no weights: it was closed"):
            await closed.update_weights(SNAPSHOT)

    asyncio.run(scenario())
