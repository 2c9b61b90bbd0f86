"""How a mask is applied, once for all of ``algorithms/``: by selection before any arithmetic.

Multiplying by the mask would not do: ``0 * NaN`` is NaN, in the value and in the gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor


def as_mask(mask: Tensor, **expected: Tensor) -> Tensor:
    """The mask as bool, after checking that every named tensor has exactly its shape.

    Raises:
        ValueError: naming the tensor whose shape differs (broadcasting [B] against [B, T] would hide a mix-up).
    """
    for name, tensor in expected.items():
        if tensor.shape != mask.shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, mask has {tuple(mask.shape)}; they must be one value a token"
            )
    return mask.bool()


def upcast(x: Tensor) -> Tensor:
    """At least float32: statistics and exponentials of half-precision inputs are taken in float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def select(x: Tensor, mask: Tensor) -> Tensor:
    """``upcast(x)`` where ``mask`` (bool), exact 0 elsewhere, with exact zero gradients elsewhere."""
    x = upcast(x)
    return torch.where(mask, x, torch.zeros((), dtype=x.dtype, device=x.device))


def bound(x: Tensor, limit: float) -> Tensor:
    """x held within +-limit; unlike ``Tensor.clamp`` a NaN stays visible in the gradient too."""
    high = torch.full_like(x, limit)
    return torch.where(x > high, high, torch.where(x < -high, -high, x))
