"""Forming and closing batches, waiting and deadlines, on a clock that moves by hand."""

import asyncio

import pytest

from rlhf_cluster.experience_queue import Attempt, BatchTimeout, PutResult
from rlhf_cluster.ledger import Count
from tests.unit.builders import ManualClock, admit_many, async_test, ids, make_group, make_prompt, make_queue, put_all


def start(queue):
    return asyncio.ensure_future(queue.next_batch())


async def batch_now(queue):
    """The batch, which must form without time passing."""
    return await asyncio.wait_for(queue.next_batch(), timeout=5)


async def four_due_next_and_two_ready_later(clock):
    """K=2, B=2, v=1: a-d dispatched and due at 2, e-f ready and due at 3."""
    queue = make_queue(groups_per_batch=2, max_staleness=2, clock=clock)
    unready = admit_many(queue, "abcd", 0)
    queue.advance(1)
    put_all(queue, admit_many(queue, "ef", 1))
    return queue, unready


@async_test
async def test_ready_groups_wait_when_training_them_would_leave_four_for_one_batch_of_two():
    clock = ManualClock()
    queue, (a, b, c, d) = await four_due_next_and_two_ready_later(clock)
    waiting = start(queue)
    await clock.run_ready()
    assert not waiting.done()
    put_all(queue, [d])
    await clock.run_ready()
    assert not waiting.done(), "n(2) = 4 - 2 = 2, and only d is there"
    put_all(queue, [b])
    assert ids(await waiting) == "bd"
    queue.advance(2)
    waiting = start(queue)
    put_all(queue, [c])
    await clock.run_ready()
    assert not waiting.done(), "a is due now"
    put_all(queue, [a])
    assert ids(await waiting) == "ac"
    await clock.run_ready()
    assert clock.sleeping == 0, "a wait that ended leaves no timer behind"
    queue.advance(3)
    assert ids(await batch_now(queue)) == "ef"


@async_test
async def test_the_deadline_of_a_wait_for_later_dues_names_all_that_are_overdue():
    clock = ManualClock()
    queue, _ = await four_due_next_and_two_ready_later(clock)
    waiting = start(queue)
    await clock.advance(9.9)
    assert not waiting.done()
    await clock.advance(0.1)
    with pytest.raises(BatchTimeout, match=r"batch for version 1: .* overdue groups a, b, c, d") as caught:
        await waiting
    assert caught.value.version == 1
    assert caught.value.group_ids == ("a", "b", "c", "d")
    assert queue.outstanding == 6
    assert queue.queued == 2


@async_test
async def test_overdue_groups_are_not_named_while_younger_ones_can_still_supply_the_batch():
    clock = ManualClock()
    queue = make_queue(groups_per_batch=2, max_staleness=2, clock=clock)
    admit_many(queue, "ab", 0)
    await clock.advance(5)
    c, d = admit_many(queue, "cd", 0)
    queue.advance(1)
    put_all(queue, admit_many(queue, "ef", 1))
    waiting = start(queue)
    await clock.advance(7)
    assert not waiting.done(), "a and b are overdue, but c and d are enough for version 1"
    put_all(queue, [d, c])
    assert ids(await waiting) == "cd"
    queue.advance(2)
    with pytest.raises(BatchTimeout) as caught:
        await batch_now(queue)
    assert caught.value.group_ids == ("a", "b")


@async_test
async def test_s07_lost_groups_are_named_at_their_deadline_and_the_run_goes_on_with_their_next_attempts():
    clock = ManualClock()
    queue = make_queue(groups_per_batch=8, max_staleness=0, clock=clock)
    attempts = admit_many(queue, "abcdefgh", 0)
    put_all(queue, [attempt for attempt in attempts if attempt.group_id not in "cf"])
    waiting = start(queue)
    await clock.advance(10)
    with pytest.raises(BatchTimeout) as caught:
        await waiting
    assert (caught.value.version, caught.value.group_ids) == (0, ("c", "f"))
    for lost in caught.value.group_ids:
        assert queue.retire(lost, 0, "failed")
        assert queue.put(make_group(queue.admit(make_prompt(lost), 0))) is PutResult.QUEUED
    assert ids(await batch_now(queue)) == "abdeghcf"
    assert queue.ledger.counts["trained"] == Count(8, 16, 32)
    assert queue.ledger.counts["failed"] == Count(2, 0, 0)


@async_test
async def test_an_overdue_group_is_named_before_it_is_due_when_the_batch_cannot_be_filled_without_it():
    clock = ManualClock()
    queue = make_queue(groups_per_batch=2, max_staleness=1, clock=clock)
    a, _ = admit_many(queue, "ab", 0)
    put_all(queue, [a])
    waiting = start(queue)
    await clock.advance(10)
    with pytest.raises(BatchTimeout) as caught:
        await waiting
    assert (caught.value.version, caught.value.group_ids) == (0, ("b",))


@async_test
async def test_a_straggler_blocks_nobody_until_it_is_needed():
    clock = ManualClock()
    queue = make_queue(groups_per_batch=1, max_staleness=1, clock=clock)
    _, b = admit_many(queue, "ab", 0)
    put_all(queue, [b])
    await clock.advance(50)
    assert ids(await batch_now(queue)) == "b"
    queue.advance(1)
    with pytest.raises(BatchTimeout) as caught:
        await batch_now(queue)
    assert (caught.value.version, caught.value.group_ids) == (1, ("a",))


@async_test
async def test_overdue_groups_that_this_batch_does_not_need_are_not_named():
    clock = ManualClock()
    queue = make_queue(groups_per_batch=1, max_staleness=2, clock=clock)
    due = {}
    for version, name in enumerate("acb"):
        queue.advance(version)
        due[name] = queue.admit(make_prompt(name), version)
    put_all(queue, [due["c"]])
    await clock.advance(20)
    with pytest.raises(BatchTimeout) as caught:
        await batch_now(queue)
    assert caught.value.group_ids == ("a",), "c is ready for version 3, and b has until version 4"


@async_test
async def test_a_queue_that_nobody_feeds_times_out_naming_no_group():
    clock = ManualClock()
    queue = make_queue(groups_per_batch=2, clock=clock)
    waiting = start(queue)
    await clock.advance(6)
    put_all(queue, admit_many(queue, "a", 0))
    await clock.advance(9.5)
    assert not waiting.done(), "the last admission was 9.5 s ago"
    await clock.advance(0.5)
    with pytest.raises(BatchTimeout, match="nothing was admitted") as caught:
        await waiting
    assert caught.value.group_ids == ()
    assert queue.queued == 1


@async_test
async def test_a_long_learner_step_is_not_held_against_the_feed():
    clock = ManualClock()
    queue = make_queue(groups_per_batch=1, max_staleness=0, clock=clock)
    put_all(queue, admit_many(queue, "a", 0))
    await batch_now(queue)
    await clock.advance(100)
    queue.advance(1)
    waiting = start(queue)
    await clock.run_ready()
    assert not waiting.done()
    put_all(queue, admit_many(queue, "b", 1))
    assert ids(await waiting) == "b"


@async_test
async def test_polling_with_cancellation_loses_nothing_and_still_times_out():
    clock = ManualClock()
    queue = make_queue(groups_per_batch=2, max_staleness=0, clock=clock)
    a, b = admit_many(queue, "ab", 0)
    put_all(queue, [a])
    for _ in range(3):
        waiting = start(queue)
        await clock.advance(1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    assert (queue.queued, queue.outstanding) == (1, 2)
    waiting = start(queue)
    await clock.run_ready()
    put_all(queue, [b])
    waiting.cancel()  # the wake-up and the cancellation meet: nothing may have been taken
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert queue.queued == 2
    assert ids(await batch_now(queue)) == "ab"

    starving = make_queue(groups_per_batch=2, clock=clock)
    for _ in range(2):
        waiting = start(starving)
        await clock.advance(5)
        if not waiting.done():
            waiting.cancel()
    with pytest.raises(BatchTimeout):
        await waiting


@async_test
async def test_one_consumer_at_a_time():
    clock = ManualClock()
    queue = make_queue(groups_per_batch=1, max_staleness=1, clock=clock)
    waiting = start(queue)
    await clock.run_ready()
    with pytest.raises(RuntimeError, match="another next_batch"):
        await queue.next_batch()
    put_all(queue, admit_many(queue, "ab", 0))
    assert ids(await waiting) == "a"
    with pytest.raises(RuntimeError, match="batch for version 0 is in training"):
        await queue.next_batch()


@async_test
async def test_a_wait_ends_with_the_error_of_a_broken_clock():
    class BrokenClock(ManualClock):
        async def sleep(self, seconds):
            raise OSError("no timer")

    with pytest.raises(OSError, match="no timer"):
        await make_queue(clock=BrokenClock()).next_batch()


@async_test
async def test_the_slots_of_a_version_are_spent_while_its_batch_trains_and_open_again_after_a_skipped_step():
    queue = make_queue(groups_per_batch=1, max_staleness=1)
    put_all(queue, admit_many(queue, "a", 0))
    assert ids(await batch_now(queue)) == "a"
    with pytest.raises(ValueError, match="group a: attempt 0 is outstanding or in training"):
        queue.admit(make_prompt("a"), 0)
    admit_many(queue, "b", 0)
    assert not queue.can_admit(0), "only the slot of version 1 was left"
    assert queue.advance(0) == [Attempt("a", 0, 0)]
    assert queue.can_admit(0)
    assert queue.ledger.counts["trained"] == Count()
    assert queue.ledger.counts["failed"] == Count(1, 2, 4)
    assert queue.admit(make_prompt("a"), 0) == Attempt("a", 1, 0)


@async_test
async def test_k0_admits_nothing_between_handing_out_and_advance():
    queue = make_queue(groups_per_batch=1, max_staleness=0)
    put_all(queue, admit_many(queue, "a", 0))
    await batch_now(queue)
    assert not queue.can_admit(0)
    assert queue.advance(1) == []
    assert [queue.can_admit(0), queue.can_admit(1), queue.can_admit(2)] == [False, True, False]


@async_test
async def test_a_group_due_at_the_version_in_training_is_stale():
    queue = make_queue(groups_per_batch=1, max_staleness=1)
    late, b = admit_many(queue, "ab", 0)
    queue.advance(1)  # a jump: two groups are due at 1 and one fits
    put_all(queue, [b])
    assert ids(await batch_now(queue)) == "b"
    assert queue.put(make_group(late)) is PutResult.STALE
    assert queue.ledger.counts["stale"] == Count(1, 2, 4)


@async_test
async def test_after_a_jump_the_batch_is_filled_with_the_earliest_due_and_the_rest_goes_stale():
    queue = make_queue(groups_per_batch=2, max_staleness=1)
    attempts = admit_many(queue, "abcd", 0)
    put_all(queue, attempts)
    queue.advance(1)
    assert ids(await batch_now(queue)) == "ab"
    assert queue.advance(2) == attempts[2:]
    assert queue.ledger.counts["stale"].groups == 2


@async_test
async def test_s12_a_batch_counts_groups_not_rollouts_and_keeps_them_whole():
    queue = make_queue(groups_per_batch=3, max_staleness=1)
    for attempt in admit_many(queue, "abcd", 0):
        assert queue.put(make_group(attempt, samples=4)) is PutResult.QUEUED
    batch = await batch_now(queue)
    assert [len(group.rollouts) for group in batch] == [4, 4, 4]
    assert queue.ledger.counts["trained"] == Count(3, 12, 24)


@async_test
async def test_s10_leftovers_at_the_end_are_surplus_not_failures():
    queue = make_queue(groups_per_batch=2, max_staleness=3)
    issued = 0
    for version in range(5):
        while queue.can_admit(version):
            attempt = queue.admit(make_prompt(f"p{issued}"), version)
            issued += 1
            if issued % 3:
                assert queue.put(make_group(attempt)) is PutResult.QUEUED
        for attempt in queue.dispatched()[:2]:
            queue.put(make_group(attempt))
        await batch_now(queue)
        queue.advance(version + 1)
    leftovers = [*queue.dispatched(), *(Attempt(f"p{i}", 0, 0) for i in range(issued))]
    for attempt in leftovers:
        queue.retire(attempt.group_id, attempt.attempt, "surplus")
    counts = {state: count.groups for state, count in queue.ledger.counts.items() if count.groups}
    assert counts == {"trained": 10, "surplus": issued - 10}
    assert queue.outstanding == 0


@async_test
async def test_ties_are_broken_by_admission_order_and_a_batch_is_in_admission_order():
    queue = make_queue(groups_per_batch=2, max_staleness=1)
    queue.advance(1)
    a, b, c = (queue.admit(make_prompt(name), version) for name, version in (("a", 1), ("b", 0), ("c", 1)))
    put_all(queue, [c, b, a])
    assert ids(await batch_now(queue)) == "ab", "b is due first, a ties with c and came earlier"
