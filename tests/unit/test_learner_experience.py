"""From scored rollouts to rewards, advantages and batch statistics, with numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from learner.experience import (
    BatchTensors,
    batch_metrics,
    build_experience,
    monte_carlo_returns,
    normalised_scores,
    rewards_of,
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


def test_an_unscorable_rollout_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="rollout b/0/0: its score"):
        tensors_of(scored("a"), scored("b", score=float("nan")))


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


def test_a_truncated_answer_is_bootstrapped_and_an_ended_one_is_not() -> None:
    # gamma 0.5, lambda 0: advantage = reward + 0.5 * next value - value; rewards 0, 1; values 0.4, 0.2; after last 0.6.
    algorithm = AlgorithmConfig(gamma=0.5, lam=0.0, advantage_norm=False, kl={"coef": 0.0})
    tensors = tensors_of(scored("a", finish_reason="length"), scored("b", finish_reason="stop"))
    proximal = torch.zeros(2, 2)
    rewards = rewards_of(tensors, proximal, torch.ones(2), algorithm=algorithm, kl_coef=0.0)
    values, after_last = torch.tensor([[0.4, 0.2]] * 2), torch.tensor([0.6, 0.6])
    experience, metrics = build_experience(tensors, proximal, rewards, values, after_last, algorithm=algorithm)
    torch.testing.assert_close(experience.advantages, torch.tensor([[-0.3, 1.1], [-0.3, 0.8]]))
    torch.testing.assert_close(experience.returns, torch.tensor([[0.1, 1.3], [0.1, 1.0]]))
    assert metrics["return_mean"] == Ratio(pytest.approx(2.5), 4)


def test_advantages_are_whitened_over_the_batch_and_then_clipped() -> None:
    # One token each, rewards 1, 2, 3, 4, 10 and values 0: mean 4, variance 10 (N08).
    algorithm = AlgorithmConfig(advantage_clip=1.5, kl={"coef": 0.0})
    tensors = tensors_of(*(scored(name, versions=(0,)) for name in "abcde"))
    nothing = torch.zeros(5, 1)
    rewards = torch.tensor([[1.0], [2.0], [3.0], [4.0], [10.0]])
    experience, metrics = build_experience(tensors, nothing, rewards, nothing, nothing[:, 0], algorithm=algorithm)
    expected = torch.tensor([-0.948683, -0.632456, -0.316228, 0.0, 1.5])
    torch.testing.assert_close(experience.advantages[:, 0], expected)
    assert metrics["advantage_std"].value == pytest.approx(10**0.5)


def test_the_kl_penalty_is_taken_from_every_token_and_the_score_lands_on_the_last() -> None:
    tensors = tensors_of(scored("a", versions=(0, 0, 0)))
    proximal = torch.tensor([[0.1, 0.3, -0.2]])  # minus reference 0 is the k1 estimate
    rewards = rewards_of(tensors, proximal, torch.tensor([2.0]), algorithm=AlgorithmConfig(), kl_coef=0.5)
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


def test_rows_of_a_micro_batch_keep_their_own_numbers_and_a_filler_row_has_no_mask() -> None:
    algorithm = AlgorithmConfig(advantage_norm=False, kl={"coef": 0.0})
    tensors = tensors_of(scored("a"), scored("b"), scored("c"))
    rewards = torch.tensor([[0.0, 1.0], [0.0, 2.0], [0.0, 3.0]])
    nothing = torch.zeros(3, 2)
    experience, _ = build_experience(tensors, nothing, rewards, nothing, nothing[:, 0], algorithm=algorithm)
    part = experience.take((2, 0), 1, torch.device("cpu"))
    assert part.returns.tolist() == [[pytest.approx(2.85)], [pytest.approx(0.95)]]
    assert not experience.take((), 1, torch.device("cpu")).mask.any()
