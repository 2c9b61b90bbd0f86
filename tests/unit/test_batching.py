from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_cluster.batching import forward_plan, plan_minibatches

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=40)


def rank_tokens(plan, lengths):
    return [sum(lengths[i] for micro_batch in rank for i in micro_batch) for rank in plan.ranks]


def check_plan(plan, lengths, ranks, budget):
    assert len(plan.ranks) == ranks
    assert {len(rank) for rank in plan.ranks} == {plan.micro_batches}
    for rank in plan.ranks:
        order = [lengths[i] for micro_batch in rank for i in micro_batch]
        assert order == sorted(order, reverse=True)
        for micro_batch in rank:
            cost = len(micro_batch) * max((lengths[i] for i in micro_batch), default=0)
            assert cost <= budget or len(micro_batch) == 1
        assert all(later == () for earlier, later in pairwise(rank) if earlier == ())
    if plan.samples:
        tokens = rank_tokens(plan, lengths)
        assert max(tokens) - min(tokens) <= max(lengths[i] for i in plan.samples)
        assert any(rank[-1] for rank in plan.ranks), "a micro-batch that is empty on every rank is wasted"


@settings(max_examples=150, deadline=None)
@given(LENGTHS, st.integers(1, 5), st.integers(1, 6), st.integers(1, 120), st.integers(0, 9), st.integers(0, 3))
def test_every_epoch_trains_each_sample_once_in_balanced_micro_batches(
    lengths, ranks, minibatches, budget, seed, epoch
):
    minibatches = min(minibatches, len(lengths))
    arguments = dict(ranks=ranks, minibatches=minibatches, micro_batch_tokens=budget, seed=seed, epoch=epoch)
    plans = plan_minibatches(lengths, **arguments)
    assert plans == plan_minibatches(lengths, **arguments)
    assert len(plans) == minibatches
    assert sorted(i for plan in plans for i in plan.samples) == list(range(len(lengths)))
    sizes = [len(plan.samples) for plan in plans]
    assert max(sizes) - min(sizes) <= 1
    for plan in plans:
        check_plan(plan, lengths, ranks, budget)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 60), max_size=30), st.integers(1, 5), st.integers(1, 120))
def test_a_forward_plan_covers_each_sample_once(lengths, ranks, budget):
    plan = forward_plan(lengths, ranks=ranks, micro_batch_tokens=budget)
    assert plan.samples == tuple(range(len(lengths)))
    check_plan(plan, lengths, ranks, budget)


def test_the_shuffle_changes_with_the_epoch_and_with_the_seed():
    def order(seed, epoch):
        plans = plan_minibatches([7] * 32, ranks=1, minibatches=4, micro_batch_tokens=28, seed=seed, epoch=epoch)
        return [plan.samples for plan in plans]

    assert order(1, 0) != order(1, 1)
    assert order(1, 0) != order(2, 0)


def test_the_worked_example_of_the_module_holds():
    plan = forward_plan([5, 4, 4, 3], ranks=2, micro_batch_tokens=8)
    assert plan.ranks == (((0,), (3,)), ((1, 2), ()))


def test_a_row_above_the_budget_gets_a_micro_batch_of_its_own():
    plan = forward_plan([20, 3, 3], ranks=1, micro_batch_tokens=6)
    assert plan.ranks == (((0,), (1, 2)),)


@pytest.mark.parametrize(("budget", "micro_batches"), [(7, ((0,), (1,))), (8, ((0, 1),))])
def test_two_rows_of_four_share_a_micro_batch_from_eight_tokens_on(budget, micro_batches):
    assert forward_plan([4, 4], ranks=1, micro_batch_tokens=budget).ranks == (micro_batches,)


def test_ranks_without_samples_run_padding_only():
    plan = forward_plan([9], ranks=3, micro_batch_tokens=16)
    assert plan.ranks == (((0,),), ((),), ((),))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"minibatches": 4}, r"learner\.minibatches must lie between 1 and the 3 samples of the batch, got 4"),
        ({"minibatches": 0}, r"learner\.minibatches .* got 0"),
        ({"ranks": 0}, r"learner\.ranks must be at least 1, got 0"),
        ({"micro_batch_tokens": 0}, r"learner\.micro_batch_tokens must be at least 1, got 0"),
        ({"lengths": [3, 0, 2]}, r"at least 1 token, got lengths \[3, 0, 2\]"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_by_name(change, message):
    arguments = dict(lengths=[1, 2, 3], ranks=1, minibatches=1, micro_batch_tokens=8, seed=0, epoch=0) | change
    with pytest.raises(ValueError, match=message):
        plan_minibatches(arguments.pop("lengths"), **arguments)
