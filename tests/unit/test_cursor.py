"""The prompt cursor: every prompt once an epoch, whatever is consumed out of order or lost at a restart (case F04)."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest

from rlhf_cluster.data.cursor import PromptCursor
from rlhf_cluster.types import Prompt


def prompts(n=8):
    return [Prompt(f"p{i}", (i, i + 1), f"text {i}") for i in range(n)]


def cursor(n=8, seed=3, epochs=2):
    return PromptCursor(prompts(n), seed=seed, epochs=epochs)


def take(source, n):
    issues = [source.next() for _ in range(n)]
    assert None not in issues
    return issues


def saved(source):
    """The state as it comes back from disk."""
    return json.loads(json.dumps(source.state_dict()))


def test_each_epoch_issues_every_prompt_once_in_its_own_order():
    first, second = take(cursor(64), 64), take(cursor(64), 128)[64:]
    for epoch, issues in enumerate((first, second)):
        assert sorted(issue.prompt.prompt_id for issue in issues) == sorted(p.prompt_id for p in prompts(64))
        assert [(issue.epoch, issue.position) for issue in issues] == [(epoch, i) for i in range(64)]
    orders = [[issue.prompt.prompt_id for issue in issues] for issues in (first, second)]
    assert orders[0] != orders[1]
    assert orders[0] != [p.prompt_id for p in prompts(64)]


def test_order_depends_on_the_seed_only():
    def order(seed):
        return [issue.prompt.prompt_id for issue in take(cursor(64, seed), 64)]

    assert order(3) == order(3)
    assert order(3) != order(4)


def test_group_ids_name_epoch_and_prompt_and_never_repeat():
    issues = take(cursor(3), 6)
    assert {issue.group_id for issue in issues} == {f"{epoch}:p{i}" for epoch in (0, 1) for i in range(3)}


def test_after_the_last_epoch_there_is_nothing_and_done_waits_for_consumption():
    source = cursor(2, epochs=1)
    issues = take(source, 2)
    assert source.next() is None
    assert not source.done
    for issue in issues:
        source.consumed(issue.group_id)
    assert source.done
    assert source.next() is None


def test_without_a_number_of_epochs_prompts_repeat_for_ever():
    source = cursor(2, epochs=None)
    assert Counter(issue.prompt.prompt_id for issue in take(source, 10)) == {"p0": 5, "p1": 5}
    assert not source.done


def test_resume_issues_what_was_generated_but_not_trained():
    # F04: generation batch 4, learner batch 2, saved after training positions 0 and 1.
    source = cursor(epochs=1)
    issued = take(source, 4)
    for issue in issued[:2]:
        source.consumed(issue.group_id)
    resumed = cursor(epochs=1)
    resumed.load_state_dict(saved(source))
    assert [issue.position for issue in take(resumed, 6)] == [2, 3, 4, 5, 6, 7]
    assert resumed.next() is None


def test_consumption_out_of_order_is_not_issued_again():
    source = cursor(epochs=1)
    issued = take(source, 4)
    for i in (3, 0, 1):
        source.consumed(issued[i].group_id)
    assert (saved(source)["frontier"], saved(source)["consumed_ahead"]) == (2, [3])
    resumed = cursor(epochs=1)
    resumed.load_state_dict(saved(source))
    assert [issue.position for issue in take(resumed, 5)] == [2, 4, 5, 6, 7]


def test_resume_over_an_epoch_boundary_finishes_the_straggler_of_the_old_epoch():
    source = cursor(3)
    issued = take(source, 5)
    for i in (0, 2, 4):
        source.consumed(issued[i].group_id)
    resumed = cursor(3)
    resumed.load_state_dict(saved(source))
    assert [(issue.epoch, issue.position) for issue in take(resumed, 3)] == [(0, 1), (1, 0), (1, 2)]


def test_exhausted_epochs_stay_exhausted_after_a_resume():
    source = cursor(2, epochs=1)
    for issue in take(source, 2):
        source.consumed(issue.group_id)
    resumed = cursor(2, epochs=1)
    resumed.load_state_dict(saved(source))
    assert resumed.done
    assert resumed.next() is None


def test_groups_that_live_on_in_a_restored_queue_are_not_issued_but_can_be_consumed():
    source = cursor(epochs=1)
    issued = take(source, 4)
    source.consumed(issued[0].group_id)
    queued = [issued[1].group_id, issued[3].group_id]
    resumed = cursor(epochs=1)
    resumed.load_state_dict(saved(source), outstanding=queued)
    assert [issue.position for issue in take(resumed, 5)] == [2, 4, 5, 6, 7]
    resumed.consumed(queued[0])
    assert saved(resumed)["frontier"] == 2


def test_outstanding_group_that_is_consumed_or_unknown_is_refused():
    source = cursor(epochs=1)
    (issue,) = take(source, 1)
    source.consumed(issue.group_id)
    for group_id, message in ((issue.group_id, "but consumed"), ("0:nobody", "not an issue of these prompts")):
        with pytest.raises(ValueError, match=message):
            cursor(epochs=1).load_state_dict(saved(source), outstanding=[group_id])


@pytest.mark.parametrize("seed", range(20))
def test_every_prompt_is_consumed_once_an_epoch_whatever_event_the_run_is_killed_after(seed):
    """Random issues, consumptions, saves and kills; a kill falls back to the newest save."""
    chance = random.Random(seed)
    source, outstanding, trained = cursor(5, epochs=3), [], []
    state, trained_at_save = saved(source), []
    while not source.done:
        event = chance.choice(["issue", "issue", "consume", "consume", "save", "kill"])
        if event == "issue" and len(outstanding) < 4 and (issue := source.next()) is not None:
            outstanding.append(issue.group_id)
        elif event == "consume" and outstanding:
            group_id = outstanding.pop(chance.randrange(len(outstanding)))
            source.consumed(group_id)
            trained.append(group_id)
        elif event == "save":
            state, trained_at_save = saved(source), list(trained)
            assert len(state["consumed_ahead"]) <= 15
        elif event == "kill":
            source, outstanding, trained = cursor(5, epochs=3), [], list(trained_at_save)
            source.load_state_dict(state)
    assert Counter(trained) == Counter({f"{epoch}:p{i}": 1 for epoch in range(3) for i in range(5)})


def test_state_stays_small_over_many_epochs():
    source = cursor(4, epochs=None)
    for _ in range(400):
        source.consumed(take(source, 1)[0].group_id)
    assert saved(source)["frontier"] == 400
    assert saved(source)["consumed_ahead"] == []
    assert len(source._orders) <= 1
    assert source._issued_before == set()


def test_passed_is_what_a_cursor_that_resumes_at_the_frontier_never_issues_again():
    source = cursor(4, epochs=3)
    groups = [issue.group_id for issue in take(source, 12)]
    for frontier in range(13):
        assert [source.passed(group_id, frontier) for group_id in groups] == [i < frontier for i in range(12)]
    assert not source.passed("0:nobody", 12)
    assert not source.passed("p0", 12)
    assert source.frontier == 0
    source.consumed(groups[1])
    source.consumed(groups[0])
    assert source.frontier == 2


def test_places_that_a_resume_passes_over_are_dropped_on_the_way():
    source = cursor(epochs=1)
    issued = take(source, 4)
    source.consumed(issued[3].group_id)
    resumed = cursor(epochs=1)
    resumed.load_state_dict(saved(source), outstanding=[issued[1].group_id])
    assert [issue.position for issue in take(resumed, 6)] == [0, 2, 4, 5, 6, 7]
    assert resumed._issued_before == set()


def test_group_that_is_not_outstanding_cannot_be_consumed():
    source = cursor()
    (issue,) = take(source, 1)
    source.consumed(issue.group_id)
    for group_id in (issue.group_id, "0:p99"):
        with pytest.raises(ValueError, match="not outstanding"):
            source.consumed(group_id)


@pytest.mark.parametrize(
    "changed",
    [
        [*prompts(7), Prompt("new", (7, 8), "text 7")],
        [*prompts(7), Prompt("p7", (8, 7), "other tokens")],
        prompts(9),
        prompts()[::-1],
    ],
    ids=["other id", "other tokens", "one more", "other order"],
)
def test_prompts_that_changed_between_runs_are_refused(changed):
    with pytest.raises(ValueError, match=r"data\.prompts: the saved run had 8 prompts"):
        PromptCursor(changed, seed=3).load_state_dict(saved(cursor()))


def test_seed_that_changed_between_runs_is_refused():
    with pytest.raises(ValueError, match=r"run\.seed: the saved run has seed 3, got 4"):
        cursor(seed=4).load_state_dict(saved(cursor()))


def test_unusable_arguments_are_refused():
    with pytest.raises(ValueError, match="at least one prompt"):
        PromptCursor([], seed=0)
    with pytest.raises(ValueError, match="ids must differ"):
        PromptCursor([*prompts(2), prompts(1)[0]], seed=0)
    with pytest.raises(ValueError, match="epochs: must be at least 1"):
        PromptCursor(prompts(), seed=0, epochs=0)


def test_prompts_whose_other_fields_changed_are_not_the_same():
    before = PromptCursor([Prompt("p", (1, 2), "2 + 2?", {"answer": "4"})], seed=0)
    after = PromptCursor([Prompt("p", (1, 2), "2 + 2?", {"answer": "5"})], seed=0)
    with pytest.raises(ValueError, match=r"data\.prompts: .*other fields"):
        after.load_state_dict(before.state_dict())
