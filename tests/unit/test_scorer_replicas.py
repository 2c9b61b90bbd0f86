"""Calls that wait for their turn to be repeated on another scorer; the scorers are stand-ins without actors."""

from __future__ import annotations

import asyncio
from typing import Any

from actors.scorer_replicas import Replicas, Retries
from rlhf_cluster.supervision import SupervisionSettings
from rlhf_cluster.watchdog import blame
from tests.unit.builders import async_test


class Method:
    def __init__(self, *, answers: bool) -> None:
        self._answers = answers

    def remote(self, *_: Any) -> asyncio.Future[Any]:
        reply = asyncio.get_running_loop().create_future()
        if self._answers:
            reply.set_result(None)
        return reply


class Hanging:
    """An actor that answers heartbeats and no call."""

    ping, score = Method(answers=True), Method(answers=False)


@async_test
async def test_a_call_waits_for_its_turn_to_be_repeated_no_longer_than_for_an_answer_and_says_for_whom() -> None:
    replicas = Replicas(
        "reward_scorer",
        1,
        Hanging,
        timeout_s=1.5,
        supervision=SupervisionSettings(heartbeat_s=0.05, backoff_s=0.01),
        retries=Retries(backoff_s=0.01),
        on_event=None,
    )
    await replicas.start(5)
    calls = [asyncio.ensure_future(replicas.call("score")) for _ in range(5)]
    await asyncio.sleep(0.05)
    replicas.members()[0].life.end("killed")
    async with asyncio.timeout(1.4):
        while len(waits := replicas.waits()) < 5:
            await asyncio.sleep(0.01)
    assert sorted(wait.waiter for wait in waits) == ["a repeat of score"] * 4 + ["score"]
    assert blame(waits) == "At the end of it stands reward scorer 0"
    done, late = await asyncio.wait(calls, timeout=3)
    assert len(done) >= 4 and len(late) <= 1
    await asyncio.gather(*calls, return_exceptions=True)
    messages = sorted(str(call.exception()) for call in calls)
    assert messages[0] == "reward scorer 0 did not finish score within 1.5 s"
    assert "score had no turn to be repeated within 1.5 s, others are repeated on reward scorer 0" in messages
    assert replicas.waits() == []
    await replicas.close()


class Answering(Hanging):
    score = Method(answers=True)


@async_test
async def test_calls_of_a_scorer_that_died_are_repeated_one_after_another_on_the_next() -> None:
    actors = iter([Hanging(), Answering()])
    replicas = Replicas(
        "reward_scorer",
        1,
        lambda: next(actors),
        timeout_s=5.0,
        supervision=SupervisionSettings(heartbeat_s=0.05, backoff_s=0.01),
        retries=Retries(backoff_s=0.01),
        on_event=None,
    )
    await replicas.start(5)
    calls = [asyncio.ensure_future(replicas.call("score")) for _ in range(3)]
    await asyncio.sleep(0.05)
    replicas.members()[0].life.end("killed")
    await asyncio.wait_for(asyncio.gather(*calls), 4)
    await replicas.close()
