"""The learner changes no weights that are still being read."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from learner.learner_group import LearnerGroup
from tests.unit.builders import async_test


def group() -> LearnerGroup:
    spec: Any = SimpleNamespace(learner=SimpleNamespace(ranks=1))
    return LearnerGroup(spec, actor_options=[{}], start_timeout_s=1)


@async_test
async def test_a_publication_that_begins_while_one_is_waited_for_is_waited_for_too() -> None:
    learner, loop = group(), asyncio.get_running_loop()
    first, second = loop.create_future(), loop.create_future()
    learner.hold_for(first)
    waiting = asyncio.ensure_future(learner._published())
    await asyncio.sleep(0)
    first.set_result(None)
    learner.hold_for(second)
    for _ in range(3):
        await asyncio.sleep(0)
    assert not waiting.done()
    second.set_result(None)
    await asyncio.wait_for(waiting, 1)


@async_test
async def test_what_ended_a_publication_ends_the_step_that_waited_for_it() -> None:
    learner = group()
    publication = asyncio.get_running_loop().create_future()
    learner.hold_for(publication)
    publication.set_exception(ValueError("no v3"))
    with pytest.raises(ValueError, match="no v3"):
        await learner._published()


@async_test
async def test_a_cancelled_publication_holds_nobody_up() -> None:
    learner = group()
    publication = asyncio.get_running_loop().create_future()
    learner.hold_for(publication)
    waiting = asyncio.ensure_future(learner._published())
    await asyncio.sleep(0)
    publication.cancel()
    await asyncio.wait_for(waiting, 1)
    # One that was over before anybody waited.
    await asyncio.wait_for(learner._published(), 1)


@async_test
async def test_a_step_that_is_given_up_leaves_the_publication_it_waited_for_alone() -> None:
    learner = group()
    publication = asyncio.get_running_loop().create_future()
    learner.hold_for(publication)
    waiting = asyncio.ensure_future(learner._published())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled() and not publication.done()


@pytest.mark.parametrize("error", [None, RuntimeError("rank 1 did not come up")])
@async_test
async def test_while_ranks_are_replaced_nobody_is_sent_their_weights_and_what_they_were_sending_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    learner = group()
    learner.hold_for(asyncio.get_running_loop().create_future())
    seen: list[tuple[Any, ...]] = []

    async def start() -> None:
        seen.append(("start", learner.training))
        if error is not None:
            raise error

    async def call(method: str, *args: Any) -> list[Any]:
        seen.append((method, *args, learner.training))
        return [args[0]]

    monkeypatch.setattr(learner, "start", start)
    monkeypatch.setattr(learner, "_call", call)
    if error is None:
        await learner.restart(version=7)
        assert (seen, learner.version) == ([("start", True), ("renumber", 7, True)], 7)
    else:
        with pytest.raises(RuntimeError, match="rank 1 did not come up"):
            await learner.restart(version=7)
    assert not learner.training
    await asyncio.wait_for(learner._published(), 1)
