"""A main task with companions: the first that ends, ends all, and its error is the one that is raised."""

from __future__ import annotations

import asyncio

import pytest

from rlhf_cluster.beside import run_beside
from tests.unit.builders import async_test


async def forever(ended: list[str], name: str) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        ended.append(name)


async def returns(value: str) -> str:
    await asyncio.sleep(0)
    return value


async def fails(words: str) -> None:
    await asyncio.sleep(0)
    raise RuntimeError(words)


@async_test
async def test_the_result_of_main_ends_its_companions() -> None:
    ended: list[str] = []
    assert await run_beside(returns("done"), forever(ended, "a"), forever(ended, "b")) == "done"
    assert sorted(ended) == ["a", "b"]


@async_test
async def test_a_companion_that_fails_ends_main_and_is_the_cause() -> None:
    ended: list[str] = []
    with pytest.raises(RuntimeError, match="watchdog"):
        await run_beside(forever(ended, "main"), fails("watchdog"))
    assert ended == ["main"]


@async_test
async def test_an_error_of_main_is_raised_as_it_is() -> None:
    ended: list[str] = []
    with pytest.raises(RuntimeError, match="learner lost"):
        await run_beside(fails("learner lost"), forever(ended, "a"))
    assert ended == ["a"]


@async_test
async def test_being_cancelled_cancels_all() -> None:
    ended: list[str] = []
    task = asyncio.ensure_future(run_beside(forever(ended, "main"), forever(ended, "a")))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sorted(ended) == ["a", "main"]
