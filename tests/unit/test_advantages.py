"""GAE, group baselines and local whitening against numbers worked out by hand."""

import math

import pytest
import torch

from rlhf_cluster.algorithms.advantages import GROUP_KINDS, gae, group_advantages, whiten

NAN = float("nan")


def close(actual, expected, atol=1e-6):
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=actual.dtype), atol=atol, rtol=0)


REWARDS = [[0.0, 0, 1, 0], [0, 0, 0, -1]]
VALUES = [[0.5, 0.2, 0.1, 9.0], [0.1, 0.2, 0.3, 0.4]]
MASK = [[1, 1, 1, 0], [1, 1, 1, 1]]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32, torch.bfloat16])
def test_gae_ignores_the_critic_on_padding(dtype):
    """N01."""
    mask = torch.tensor(MASK).to(dtype)
    advantages, returns = gae(torch.tensor(REWARDS), torch.tensor(VALUES), mask, gamma=1.0, lam=0.95)
    close(advantages, [[0.41725, 0.755, 0.9, 0], [-0.915075, -1.0685, -1.23, -1.4]])
    close(returns, [[0.91725, 0.955, 1.0, 0], [-0.815075, -0.8685, -0.93, -1.0]])


def test_gae_discounts():
    """N01, second setting."""
    advantages, _ = gae(torch.tensor(REWARDS), torch.tensor(VALUES), torch.tensor(MASK), gamma=0.9, lam=0.8)
    close(advantages[0], [0.06736, 0.538, 0.9, 0])


def test_gae_runs_over_the_masked_subsequence_as_if_gaps_were_cut_out():
    torch.manual_seed(0)
    rewards, values = torch.randn(1, 4), torch.randn(1, 4)
    short = gae(rewards, values, torch.ones(1, 4), gamma=0.9, lam=0.8, bootstrap=torch.tensor([0.7]))
    mask = torch.tensor([[0, 1, 1, 0, 0, 1, 1, 0]])
    wide = [torch.full((1, 8), NAN).masked_scatter(mask.bool(), x) for x in (rewards, values)]
    long = gae(*wide, mask, gamma=0.9, lam=0.8, bootstrap=torch.tensor([0.7]))
    for packed, spread in zip(short, long, strict=True):
        assert spread[mask.bool()].tolist() == packed[0].tolist()
        assert spread[~mask.bool()].tolist() == [0.0] * 4


def test_truncated_response_bootstraps_from_the_value_after_its_last_token():
    """One token, reward 1, value 0.5, gamma 0.9: ended 0.5; truncated with value 2 after it 0.5 + 1.8."""
    mask = torch.tensor([[1, 0], [1, 0]])
    rewards, values = torch.tensor([[1.0, 5.0]] * 2), torch.tensor([[0.5, 7.0]] * 2)
    advantages, returns = gae(rewards, values, mask, gamma=0.9, lam=0.5, bootstrap=torch.tensor([0.0, 2.0]))
    close(advantages, [[0.5, 0], [2.3, 0]])
    close(returns, [[1.0, 0], [2.8, 0]])


def test_junk_under_mask_zero_changes_no_bit_of_gae_or_its_gradient():
    mask = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0]])
    results = []
    for fill in (0.0, NAN, math.inf):
        junk = torch.full((2, 4), fill)
        rewards = torch.where(mask.bool(), torch.tensor(REWARDS), junk).requires_grad_()
        values = torch.where(mask.bool(), torch.tensor(VALUES), junk).requires_grad_()
        advantages, returns = gae(rewards, values, mask, gamma=0.9, lam=0.8, bootstrap=torch.tensor([0.3, fill]))
        (advantages.square() + returns).sum().backward()
        results.append([x.tolist() for x in (advantages, returns, rewards.grad, values.grad)])
    assert results[0] == results[1] == results[2]


def test_nan_value_of_a_real_token_stays_visible():
    advantages, _ = gae(torch.zeros(1, 3), torch.tensor([[0.0, NAN, 0.0]]), torch.ones(1, 3), gamma=1.0, lam=1.0)
    assert advantages.isnan().tolist() == [[True, True, False]]


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_gae_of_an_empty_batch_is_a_differentiable_nothing(shape):
    values = torch.zeros(shape, requires_grad=True)
    advantages, returns = gae(torch.zeros(shape), values, torch.zeros(shape), gamma=1.0, lam=1.0)
    assert advantages.shape == returns.shape == shape
    (advantages.sum() + returns.sum()).backward()
    assert values.grad.shape == shape


def test_gae_of_half_precision_is_computed_in_float32():
    half = [torch.tensor(x, dtype=torch.bfloat16) for x in (REWARDS, VALUES)]
    advantages, _ = gae(*half, torch.tensor(MASK), gamma=1.0, lam=0.95)
    exact, _ = gae(*[x.float() for x in half], torch.tensor(MASK), gamma=1.0, lam=0.95)
    assert advantages.dtype == torch.float32 and advantages.tolist() == exact.tolist()


def test_shapes_that_would_broadcast_are_refused():
    with pytest.raises(ValueError, match="values"):
        gae(torch.zeros(2, 2), torch.zeros(2), torch.ones(2, 2), gamma=1.0, lam=1.0)
    with pytest.raises(ValueError, match="bootstrap"):
        gae(torch.zeros(2, 2), torch.zeros(2, 2), torch.ones(2, 2), gamma=1.0, lam=1.0, bootstrap=torch.zeros(2, 1))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("grpo", 1.0), ("dr_grpo", 0.5), ("rloo", 2 / 3), ("reinforce_baseline", 1.0)],
)
def test_one_group_of_right_and_wrong_answers(kind, expected):
    """N17 (d): mean 0.5, population std 0.5, mean of the others 1/3 or 2/3."""
    out = group_advantages(torch.tensor([1.0, 0, 0, 1]), torch.zeros(4, dtype=torch.long), kind)
    close(out, [expected, -expected, -expected, expected])


def test_group_kinds_differ_on_two_interleaved_groups():
    """a: 0, 4 (mean 2, std 2); b: 1, 2 (mean 1.5, std 0.5). Batch std of differences: sqrt((4+4+.25+.25)/4)."""
    scores, ids = torch.tensor([0.0, 1.0, 4.0, 2.0]), ["a", "b", "a", "b"]
    close(group_advantages(scores, ids, "grpo"), [-1, -1, 1, 1])
    close(group_advantages(scores, ids, "dr_grpo"), [-2, -0.5, 2, 0.5])
    close(group_advantages(scores, ids, "rloo"), [-4, -1, 4, 1])
    std = math.sqrt(8.5 / 4)
    close(
        group_advantages(scores, torch.tensor([7, 3, 7, 3]), "reinforce_baseline"),
        [-2 / std, -0.5 / std, 2 / std, 0.5 / std],
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", GROUP_KINDS)
def test_equal_scores_give_exact_zeros_on_the_whole_grid(kind, dtype):
    """N17 (a)(b): dividing rounding noise by its own std would give advantages near 1."""
    for size in range(2, 17):
        grid = torch.arange(-100, 101, dtype=dtype) / 100
        out = group_advantages(grid.repeat_interleave(size), torch.arange(201).repeat_interleave(size), kind)
        assert not out.any(), (size, out.abs().max())


@pytest.mark.parametrize("kind", GROUP_KINDS)
def test_unscorable_member_gets_zero_and_the_others_are_compared_among_themselves(kind):
    """N17 (e) and R02."""
    ids = [0, 0, 0, 0]
    mixed = group_advantages(torch.tensor([1.0, 0, NAN, 0]), ids, kind)
    alone = group_advantages(torch.tensor([1.0, 0, 0]), ids[:3], kind)
    assert mixed[[0, 1, 3]].tolist() == alone.tolist()
    assert mixed[2] == 0 and alone[0] > 0
    assert group_advantages(torch.tensor([-1.0, -1, -1, NAN]), ids, kind).tolist() == [0, 0, 0, 0]
    assert group_advantages(torch.tensor([NAN, 5.0, math.inf, NAN]), ids, kind).tolist() == [0, 0, 0, 0]


def test_three_scorable_members_have_hand_computed_advantages():
    """[1, 0, NaN, 0]: mean 1/3, std sqrt(2)/3, so sqrt(2) and -1/sqrt(2)."""
    out = group_advantages(torch.tensor([1.0, 0, NAN, 0]), [5, 5, 5, 5], "grpo")
    close(out, [math.sqrt(2), -1 / math.sqrt(2), 0, -1 / math.sqrt(2)])


@pytest.mark.parametrize("kind", GROUP_KINDS)
def test_group_of_one_is_refused(kind):
    with pytest.raises(ValueError, match="'b' has one member"):
        group_advantages(torch.tensor([1.0, 2.0, 3.0]), ["a", "a", "b"], kind)


def test_group_advantages_of_nothing_are_nothing_and_unknown_kinds_are_refused():
    assert group_advantages(torch.zeros(0), [], "grpo").shape == (0,)
    with pytest.raises(ValueError, match="ppo"):
        group_advantages(torch.zeros(2), [0, 0], "ppo")
    with pytest.raises(ValueError, match="group_ids"):
        group_advantages(torch.zeros(2), [0, 0, 0], "grpo")


def test_group_advantages_of_half_precision_scores_are_float32():
    out = group_advantages(torch.tensor([1.0, 0.0, 0.0], dtype=torch.bfloat16), [0, 0, 0], "grpo")
    assert out.dtype == torch.float32
    close(out, [math.sqrt(2), -1 / math.sqrt(2), -1 / math.sqrt(2)])


def test_whitening_uses_the_population_variance_of_masked_tokens():
    """Mean 4, variance 10 (N08 on one rank)."""
    out = whiten(torch.tensor([[1.0, 2, 3, NAN], [4, NAN, 10, 7]]), torch.tensor([[1, 1, 1, 0], [1, 0, 1, 0]]))
    close(out, [[-0.948683, -0.632456, -0.316228, 0], [0, 0, 1.897367, 0]])


def test_whitening_equal_values_gives_exact_zeros():
    for size in range(1, 17):
        assert not whiten(torch.full((1, size), 0.1, dtype=torch.float64), torch.ones(1, size)).any(), size
    assert not whiten(torch.tensor([[2.0, NAN]]), torch.tensor([[1, 0]])).any()


def test_whitening_nothing_locally_gives_differentiable_zeros():
    x = torch.full((2, 2), NAN, requires_grad=True)
    out = whiten(x, torch.zeros(2, 2))
    out.sum().backward()
    assert out.tolist() == [[0, 0], [0, 0]] and x.grad.tolist() == [[0, 0], [0, 0]]
    assert whiten(torch.zeros(0, 3), torch.zeros(0, 3)).shape == (0, 3)


def test_whitening_keeps_nan_of_a_real_token_visible():
    out = whiten(torch.tensor([[1.0, NAN, 2.0]]), torch.tensor([[1, 1, 0]]))
    assert out.isnan().tolist() == [[True, True, False]]


def test_whitening_survives_a_large_offset_and_half_precision_input():
    out = whiten(torch.tensor([[4096.0, 4128.0]], dtype=torch.bfloat16), torch.ones(1, 2))
    assert out.dtype == torch.float32 and out.tolist() == [[-1.0, 1.0]]
