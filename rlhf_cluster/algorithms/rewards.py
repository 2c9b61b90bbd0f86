"""From one score a sample to one reward a token: running normalisation, clipping, KL penalty."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rlhf_cluster.algorithms.masking import as_mask, select, upcast


class RunningMoments:
    """Count, mean and population std of all numbers seen so far, in float64 (Chan, Golub and LeVeque 1979)."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self._m2 = 0.0

    @property
    def std(self) -> float:
        """Population standard deviation (ddof 0); 0.0 before the second distinct number."""
        return math.sqrt(self._m2 / self.count) if self.count else 0.0

    def update(self, x: Tensor | Sequence[float]) -> None:
        """Add numbers (any shape).

        Raises:
            ValueError: one of them is not finite; nothing is added then.
        """
        values = torch.as_tensor(x, dtype=torch.float64, device="cpu").detach().flatten()
        bad = int((~values.isfinite()).sum())
        if bad:
            raise ValueError(
                f"RunningMoments.update: {bad} of {len(values)} numbers are not finite; leave unscorable samples out"
            )
        if not len(values):
            return
        batch = RunningMoments()
        # Taken about the first number, equal numbers have a variance of exactly 0, not of rounding noise.
        shifted = values - values[0]
        batch.count = len(values)
        batch.mean = float(values[0] + shifted.mean())
        batch._m2 = float((shifted - shifted.mean()).square().sum())
        self.merge(batch)

    def merge(self, other: RunningMoments) -> None:
        """Add everything ``other`` has seen, in place; ``other`` is left as it is."""
        if not other.count:
            return
        if not self.count:
            self.count, self.mean, self._m2 = other.count, other.mean, other._m2
            return
        count = self.count + other.count
        delta = other.mean - self.mean
        self._m2 += other._m2 + delta * delta * self.count * other.count / count
        self.mean += delta * other.count / count
        self.count = count

    def state_dict(self) -> dict[str, int | float]:
        """Plain numbers, exact to the bit through JSON."""
        return {"count": self.count, "mean": self.mean, "m2": self._m2}

    def load_state_dict(self, state: Mapping[str, int | float]) -> None:
        self.count, self.mean, self._m2 = int(state["count"]), float(state["mean"]), float(state["m2"])


def normalize_scores(scores: Tensor, moments: RunningMoments, clip: float | None) -> Tensor:
    """``(scores - mean) / std`` by the running moments, clipped to [-clip, clip] (None: not clipped). Shape kept.

    Without variance yet there is nothing to divide by and scores are only centred. NaN scores stay NaN.

    Raises:
        ValueError: clip is not positive.
    """
    if clip is not None and not clip > 0:
        raise ValueError(f"reward clip must be > 0 or None, got {clip}")
    dtype = upcast(scores).dtype
    z = scores.to(torch.float64) - moments.mean
    if moments.std > 0:
        z = z / moments.std
    if clip is not None:
        z = z.clamp(-clip, clip)
    return z.to(dtype)


def scale_scores(scores: Tensor, moments: RunningMoments, clip: float | None) -> Tensor:
    """``scores / std`` by the running std, not centred, clipped to [-clip, clip] (None: not clipped). Shape kept.

    Without variance yet scores stay as they are. NaN scores stay NaN.

    Raises:
        ValueError: clip is not positive.
    """
    centre = RunningMoments()
    centre.load_state_dict({**moments.state_dict(), "mean": 0.0})
    return normalize_scores(scores, centre, clip)


def token_rewards(scores: Tensor, kl: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
    """``-kl_coef * kl`` on every masked-in token, plus the score on the last one of each row: [B, T].

    ``scores`` [B], ``kl`` [B, T] in nats. A row without tokens gets no reward at all, whatever its score.

    Example: mask ``[1, 1, 0]``, score 2, kl ``[.1, .3, nan]``, coefficient 1 give ``[-.1, 1.7, 0]``.

    Raises:
        ValueError: shapes that do not fit.
    """
    keep = as_mask(mask, kl=kl)
    if scores.shape != mask.shape[:1]:
        raise ValueError(f"scores has shape {tuple(scores.shape)}, expected [B] = [{mask.shape[0]}]: one a row")
    # Interior zeros are legal, so the last token is where no masked-in token follows.
    following = keep.flip(-1).cumsum(-1).flip(-1)
    last = keep & (following == 1)
    return select(scores[:, None].expand(kl.shape), last) - kl_coef * select(kl, keep)
