"""Importance weights by token and by answer, and the losses they and the dual clip go into."""

from __future__ import annotations

import math

import pytest
import torch

from rlhf_cluster.algorithms.importance import importance_weights
from rlhf_cluster.algorithms.losses import clipped_entropy, policy_loss

NAN = float("nan")


def test_a_token_weighs_proximal_over_behaviour_and_never_the_inverse() -> None:
    """N20: behaviour -2, proximal -1, cap 2."""
    proximal, behaviour, mask = torch.tensor([[-1.0]]), torch.tensor([[-2.0]]), torch.ones(1, 1)
    assert importance_weights(proximal, behaviour, mask).weights.item() == pytest.approx(2.718282)
    capped = importance_weights(proximal, behaviour, mask, cap=2.0)
    assert capped.weights.item() == 2.0
    assert capped.capped.item()


def test_an_answer_weighs_the_product_of_its_tokens_and_leaves_above_the_cap() -> None:
    """N20: 0.012 nats a token over 100 tokens is a ratio of 3.3."""
    behaviour = torch.full((2, 100), -2.0)
    proximal = behaviour + torch.tensor([[0.012], [0.004]])
    mask = torch.ones(2, 100)
    weights = importance_weights(proximal, behaviour, mask, kind="sequence").weights
    torch.testing.assert_close(weights[:, 0], torch.tensor([3.32012, 1.49182]), atol=1e-4, rtol=0)
    assert (weights == weights[:, :1]).all()
    capped = importance_weights(proximal, behaviour, mask, kind="sequence", cap=2.0)
    assert (capped.weights[0] == 0).all()
    torch.testing.assert_close(capped.weights[1], weights[1])
    assert capped.capped.sum().item() == 100


@pytest.mark.parametrize("kind", ["token", "sequence"])
def test_what_stands_under_mask_zero_changes_no_weight(kind) -> None:
    proximal = torch.tensor([[-1.0, NAN], [-1.0, -3.0]], requires_grad=True)
    behaviour = torch.tensor([[-1.5, math.inf], [-1.2, -2.0]])
    mask = torch.tensor([[1, 0], [1, 1]])
    weights = importance_weights(proximal, behaviour, mask, kind=kind, cap=5.0).weights
    assert weights[0].tolist() == [pytest.approx(math.exp(0.5)), 0.0]
    assert not weights.requires_grad
    assert weights[1].tolist() == pytest.approx(
        [math.exp(0.2), math.exp(-1.0)] if kind == "token" else [math.exp(-0.8)] * 2
    )


def test_a_broken_number_under_the_mask_stays_visible() -> None:
    weights = importance_weights(torch.tensor([[NAN, -1.0]]), torch.zeros(1, 2), torch.ones(1, 2), kind="sequence")
    assert weights.weights.isnan().all()


def test_an_unknown_kind_or_a_cap_that_is_not_positive_is_refused() -> None:
    x = torch.zeros(1, 1)
    with pytest.raises(ValueError, match="choose token or sequence"):
        importance_weights(x, x, x, kind="mean")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="importance_cap must be > 0"):
        importance_weights(x, x, x, cap=0.0)


def surrogate(ratio: float, advantage: float, **options) -> tuple[float, float, dict]:
    """(loss, gradient in the log-prob, metrics) of one token."""
    logprobs = torch.tensor([[math.log(ratio)]], requires_grad=True)
    zero = torch.zeros(1, 1)
    loss = policy_loss(
        logprobs, zero, torch.tensor([[advantage]]), torch.ones(1, 1), clip_low=0.2, clip_high=0.2, **options
    )
    loss.total.backward()
    return loss.total.item(), logprobs.grad.item(), {name: value.value for name, value in loss.metrics.items()}


def test_the_dual_clip_bounds_the_loss_of_a_negative_advantage_alone() -> None:
    # Ratio 5, advantage -2: -A r = 10, held at 3 * 2 = 6, where the gradient is 0.
    assert surrogate(5.0, -2.0)[:2] == pytest.approx((10.0, 10.0))
    loss, grad, metrics = surrogate(5.0, -2.0, dual_clip=3.0)
    assert (loss, grad) == (pytest.approx(6.0), 0.0)
    assert metrics["dual_clip_fraction"] == 1.0
    assert surrogate(2.0, -2.0, dual_clip=3.0)[:2] == pytest.approx((4.0, 4.0))
    assert surrogate(5.0, 2.0, dual_clip=3.0)[:2] == pytest.approx((-2.4, 0.0))
    with pytest.raises(ValueError, match="dual_clip must be > 1"):
        surrogate(1.0, 1.0, dual_clip=1.0)


def test_weights_replace_the_plain_sum_and_leave_metrics_alone() -> None:
    logprobs, zero = torch.zeros(1, 3, requires_grad=True), torch.zeros(1, 3)
    mask = torch.tensor([[1, 1, 0]])
    advantages = torch.tensor([[1.0, 2.0, NAN]])
    weights = torch.tensor([[0.5, 0.25, NAN]])
    loss = policy_loss(logprobs, zero, advantages, mask, clip_low=0.2, clip_high=0.2, weights=weights)
    loss.total.backward()
    assert loss.total.item() == pytest.approx(-1.0)
    assert logprobs.grad.tolist() == [[-0.5, -0.5, 0.0]]
    assert loss.metrics["ratio_mean"].total == 2.0


def test_entropy_above_its_threshold_earns_nothing_more() -> None:
    entropies = torch.tensor([[0.5, 1.0, 3.0]], requires_grad=True)
    paid = clipped_entropy(entropies, 1.0)
    paid.sum().backward()
    assert paid.tolist() == [[0.5, 1.0, 1.0]]
    assert entropies.grad.tolist() == [[1.0, 1.0, 0.0]]
    assert clipped_entropy(entropies, None) is entropies
    with pytest.raises(ValueError, match="entropy clip must be > 0"):
        clipped_entropy(entropies, 0.0)
