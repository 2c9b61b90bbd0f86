"""From scored rollouts to rewards, advantages and batch statistics, with numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from learner.batch_metrics import advantage_metrics, batch_metrics, ratio_metrics
from learner.batch_tensors import BadData, BatchTensors
from learner.experience import (
    Experience,
    answer_advantages,
    finish_advantages,
    monte_carlo_returns,
    normalised_scores,
    rewards_of,
    token_advantages,
)
from rlhf_cluster.algorithms.rewards import RunningMoments
from rlhf_cluster.config import AlgorithmConfig, RewardConfig
from rlhf_cluster.types import Ratio, ScoredGroup, ScoredRollout, TrainBatch
from tests.unit.builders import make_rollout

COMPONENTS: Any = ({"name": "model", "kind": "model"},)


def tensors_of(*members: ScoredRollout, version: int = 0, max_staleness: int = 1) -> BatchTensors:
    groups = tuple(ScoredGroup(member.rollout.group_id, (member,)) for member in members)
    return BatchTensors.from_batch(TrainBatch(version, groups), max_staleness)


def scored(group: str, score: float = 0.0, **rollout: Any) -> ScoredRollout:
    made = make_rollout(group, **rollout)
    return ScoredRollout(made, score, {}, np.zeros(made.n_tokens, dtype=np.float32))


def test_masks_come_from_lengths_and_empty_rollouts_are_left_out() -> None:
    tensors = tensors_of(scored("a", versions=(0, 0, 0)), scored("b", versions=()), scored("c", versions=(0,)))
    assert tensors.mask.tolist() == [[True, True, True], [True, False, False]]
    assert tensors.lengths == [6, 4]
    assert tensors.n_empty == 1


@pytest.mark.parametrize("versions", [(7, 10), (10, 11)])
def test_a_token_outside_the_staleness_bound_never_becomes_experience(versions: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"a/0/0: token lags .* leave 0\.\.2"):
        tensors_of(scored("a", versions=versions), version=10, max_staleness=2)


def grouped(*groups: list[ScoredRollout], version: int = 0) -> BatchTensors:
    batch = TrainBatch(version, tuple(ScoredGroup(members[0].rollout.group_id, tuple(members)) for members in groups))
    return BatchTensors.from_batch(batch, 1)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_leaves_with_its_group_and_is_counted_by_kind(bad: float) -> None:
    behaviour = scored("c", versions=(0, 0))
    behaviour.rollout.behaviour_logprobs[1] = bad
    reference = scored("d", versions=(0, 0))
    reference.ref_logprobs[0] = bad
    tensors = grouped(
        [scored("a"), scored("a")], [scored("b", score=bad), scored("b")], [behaviour], [reference, scored("d")]
    )
    assert tensors.groups == ("a", "a")
    assert tensors.excluded == {"score": 1, "group": 2, "behaviour_logprobs": 1, "ref_logprobs": 1}
    with pytest.raises(BadData, match=r"3 of the 7 rollouts .*1 with score.*max_unscorable_fraction is 0\.4"):
        tensors.check_excluded(0.4)
    tensors.check_excluded(3 / 7)


def test_numbers_computed_for_a_row_that_are_not_finite_take_its_group_out_and_leave_the_others_untouched() -> None:
    tensors = grouped([scored("a", 1.0), scored("a", 2.0)], [scored("b", 3.0)], [scored("c", 4.0), scored("c", 5.0)])
    computed = torch.zeros(5, 2)
    computed[1, 0] = float("nan")
    assert tensors.bad_rows(computed) == [1]
    assert tensors.kept_without([1]) == [2, 3, 4]
    left = tensors.without([1], "values")
    assert left.groups == ("b", "c", "c")
    assert left.scores.tolist() == [3.0, 4.0, 5.0]
    assert left.excluded == {"values": 1, "group": 1}
    assert tensors.bad_rows(torch.tensor([0.0, float("inf"), 0.0, 0.0, 0.0])) == [1]


def test_a_bad_number_under_mask_zero_is_no_bad_row() -> None:
    tensors = tensors_of(scored("a", versions=(0, 0)), scored("b", versions=(0,)))
    assert tensors.bad_rows(torch.tensor([[0.0, 0.0], [0.0, float("nan")]])) == []


def test_every_row_keeps_its_own_score_through_a_reorder() -> None:
    """N24: reward = prompt * 10 + k; prompt 2 is dropped; rows are picked in another order."""
    groups = [[scored(str(prompt), prompt * 10.0 + k, versions=(0,) * (4 - k)) for k in (0, 1)] for prompt in (1, 2, 3)]
    groups[1][0] = scored("2", float("nan"))
    tensors = grouped(*groups)
    assert [(group, score) for group, score in zip(tensors.groups, tensors.scores.tolist(), strict=True)] == [
        ("1", 10.0),
        ("1", 11.0),
        ("3", 30.0),
        ("3", 31.0),
    ]
    zeros = torch.zeros(tensors.mask.shape)
    experience = Experience(tensors.mask, zeros, zeros, tensors.scores[:, None].expand(4, 4), zeros, zeros)
    part = experience.take((3, 0, 2), 3, torch.device("cpu"))
    assert part.advantages[:, 0].tolist() == [31.0, 10.0, 30.0]
    assert part.mask.sum(-1).tolist() == [3, 3, 3]


def test_scores_are_normalised_by_moments_that_already_hold_the_batch() -> None:
    # 1 and 3: mean 2, population std 1; then 1, 3, 4, 4: mean 3, std sqrt(1.5).
    moments, config = RunningMoments(), RewardConfig(components=COMPONENTS, clip=0.9)
    assert normalised_scores(tensors_of(scored("a", 1.0), scored("b", 3.0)), moments, config).tolist() == [
        pytest.approx(-0.9),
        pytest.approx(0.9),
    ]
    later = normalised_scores(tensors_of(scored("a", 4.0), scored("b", 4.0)), moments, config)
    torch.testing.assert_close(later, torch.full((2,), 1 / 1.5**0.5))


def test_scores_without_normalisation_are_still_clipped() -> None:
    config = RewardConfig(components=COMPONENTS, normalize="none", clip=2.0)
    moments = RunningMoments()
    assert normalised_scores(tensors_of(scored("a", 1.5), scored("b", -9.0)), moments, config).tolist() == [1.5, -2.0]
    assert moments.count == 0


def test_scaling_alone_divides_by_the_running_std_and_does_not_centre() -> None:
    # 1 and 3: population std 1; then 1, 3, 4, 4: std sqrt(1.5).
    moments, config = RunningMoments(), RewardConfig(components=COMPONENTS, normalize="scale", clip=2.5)
    first = normalised_scores(tensors_of(scored("a", 1.0), scored("b", 3.0)), moments, config)
    assert first.tolist() == [1.0, 2.5]
    later = normalised_scores(
        tensors_of(scored("a", 4.0), scored("b", 4.0)), moments, config.model_copy(update={"clip": None})
    )
    torch.testing.assert_close(later, torch.full((2,), 4 / 1.5**0.5))


@pytest.mark.parametrize("normalize", ["running", "scale"])
def test_a_single_sample_has_no_variance_to_divide_by(normalize: Any) -> None:
    config = RewardConfig(components=COMPONENTS, normalize=normalize, clip=None)
    only = normalised_scores(tensors_of(scored("a", 3.0)), RunningMoments(), config)
    assert only.tolist() == [0.0 if normalize == "running" else 3.0]


def test_a_truncated_answer_is_bootstrapped_and_an_ended_one_is_not() -> None:
    # gamma 0.5, lambda 0: advantage = reward + 0.5 * next value - value; rewards 0, 1; values 0.4, 0.2; after last 0.6.
    algorithm = AlgorithmConfig(gamma=0.5, lam=0.0, advantage_norm=False, kl={"coef": 0.0})
    tensors = tensors_of(scored("a", finish_reason="length"), scored("b", finish_reason="stop"))
    rewards = rewards_of(tensors, torch.ones(2), torch.zeros(2, 2), 0.0)
    values, after_last = torch.tensor([[0.4, 0.2]] * 2), torch.tensor([0.6, 0.6])
    advantages, returns = token_advantages(tensors, rewards, values, after_last, algorithm=algorithm)
    torch.testing.assert_close(advantages, torch.tensor([[-0.3, 1.1], [-0.3, 0.8]]))
    torch.testing.assert_close(returns, torch.tensor([[0.1, 1.3], [0.1, 1.0]]))
    ended = algorithm.model_copy(update={"bootstrap_truncated": False})
    advantages, _ = token_advantages(tensors, rewards, values, after_last, algorithm=ended)
    torch.testing.assert_close(advantages, torch.tensor([[-0.3, 0.8], [-0.3, 0.8]]))


def test_advantages_are_whitened_over_the_batch_and_then_clipped_each_by_its_own_switch() -> None:
    # One token each, 1, 2, 3, 4, 10: mean 4, variance 10 (N08).
    raw, mask = torch.tensor([[1.0], [2.0], [3.0], [4.0], [10.0]]), torch.ones(5, 1, dtype=torch.bool)
    white = [-0.948683, -0.632456, -0.316228, 0.0, 1.897367]
    for norm, clip, expected in (
        (True, 1.5, [*white[:4], 1.5]),
        (True, None, white),
        (False, 1.5, [1.0, 1.5, 1.5, 1.5, 1.5]),
        (False, None, raw[:, 0].tolist()),
    ):
        algorithm = AlgorithmConfig(advantage_norm=norm, advantage_clip=clip)
        torch.testing.assert_close(finish_advantages(raw, mask, algorithm=algorithm)[:, 0], torch.tensor(expected))
    assert advantage_metrics(raw, mask)["advantage_std"].value == pytest.approx(10**0.5)


def group_rows(name: Any, *scores: float, penalty: list[float] | None = None, empty: int = 0) -> list[float]:
    """The advantages of one group whose members have 1, 2, 3, ... tokens, one number a row."""
    members = [scored("a", score, versions=(0,) * (index + 1)) for index, score in enumerate(scores)]
    members += [scored("a", 100.0, versions=()) for _ in range(empty)]
    tensors = grouped(members)
    kl = torch.full(tensors.mask.shape, float("nan"))
    for row, value in enumerate(penalty or [0.0] * len(scores)):
        kl[row] = torch.where(tensors.mask[row], value, torch.nan)
    advantages = answer_advantages(tensors, tensors.scores, kl, algorithm=AlgorithmConfig(name=name))
    assert (advantages[~tensors.mask] == 0).all()
    for row, length in enumerate(tensors.mask.sum(-1).tolist()):
        assert len(set(advantages[row, :length].tolist())) == 1
    return advantages[:, 0].tolist()


def test_group_methods_spread_one_advantage_over_the_tokens_of_an_answer() -> None:
    """N17 d."""
    assert group_rows("grpo", 1.0, 0.0, 0.0, 1.0) == [1.0, -1.0, -1.0, 1.0]
    assert group_rows("rloo", 1.0, 0.0, 0.0, 1.0) == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3])
    assert group_rows("dr_grpo", 1.0, 0.0, 0.0, 1.0) == [0.5, -0.5, -0.5, 0.5]
    assert group_rows("reinforce_baseline", 0.9, 0.9, 0.9) == [0.0, 0.0, 0.0]


def test_a_group_pays_the_kl_of_the_whole_answer() -> None:
    # Answers of 1 and 2 tokens, a penalty of 0.5 a token: 2 - 0.5 and 2 - 1.
    assert group_rows("dr_grpo", 2.0, 2.0, penalty=[0.5, 0.5]) == [0.25, -0.25]


def test_a_member_without_tokens_is_compared_with_nobody() -> None:
    assert group_rows("dr_grpo", 1.0, 3.0, empty=1) == [-1.0, 1.0]
    assert group_rows("grpo", 1.0, empty=1) == [0.0]


@pytest.mark.parametrize(
    ("reduction", "constant", "short", "long"),
    [("sequence_mean", None, 0.05, 0.0005), ("token_mean", None, 1 / 1010, 1 / 1010), ("constant", 1000, 5e-4, 5e-4)],
)
def test_the_weight_of_a_token_is_that_of_the_reduction(
    reduction: Any, constant: int | None, short: float, long: float
) -> None:
    """R01: answers of 10 and 1000 tokens."""
    mask = torch.arange(1000) < torch.tensor([[10], [1000], [7]])
    nothing = torch.zeros(mask.shape)
    experience = Experience(mask, nothing, nothing, nothing, nothing, nothing)
    algorithm = AlgorithmConfig(reduction=reduction, reduction_constant=constant)
    weights = experience.weighted((0, 1), algorithm, max_new_tokens=77).weights
    assert weights is not None
    assert weights[0, 0].item() == pytest.approx(short)
    assert weights[1, 999].item() == pytest.approx(long)
    assert (weights[0, 10:] == 0).all()
    assert (weights[2] == 0).all()


def test_the_constant_of_the_reduction_is_the_longest_answer_unless_it_is_named() -> None:
    mask = torch.ones(1, 4, dtype=torch.bool)
    nothing = torch.zeros(1, 4)
    experience = Experience(mask, nothing, nothing, nothing, nothing, nothing)
    weights = experience.weighted((0,), AlgorithmConfig(reduction="constant"), max_new_tokens=50).weights
    assert weights is not None
    assert weights.tolist() == [[pytest.approx(0.02)] * 4]


def test_ratio_quantiles_are_over_trained_tokens_alone() -> None:
    mask = torch.ones(1, 101, dtype=torch.bool)
    current = torch.linspace(0.0, 1.0, 101)[None]
    measured = ratio_metrics(current, torch.zeros(1, 101), mask)
    assert [measured[name].value for name in ("ratio_q01", "ratio_q50", "ratio_q99")] == pytest.approx(
        [2.718281828**x for x in (0.01, 0.5, 0.99)], rel=1e-5
    )
    assert ratio_metrics(current, torch.zeros(1, 101), ~mask)["ratio_q50"].count == 0


def test_the_kl_penalty_is_taken_from_every_token_and_the_score_lands_on_the_last() -> None:
    tensors = tensors_of(scored("a", versions=(0, 0, 0)))
    rewards = rewards_of(tensors, torch.tensor([2.0]), torch.tensor([[0.1, 0.3, -0.2]]), 0.5)
    torch.testing.assert_close(rewards, torch.tensor([[-0.05, -0.15, 2.1]]))
    returns = monte_carlo_returns(tensors, rewards, gamma=1.0)
    torch.testing.assert_close(returns, torch.tensor([[1.9, 1.95, 2.1]]))


def test_engine_mismatch_is_measured_over_all_tokens_and_under_each_lag() -> None:
    tensors = tensors_of(scored("a", versions=(0, 1, 1)), version=1)  # behaviour -0.1, -0.5, -0.9
    proximal = torch.tensor([[-0.2, -0.2, -0.9]])
    nothing = torch.zeros(1, 3)
    metrics = batch_metrics(tensors, proximal, nothing, torch.zeros(1), max_staleness=1)
    assert metrics["kl_behaviour"] == Ratio(pytest.approx(0.4), 3)
    assert metrics["kl_behaviour_signed"] == Ratio(pytest.approx(-0.2), 3)
    assert metrics["kl_behaviour_lag0"] == Ratio(pytest.approx(0.3), 2)
    assert metrics["kl_behaviour_lag1"] == Ratio(pytest.approx(0.1), 1)
    assert metrics["nll"] == Ratio(pytest.approx(1.3), 3)
    above = [metrics[f"kl_behaviour_above_{bound}"] for bound in ("0.001", "0.01", "1")]
    assert above == [Ratio(2.0, 3), Ratio(2.0, 3), Ratio(0.0, 3)]


def test_a_filler_row_has_no_mask() -> None:
    nothing = torch.zeros(3, 2)
    experience = Experience(torch.ones(3, 2, dtype=torch.bool), nothing, nothing, nothing, nothing, nothing)
    part = experience.take((), 1, torch.device("cpu"))
    assert part.mask.shape == (1, 1)
    assert not part.mask.any()
    assert part.proximal is None
