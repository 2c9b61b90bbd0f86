"""Where rewards land, and how scores are normalised."""

import json
import math

import numpy as np
import pytest
import torch

from rlhf_cluster.algorithms.rewards import RunningMoments, normalize_scores, token_rewards

NAN = float("nan")


def test_score_lands_on_the_last_masked_token_and_nowhere_for_an_empty_row():
    """N03."""
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
    rewards = token_rewards(torch.tensor([2.0, 3.0, 5.0]), torch.full((3, 4), 9.0), mask, 0.0)
    assert rewards.tolist() == [[0, 0, 2, 0], [0, 0, 0, 3], [0, 0, 0, 0]]
    assert rewards.sum() == 5


def test_stop_token_gets_the_score_although_padding_has_the_same_id():
    """N04: lengths 3, 4, 5; the mask knows lengths, not ids."""
    mask = torch.arange(5) < torch.tensor([[3], [4], [5]])
    rewards = token_rewards(torch.ones(3), torch.zeros(3, 5), mask, 0.1)
    assert rewards.argmax(1).tolist() == [2, 3, 4]


def test_kl_penalty_is_charged_on_every_token_and_score_added_once():
    rewards = token_rewards(torch.tensor([2.0]), torch.tensor([[0.1, 0.3, NAN]]), torch.tensor([[1, 1, 0]]), 1.0)
    torch.testing.assert_close(rewards, torch.tensor([[-0.1, 1.7, 0.0]]))


def test_interior_gap_gets_nothing():
    rewards = token_rewards(torch.tensor([1.0]), torch.full((1, 4), 0.5), torch.tensor([[1, 0, 1, 0]]), 2.0)
    assert rewards.tolist() == [[-1.0, 0.0, 0.0, 0.0]]


def test_junk_under_mask_zero_changes_no_bit_of_rewards_or_gradient():
    mask = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 0.0]], dtype=torch.bfloat16)
    results = []
    for fill in (0.0, NAN, math.inf):
        kl = torch.tensor([[0.1, fill, 0.2], [fill, fill, fill]], requires_grad=True)
        rewards = token_rewards(torch.tensor([1.0, fill]), kl, mask, 0.3)
        (rewards * 3).sum().backward()
        results.append((rewards.tolist(), kl.grad.tolist()))
    assert results[0] == results[1] == results[2]


def test_nan_score_of_a_real_answer_stays_visible_on_its_last_token_only():
    rewards = token_rewards(torch.tensor([NAN]), torch.zeros(1, 3), torch.tensor([[1, 1, 0]]), 0.1)
    assert rewards.isnan().tolist() == [[False, True, False]]


def test_empty_batches_keep_their_shape():
    assert token_rewards(torch.zeros(0), torch.zeros(0, 4), torch.zeros(0, 4), 0.1).shape == (0, 4)
    assert token_rewards(torch.zeros(2), torch.zeros(2, 0), torch.zeros(2, 0), 0.1).shape == (2, 0)


def test_scores_that_do_not_fit_the_rows_are_refused():
    with pytest.raises(ValueError, match="scores"):
        token_rewards(torch.zeros(3), torch.zeros(2, 3), torch.ones(2, 3), 0.1)


def test_running_moments_are_population_moments_of_everything_seen():
    moments = RunningMoments()
    moments.update(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    moments.update([10.0])
    assert (moments.count, moments.mean) == (5, 4.0)
    assert moments.std == pytest.approx(math.sqrt(10), rel=1e-15)


def test_merged_moments_equal_those_of_the_union():
    numbers = np.random.default_rng(0).normal(1e6, 1.0, size=1000)
    left, right = RunningMoments(), RunningMoments()
    left.update(torch.from_numpy(numbers[:300]))
    right.update(torch.from_numpy(numbers[300:]))
    before = right.state_dict()
    left.merge(right)
    assert left.count == 1000
    assert left.mean == pytest.approx(numbers.mean(), rel=1e-14)
    assert left.std == pytest.approx(numbers.std(), rel=1e-9)
    assert right.state_dict() == before


def test_merging_nothing_changes_nothing():
    moments = RunningMoments()
    moments.update([1.0, 2.0])
    before = moments.state_dict()
    moments.merge(RunningMoments())
    moments.update([])
    assert moments.state_dict() == before


@pytest.mark.parametrize("value", [0.1, 0.3, 0.7, 0.9, -0.37])
def test_equal_scores_have_a_std_of_exactly_zero(value):
    moments = RunningMoments()
    for size in (3, 7, 1):
        moments.update([value] * size)
    assert moments.std == 0.0
    assert normalize_scores(torch.tensor([value], dtype=torch.float64), moments, 5.0).item() == 0.0


def test_a_score_that_is_not_finite_is_refused_and_adds_nothing():
    moments = RunningMoments()
    moments.update([1.0])
    with pytest.raises(ValueError, match="2 of 3"):
        moments.update([5.0, NAN, math.inf])
    assert (moments.count, moments.mean) == (1, 1.0)


def test_moments_survive_json_to_the_bit():
    moments, restored = RunningMoments(), RunningMoments()
    moments.update(np.random.default_rng(1).normal(size=17).tolist())
    restored.load_state_dict(json.loads(json.dumps(moments.state_dict())))
    assert restored.state_dict() == moments.state_dict()
    for both in (moments, restored):
        both.update([0.1, 0.7])
    assert restored.state_dict() == moments.state_dict()


def test_scores_become_z_scores_and_are_clipped_after_that():
    moments = RunningMoments()
    moments.update([2.0, 6.0])  # mean 4, std 2
    scores = torch.tensor([4.0, 5.0, 14.0, -6.0])
    assert normalize_scores(scores, moments, 3.0).tolist() == [0.0, 0.5, 3.0, -3.0]
    assert normalize_scores(scores, moments, None).tolist() == [0.0, 0.5, 5.0, -5.0]


def test_first_score_is_finite_before_there_is_any_variance():
    moments = RunningMoments()
    assert normalize_scores(torch.tensor([0.5]), moments, None).tolist() == [0.5]
    moments.update([0.5])
    assert normalize_scores(torch.tensor([0.5, 1.5]), moments, None).tolist() == [0.0, 1.0]


def test_nan_score_stays_visible_and_half_precision_becomes_float32():
    moments = RunningMoments()
    moments.update([0.0, 2.0])
    out = normalize_scores(torch.tensor([NAN, 3.0], dtype=torch.bfloat16), moments, 1.0)
    assert out.dtype == torch.float32
    assert out.isnan().tolist() == [True, False] and out[1] == 1.0


def test_a_clip_that_would_zero_or_flip_scores_is_refused():
    with pytest.raises(ValueError, match="clip"):
        normalize_scores(torch.zeros(1), RunningMoments(), 0.0)
