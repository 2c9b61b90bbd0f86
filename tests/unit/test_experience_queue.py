"""Admission, delivery, retirement and the ledger. Case numbers are those of the known-faults list."""

import pytest

from rlhf_cluster.experience_queue import Attempt, NotAdmissible, PutResult
from rlhf_cluster.ledger import Count
from rlhf_cluster.types import ScoredGroup
from tests.unit.builders import admit_many, make_group, make_prompt, make_queue, make_rollout, make_scored, put_all


def groups_in(queue):
    """Non-zero states in groups."""
    return {state: count.groups for state, count in queue.ledger.counts.items() if count.groups}


def test_s01_the_bound_accepts_lag_0_to_k_and_refuses_older_and_future_versions():
    queue = make_queue(groups_per_batch=4, max_staleness=2)
    attempts = {}
    for version in (7, 8, 9, 10):
        queue.advance(version)
        attempts[version] = queue.admit(make_prompt(f"p{version}"), version)
    assert [queue.can_admit(version) for version in (7, 8, 9, 10, 11)] == [False, True, True, True, False]
    with pytest.raises(ValueError, match=r"versions 10 to 11.*learner version 10"):
        queue.put(make_group(attempts[10], versions=[10, 11]))
    results = {version: queue.put(make_group(attempt)) for version, attempt in attempts.items()}
    queued = PutResult.QUEUED
    assert results == {7: PutResult.STALE, 8: queued, 9: queued, 10: queued}
    assert groups_in(queue) == {"stale": 1, "queued": 3}
    assert queue.oldest_lag == 2


def test_s01_queued_groups_that_grow_too_old_are_retired_as_stale_before_they_are_trained():
    queue = make_queue(groups_per_batch=2, max_staleness=1)
    a, b = admit_many(queue, "ab", 0)
    put_all(queue, [a])
    queue.advance(1)
    assert queue.put(make_group(b, versions=[1, 1])) is PutResult.QUEUED
    assert queue.advance(2) == [a]
    assert groups_in(queue) == {"stale": 1, "queued": 1}


@pytest.mark.parametrize(("max_staleness", "result"), [(2, PutResult.QUEUED), (1, PutResult.STALE)])
def test_s02_a_group_over_several_versions_is_as_old_as_its_oldest_token(max_staleness, result):
    queue = make_queue(max_staleness=max_staleness)
    queue.advance(7)
    attempt = queue.admit(make_prompt(), 7)
    queue.advance(9)
    group = make_group(attempt, versions=[7, 7, 8, 8])
    assert group.rollouts[0].rollout.token_versions().tolist() == [7, 7, 8, 8]
    assert queue.put(group) is result


def test_a_version_below_the_admitted_start_is_an_error_of_the_worker_and_leaves_the_attempt_dispatched():
    queue = make_queue(max_staleness=3)
    queue.advance(2)
    attempt = queue.admit(make_prompt(), 2)
    with pytest.raises(ValueError, match=r"versions 1 to 2.*start version 2"):
        queue.put(make_group(attempt, versions=[1, 2]))
    assert queue.dispatched() == [attempt]
    assert queue.put(make_group(attempt)) is PutResult.QUEUED


def test_a_put_that_proves_younger_than_its_admission_frees_the_earlier_slot():
    queue = make_queue(groups_per_batch=2, max_staleness=1)
    c, _ = admit_many(queue, "cd", 0)
    queue.advance(1)
    assert not queue.can_admit(0), "both slots of version 1 are taken by groups due at 1"
    assert queue.put(make_group(c, versions=[1, 1])) is PutResult.QUEUED
    assert queue.can_admit(0), "c is due at 2 now"


def test_an_empty_rollout_counts_with_its_start_version():
    queue = make_queue(max_staleness=0)
    queue.advance(5)
    attempt = queue.admit(make_prompt(), 5)
    assert queue.put(make_group(attempt, versions=[])) is PutResult.QUEUED
    assert queue.oldest_lag == 0


@pytest.mark.parametrize("version", [0, 1, 100])
def test_s04_outstanding_work_is_bounded_by_k_plus_1_batches_whatever_the_version(version):
    queue = make_queue(groups_per_batch=8, max_staleness=2)
    queue.advance(version)
    admitted = 0
    while queue.can_admit(version):
        queue.admit(make_prompt(f"p{admitted}"), version)
        admitted += 1
    assert admitted == queue.outstanding == 24
    with pytest.raises(NotAdmissible, match="24 groups outstanding"):
        queue.admit(make_prompt("one more"), version)
    assert queue.ledger.admitted == 24


def test_old_workers_get_only_the_slots_that_are_still_in_time():
    queue = make_queue(groups_per_batch=2, max_staleness=2)
    queue.advance(4)
    admit_many(queue, "ab", 2)
    assert [queue.can_admit(version) for version in (1, 2, 3, 4)] == [False, False, True, True]
    admit_many(queue, "cd", 4)
    admit_many(queue, "ef", 3)
    assert not any(queue.can_admit(version) for version in range(6))


def test_s08_retiring_frees_capacity_at_once_and_late_callbacks_change_nothing():
    queue = make_queue(groups_per_batch=2, max_staleness=1)
    first = admit_many(queue, "abcd", 0)
    put_all(queue, first[:2])
    assert not queue.can_admit(0)
    assert all(queue.retire(old.group_id, old.attempt, "filtered") for old in first)
    second = admit_many(queue, "abcd", 0)
    assert [attempt.attempt for attempt in second] == [1, 1, 1, 1]
    assert queue.retire("a", 1, "failed")
    assert not queue.retire("a", 1, "failed")
    assert not queue.retire("b", 0, "failed")
    assert queue.put(make_group(first[1])) is PutResult.DUPLICATE
    assert queue.outstanding == 3
    assert queue.ledger.admitted == 8
    assert groups_in(queue) == {"filtered": 4, "failed": 1, "dispatched": 3, "duplicate": 1}


def test_the_ledger_counts_rollouts_and_tokens_from_the_put_on():
    queue = make_queue(groups_per_batch=2, max_staleness=1)
    a, b, _ = admit_many(queue, "abc", 0)
    put_all(queue, [a])
    assert queue.put(make_group(b, versions=[0] * 5, samples=4)) is PutResult.QUEUED
    assert queue.put(make_group(b, versions=[0] * 5, samples=4)) is PutResult.DUPLICATE
    queue.retire("a", 0, "filtered")
    counts = queue.ledger.counts
    assert counts["filtered"] == Count(groups=1, rollouts=2, tokens=4)
    assert counts["queued"] == counts["duplicate"] == Count(groups=1, rollouts=4, tokens=20)
    assert counts["dispatched"] == Count(groups=1, rollouts=0, tokens=0)


def test_a_ledger_that_does_not_close_is_reported():
    queue = make_queue()
    queue.admit(make_prompt(), 0)
    queue.ledger.counts["trained"] += Count(groups=1)
    with pytest.raises(AssertionError, match="does not close"):
        queue.ledger.check()
    negative = make_queue().ledger
    negative.move(Count(groups=1), "queued", "failed")
    with pytest.raises(AssertionError, match="does not close"):
        negative.check()


def test_s12_a_group_of_two_dispatches_cannot_be_built():
    members = [make_scored(make_rollout("g", attempt)) for attempt in (0, 0, 0, 1)]
    with pytest.raises(ValueError, match="a group has one dispatch"):
        ScoredGroup("g", tuple(members))


def test_f02_a_put_repeated_after_a_lost_reply_is_stored_once():
    queue = make_queue(groups_per_batch=5)
    attempts = admit_many(queue, "abcde", 0)
    put_all(queue, attempts)
    assert queue.put(make_group(attempts[2])) is PutResult.DUPLICATE
    assert groups_in(queue) == {"queued": 5, "duplicate": 1}


def test_f02_a_queue_that_lost_its_state_refuses_groups_it_never_admitted():
    with pytest.raises(ValueError, match="group a: attempt 0 was never admitted"):
        make_queue().put(make_group(Attempt("a", 0, 0)))


@pytest.mark.parametrize("old_first", [True, False])
def test_f03_of_two_attempts_only_the_current_one_is_queued(old_first):
    queue = make_queue()
    old = queue.admit(make_prompt("a"), 0)
    queue.retire("a", 0, "failed")
    new = queue.admit(make_prompt("a"), 0)
    assert new == Attempt("a", 1, 0)
    order = [old, new] if old_first else [new, old]
    results = {attempt.attempt: queue.put(make_group(attempt)) for attempt in order}
    assert results == {0: PutResult.DUPLICATE, 1: PutResult.QUEUED}
    assert groups_in(queue) == {"failed": 1, "queued": 1, "duplicate": 1}


def test_an_attempt_that_was_never_issued_is_refused():
    queue = make_queue()
    queue.admit(make_prompt("a"), 0)
    with pytest.raises(ValueError, match="group a: attempt 1 was never admitted"):
        queue.put(make_group(Attempt("a", 1, 0)))


def test_a_group_id_has_one_outstanding_attempt_and_an_epoch_may_name_its_own():
    queue = make_queue()
    queue.admit(make_prompt("a"), 0)
    with pytest.raises(ValueError, match="group a: attempt 0 is outstanding"):
        queue.admit(make_prompt("a"), 0)
    assert queue.admit(make_prompt("a"), 0, group_id="epoch 1/a") == Attempt("epoch 1/a", 0, 0)


def test_the_learner_version_never_goes_back():
    queue = make_queue()
    queue.advance(3)
    with pytest.raises(ValueError, match="cannot go back from 3 to 2"):
        queue.advance(2)
    assert queue.learner_version == 3


@pytest.mark.parametrize("reason", ["duplicate", "trained", "bored"])
def test_retire_takes_only_the_closed_set_of_reasons(reason):
    queue = make_queue()
    queue.admit(make_prompt("a"), 0)
    with pytest.raises(ValueError, match=f"retire reason '{reason}' of group a"):
        queue.retire("a", 0, reason)
    assert queue.outstanding == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"groups_per_batch": 0}, "queue.groups_per_batch must be at least 1, got 0"),
        ({"max_staleness": -1}, "queue.max_staleness .* got -1"),
        ({"group_deadline_s": 0.0}, "queue.group_deadline_s .* got 0"),
    ],
)
def test_limits_that_make_no_sense_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        make_queue(**change)
