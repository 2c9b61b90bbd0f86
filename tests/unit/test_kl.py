"""KL estimators and coefficient controllers against numbers worked out by hand."""

import json
import math

import pytest
import torch

from rlhf_cluster.algorithms.kl import AdaptiveKL, FixedKL, kl_estimate
from rlhf_cluster.algorithms.losses import reduce_loss

NAN = float("nan")


def test_estimators_have_their_closed_form_values():
    logprobs, ref = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.0]])  # d = 0.5, -1
    for kind, expected in {
        "k1": [0.5, -1.0],
        "k2": [0.125, 0.5],
        "k3": [math.exp(-0.5) - 0.5, math.e - 2],
    }.items():
        torch.testing.assert_close(kl_estimate(logprobs, ref, kind), torch.tensor([expected]), atol=1e-6, rtol=0)


def test_estimators_of_equal_policies_are_exactly_zero():
    logprobs = torch.tensor([[-0.3, -7.0]])
    for kind in ("k1", "k2", "k3"):
        assert kl_estimate(logprobs, logprobs.clone(), kind).tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize(
    ("kind", "value", "gradient"), [("k1", 0.192745, 0.0), ("k2", None, 0.221807), ("k3", 0.192745, 0.3)]
)
def test_expected_value_and_gradient_of_each_estimator_used_as_a_loss(kind, value, gradient):
    """N11: policy (0.8, 0.2) by one logit, reference (0.5, 0.5). Exact expectation over the policy's samples."""
    t = torch.tensor(math.log(4.0), dtype=torch.float64, requires_grad=True)
    logprobs = torch.stack([torch.nn.functional.logsigmoid(t), torch.nn.functional.logsigmoid(-t)])
    estimate = kl_estimate(logprobs, torch.full((2,), math.log(0.5), dtype=torch.float64), kind)
    expected = (logprobs.exp().detach() * estimate).sum()
    expected.backward()
    assert t.grad.item() == pytest.approx(gradient, abs=1e-6)
    if value is not None:
        assert expected.item() == pytest.approx(value, abs=1e-6)


def test_backward_is_the_derivative_of_the_value():
    torch.manual_seed(0)
    d = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    for kind in ("k1", "k2", "k3"):
        assert torch.autograd.gradcheck(lambda x, kind=kind: kl_estimate(x, torch.zeros_like(x), kind), (d,))


def test_k3_of_a_broken_token_is_finite():
    k3 = kl_estimate(torch.tensor([[-500.0, 500.0]]), torch.zeros(1, 2), "k3")
    torch.testing.assert_close(k3, torch.tensor([[math.exp(20) - 21, math.exp(-20) + 19]]))


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize("junk", [NAN, math.inf, -math.inf])
def test_junk_under_mask_zero_changes_no_bit_of_a_kl_loss_or_its_gradient(kind, junk):
    mask = torch.tensor([[1, 0, 1]])
    results = []
    for fill in (-1.0, junk):
        logprobs = torch.tensor([[-0.5, fill, -2.0]], requires_grad=True)
        loss = reduce_loss(kl_estimate(logprobs, torch.tensor([[-1.0, fill, -1.0]]), kind), mask, "token_mean")
        loss.backward()
        results.append((loss.item(), logprobs.grad.tolist()))
    assert results[0] == results[1]
    assert results[0][1][0][1] == 0.0


def test_nan_under_mask_one_stays_visible_in_value_and_gradient():
    logprobs = torch.tensor([[NAN, -1.0]], requires_grad=True)
    estimate = kl_estimate(logprobs, torch.zeros(1, 2), "k3")
    estimate.sum().backward()
    assert estimate.isnan().tolist() == [[True, False]] and logprobs.grad.isnan().tolist() == [[True, False]]


def test_half_precision_logprobs_are_compared_in_float32():
    estimate = kl_estimate(torch.tensor([[-1.0]], dtype=torch.bfloat16), torch.tensor([[-1.5]]).bfloat16(), "k3")
    assert estimate.dtype == torch.float32
    assert estimate.item() == pytest.approx(math.exp(-0.5) - 0.5, abs=1e-6)


def test_unknown_estimator_and_shape_mismatch_are_refused():
    with pytest.raises(ValueError, match="k4"):
        kl_estimate(torch.zeros(1, 1), torch.zeros(1, 1), "k4")
    with pytest.raises(ValueError, match="ref_logprobs"):
        kl_estimate(torch.zeros(2, 2), torch.zeros(2), "k1")


def test_fixed_coefficient_does_not_move():
    controller = FixedKL(0.05)
    controller.update(100.0, 64)
    assert controller.coef == 0.05
    restored = FixedKL(1.0)
    restored.load_state_dict(controller.state_dict())
    assert restored.coef == 1.0, "a resume with another algorithm.kl.coef gets it"


@pytest.mark.parametrize("coef", [-0.1, NAN, math.inf])
def test_fixed_coefficient_that_rewards_divergence_is_refused(coef):
    with pytest.raises(ValueError, match="coef"):
        FixedKL(coef)


@pytest.mark.parametrize(
    ("observed", "factor"),
    [(6.0, 1.0), (6.6, 1.01), (600.0, 1.02), (5.4, 0.99), (-3.0, 0.98)],
)
def test_adaptive_coefficient_follows_the_clipped_relative_error(observed, factor):
    """Target 6, horizon 640, 64 samples: error +-0.1 moves it 1 %, and never more than 2 % (clip 0.2)."""
    controller = AdaptiveKL(0.2, target=6.0, horizon=640)
    controller.update(observed, 64)
    assert controller.coef == pytest.approx(0.2 * factor, rel=1e-12)


def test_adaptive_coefficient_survives_json_to_the_bit():
    controller = AdaptiveKL(0.2, target=6.0, horizon=10_000)
    for observed in (1.1, 7.3, 5.9):
        controller.update(observed, 48)
    restored = AdaptiveKL(0.9, target=6.0, horizon=10_000)
    restored.load_state_dict(json.loads(json.dumps(controller.state_dict())))
    assert restored.coef == controller.coef != 0.2


@pytest.mark.parametrize("bad", [{"target": 0.0}, {"horizon": 0}, {"coef": 0.0}, {"target": NAN}])
def test_adaptive_refuses_what_would_divide_by_zero_or_never_move(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        AdaptiveKL(**{"coef": 0.1, "target": 1.0, "horizon": 10, **bad})


def test_adaptive_refuses_an_observation_that_would_break_the_coefficient():
    controller = AdaptiveKL(0.1, target=1.0, horizon=10)
    with pytest.raises(ValueError, match="finite"):
        controller.update(NAN, 4)
    with pytest.raises(ValueError, match="horizon"):
        controller.update(0.0, 50)
    assert controller.coef == 0.1
