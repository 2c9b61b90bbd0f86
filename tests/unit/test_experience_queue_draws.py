"""F06: what a stop or a lost learner took back is sampled again with the same seeds, and trained in the same place."""

import json

import pytest

from rlhf_cluster.experience_queue import ExperienceQueue
from tests.unit.builders import admit_many, async_test, ids, make_group, make_prompt, make_queue, put_all


def resumed(queue: ExperienceQueue, version: int) -> tuple[ExperienceQueue, set[str]]:
    copy = make_queue(groups_per_batch=queue.groups_per_batch, max_staleness=queue.max_staleness)
    copy.load_state_dict(json.loads(json.dumps(queue.state_dict())))
    return copy, copy.resume(version)


@async_test
async def test_a_batch_forms_after_a_resume_as_if_nothing_had_happened():
    queue = make_queue(groups_per_batch=3, max_staleness=0)
    _a, _b, c = admit_many(queue, "abc", 0)
    put_all(queue, [c])
    queue, queued = resumed(queue, 0)
    assert queued == {"c"}
    again = [queue.admit(make_prompt(name), 0) for name in "ba"]
    assert [(attempt.attempt, attempt.draw) for attempt in again] == [(1, 0), (1, 0)]
    put_all(queue, again)
    assert ids(await queue.next_batch()) == "abc"


@async_test
async def test_a_queued_group_too_old_for_the_version_is_drawn_again_in_its_place():
    queue = make_queue(groups_per_batch=3, max_staleness=0)
    put_all(queue, admit_many(queue, "abc", 0)[:2])
    queue, queued = resumed(queue, 4)
    assert (queued, queue.learner_version) == (set(), 4)
    again = [queue.admit(make_prompt(name), 4) for name in "cba"]
    assert [attempt.draw for attempt in again] == [0, 0, 0]
    put_all(queue, again)
    assert ids(await queue.next_batch()) == "abc"


def test_places_that_are_not_taken_yet_survive_another_resume():
    queue = make_queue(groups_per_batch=2, max_staleness=0)
    admit_many(queue, "ab", 0)
    queue, _ = resumed(queue, 0)
    queue.admit(make_prompt("b"), 0)
    queue, _ = resumed(queue, 0)
    orders = {}
    for name in "ba":
        queue.admit(make_prompt(name), 0)
    for entry in queue.state_dict()["entries"]:
        orders[entry["group_id"]] = entry["order"]
    assert orders == {"a": 0, "b": 1}
    assert queue.state_dict()["places"] == {}


@pytest.mark.parametrize("reason", ["failed", "stale"])
def test_an_attempt_that_ended_by_itself_is_drawn_anew_also_after_a_resume(reason):
    queue = make_queue(groups_per_batch=2, max_staleness=0)
    admit_many(queue, "a", 0)
    queue.retire("a", 0, reason)
    assert queue.admit(make_prompt("a"), 0).draw == 1
    queue, _ = resumed(queue, 0)
    again = queue.admit(make_prompt("a"), 0)
    assert (again.attempt, again.draw) == (2, 1)


@async_test
async def test_a_skipped_step_and_a_late_group_are_drawn_anew():
    queue = make_queue(groups_per_batch=1, max_staleness=1)
    put_all(queue, admit_many(queue, "a", 0))
    await queue.next_batch()
    queue.advance(0)
    a = queue.admit(make_prompt("a"), 0)
    b = queue.admit(make_prompt("b"), 0)
    assert (a.draw, b.draw) == (1, 0)
    queue.advance(5)
    queue.put(make_group(b))
    assert queue.admit(make_prompt("b"), 5).draw == 1


@async_test
async def test_what_a_lost_learner_takes_back_is_drawn_as_it_was_and_counts_no_failure():
    queue = make_queue(groups_per_batch=1, max_staleness=2)
    put_all(queue, admit_many(queue, "abc", 0)[:2])
    await queue.next_batch()
    queue.advance(1)
    await queue.next_batch()
    queue.fail_over(7)
    # a was trained, b was in training and c on a worker; all three come again.
    again = [queue.admit(make_prompt(name), 7) for name in "abc"]
    assert [(attempt.attempt, attempt.draw) for attempt in again] == [(1, 0), (1, 0), (1, 0)]


@async_test
async def test_after_a_lost_learner_places_of_the_resume_before_it_are_void():
    queue = make_queue(groups_per_batch=2, max_staleness=0)
    admit_many(queue, "ab", 0)
    queue, _ = resumed(queue, 0)
    queue.fail_over(7)
    put_all(queue, admit_many(queue, "ba", 7))
    assert ids(await queue.next_batch()) == "ba"


def test_a_set_of_before_draws_were_counted_can_be_resumed():
    queue = make_queue()
    admit_many(queue, "a", 0)
    state = queue.state_dict()
    del state["draws"], state["places"]
    queue.load_state_dict(state)
    assert queue.resume(0) == set()
    assert queue.admit(make_prompt("a"), 0).draw == 0


def test_forgotten_groups_leave_no_number_behind():
    queue = make_queue()
    admit_many(queue, "a", 0)
    queue.retire("a", 0, "failed")
    assert queue.state_dict()["draws"] == {"a": 1}
    queue.forget(lambda group_id: group_id == "a")
    assert queue.state_dict()["draws"] == {}
