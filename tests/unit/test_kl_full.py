"""KL over the whole vocabulary against numbers worked out by hand and against sums written out."""

from __future__ import annotations

import math

import pytest
import torch

from rlhf_cluster.algorithms.kl import kl_full

NAN = float("nan")


def test_the_kl_of_two_coins() -> None:
    """N11: p = (0.8, 0.2), q = (0.5, 0.5): KL 0.192745, and its derivative in the logit of p 0.221807."""
    t = torch.tensor(math.log(4.0), dtype=torch.float64, requires_grad=True)
    logits = torch.stack([t, torch.zeros_like(t)])[None, None]
    kl = kl_full(logits, torch.zeros(1, 1, 2, dtype=torch.float64), torch.ones(1, 1))
    kl.sum().backward()
    assert kl.item() == pytest.approx(0.192745, abs=1e-6)
    assert t.grad.item() == pytest.approx(0.221807, abs=1e-6)


def test_it_is_the_sum_over_the_vocabulary_at_every_position_and_zero_for_equal_models() -> None:
    torch.manual_seed(0)
    p, q = torch.randn(2, 3, 7, dtype=torch.float64), torch.randn(2, 3, 7, dtype=torch.float64)
    kl = kl_full(p, q, torch.ones(2, 3))
    for b in range(2):
        for t in range(3):
            logp, logq = p[b, t].log_softmax(-1).tolist(), q[b, t].log_softmax(-1).tolist()
            expected = sum(math.exp(x) * (x - y) for x, y in zip(logp, logq, strict=True))
            assert kl[b, t].item() == pytest.approx(expected, abs=1e-12)
    assert (kl_full(p, p, torch.ones(2, 3)) == 0).all()


def test_what_stands_under_mask_zero_changes_no_bit_and_an_impossible_token_adds_nothing() -> None:
    p, q = torch.tensor([[[0.0, 1.0, -math.inf], [NAN] * 3]]), torch.tensor([[[1.0, 0.0, 2.0], [NAN] * 3]])
    p.requires_grad_()
    kl = kl_full(p, q, torch.tensor([[1, 0]]))
    kl.sum().backward()
    logq = torch.log_softmax(torch.tensor([1.0, 0.0, 2.0]), -1)
    probs = torch.softmax(torch.tensor([0.0, 1.0]), -1)
    assert kl[0, 0].item() == pytest.approx(float((probs * (probs.log() - logq[:2])).sum()), abs=1e-6)
    assert kl[0, 1].item() == 0
    assert (p.grad[0, 1] == 0).all()
    assert p.grad[0, 0].isfinite().all()


def test_logits_of_two_vocabularies_are_refused() -> None:
    with pytest.raises(ValueError, match="differ"):
        kl_full(torch.zeros(1, 1, 3), torch.zeros(1, 1, 4), torch.ones(1, 1))
