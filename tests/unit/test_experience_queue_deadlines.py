"""Deadlines of the queue: groups of different ages, a clock that jumps, room that comes late; and learner failover."""

import asyncio

import pytest

from rlhf_cluster.experience_queue import Attempt, BatchTimeout, PutResult
from tests.unit.builders import ManualClock, admit_many, async_test, ids, make_group, make_prompt, make_queue, put_all


class JumpingClock(ManualClock):
    """Shows ``ahead`` seconds more than have passed; its timers know nothing of it."""

    ahead = 0.0

    def now(self) -> float:
        return super().now() + self.ahead


@async_test
async def test_a_failover_fails_the_batch_in_training_and_aborts_everything_outstanding():
    queue = make_queue(groups_per_batch=2, max_staleness=1)
    a, b, c, d = admit_many(queue, "abcd", 0)
    put_all(queue, [a, b, c])
    assert ids(await queue.next_batch()) == "ab"
    queue.fail_over(5)
    assert (queue.learner_version, queue.outstanding, queue.in_training) == (5, 0, 0)
    states = {state: count.groups for state, count in queue.ledger.counts.items() if count.groups}
    assert states == {"failed": 2, "aborted": 2}
    for old in (a, c, d):
        assert queue.put(make_group(old)) is PutResult.DUPLICATE
    assert queue.admit(make_prompt("a"), 5) == Attempt("a", 1, 5)
    assert not queue.can_admit(3), "only what the restored weights sampled fits the new versions"


@pytest.mark.parametrize("version", [0, 3])
def test_a_restored_learner_may_not_reuse_a_version(version):
    queue = make_queue()
    queue.advance(3)
    admit_many(queue, "a", 3)
    with pytest.raises(ValueError, match=f"goes on above version 3, got {version}"):
        queue.fail_over(version)
    assert queue.outstanding == 1


async def starving(clock):
    """A learner that waits for a second group, while nobody may have been able to bring one."""
    queue = make_queue(groups_per_batch=2, max_staleness=0, clock=clock)
    put_all(queue, admit_many(queue, "a", 0))
    waiting = asyncio.ensure_future(queue.next_batch())
    await clock.advance(4)
    return queue, waiting


@pytest.mark.parametrize("jump_s", [5.5, 9.0, 30.0])
@async_test
async def test_a_clock_that_jumps_past_the_deadline_does_not_count_as_starvation(jump_s):
    clock = JumpingClock()
    queue, waiting = await starving(clock)
    clock.ahead = jump_s
    await clock.advance(6.5)
    assert not waiting.done(), "the wait begins again"
    put_all(queue, admit_many(queue, "b", 0))
    assert ids(await waiting) == "ab"


@async_test
async def test_after_a_jump_a_queue_that_nobody_feeds_still_times_out():
    clock = JumpingClock()
    _, waiting = await starving(clock)
    clock.ahead = 30.0
    await clock.advance(25)
    with pytest.raises(BatchTimeout, match="nothing was admitted"):
        await waiting


@async_test
async def test_room_made_by_a_retirement_may_be_filled_for_a_whole_deadline():
    """b hangs for 9 of the 10 seconds; its worker is ended then and needs 3 to come back."""
    clock = ManualClock()
    queue = make_queue(groups_per_batch=2, max_staleness=0, clock=clock)
    a, b = admit_many(queue, "ab", 0)
    put_all(queue, [a])
    waiting = asyncio.ensure_future(queue.next_batch())
    await clock.advance(9)
    queue.retire(b.group_id, 0, "failed")
    await clock.advance(3)
    assert not waiting.done()
    put_all(queue, [queue.admit(make_prompt("b"), 0)])
    assert ids(await waiting) == "ab"


@async_test
async def test_a_needed_group_is_named_at_its_own_deadline_although_younger_ones_have_theirs_later():
    clock = ManualClock()
    queue = make_queue(groups_per_batch=2, max_staleness=0, clock=clock)
    admit_many(queue, "a", 0)
    await clock.advance(5)
    admit_many(queue, "b", 0)
    waiting = asyncio.ensure_future(queue.next_batch())
    await clock.advance(4.9)
    assert not waiting.done()
    await clock.advance(0.2)
    assert waiting.done()
    with pytest.raises(BatchTimeout) as caught:
        await waiting
    assert caught.value.group_ids == ("a",)
