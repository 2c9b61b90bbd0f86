"""Log-probs, entropy, policy and value losses and reductions against numbers worked out by hand."""

import math
from functools import reduce

import pytest
import torch

from rlhf_cluster.algorithms.losses import (
    TokenLoss,
    entropy,
    explained_variance,
    explained_variance_sums,
    policy_loss,
    reduce_loss,
    token_logprobs,
    value_loss,
)

NAN = float("nan")


def close(actual, expected, atol=1e-6):
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=actual.dtype), atol=atol, rtol=0)


def ppo(ratios, advantages, mask=None, **options) -> tuple[TokenLoss, torch.Tensor]:
    """The loss at given current/proximal ratios, and the gradient with respect to the current log-probs."""
    proximal = torch.full((1, len(ratios)), -1.0)
    logprobs = (proximal + torch.tensor([ratios]).log()).requires_grad_()
    mask = torch.ones(1, len(ratios)) if mask is None else torch.tensor([mask])
    loss = policy_loss(
        logprobs, proximal, torch.tensor([advantages]), mask, **{"clip_low": 0.2, "clip_high": 0.3, **options}
    )
    loss.total.backward()
    return loss, logprobs.grad


# --- log-probabilities and entropy ---


def test_temperature_divides_logits_not_logprobs():
    """N14."""
    logits = torch.tensor([[2.0, 1.0, 0.0]]).expand(3, 3)[None]
    ids = torch.tensor([[0, 1, 2]])
    close(token_logprobs(logits, ids, 2.0), [[-0.680270, -1.180270, -1.680270]])
    close(token_logprobs(logits, ids), [[-0.407606, -1.407606, -2.407606]])


def test_logprobs_of_a_counting_model_are_high_only_when_aligned():
    """N05: probability 0.999 on previous id + 1, V = 100, prompt 3 4, response 5 6 7."""
    sequence = torch.tensor([3, 4, 5, 6, 7])
    logits = torch.full((1, 5, 100), math.log(0.001 / 99))
    logits[0, torch.arange(5), sequence + 1] = math.log(0.999)
    response = sequence[None, 2:]
    close(token_logprobs(logits[:, 1:4], response), [[math.log(0.999)] * 3])
    assert (token_logprobs(logits[:, 2:5], response) < -7).all()


def test_logprob_gradient_is_that_of_log_softmax_in_double_precision():
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    ids = torch.randint(5, (2, 3))
    assert torch.autograd.gradcheck(lambda x: token_logprobs(x, ids, 0.7), (logits,))


def test_logprobs_of_huge_half_precision_logits_are_finite_float32():
    logits = torch.tensor([[[30000.0, 30000.0, -30000.0]]], dtype=torch.bfloat16)
    out = token_logprobs(logits, torch.tensor([[0]]))
    assert out.dtype == torch.float32 and out.item() == pytest.approx(-math.log(2), abs=1e-6)


def test_logits_of_a_padded_position_get_an_exact_zero_gradient():
    gradients = []
    for fill in (0.0, NAN, math.inf):
        logits = torch.tensor([[[1.0, 2.0], [fill, fill]]], requires_grad=True)
        mask = torch.tensor([[1, 0]])
        reduce_loss(token_logprobs(logits, torch.tensor([[0, 0]])), mask, "token_mean").backward()
        gradients.append(logits.grad.tolist())
    assert gradients[0] == gradients[1] == gradients[2] and gradients[0][0][1] == [0.0, 0.0]


@pytest.mark.parametrize("temperature", [0.0, -1.0, NAN])
def test_temperature_that_is_not_positive_is_refused(temperature):
    with pytest.raises(ValueError, match="temperature"):
        token_logprobs(torch.zeros(1, 1, 2), torch.zeros(1, 1, dtype=torch.long), temperature)


def test_entropy_is_in_nats_and_zero_under_mask_zero():
    logits = torch.tensor([[[0.0, 0, 0, 0], [math.log(3), 0, -math.inf, -math.inf], [NAN, NAN, NAN, NAN]]])
    out = entropy(logits, torch.tensor([[1, 1, 0]]))
    close(out, [[math.log(4), -0.75 * math.log(0.75) - 0.25 * math.log(0.25), 0.0]])


def test_entropy_gradient_is_right_and_unmoved_by_junk_under_mask_zero():
    torch.manual_seed(0)
    x = torch.randn(1, 2, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda logits: entropy(logits, torch.ones(1, 2)), (x,))
    gradients = []
    for fill in (1.0, NAN):
        logits = torch.tensor([[[0.0, 1.0, -math.inf], [fill, fill, fill]]], requires_grad=True)
        entropy(logits, torch.tensor([[True, False]])).sum().backward()
        gradients.append(logits.grad.tolist())
    assert gradients[0] == gradients[1] and gradients[0][0][1] == [0.0, 0.0, 0.0]
    assert all(math.isfinite(g) for g in gradients[0][0][0]) and gradients[0][0][0][0] != 0


# --- policy loss ---


def test_first_pass_has_ratio_one_and_the_plain_policy_gradient():
    loss, gradient = ppo([1.0, 1.0], [2.0, -3.0])
    assert loss.total.item() == 1.0 and loss.n_tokens == 2
    assert gradient.tolist() == [[-2.0, 3.0]]
    assert loss.metrics["clip_fraction"].value == 0 and loss.metrics["approx_kl"].value == 0
    assert loss.metrics["ratio_mean"].value == 1


def test_clip_stops_the_gradient_only_in_the_direction_already_taken():
    """Bounds 0.8 and 1.3. Advantage +1: 1.5 is clipped at 1.3, 0.5 is not. Advantages -1, -2: the other way round."""
    loss, gradient = ppo([1.5, 0.5, 1.5, 0.5], [1.0, 1.0, -1.0, -2.0])
    assert loss.total.item() == pytest.approx(-1.3 - 0.5 + 1.5 + 1.6, abs=1e-6)
    close(gradient, [[0.0, -0.5, 1.5, 0.0]])
    assert loss.metrics["clip_fraction"].total == 2 and loss.metrics["clip_fraction"].count == 4
    assert loss.metrics["ratio_mean"].value == pytest.approx(1.0, abs=1e-6)


def test_approx_kl_is_the_k3_estimate_of_proximal_to_current():
    loss, _ = ppo([2.0], [1.0])
    assert loss.metrics["approx_kl"].total == pytest.approx(2 - 1 - math.log(2), abs=1e-6)


def test_importance_weight_is_proximal_over_behaviour_truncated_and_detached():
    """N20: behaviour -2, proximal -1: weight e, capped to 2; never the inverse."""
    behaviour = torch.tensor([[-2.0, -1.0]])
    loss, gradient = ppo([1.0, 1.0], [1.0, 1.0], behaviour_logprobs=behaviour, importance_cap=2.0)
    assert loss.total.item() == -3.0 and gradient.tolist() == [[-2.0, -1.0]]
    assert loss.metrics["importance_weight_mean"].total == 3.0
    assert loss.metrics["importance_cap_fraction"].value == 0.5
    loss, _ = ppo([1.0, 1.0], [1.0, 1.0], behaviour_logprobs=behaviour)
    assert loss.total.item() == pytest.approx(-math.e - 1, abs=1e-6)
    assert loss.metrics["importance_cap_fraction"].value == 0


def test_only_the_current_logprobs_get_a_gradient():
    """N16."""
    current, proximal, behaviour, advantages = (
        torch.full((1, 2), x, requires_grad=True) for x in (-1.0, -1.1, -1.2, 1.0)
    )
    loss = policy_loss(
        current, proximal, advantages, torch.ones(1, 2), clip_low=0.2, clip_high=0.2, behaviour_logprobs=behaviour
    )
    loss.total.backward()
    assert current.grad.abs().min() > 0
    assert proximal.grad is None and behaviour.grad is None and advantages.grad is None


def test_clipping_fires_after_a_large_step_against_fixed_proximal_logprobs():
    """N16: proximal log-probs are those of before the first step, so the second pass sees a ratio away from 1."""
    ids = torch.tensor([[1, 3, 0]])
    logits = torch.zeros(1, 3, 4, requires_grad=True)
    proximal = token_logprobs(logits, ids).detach()
    losses = []
    for _ in range(2):
        loss = policy_loss(
            token_logprobs(logits, ids), proximal, torch.ones(1, 3), torch.ones(1, 3), clip_low=0.2, clip_high=0.2
        )
        (gradient,) = torch.autograd.grad(loss.total, logits)
        logits = (logits - 1.0 * gradient).detach().requires_grad_()
        losses.append(loss)
    assert losses[0].metrics["clip_fraction"].value == 0
    assert losses[1].metrics["ratio_mean"].value > 1.2 and losses[1].metrics["clip_fraction"].value == 1


@pytest.mark.parametrize("junk", [NAN, math.inf, -math.inf])
def test_junk_under_mask_zero_changes_no_bit_of_the_policy_loss(junk):
    mask = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0]])
    torch.manual_seed(0)
    clean = torch.randn(4, 2, 4)
    results = []
    for fill in (0.5, junk):
        logprobs, proximal, behaviour, advantages = torch.where(mask.bool(), clean, torch.tensor(fill)).unbind()
        logprobs.requires_grad_()
        loss = policy_loss(
            logprobs,
            proximal,
            advantages,
            mask,
            clip_low=0.2,
            clip_high=0.2,
            behaviour_logprobs=behaviour,
            importance_cap=2.0,
        )
        loss.total.backward()
        results.append((loss.total.item(), loss.n_tokens, loss.metrics, logprobs.grad.tolist()))
    assert results[0] == results[1]
    assert results[0][1] == 2 and results[0][3][1] == [0.0] * 4


@pytest.mark.parametrize("broken", ["current", "proximal", "behaviour", "advantages"])
def test_nan_under_mask_one_stays_visible_in_loss_and_gradient(broken):
    tensors = {name: torch.full((1, 2), -1.0) for name in ("current", "proximal", "behaviour", "advantages")}
    tensors[broken][0, 0] = NAN
    current = tensors["current"].requires_grad_()
    loss = policy_loss(
        current,
        tensors["proximal"],
        tensors["advantages"],
        torch.ones(1, 2),
        clip_low=0.2,
        clip_high=0.2,
        behaviour_logprobs=tensors["behaviour"],
    )
    loss.total.backward()
    assert loss.total.isnan() and current.grad.isnan().tolist() == [[True, False]]


def test_broken_token_makes_no_infinity():
    loss, gradient = ppo([1.0], [-1.0], behaviour_logprobs=torch.tensor([[-500.0]]))
    assert loss.total.item() == pytest.approx(math.exp(20)) and gradient.isfinite().all()
    logprobs = torch.tensor([[500.0]], requires_grad=True)
    far = policy_loss(logprobs, torch.zeros(1, 1), -torch.ones(1, 1), torch.ones(1, 1), clip_low=0.2, clip_high=0.2)
    assert far.total.item() == pytest.approx(math.exp(20))


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (2, 3)])
def test_batch_without_tokens_gives_a_differentiable_zero(shape):
    """N18: no rows, no columns, or everything masked out."""
    x = torch.full(shape, NAN, requires_grad=True)
    mask = torch.zeros(shape)
    losses = [
        policy_loss(x, x, x, mask, clip_low=0.2, clip_high=0.2, behaviour_logprobs=x, importance_cap=1.0).total,
        value_loss(x, x, mask, old_values=x, clip=0.2).total,
        reduce_loss(x, mask, "token_mean"),
        reduce_loss(x, mask, "sequence_mean"),
        reduce_loss(x, mask, "constant", constant=8),
    ]
    for loss in losses:
        x.grad = None
        assert loss.item() == 0.0 and loss.shape == ()
        loss.backward()
        assert x.grad.tolist() == torch.zeros(shape).tolist()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"importance_cap": 2.0}, "behaviour_logprobs"),
        ({"importance_cap": 0.0, "behaviour_logprobs": torch.zeros(1, 1)}, "importance_cap"),
        ({"clip_low": 1.0}, "clip_low"),
        ({"clip_high": -0.1}, "clip_high"),
        ({"behaviour_logprobs": torch.zeros(1)}, "behaviour_logprobs"),
    ],
)
def test_policy_options_that_do_nothing_or_harm_are_refused(options, named):
    with pytest.raises(ValueError, match=named):
        ppo([1.0], [1.0], **options)


# --- value loss ---


def test_value_loss_is_half_the_squared_error_summed_over_tokens():
    values = torch.tensor([[1.0, NAN, 3.0]], requires_grad=True)
    loss = value_loss(values, torch.tensor([[0.0, NAN, 5.0]]), torch.tensor([[1, 0, 1]]))
    loss.total.backward()
    assert loss.total.item() == 0.5 + 2.0 and loss.n_tokens == 2
    assert values.grad.tolist() == [[1.0, 0.0, -2.0]]
    assert loss.metrics["value_loss"].value == 1.25 and loss.metrics["value_clip_fraction"].total == 0


def test_clipped_value_loss_takes_the_larger_branch():
    """Old 0, return 1, clip 0.2. v = 0.5: unclipped 0.125, clipped 0.32 wins, no gradient. v = -0.5: 1.125 wins."""
    values = torch.tensor([[0.5, -0.5]], requires_grad=True)
    loss = value_loss(values, torch.ones(1, 2), torch.ones(1, 2), old_values=torch.zeros(1, 2), clip=0.2)
    loss.total.backward()
    assert loss.total.item() == pytest.approx(0.32 + 1.125)
    close(values.grad, [[0.0, -1.5]])
    assert (loss.metrics["value_clip_fraction"].total, loss.metrics["value_clip_fraction"].count) == (1, 2)


def test_value_loss_sends_no_gradient_into_its_targets():
    values, returns, old = (torch.full((1, 2), x, requires_grad=True) for x in (0.1, 1.0, 0.0))
    value_loss(values, returns, torch.ones(1, 2), old_values=old, clip=0.2).total.backward()
    assert values.grad is not None and returns.grad is None and old.grad is None


@pytest.mark.parametrize("broken", ["values", "returns", "old"])
def test_nan_value_under_mask_one_stays_visible(broken):
    tensors = {name: torch.zeros(1, 2) for name in ("values", "returns", "old")}
    tensors[broken][0, 0] = NAN
    values = tensors["values"].requires_grad_()
    loss = value_loss(values, tensors["returns"], torch.ones(1, 2), old_values=tensors["old"], clip=0.2)
    loss.total.backward()
    assert loss.total.isnan() and values.grad.isnan().tolist() == [[True, False]]


def test_value_clip_without_old_values_is_refused():
    with pytest.raises(ValueError, match="old_values"):
        value_loss(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1), clip=0.2)


# --- reductions and sums over counts ---


def test_each_reduction_is_the_one_it_names():
    """N10: rows [2, 2, 2, 2] and [10]."""
    losses = torch.tensor([[2.0, 2, 2, 2], [10, NAN, NAN, NAN]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]])
    assert reduce_loss(losses, mask, "token_mean").item() == pytest.approx(3.6)
    assert reduce_loss(losses, mask, "sequence_mean").item() == pytest.approx(6.0)
    assert reduce_loss(losses, mask, "constant", constant=8).item() == pytest.approx(1.125)


@pytest.mark.parametrize(("mode", "constant"), [("token_mean", None), ("sequence_mean", None), ("constant", 8)])
def test_rows_without_tokens_leave_the_loss_of_the_others_alone(mode, constant):
    """N18."""
    normal = torch.tensor([[1.0, 4.0, 4.0]])
    alone = reduce_loss(normal, torch.tensor([[1, 1, 1]]), mode, constant=constant)
    padded = torch.cat([torch.full((2, 3), NAN), normal])
    among = reduce_loss(padded, torch.tensor([[0, 0, 0], [0, 0, 0], [1, 1, 1]]), mode, constant=constant)
    assert among.item() == alone.item() > 0


@pytest.mark.parametrize(
    ("mode", "constant", "short", "long"),
    [
        ("sequence_mean", None, -0.05, -0.0005),
        ("token_mean", None, -1 / 1010, -1 / 1010),
        ("constant", 1000, -0.0005, -0.0005),
    ],
)
def test_weight_of_a_token_in_a_short_and_a_long_wrong_answer(mode, constant, short, long):
    """R01: advantage -1, lengths 10 and 1000. Only the sequence mean spares the long one."""
    mask = torch.arange(1000) < torch.tensor([[10], [1000]])
    token_losses = torch.zeros(2, 1000, requires_grad=True)
    reduce_loss(-token_losses, mask, mode, constant=constant).backward()
    assert token_losses.grad[0, 0].item() == pytest.approx(short, rel=1e-6)
    assert token_losses.grad[1, 999].item() == pytest.approx(long, rel=1e-6)


def test_reduction_arguments_that_contradict_the_mode_are_refused():
    x = torch.ones(1, 1)
    for mode, constant in (("constant", None), ("constant", 0), ("token_mean", 8), ("mean", None)):
        with pytest.raises(ValueError, match=mode):
            reduce_loss(x, x, mode, constant=constant)


@pytest.mark.parametrize("split", [[20], [10, 10], [8, 2, 4, 6], [1] * 20])
def test_summed_totals_over_summed_tokens_are_the_same_for_every_split(split):
    """N09: (tokens, loss sum) = (8, 8), (2, 18), (4, 8), (6, 18): 52 / 20 however it is cut; mean of means is 3.75."""
    per_token = torch.cat([torch.full((n,), s / n) for n, s in ((8, 8.0), (2, 18.0), (4, 8.0), (6, 18.0))])
    parameter = torch.ones((), requires_grad=True)
    total, tokens = torch.zeros(()), 0
    for part in per_token.split(split):
        zeros = torch.zeros(1, len(part))
        logprobs = zeros + parameter - 1.0  # ratio 1, so the gradient is the loss
        loss = policy_loss(logprobs, zeros, -part[None], torch.ones(1, len(part)), clip_low=0.2, clip_high=0.2)
        total, tokens = total + loss.total, tokens + loss.n_tokens
    (total / tokens).backward()
    assert (total / tokens).item() == pytest.approx(2.6, rel=1e-6)
    assert parameter.grad.item() == pytest.approx(2.6, rel=1e-6)


def test_clip_fraction_of_micro_batches_is_a_sum_over_a_count():
    """M02: (tokens, clipped) = (4, 0) x 3 and (2, 2): 2/14, not 0.25."""
    parts = [ppo([1.0] * 4, [1.0] * 4)[0]] * 3 + [ppo([2.0, 2.0, 9.0], [1.0] * 3, mask=[1, 1, 0])[0]]
    for name, expected in (("clip_fraction", 2 / 14), ("ratio_mean", 16 / 14)):
        total = reduce(lambda a, b: a + b, (part.metrics[name] for part in parts))
        assert total.value == pytest.approx(expected)


def test_explained_variance_adds_over_micro_batches():
    """Returns 1, 2, 3, 4 (variance 1.25), errors 0, 1, 0, 1 (variance 0.25): 0.8."""
    values, returns = torch.tensor([[1.0, 1, NAN], [3, 3, NAN]]), torch.tensor([[1.0, 2, NAN], [3, 4, NAN]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 0]])
    whole = explained_variance_sums(values, returns, mask)
    assert explained_variance(whole) == pytest.approx(0.8)
    first, second = (explained_variance_sums(values[i : i + 1], returns[i : i + 1], mask[i : i + 1]) for i in (0, 1))
    assert {name: first[name] + second[name] for name in whole} == whole


def test_explained_variance_of_equal_returns_is_not_a_number_made_of_rounding():
    returns = torch.full((1, 7), 0.9, dtype=torch.float64)
    for n in range(8):
        mask = torch.arange(7)[None] < n
        assert math.isnan(explained_variance(explained_variance_sums(torch.zeros(1, 7), returns, mask)))
