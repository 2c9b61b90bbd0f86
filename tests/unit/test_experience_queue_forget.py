"""Forgetting attempts that are over: the queue stays small, and no late reply passes for a new attempt."""

from __future__ import annotations

import json

import pytest

from rlhf_cluster.experience_queue import Attempt, PutResult
from tests.unit.builders import admit_many, async_test, ids, make_group, make_prompt, make_queue, put_all


def never(group_id):
    return False


def only(names):
    return lambda group_id: group_id in names


@async_test
async def test_what_is_over_leaves_the_state_and_its_late_replies_are_still_duplicates():
    queue = make_queue(groups_per_batch=2, max_staleness=1)
    a, b, c, d = admit_many(queue, "abcd", 0)
    put_all(queue, [a, b, c])
    assert ids(await queue.next_batch()) == "ab"
    queue.advance(1)
    queue.retire("d", 0, "filtered")
    assert queue.forget(only("abd")) == 3
    assert queue.state_dict()["last_attempt"] == {"c": 0}
    for late in (a, b, d):
        assert queue.put(make_group(late)) is PutResult.DUPLICATE
    assert queue.queued == 1
    assert queue.ledger.counts["duplicate"].groups == 3


def test_what_is_outstanding_is_never_forgotten():
    queue = make_queue(groups_per_batch=2, max_staleness=1)
    a, b = admit_many(queue, "ab", 0)
    put_all(queue, [a])
    assert queue.forget(only("ab")) == 0
    assert queue.put(make_group(b)) is PutResult.QUEUED


@async_test
async def test_a_batch_in_training_is_not_forgotten_because_a_skipped_step_issues_it_again():
    queue = make_queue(groups_per_batch=1, max_staleness=0)
    put_all(queue, admit_many(queue, "a", 0))
    assert ids(await queue.next_batch()) == "a"
    assert queue.forget(only("a")) == 0
    queue.advance(0)
    assert queue.forget(never) == 0
    assert queue.admit(make_prompt("a"), 0) == Attempt("a", 1, 0)


def test_admitting_what_is_over_is_refused_because_its_attempts_would_start_again():
    queue = make_queue()
    admit_many(queue, "a", 0)
    queue.retire("a", 0, "failed")
    assert queue.forget(only("a")) == 1
    with pytest.raises(ValueError, match=r"group a is over: forget\(\) dropped its attempts"):
        queue.admit(make_prompt("a"), 0)
    assert (queue.outstanding, queue.ledger.admitted) == (0, 1)


def test_a_reply_that_nobody_asked_for_is_still_an_error_after_forgetting():
    queue = make_queue()
    admit_many(queue, "ab", 0)
    queue.retire("a", 0, "failed")
    queue.forget(only("a"))
    with pytest.raises(ValueError, match="group x: attempt 0 was never admitted"):
        queue.put(make_group(Attempt("x", 0, 0)))
    with pytest.raises(ValueError, match="group b: attempt 1 was never admitted"):
        queue.put(make_group(Attempt("b", 1, 0)))
    with pytest.raises(ValueError, match="group a: attempt -1 was never admitted"):
        queue.put(make_group(Attempt("a", -1, 0)))


def test_a_restored_queue_goes_by_its_state_alone():
    queue = make_queue()
    admit_many(queue, "a", 0)
    queue.retire("a", 0, "failed")
    before = json.loads(json.dumps(queue.state_dict()))
    admit_many(queue, "b", 0)
    queue.retire("b", 0, "failed")
    queue.forget(only("ab"))
    assert queue.state_dict()["last_attempt"] == {}
    queue.load_state_dict(before)
    assert queue.admit(make_prompt("a"), 0) == Attempt("a", 1, 0)
    assert queue.admit(make_prompt("b"), 0) == Attempt("b", 0, 0)
