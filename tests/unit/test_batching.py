from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_cluster.batching import PADDING_SHARE, forward_plan, plan_minibatches

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=40)


def rank_tokens(plan, lengths):
    return [sum(lengths[i] for micro_batch in rank for i in micro_batch) for rank in plan.ranks]


def slots(micro_batch, lengths, packed):
    mine = [lengths[i] for i in micro_batch]
    return sum(mine) if packed else len(mine) * max(mine, default=0)


def padding_share(plan, lengths):
    used = sum(slots(micro_batch, lengths, packed=False) for rank in plan.ranks for micro_batch in rank)
    return 1 - sum(rank_tokens(plan, lengths)) / used


def check_plan(plan, lengths, ranks, budget, packed):
    assert len(plan.ranks) == ranks
    assert {len(rank) for rank in plan.ranks} == {plan.micro_batches}
    for rank in plan.ranks:
        order = [lengths[i] for micro_batch in rank for i in micro_batch]
        assert not order or order[0] == max(order), "the micro-batch that needs the most memory comes first"
        if not packed:
            assert order == sorted(order, reverse=True)
        for micro_batch in rank:
            mine = [lengths[i] for i in micro_batch]
            assert mine == sorted(mine, reverse=True)
            assert slots(micro_batch, lengths, packed) <= budget or len(micro_batch) == 1
        assert all(later == () for earlier, later in pairwise(rank) if earlier == ())
        if packed and order:
            # First fit: what stands in a later micro-batch had no room in any earlier one.
            for earlier, later in combinations([m for m in rank if m], 2):
                assert slots(earlier, lengths, packed) + min(lengths[i] for i in later) > budget
    if plan.samples:
        tokens = rank_tokens(plan, lengths)
        assert max(tokens) - min(tokens) <= max(lengths[i] for i in plan.samples)
        assert any(rank[-1] for rank in plan.ranks), "a micro-batch that is empty on every rank is wasted"
        if not packed:
            assert padding_share(plan, lengths) <= PADDING_SHARE + 1e-12


@settings(max_examples=150, deadline=None)
@given(
    LENGTHS,
    st.integers(1, 5),
    st.integers(1, 6),
    st.integers(1, 120),
    st.integers(0, 9),
    st.integers(0, 3),
    st.booleans(),
)
def test_every_epoch_trains_each_sample_once_in_balanced_micro_batches(
    lengths, ranks, minibatches, budget, seed, epoch, packed
):
    minibatches = min(minibatches, len(lengths))
    arguments = dict(
        ranks=ranks, minibatches=minibatches, micro_batch_tokens=budget, seed=seed, epoch=epoch, packed=packed
    )
    plans = plan_minibatches(lengths, **arguments)
    assert plans == plan_minibatches(lengths, **arguments)
    assert len(plans) == minibatches
    assert sorted(i for plan in plans for i in plan.samples) == list(range(len(lengths)))
    sizes = [len(plan.samples) for plan in plans]
    assert max(sizes) - min(sizes) <= 1
    for plan in plans:
        check_plan(plan, lengths, ranks, budget, packed)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 60), max_size=30), st.integers(1, 5), st.integers(1, 120), st.booleans())
def test_a_forward_plan_covers_each_sample_once(lengths, ranks, budget, packed):
    plan = forward_plan(lengths, ranks=ranks, micro_batch_tokens=budget, packed=packed)
    assert plan.samples == tuple(range(len(lengths)))
    check_plan(plan, lengths, ranks, budget, packed)


@settings(max_examples=50, deadline=None)
@given(LENGTHS, st.integers(1, 3), st.integers(0, 9))
def test_layout_and_budget_change_neither_the_minibatches_nor_the_ranks(lengths, ranks, seed):
    def shares(budget, packed):
        plans = plan_minibatches(
            lengths, ranks=ranks, minibatches=1, micro_batch_tokens=budget, seed=seed, epoch=0, packed=packed
        )
        return [[sorted(i for micro_batch in rank for i in micro_batch) for rank in plan.ranks] for plan in plans]

    assert shares(64, True) == shares(64, False) == shares(17, True) == shares(1000, False)


def test_mixed_lengths_make_few_micro_batches_and_little_padding():
    lengths = [45 + 5 * i // 4 for i in range(64)]  # 45 to 123
    padded = forward_plan(lengths, ranks=1, micro_batch_tokens=1024)
    assert padding_share(padded, lengths) < 0.05
    assert padded.micro_batches <= 10
    packed = forward_plan(lengths, ranks=1, micro_batch_tokens=1024, packed=True)
    assert packed.micro_batches == -(-sum(lengths) // 1024)  # no fewer are possible


def test_one_longer_row_does_not_pad_all_others():
    plan = forward_plan([100] + [92] * 9, ranks=1, micro_batch_tokens=1000)  # together 7 % would be padding
    assert plan.ranks == (((0,), tuple(range(1, 10))),)
    plan = forward_plan([100] + [96] * 9, ranks=1, micro_batch_tokens=1000)  # 3.6 %
    assert plan.ranks == ((tuple(range(10)),),)


def test_packing_fills_a_gap_with_the_first_sample_that_fits():
    plan = forward_plan([7, 6, 4, 3, 2], ranks=1, micro_batch_tokens=10, packed=True)
    assert plan.ranks == (((0, 3), (1, 2), (4,)),)


def test_the_shuffle_changes_with_the_epoch_and_with_the_seed():
    def order(seed, epoch):
        plans = plan_minibatches([7] * 32, ranks=1, minibatches=4, micro_batch_tokens=28, seed=seed, epoch=epoch)
        return [plan.samples for plan in plans]

    assert order(1, 0) != order(1, 1)
    assert order(1, 0) != order(2, 0)


def test_the_worked_example_of_the_module_holds():
    plan = forward_plan([5, 4, 4, 3], ranks=2, micro_batch_tokens=8)
    assert plan.ranks == (((0,), (3,)), ((1, 2), ()))
    plan = forward_plan([5, 4, 4, 3], ranks=2, micro_batch_tokens=8, packed=True)
    assert plan.ranks == (((0, 3),), ((1, 2),))


@pytest.mark.parametrize("packed", [False, True])
def test_a_sample_above_the_budget_gets_a_micro_batch_of_its_own(packed):
    plan = forward_plan([20, 3, 3], ranks=1, micro_batch_tokens=6, packed=packed)
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
