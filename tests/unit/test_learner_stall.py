"""A step in which no rank moves is ended in time, and only such a step."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from learner import learner_group
from learner.learner_group import LearnerGroup, LearnerStalled
from tests.unit.builders import async_test

STALL_S = 0.4


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner_group, "_POLL_S", 0.02)


class Rank:
    """An actor handle whose micro-batches the test counts; ``answers(look)``: whether it says so at that look."""

    def __init__(self, answers: Callable[[int], bool] = lambda look: True) -> None:
        self.done = 1
        self.looks = 0
        self.progress = SimpleNamespace(remote=self._progress)
        self.dump_stacks = SimpleNamespace(remote=self._stacks)
        self._answers = answers

    async def _progress(self) -> int:
        self.looks += 1
        if not self._answers(self.looks):
            await asyncio.Event().wait()
        return self.done

    async def _stacks(self) -> str:
        return "in all_reduce"


def group_of(*ranks: Rank) -> LearnerGroup:
    spec: Any = SimpleNamespace(learner=SimpleNamespace(ranks=len(ranks), stall_timeout_s=STALL_S))
    group = LearnerGroup(spec, actor_options=[{}] * len(ranks), start_timeout_s=1)
    group._actors = list(ranks)
    return group


async def watched(step: Awaitable[Any], *ranks: Rank) -> Any:
    async def call() -> list[Any]:
        return [await step]

    (answer,) = await asyncio.wait_for(group_of(*ranks)._watched(call()), 10 * STALL_S)
    return answer


@async_test
async def test_a_rank_that_answers_now_and_then_does_not_look_like_one_that_moves() -> None:
    with pytest.raises(LearnerStalled, match=r"ranks \[0, 1\] ran no micro-batch for 0.4 s"):
        await watched(asyncio.Event().wait(), Rank(), Rank(lambda look: look % 3 > 0))


@async_test
async def test_a_step_goes_on_while_one_rank_moves_and_the_others_say_nothing() -> None:
    moving = Rank()

    async def step() -> str:
        for _ in range(10):
            await asyncio.sleep(STALL_S / 4)
            moving.done += 1
        return "done"

    assert await watched(step(), moving, Rank(lambda look: False)) == "done"


@pytest.mark.parametrize("silent", [False, True])
@async_test
async def test_the_time_in_which_the_whole_machine_was_frozen_is_no_stall(silent: bool) -> None:
    rank = Rank(lambda look: not silent or look < 3)

    async def step() -> str:
        await asyncio.sleep(STALL_S / 4)
        time.sleep(3 * STALL_S)
        await asyncio.sleep(STALL_S / 4)
        return "done"

    assert await watched(step(), rank) == "done"


@async_test
async def test_a_stall_is_noticed_hardly_later_than_configured() -> None:
    started, silent = time.monotonic(), Rank(lambda look: False)
    with pytest.raises(LearnerStalled):
        await watched(asyncio.Event().wait(), Rank(), silent)
    assert time.monotonic() - started < 3 * STALL_S
    assert silent.looks <= STALL_S / (2 * learner_group._POLL_S) + 2, "what a look waits for in vain counts too"


@async_test
async def test_a_machine_that_was_frozen_during_a_look_has_not_watched_for_longer_than_a_look_may_take() -> None:
    def answers(look: int) -> bool:
        if look == 2:
            time.sleep(3 * STALL_S)
        return True

    async def step() -> str:
        while rank.looks < 4:
            await asyncio.sleep(0.001)
        return "done"

    rank = Rank(answers)
    assert await watched(step(), rank) == "done"


@async_test
async def test_a_rank_that_cannot_say_how_far_it_is_leaves_the_cause_to_the_step() -> None:
    def answers(look: int) -> bool:
        raise ConnectionError("the actor is dead")

    async def step() -> None:
        await asyncio.sleep(STALL_S / 4)
        raise ValueError("an odd batch")

    with pytest.raises(ValueError, match="an odd batch"):
        await watched(step(), Rank(), Rank(answers))
