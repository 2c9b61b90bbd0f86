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
    publication.cancel()
    await asyncio.wait_for(learner._published(), 1)
    assert not learner.training
