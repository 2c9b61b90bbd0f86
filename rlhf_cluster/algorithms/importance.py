"""Importance weights: how much a token that another policy sampled counts for the proximal one."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from rlhf_cluster.algorithms.kl import LOG_RATIO_LIMIT
from rlhf_cluster.algorithms.masking import as_mask, bound, select

ImportanceKind = Literal["token", "sequence"]


class ImportanceWeights(NamedTuple):
    """``weights``: as applied, [B, T], detached; ``capped``: bool [B, T], where the weight was above the cap."""

    weights: Tensor
    capped: Tensor


def importance_weights(
    proximal_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    mask: Tensor,
    *,
    kind: ImportanceKind = "token",
    cap: float | None = None,
) -> ImportanceWeights:
    """exp(proximal - behaviour), [B, T], 0 under mask 0.

    - ``token``: each token its own, truncated at ``cap`` (Espeholt et al. 2018; Hilton et al. 2022 for the decoupled
      objective).
    - ``sequence``: every token of a row the weight of the whole answer, exp of the *sum* of the differences; a row
      above ``cap`` is left out (weight 0): the exact correction, without bias, but of high variance.

    Log-ratios are clamped to +-20 before exp. ``cap`` None: unbounded.

    Example: proximal -1, behaviour -2, cap 2: exp(1) = 2.718, truncated to 2 (never the inverse).

    Raises:
        ValueError: unknown kind, shapes that differ, or a cap that is not positive.
    """
    if cap is not None and not cap > 0:
        raise ValueError(f"importance_cap must be > 0 or None, got {cap}")
    keep = as_mask(mask, proximal_logprobs=proximal_logprobs, behaviour_logprobs=behaviour_logprobs)
    log_weight = select(proximal_logprobs.detach(), keep) - select(behaviour_logprobs.detach(), keep)
    if kind == "sequence":
        log_weight = log_weight.sum(-1, keepdim=True).expand(mask.shape)
    elif kind != "token":
        raise ValueError(f"importance {kind!r} is unknown; choose token or sequence")
    raw = torch.where(keep, bound(log_weight, LOG_RATIO_LIMIT).exp(), 0.0)
    if cap is None:
        return ImportanceWeights(raw, torch.zeros_like(keep))
    capped = raw > cap
    return ImportanceWeights(torch.where(capped, 0.0 if kind == "sequence" else cap, raw), capped)
