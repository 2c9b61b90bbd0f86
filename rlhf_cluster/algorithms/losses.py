"""Token losses: sums over tokens plus the count to divide by, so that no split of a batch changes the result."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlhf_cluster.algorithms.importance import ImportanceKind, ImportanceWeights, importance_weights
from rlhf_cluster.algorithms.kl import LOG_RATIO_LIMIT
from rlhf_cluster.algorithms.masking import as_mask, bound, select, upcast
from rlhf_cluster.algorithms.reductions import Reduction, reduce_loss, token_weights
from rlhf_cluster.types import Ratio

__all__ = [
    "Reduction",
    "TokenLoss",
    "clipped_entropy",
    "entropy",
    "explained_variance",
    "explained_variance_sums",
    "policy_loss",
    "reduce_loss",
    "token_logprobs",
    "token_weights",
    "value_loss",
    "weighted_sum",
]


class TokenLoss(NamedTuple):
    """``total``: differentiable scalar, a sum over tokens; ``n_tokens``: how many; ``metrics``: sums over counts.

    The learner divides ``total`` by the global token count of the optimizer step. The metric names of a loss are
    always the same, so ranks can add them position by position.
    """

    total: Tensor
    n_tokens: int
    metrics: dict[str, Ratio]


class _TokenLogprobs(torch.autograd.Function):
    """Selected log-softmax without keeping a float32 copy of the logits for backward.

    A row whose upstream gradient is exactly 0 (a padded position) gets exactly 0, whatever its logits are.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, token_ids: Tensor, temperature: float) -> Tensor:
        scaled = upcast(logits) / temperature
        # The largest logit goes first: float32 near 30,000 has no digits left for a difference of log 2.
        top = scaled.amax(-1, keepdim=True)
        log_sum = scaled.sub_(top).logsumexp(-1, keepdim=True)
        ctx.save_for_backward(logits, token_ids, top, log_sum)
        ctx.temperature = temperature
        return (scaled.gather(-1, token_ids[..., None]) - log_sum).squeeze(-1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        logits, token_ids, top, log_sum = ctx.saved_tensors
        scale = (grad / ctx.temperature)[..., None]
        probs = (upcast(logits) / ctx.temperature).sub_(top).sub_(log_sum).exp_()
        grads = probs.mul_(-scale).scatter_add_(-1, token_ids[..., None], scale)
        return grads.masked_fill_((grad == 0)[..., None], 0.0).to(logits.dtype), None, None


def token_logprobs(logits: Tensor, token_ids: Tensor, temperature: float = 1.0) -> Tensor:
    """log p(token) in nats under softmax(logits / temperature): [..., V], [...] -> [...], at least float32.

    ``logits[..., t, :]`` must be the prediction *of* ``token_ids[..., t]``: the caller has shifted them by one.

    Raises:
        ValueError: shapes that do not fit, or a temperature that is not positive.
    """
    if logits.shape[:-1] != token_ids.shape:
        raise ValueError(f"logits {tuple(logits.shape)} must be token_ids {tuple(token_ids.shape)} plus a vocabulary")
    if not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(f"temperature must be finite and > 0, got {temperature}")
    return _TokenLogprobs.apply(logits, token_ids.long(), temperature)


def entropy(logits: Tensor, mask: Tensor) -> Tensor:
    """Entropy of softmax(logits) in nats: [B, T, V], [B, T] -> [B, T], 0 under mask 0. Divide by temperature before.

    Raises:
        ValueError: shapes that do not fit.
    """
    keep = as_mask(mask, logits=logits[..., 0])
    logp = torch.log_softmax(select(logits, keep[..., None]), dim=-1)
    # A logit of -inf has probability 0 and adds 0; without the clamp it would be 0 * inf.
    plogp = logp.exp() * logp.clamp(min=torch.finfo(logp.dtype).min)
    return select(-plogp.sum(-1), keep)


def clipped_entropy(entropies: Tensor, clip: float | None) -> Tensor:
    """What the entropy bonus is paid for, in nats: min(H, clip) [B, T]; above ``clip`` there is no gradient.

    Raises:
        ValueError: a clip that is not positive.
    """
    if clip is None:
        return entropies
    if not clip > 0:
        raise ValueError(f"entropy clip must be > 0 or None, got {clip}")
    return torch.where(entropies > clip, torch.full_like(entropies, clip), entropies)


def policy_loss(
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    behaviour_logprobs: Tensor | None = None,
    importance: ImportanceKind = "token",
    importance_cap: float | None = None,
    weights: Tensor | None = None,
) -> TokenLoss:
    """Decoupled PPO (Hilton et al. 2022; clip of Schulman et al. 2017, eq. 7), all inputs [B, T]:

    ``w * max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))`` with ``r = exp(logprobs - proximal)`` and the detached
    ``w = importance_weights(proximal, behaviour, importance, importance_cap)``; no behaviour log-probs: w = 1. With
    ``dual_clip`` c a token of negative advantage loses at most ``-c A`` (Ye et al. 2020), so that a ratio that exploded
    cannot. ``weights`` are those of ``token_weights``; without them the total is a plain sum. Only ``logprobs`` gets a
    gradient.

    Metrics, all over tokens and without ``weights``: ``clip_fraction`` (the clipped branch is the one taken),
    ``dual_clip_fraction``, ``approx_kl`` (k3 estimate of KL(proximal || current), nats), ``ratio_mean``,
    ``importance_weight_mean`` (w as applied), ``importance_cap_fraction`` (the weight before the cap was above it).

    Raises:
        ValueError: shapes that differ, clip bounds outside 0 <= clip_low < 1, clip_high >= 0, dual_clip > 1, a cap that
            is not positive, or a cap without behaviour log-probs (it would do nothing).
    """
    if not (0 <= clip_low < 1 and clip_high >= 0):
        raise ValueError(f"need 0 <= clip_low < 1 and clip_high >= 0, got clip_low {clip_low}, clip_high {clip_high}")
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip must be > 1 or None, got {dual_clip}")
    if importance_cap is not None and behaviour_logprobs is None:
        raise ValueError("importance_cap needs behaviour_logprobs; without them there is no weight to cap")
    keep = as_mask(mask, logprobs=logprobs, proximal_logprobs=proximal_logprobs, advantages=advantages)
    proximal = select(proximal_logprobs.detach(), keep)
    advantage = select(advantages.detach(), keep)
    log_ratio = bound(select(logprobs, keep) - proximal, LOG_RATIO_LIMIT)
    ratio = log_ratio.exp()
    unclipped = -advantage * ratio
    clipped = -advantage * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    losses = torch.maximum(unclipped, clipped)
    held = torch.zeros_like(keep)
    if dual_clip is not None:
        held = (advantage < 0) & (losses > -dual_clip * advantage)
        losses = torch.where(held, -dual_clip * advantage, losses)
    if behaviour_logprobs is None:
        sampled = ImportanceWeights(torch.ones_like(proximal), torch.zeros_like(keep))
    else:
        sampled = importance_weights(proximal_logprobs, behaviour_logprobs, mask, kind=importance, cap=importance_cap)
    losses = select(sampled.weights * losses, keep)
    total = losses.sum() if weights is None else weighted_sum(losses, weights, keep)

    measured = {
        "clip_fraction": clipped > unclipped,
        "dual_clip_fraction": held,
        "approx_kl": torch.expm1(log_ratio) - log_ratio,
        "ratio_mean": ratio,
        "importance_weight_mean": sampled.weights,
        "importance_cap_fraction": sampled.capped,
    }
    return _token_loss(total, keep, measured)


def weighted_sum(token_losses: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
    """Dot product of [B, T] losses and weights over masked-in tokens."""
    keep = as_mask(mask, token_losses=token_losses, weights=weights)
    return (select(weights.detach(), keep) * select(token_losses, keep)).sum()


def value_loss(
    values: Tensor, returns: Tensor, mask: Tensor, *, old_values: Tensor | None = None, clip: float | None = None
) -> TokenLoss:
    """``0.5 (v - return)^2``, all inputs [B, T]; with ``clip`` the larger of it and the same for v held within
    ``old_values +- clip``. Only ``values`` gets a gradient. Metrics, over tokens: ``value_loss``,
    ``value_clip_fraction`` (the clipped branch is the one taken).

    Raises:
        ValueError: shapes that differ, a clip that is not positive, or a clip without ``old_values``.
    """
    keep = as_mask(mask, values=values, returns=returns)
    value, target = select(values, keep), select(returns.detach(), keep)
    unclipped = clipped = 0.5 * (value - target).square()
    if clip is not None:
        if old_values is None or not clip > 0:
            raise ValueError(f"value clip {clip} must be > 0 and needs old_values")
        as_mask(mask, old_values=old_values)
        old = select(old_values.detach(), keep)
        clipped = 0.5 * (old + bound(value - old, clip) - target).square()
    losses = torch.maximum(unclipped, clipped)
    return _token_loss(losses.sum(), keep, {"value_loss": losses, "value_clip_fraction": clipped > unclipped})


def explained_variance_sums(values: Tensor, returns: Tensor, mask: Tensor) -> dict[str, Ratio]:
    """The moments of explained variance as sums over counts: add them over micro-batches and ranks, then call
    ``explained_variance``. Inputs [B, T]."""
    keep = as_mask(mask, values=values, returns=returns)
    target = returns.detach()[keep].double()
    error = target - values.detach()[keep].double()
    moments = {
        "return_mean": target,
        "return_square_mean": target.square(),
        "value_error_mean": error,
        "value_error_square_mean": error.square(),
    }
    sums = torch.stack([moment.sum() for moment in moments.values()]).tolist()
    return {name: Ratio(total, float(target.numel())) for name, total in zip(moments, sums, strict=True)}


def explained_variance(sums: Mapping[str, Ratio]) -> float:
    """``1 - Var(return - value) / Var(return)``; NaN when the returns do not vary or nothing was counted."""
    square_mean = sums["return_square_mean"].value
    variance = square_mean - sums["return_mean"].value ** 2
    residual = sums["value_error_square_mean"].value - sums["value_error_mean"].value ** 2
    # Below this the difference of two float64 sums is rounding, not variance.
    return 1.0 - residual / variance if variance > 1e-12 * square_mean else math.nan


def _token_loss(total: Tensor, keep: Tensor, measured: dict[str, Tensor]) -> TokenLoss:
    """Metric sums over masked-in tokens, fetched from the device in one transfer."""
    sums = [torch.where(keep, x.detach().double(), 0.0).sum() for x in measured.values()]
    n_tokens, *totals = torch.stack([keep.sum().double(), *sums]).tolist()
    metrics = {name: Ratio(value, n_tokens) for name, value in zip(measured, totals, strict=True)}
    return TokenLoss(total, int(n_tokens), metrics)
