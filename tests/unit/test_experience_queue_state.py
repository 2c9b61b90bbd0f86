"""Saving and restoring the queue, always through JSON text."""

import asyncio
import dataclasses
import json
import math

import numpy as np
import pytest

from rlhf_cluster.experience_queue import Attempt, BatchTimeout, PutResult
from rlhf_cluster.ledger import Count
from rlhf_cluster.types import ScoredGroup
from tests.unit.builders import (
    ManualClock,
    admit_many,
    async_test,
    ids,
    make_group,
    make_prompt,
    make_queue,
    make_rollout,
    make_scored,
    put_all,
)


def restored(queue, **limits):
    copy = make_queue(groups_per_batch=queue.groups_per_batch, max_staleness=queue.max_staleness, **limits)
    copy.load_state_dict(json.loads(json.dumps(queue.state_dict())))
    return copy


@async_test
async def test_f04_groups_generated_but_not_trained_are_trained_once_after_resume():
    queue = make_queue(groups_per_batch=2, max_staleness=1)
    trained = ""
    put_all(queue, admit_many(queue, "0123", 0))
    trained += ids(await queue.next_batch())
    queue.advance(1)
    admit_many(queue, "45", 1)

    queue = restored(queue)
    assert queue.learner_version == 1
    assert queue.dispatched() == [Attempt("4", 0, 1), Attempt("5", 0, 1)]
    for lost in queue.dispatched():
        assert queue.retire(lost.group_id, lost.attempt, "aborted")
        attempt = queue.admit(make_prompt(lost.group_id), 1)
        assert attempt.attempt == 1
        assert queue.put(make_group(lost)) is PutResult.DUPLICATE
        put_all(queue, [attempt])
    trained += ids(await queue.next_batch())
    queue.advance(2)
    put_all(queue, admit_many(queue, "67", 2))
    for version in (3, 4):
        trained += ids(await queue.next_batch())
        queue.advance(version)
    assert trained == "01234567"
    assert queue.ledger.admitted == 10
    groups = {state: count.groups for state, count in queue.ledger.counts.items() if count.groups}
    assert groups == {"trained": 8, "aborted": 2, "duplicate": 2}


@async_test
async def test_a_batch_handed_out_but_not_closed_comes_back_as_queued_in_its_old_place():
    queue = make_queue(groups_per_batch=2, max_staleness=1)
    attempts = admit_many(queue, "abcd", 0)
    put_all(queue, [attempts[3], attempts[1]])
    assert ids(await queue.next_batch()) == "bd"
    before = queue.ledger.counts["trained"]
    copy = restored(queue)
    assert queue.ledger.counts["trained"] == before == Count(2, 4, 8), "saving changes nothing"
    assert copy.ledger.counts["queued"] == before
    assert copy.ledger.counts["trained"] == Count()
    assert not copy.can_admit(0)
    assert ids(await copy.next_batch()) == "bd"
    copy.advance(1)
    put_all(copy, copy.dispatched())
    assert ids(await copy.next_batch()) == "ac"


@async_test
async def test_every_field_of_a_group_survives_to_the_bit():
    queue = make_queue(groups_per_batch=1, max_staleness=2)
    queue.advance(7)
    attempt = queue.admit(make_prompt("g"), 7)
    queue.advance(8)
    rollout = make_rollout("g", versions=[7, 7, 8, 8], finish_reason="length", sample=3)
    odd = np.array([1 / 3, np.nan, -np.inf, 1e-42], dtype=np.float32)
    scored = dataclasses.replace(make_scored(rollout, 0.1 + 0.2), ref_logprobs=odd)
    empty = make_scored(make_rollout("g", versions=[], start_version=7), math.nan)
    assert queue.put(ScoredGroup(attempt.group_id, (scored, empty))) is PutResult.QUEUED

    (group,) = await restored(queue).next_batch()
    first, second = group.rollouts
    assert dataclasses.replace(first.rollout, sampling=rollout.sampling).version_spans == rollout.version_spans
    for name in ("prompt_token_ids", "token_ids", "behaviour_logprobs"):
        ours, theirs = getattr(first.rollout, name), getattr(rollout, name)
        assert ours.dtype == theirs.dtype
        assert ours.tobytes() == theirs.tobytes()
    assert first.ref_logprobs.tobytes() == odd.tobytes()
    for name in ("rollout_id", "attempt", "group_id", "finish_reason", "sampling"):
        assert getattr(first.rollout, name) == getattr(rollout, name)
    assert (first.score, first.score_components) == (0.1 + 0.2, {"model": 0.1 + 0.2})
    assert math.isnan(second.score)
    assert second.rollout.version_spans == ((7, 0, 0),)


@async_test
async def test_deadlines_go_on_from_the_age_a_group_had():
    clock = ManualClock(start=3.0)
    queue = make_queue(groups_per_batch=1, max_staleness=0, clock=clock)
    admit_many(queue, "a", 0)
    await clock.advance(4)
    later = ManualClock(start=1000.0)
    copy = restored(queue, clock=later)
    waiting = asyncio.ensure_future(copy.next_batch())
    await later.advance(5.9)
    assert not waiting.done()
    await later.advance(0.1)
    with pytest.raises(BatchTimeout) as caught:
        await waiting
    assert caught.value.group_ids == ("a",)


def test_a_state_is_a_copy_and_restoring_it_forgets_what_came_after():
    queue = make_queue(groups_per_batch=2, max_staleness=1)
    put_all(queue, admit_many(queue, "ab", 0))
    state = queue.state_dict()
    text = json.dumps(state)
    queue.retire("a", 0, "filtered")
    admit_many(queue, "acd", 0)
    queue.advance(5)
    assert json.dumps(state) == text
    queue.load_state_dict(state)
    assert json.dumps(queue.state_dict()) == text
    assert (queue.learner_version, queue.outstanding, queue.queued, queue.ledger.admitted) == (0, 2, 2, 2)
    assert len(admit_many(queue, "cd", 0)) == 2
    assert not queue.can_admit(0)


@pytest.mark.parametrize(("name", "limits"), [("groups_per_batch", (3, 1)), ("max_staleness", (2, 2))])
def test_a_state_of_another_schedule_is_refused(name, limits):
    state = make_queue(groups_per_batch=2, max_staleness=1).state_dict()
    other = make_queue(groups_per_batch=limits[0], max_staleness=limits[1])
    with pytest.raises(ValueError, match=f"queue.{name} is .* resume with the saved value"):
        other.load_state_dict(state)
