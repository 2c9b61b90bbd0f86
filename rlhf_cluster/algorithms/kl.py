"""KL divergence to the reference: per-token estimators and the controllers of its coefficient."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from rlhf_cluster.algorithms.masking import as_mask, bound, select, upcast

KLKind = Literal["k1", "k2", "k3"]

LOG_RATIO_LIMIT = 20.0
"""Log-ratios (nats) are clamped to +- this before exp, so that one broken token cannot make an infinity."""

# Ziegler et al. 2019, section 2.2: one update changes the coefficient by at most this fraction a horizon.
_MAX_ERROR = 0.2


class _Pointwise(torch.autograd.Function):
    """``value`` with derivative ``slope`` in x; an upstream gradient of exactly 0 gives exactly 0.

    kl_estimate sees no mask, and plain autograd makes ``0 * NaN`` of a padded slot that the loss left out.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor, slope: Tensor) -> Tensor:
        ctx.save_for_backward(slope)
        return value.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (slope,) = ctx.saved_tensors
        return torch.where(grad == 0, torch.zeros_like(grad), grad * slope), None, None


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, kind: KLKind) -> Tensor:
    """Per-token estimate of KL(policy || reference) in nats, [B, T], from tokens sampled by the policy.

    With ``d = logprobs - ref_logprobs`` (Schulman 2020, "Approximating KL divergence"):

    - ``k1 = d``: unbiased, high variance, may be negative. As a loss its expected gradient is 0, so it belongs in
      the reward.
    - ``k2 = d^2 / 2``: biased value; on-policy its gradient is that of KL(policy || reference).
    - ``k3 = exp(-d) - 1 + d``: unbiased, never negative; its gradient is that of the forward
      KL(reference || policy). d is clamped to +-20 in the whole of it, so value and slope agree at the ends.

    Raises:
        ValueError: unknown kind, or shapes that differ.
    """
    if logprobs.shape != ref_logprobs.shape:
        raise ValueError(f"logprobs {tuple(logprobs.shape)} and ref_logprobs {tuple(ref_logprobs.shape)} differ")
    d = upcast(logprobs) - upcast(ref_logprobs)
    with torch.no_grad():
        if kind == "k1":
            value, slope = d, torch.ones_like(d)
        elif kind == "k2":
            value, slope = 0.5 * d * d, d
        elif kind == "k3":
            near = bound(d, LOG_RATIO_LIMIT)
            value = torch.expm1(-near) + near
            slope = torch.where(d.abs() > LOG_RATIO_LIMIT, torch.zeros_like(d), -torch.expm1(-near))
        else:
            raise ValueError(f"KL estimator {kind!r} is unknown; choose k1, k2 or k3")
    return _Pointwise.apply(d, value, slope)


def kl_full(logits: Tensor, ref_logits: Tensor, mask: Tensor) -> Tensor:
    """KL(policy || reference) over the whole vocabulary, no estimate: [B, T, V] twice, [B, T] -> [B, T] in nats.

    ``sum_v p(v) (log p(v) - log q(v))``, 0 under mask 0. Divide both logits by the temperature before. A token that
    the policy never samples (logit -inf) adds 0.

    Raises:
        ValueError: shapes that do not fit.
    """
    keep = as_mask(mask, logits=logits[..., 0])
    if logits.shape != ref_logits.shape:
        raise ValueError(f"logits {tuple(logits.shape)} and ref_logits {tuple(ref_logits.shape)} differ")
    logp = torch.log_softmax(select(logits, keep[..., None]), dim=-1)
    logq = torch.log_softmax(select(ref_logits, keep[..., None]), dim=-1)
    impossible = torch.isneginf(logp)
    gap = torch.where(impossible, 0.0, logp - logq)
    return select((logp.exp() * gap).sum(-1), keep)


class FixedKL:
    """A KL coefficient that does not move."""

    def __init__(self, coef: float) -> None:
        if not (math.isfinite(coef) and coef >= 0):
            raise ValueError(f"KL coef must be finite and >= 0, got {coef}")
        self.coef = float(coef)

    def update(self, observed_kl: float, n_samples: int) -> None:
        """Nothing to adapt; here so that both controllers are driven alike."""

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Nothing: the coefficient is that of the config, also when a resume changed it."""


class AdaptiveKL:
    """Proportional controller that steers the KL to ``target`` (Ziegler et al. 2019, section 2.2).

    ``coef <- coef * (1 + clip(observed / target - 1, -0.2, 0.2) * n_samples / horizon)``; ``observed`` and ``target``
    in the same unit (nats a token, or nats a sequence), ``horizon`` in samples.

    Raises:
        ValueError: coef, target or horizon not finite and positive.
    """

    def __init__(self, coef: float, target: float, horizon: float) -> None:
        for name, value in (("coef", coef), ("target", target), ("horizon", horizon)):
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"adaptive KL {name} must be finite and > 0, got {value}")
        self.coef = float(coef)
        self.target = float(target)
        self.horizon = float(horizon)

    def update(self, observed_kl: float, n_samples: int) -> None:
        """Adapt to the mean KL of ``n_samples`` new samples.

        Raises:
            ValueError: ``observed_kl`` is not finite, or so many samples that the coefficient could leave (0, inf).
        """
        if not math.isfinite(observed_kl):
            raise ValueError(f"observed KL must be finite, got {observed_kl}; the coefficient stays {self.coef}")
        share = n_samples / self.horizon
        if not 0 <= _MAX_ERROR * share < 1:
            raise ValueError(
                f"adaptive KL: {n_samples} samples a batch against a horizon of {self.horizon}; "
                f"the horizon must be above {_MAX_ERROR * n_samples:g} samples"
            )
        error = min(max(observed_kl / self.target - 1.0, -_MAX_ERROR), _MAX_ERROR)
        self.coef *= 1.0 + error * share

    def state_dict(self) -> dict[str, float]:
        """The coefficient only: target and horizon come from the config."""
        return {"coef": self.coef}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.coef = float(state["coef"])
