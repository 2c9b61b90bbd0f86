"""The language-model head: the numbers and gradients of the plain formulas, from a bounded number of rows of logits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import learner.heads
from learner.heads import HeadOutputs, LogprobHead, ReferenceRows
from rlhf_cluster.algorithms.losses import entropy, token_logprobs

VOCAB = 50
PARTS = ("logprobs", "entropy", "kl")


class Case:
    """Random hidden states, tokens, a reference and upstream weights for each output."""

    def __init__(self, n: int, *, bias: bool = False, dtype: torch.dtype = torch.float64, spread: float = 1.0) -> None:
        generator = torch.Generator().manual_seed(n)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

        self.head = nn.Linear(16, VOCAB, bias=bias).to(dtype)
        for parameter in self.head.parameters():
            parameter.data = normal(*parameter.shape)
        self.hidden = spread * normal(n, 16)
        self.token_ids = torch.randint(VOCAB, (n,), generator=generator)
        # Another hidden size, as a smaller reference model of the same vocabulary has.
        self.reference = ReferenceRows(normal(n, 8), normal(VOCAB, 8), normal(VOCAB) if bias else None)
        self.weights = {part: normal(n) for part in PARTS}

    def plain(self, hidden: Tensor, temperature: float) -> dict[str, Tensor]:
        """The textbook formulas over the whole matrix of logits."""
        log_p = torch.log_softmax(self.head(hidden) / temperature, -1)
        reference = nn.functional.linear(*self.reference)
        log_q = torch.log_softmax(reference / temperature, -1)
        return {
            "logprobs": log_p.gather(-1, self.token_ids[:, None]).squeeze(-1),
            "entropy": -(log_p.exp() * log_p).sum(-1),
            "kl": (log_p.exp() * (log_p - log_q)).sum(-1),
        }

    def head_outputs(self, hidden: Tensor, temperature: float, rows: int = 1024, **options: Any) -> HeadOutputs:
        return LogprobHead(self.head, rows)(hidden, self.token_ids, temperature=temperature, **options)

    def gradients(self, hidden: Tensor, outputs: dict[str, Tensor], parts: tuple[str, ...]) -> list[Tensor]:
        self.head.zero_grad()
        torch.stack([(outputs[part] * self.weights[part]).sum() for part in parts]).sum().backward()
        grads = [hidden.grad, *(parameter.grad for parameter in self.head.parameters())]
        return [grad.clone() for grad in grads if grad is not None]


@pytest.fixture(autouse=True)
def blocks_of_a_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(learner.heads._BLOCK_ELEMENTS, "cpu", 7 * VOCAB)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1000, 20])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("parts", [("logprobs",), ("logprobs", "entropy"), ("logprobs", "kl"), ("kl",), PARTS])
def test_values_and_gradients_are_those_of_plain_autograd(
    parts: tuple[str, ...], temperature: float, rows: int, bias: bool
) -> None:
    case = Case(45, bias=bias)
    plain = case.hidden.clone().requires_grad_()
    expected = case.plain(plain, temperature)
    wanted = case.gradients(plain, expected, parts)

    hidden = case.hidden.clone().requires_grad_()
    outputs = case.head_outputs(
        hidden,
        temperature,
        rows,
        entropy_gradient="entropy" in parts,
        reference=case.reference if "kl" in parts else None,
    )
    for part in {"logprobs", *parts}:
        torch.testing.assert_close(getattr(outputs, part), expected[part], atol=1e-12, rtol=1e-12)
    got = case.gradients(hidden, outputs._asdict(), parts)
    assert len(got) == len(wanted) == 2 + bias
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-11, rtol=1e-10)


def test_float32_with_wide_logits_agrees_with_the_projects_own_formulas() -> None:
    case = Case(45, dtype=torch.float32, spread=40.0)
    with torch.no_grad():
        outputs = case.head_outputs(case.hidden, 0.8, with_entropy=True)
        logits = case.head(case.hidden)
    torch.testing.assert_close(outputs.logprobs, token_logprobs(logits, case.token_ids, 0.8), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(outputs.entropy, entropy(logits / 0.8, torch.ones(45)), atol=1e-5, rtol=1e-4)


def test_what_is_not_asked_for_is_not_there() -> None:
    case = Case(4)
    outputs = case.head_outputs(case.hidden, 1.0)
    assert outputs.entropy is None and outputs.kl is None


def test_an_entropy_for_the_metrics_carries_no_gradient_and_changes_none() -> None:
    case = Case(30)
    results = []
    for options in ({}, {"with_entropy": True}):
        hidden = case.hidden.clone().requires_grad_()
        outputs = case.head_outputs(hidden, 0.7, **options)
        results.append(case.gradients(hidden, outputs._asdict(), ("logprobs",)))
    assert outputs.entropy is not None and not outputs.entropy.requires_grad
    torch.testing.assert_close(outputs.entropy, case.plain(case.hidden, 0.7)["entropy"].detach())
    for without, with_entropy in zip(*results, strict=True):
        torch.testing.assert_close(with_entropy, without, atol=1e-12, rtol=1e-12)


def test_no_gradient_and_no_graph_node_reaches_the_reference() -> None:
    case = Case(5)
    reference = ReferenceRows(case.reference.hidden.clone().requires_grad_(), case.reference.weight, None)
    outputs = case.head_outputs(case.hidden.clone().requires_grad_(), 1.0, reference=reference)
    assert outputs.kl is not None
    outputs.kl.sum().backward()
    assert reference.hidden.grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_policy_and_reference_have_a_kl_of_exactly_zero(dtype: torch.dtype) -> None:
    case = Case(45, dtype=dtype, spread=5.0)
    reference = ReferenceRows(case.hidden, case.head.weight, None)
    with torch.no_grad():
        kl = case.head_outputs(case.hidden, 0.7, 20, reference=reference).kl
    assert kl is not None and not kl.any()


@pytest.mark.parametrize("rows", [1000, 20])
def test_rows_the_loss_leaves_out_add_nothing_even_when_they_are_nan(rows: int) -> None:
    case = Case(45)
    left_out = torch.zeros(45, dtype=torch.bool)
    left_out[[0, 7, 8, 9, 30, 44]] = True
    for part in PARTS:
        case.weights[part][left_out] = 0.0
    plain = case.hidden.clone().requires_grad_()
    wanted = case.gradients(plain, case.plain(plain, 0.7), PARTS)

    poisoned = case.hidden.clone()
    poisoned[left_out] = math.nan
    hidden = poisoned.requires_grad_()
    outputs = case.head_outputs(hidden, 0.7, rows, entropy_gradient=True, reference=case.reference)
    assert torch.isnan(outputs.logprobs[left_out]).all()
    used = {part: getattr(outputs, part).where(~left_out, 0.0) for part in PARTS}
    for mine, theirs in zip(case.gradients(hidden, used, PARTS), wanted, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-11, rtol=1e-10)


def test_a_nan_that_the_loss_uses_stays_visible() -> None:
    case = Case(5)
    hidden = case.hidden.clone()
    hidden[2] = math.nan
    hidden.requires_grad_()
    case.head_outputs(hidden, 1.0).logprobs.sum().backward()
    assert hidden.grad is not None
    assert torch.isnan(hidden.grad).any(-1).tolist() == [False, False, True, False, False]


def test_a_loss_that_uses_no_row_has_gradients_of_zero() -> None:
    case = Case(5)
    hidden = case.hidden.clone().requires_grad_()
    (case.head_outputs(hidden, 1.0).logprobs * 0.0).sum().backward()
    assert hidden.grad is not None and not hidden.grad.any()
    assert case.head.weight.grad is not None and not case.head.weight.grad.any()


def test_a_second_backward_through_the_same_rows_gives_the_same_gradients() -> None:
    case = Case(45)
    hidden = case.hidden.clone().requires_grad_()
    loss = case.head_outputs(hidden, 0.7, reference=case.reference).logprobs.sum()
    (first,) = torch.autograd.grad(loss, hidden, retain_graph=True)
    (second,) = torch.autograd.grad(loss, hidden)
    torch.testing.assert_close(first, second, atol=1e-12, rtol=1e-12)


def test_no_rows_give_no_numbers_and_gradients_of_zero() -> None:
    case = Case(3)
    hidden = case.hidden[:0].clone().requires_grad_()
    head = LogprobHead(case.head)
    outputs = head(hidden, case.token_ids[:0], temperature=1.0, with_entropy=True)
    assert outputs.logprobs.shape == outputs.entropy.shape == (0,)
    outputs.logprobs.sum().backward()
    assert not case.head.weight.grad.any()


def test_logits_of_no_more_than_the_given_rows_are_made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(45)
    made: list[tuple[int, int]] = []
    linear = nn.functional.linear

    def spy(rows: Tensor, *parameters: Any) -> Tensor:
        made.append(tuple(rows.shape))
        return linear(rows, *parameters)

    monkeypatch.setattr(nn.functional, "linear", spy)
    hidden = case.hidden.clone().requires_grad_()
    outputs = case.head_outputs(hidden, 1.0, 20, entropy_gradient=True, reference=case.reference)
    torch.stack([getattr(outputs, part).sum() for part in PARTS]).sum().backward()
    forward = [(20, 16), (20, 8), (20, 16), (20, 8), (5, 16), (5, 8)]
    assert made == [*forward, *forward], "policy (16 features) and reference (8), in forward and again in backward"


def test_logits_that_fit_at_once_are_not_made_again_in_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(20)
    case.weights["logprobs"][3] = 0.0  # a clipped token: its row is dropped, the others' logits still serve
    hidden = case.hidden.clone().requires_grad_()
    outputs = case.head_outputs(hidden, 1.0, 20)
    monkeypatch.setattr(nn.functional, "linear", lambda *_: pytest.fail("logits were computed again"))
    case.gradients(hidden, outputs._asdict(), ("logprobs",))


def test_a_logit_of_minus_infinity_adds_nothing() -> None:
    head = nn.Linear(1, 3)
    head.weight.data.zero_()
    head.bias.data = torch.tensor([0.0, 0.0, -math.inf])
    hidden = torch.ones(2, 1, requires_grad=True)
    reference = ReferenceRows(hidden.detach(), torch.zeros(3, 1), head.bias.detach())
    outputs = LogprobHead(head)(
        hidden, torch.tensor([0, 1]), temperature=1.0, entropy_gradient=True, reference=reference
    )
    torch.testing.assert_close(outputs.logprobs, torch.full((2,), -math.log(2)))
    torch.testing.assert_close(outputs.entropy, torch.full((2,), math.log(2)))
    torch.testing.assert_close(outputs.kl, torch.zeros(2))
    torch.stack([each.sum() for each in outputs]).sum().backward()
    torch.testing.assert_close(head.bias.grad, torch.zeros(3))


def test_a_reference_of_another_vocabulary_is_refused() -> None:
    case = Case(2)
    reference = ReferenceRows(case.reference.hidden, torch.zeros(VOCAB + 1, 8), None)
    with pytest.raises(ValueError, match=r"model\.reference has 51 output tokens, model\.policy 50"):
        case.head_outputs(case.hidden, 1.0, reference=reference)


def test_a_head_that_is_not_linear_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model\.policy has an LM head of type Identity"):
        LogprobHead(nn.Identity())
