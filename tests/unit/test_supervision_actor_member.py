"""What calls of one actor incarnation turn into; the handle is not Ray's, so it can be as silent as a lost node."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import ray
from ray.exceptions import ActorUnavailableError, RayTaskError

from actors.supervisor import ActorMember, WorkerDied
from rlhf_cluster.protocols import WorkerFailed
from tests.unit.builders import async_test


class FatalError(RuntimeError):
    """What ``Member`` declares fatal."""


class Member(ActorMember):
    fatal = (FatalError,)


class Method:
    def __init__(self, answer: asyncio.Future[Any]) -> None:
        self._answer = answer

    def remote(self, *_: Any) -> asyncio.Future[Any]:
        return self._answer


class Handle:
    """``work`` gets the answer that the test gives or withholds, ``ping`` none."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.work = Method(self.answer)
        self.ping = Method(asyncio.get_running_loop().create_future())


def raised(cause: Exception) -> RayTaskError:
    return RayTaskError("work", "remote traceback", cause)


@async_test
async def test_a_call_to_a_node_that_says_nothing_ends_the_moment_the_death_is_told() -> None:
    member = Member("rollout worker 3", 1, Handle())
    call = asyncio.ensure_future(member.call("work", timeout_s=60, what="group 7"))
    beat = asyncio.ensure_future(member.ping())
    await asyncio.sleep(0.01)
    member.life.end("missed 3 heartbeats")
    done, _ = await asyncio.wait([call, beat], timeout=1)
    assert done == {call, beat}
    assert isinstance(call.exception(), WorkerDied)
    assert str(call.exception()) == "rollout worker 3 died during group 7: missed 3 heartbeats"
    with pytest.raises(WorkerDied, match="missed 3 heartbeats"):
        await member.call("work", timeout_s=60, what="group 8")


@async_test
async def test_a_reply_that_comes_with_or_after_the_death_is_dropped() -> None:
    handle = Handle()
    member = Member("rollout worker 3", 1, handle)
    call = asyncio.ensure_future(member.call("work", timeout_s=60, what="group 7"))
    await asyncio.sleep(0.01)
    handle.answer.set_result("tokens")
    member.life.end("killed")
    with pytest.raises(WorkerDied):
        await call


@async_test
async def test_an_unreachable_actor_is_a_dead_one() -> None:
    handle = Handle()
    member = Member("rollout worker 3", 1, handle)
    handle.answer.set_exception(ActorUnavailableError("connection refused", None))
    with pytest.raises(WorkerDied, match="rollout worker 3 died during group 7: ActorUnavailableError"):
        await member.call("work", timeout_s=60, what="group 7")
    assert member.life.cause is not None


@async_test
async def test_what_an_actor_raises_is_its_death_only_when_it_is_fatal() -> None:
    for cause, dies in ((ValueError("too long"), False), (TimeoutError("inner"), False), (FatalError("gone"), True)):
        handle = Handle()
        member = Member("rollout worker 3", 1, handle)
        handle.answer.set_exception(raised(cause))
        with pytest.raises(WorkerFailed, match=str(cause)) as failure:
            await member.call("work", timeout_s=60, what="group 7")
        assert isinstance(failure.value, WorkerDied) is dies
        assert (member.life.cause is not None) is dies


@async_test
async def test_a_missed_deadline_names_the_actor_and_leaves_the_verdict_to_the_caller() -> None:
    member = Member("rollout worker 3", 1, Handle())
    with pytest.raises(TimeoutError, match=r"rollout worker 3 did not finish group 7 within 0\.02 s"):
        await member.call("work", timeout_s=0.02, what="group 7")
    assert member.life.cause is None
    assert member.waits() == []
    member.kill()
    assert not ray.is_initialized(), "a call that is given up must not start Ray"
