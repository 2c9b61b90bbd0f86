"""The modelled engine: shared speed, updates in flight, and leaving early, with times worked out by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from rlhf_cluster.protocols import RolloutRequest
from rlhf_cluster.simulation.actors import EngineSpeed, ModelledScorers, ModelledWorkers, ScorerStage
from rlhf_cluster.simulation.engine import Engine
from rlhf_cluster.simulation.virtual_time import VirtualTimeLoop, run_virtual
from rlhf_cluster.types import Prompt, Sampling, VersionSpan


def request(samples: int = 1, limit: int = 100) -> RolloutRequest:
    return RolloutRequest("g", 0, Prompt("p", (1, 2), ""), tuple(Sampling(1.0, limit, i) for i in range(samples)))


def play(script: Callable[[VirtualTimeLoop], Coroutine[Any, Any, None]]) -> None:
    loop = VirtualTimeLoop()
    run_virtual(script(loop), loop)


def test_speed_goes_from_one_sequence_alone_towards_the_peak() -> None:
    speed = EngineSpeed(alone=100.0, peak=1000.0)
    assert speed(1) == pytest.approx(100.0)
    assert [n * speed(n) for n in (9, 91)] == pytest.approx([500.0, 910.0])


def test_sequences_share_the_speed_and_the_rest_gets_it_when_one_ends() -> None:
    """12 tokens/s together: 3 sequences at 4/s each end the first (4 tokens) at 1 s; then 6/s each: the second (10
    tokens) needs 6 more, 2 s in all; then 12/s: the third (22 tokens) needs 12 more, 3 s in all."""

    async def script(loop: VirtualTimeLoop) -> None:
        engine = Engine(loop, lambda n: 12.0 / n)
        ends: list[float] = []
        runs = [engine.start(request(), [length]) for length in (22, 4, 10)]
        for run in runs:
            run.done.add_done_callback(lambda _: ends.append(loop.time()))
        await asyncio.gather(*(run.done for run in runs))
        await asyncio.sleep(0)
        assert ends == pytest.approx([1.0, 2.0, 3.0])
        assert engine.busy_s == pytest.approx(3.0)
        assert engine.running == 0

    play(script)


def test_a_paused_engine_keeps_every_sequence_and_its_time_counts_as_paused() -> None:
    async def script(loop: VirtualTimeLoop) -> None:
        engine = Engine(loop, lambda n: 2.0)
        run = engine.start(request(), [10])
        await asyncio.sleep(2.0)
        engine.pause()
        await asyncio.sleep(7.0)
        engine.resume(3)
        await run.done
        assert loop.time() == pytest.approx(5.0 + 7.0)
        assert engine.paused_s == pytest.approx(7.0)
        (rollout,) = engine.rollouts(run, ["stop"])
        assert rollout.version_spans == (VersionSpan(0, 0, 4), VersionSpan(3, 4, 10))

    play(script)


def test_an_update_before_the_first_token_leaves_no_token_of_the_old_version() -> None:
    async def script(loop: VirtualTimeLoop) -> None:
        engine = Engine(loop, lambda n: 1.0)
        run = engine.start(request(2), [3, 1], prefill=2.0)
        await asyncio.sleep(1.0)
        engine.resume(1)
        await run.done
        assert loop.time() == pytest.approx(5.0)
        long, short = engine.rollouts(run, ["stop", "stop"])
        assert long.version_spans == (VersionSpan(1, 0, 3),)
        assert short.version_spans == (VersionSpan(1, 0, 1),)

    play(script)


def test_an_abandoned_group_leaves_its_speed_to_the_others_and_says_what_it_had_sampled() -> None:
    async def script(loop: VirtualTimeLoop) -> None:
        engine = Engine(loop, lambda n: 4.0 / n)
        leaving, staying = engine.start(request(1), [50]), engine.start(request(1), [10])
        await asyncio.sleep(2.0)
        assert engine.abandon(leaving) == 4
        await staying.done
        assert loop.time() == pytest.approx(2.0 + 6.0 / 4.0)

    play(script)


def test_the_router_fills_the_emptiest_worker_and_stops_at_capacity() -> None:
    async def script(loop: VirtualTimeLoop) -> None:
        workers = ModelledWorkers(
            loop, workers=2, capacity=2, speed=EngineSpeed(1.0, 1.0), length=lambda seed, limit: 5
        )
        asked: list[int] = []
        calls = []
        while (slot := workers.choose()) is not None:
            asked.append(slot.index)
            calls.append(asyncio.ensure_future(workers.generate(slot, request())))
            await asyncio.sleep(0)
        assert asked == [0, 1, 0, 1]
        calls[2].cancel()
        await asyncio.sleep(0)
        again = workers.choose()
        assert again is not None
        assert again.index == 0
        for call in calls:
            call.cancel()

    play(script)


def test_scorer_replicas_take_groups_in_order_of_arrival() -> None:
    stage = ScorerStage(replicas=2, tokens_per_s=10.0, overhead_s=0.5)
    assert [stage.finishes_at(0.0, tokens) for tokens in (15, 5, 10)] == [2.0, 1.0, 2.5]
    assert stage.busy_s == pytest.approx(2.0 + 1.0 + 1.5)


def test_a_group_is_scored_when_its_slowest_stage_is_done() -> None:
    async def script(loop: VirtualTimeLoop) -> None:
        engine = Engine(loop, lambda n: 1e6)
        run = engine.start(request(2), [4, 4])
        await run.done
        started = loop.time()
        slow, fast = (ScorerStage(replicas=1, tokens_per_s=speed) for speed in (2.0, 100.0))
        rollouts = engine.rollouts(run, ["stop", "stop"])
        members = await ModelledScorers(loop, [fast, slow]).score(request().prompt, rollouts)
        # 8 answer tokens and twice the 2 prompt tokens.
        assert loop.time() - started == pytest.approx(12 / 2.0)
        assert [member.rollout for member in members] == rollouts

    play(script)
