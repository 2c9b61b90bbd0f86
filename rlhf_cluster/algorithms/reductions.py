"""From one loss a token to one number: what each token weighs, so that any split of a minibatch adds up to the same."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rlhf_cluster.algorithms.masking import as_mask, select

Reduction = Literal["token_mean", "sequence_mean", "constant"]


def token_weights(mask: Tensor, mode: Reduction, *, constant: float | None = None) -> Tensor:
    """[B, T] float32: what each token of the *whole* minibatch weighs, 0 under mask 0; ``reduce_loss`` is their dot
    product with the losses. Rows without tokens take no part in any denominator.

    - ``token_mean``: 1 / tokens. Every token weighs the same.
    - ``sequence_mean``: 1 / (rows * tokens of the row). A token of a long answer weighs less: long wrong answers are
      punished less (length bias; R01: lengths 10 and 1000 weigh 0.05 and 0.0005 a token).
    - ``constant``: 1 / (rows * constant) (Liu et al. 2025, "Understanding R1-Zero-like training"). Every token weighs
      the same, whatever the lengths.

    Raises:
        ValueError: unknown mode, or ``constant`` missing, not positive, or given to another mode.
    """
    if (constant is not None) != (mode == "constant") or (constant is not None and not constant > 0):
        raise ValueError(f"constant must be > 0 with mode 'constant' and None otherwise, got {constant} with {mode!r}")
    keep = as_mask(mask)
    row_tokens = keep.sum(-1, keepdim=True)
    rows = (row_tokens > 0).sum().clamp(min=1)
    if mode == "token_mean":
        weight = 1.0 / row_tokens.sum().clamp(min=1)
    elif mode == "sequence_mean":
        weight = 1.0 / (rows * row_tokens.clamp(min=1))
    elif constant is not None:
        weight = 1.0 / (rows * constant)
    else:
        raise ValueError(f"loss reduction {mode!r} is unknown; choose token_mean, sequence_mean or constant")
    return torch.where(keep, weight, torch.zeros((), device=mask.device)).float()


def reduce_loss(token_losses: Tensor, mask: Tensor, mode: Reduction, *, constant: float | None = None) -> Tensor:
    """One differentiable scalar from [B, T], by ``token_weights``; without any token a differentiable 0.

    Raises:
        ValueError: as ``token_weights``, or shapes that differ.
    """
    keep = as_mask(mask, token_losses=token_losses)
    return (token_weights(mask, mode, constant=constant) * select(token_losses, keep)).sum()
