"""Sums that are divided only at export: cumulative histograms and the per-version window."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhf_cluster.metrics.names import VERSION_WINDOW
from rlhf_cluster.metrics.series import series_key

LOG_RATIO_LIMIT = 20.0
"""Log-ratios (nats) are clamped to +- this before exp, as in algorithms/kl.py (which needs torch)."""


class Histogram:
    """Counts of values by upper bound (inclusive), with their sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = (*map(float, bounds), math.inf)
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0

    def observe(self, value: float, weight: int = 1) -> None:
        """Count ``value`` ``weight`` times."""
        self._add(value, weight)
        self._sum += value * weight

    def _add(self, value: float, weight: int) -> None:
        self._counts[next(i for i, bound in enumerate(self._bounds) if value <= bound)] += weight

    def series(self, name: str, labels: Mapping[str, str]) -> dict[str, float]:
        """The samples as Prometheus writes them: cumulative buckets, then count and sum."""
        values = {
            series_key(f"{name}_bucket", {**labels, "le": "+Inf" if math.isinf(bound) else str(bound)}): float(count)
            for bound, count in zip(self._bounds, accumulate(self._counts), strict=True)
        }
        values[series_key(f"{name}_count", labels)] = float(sum(self._counts))
        values[series_key(f"{name}_sum", labels)] = self._sum
        return values

    def state_dict(self) -> dict[str, Any]:
        return {"counts": [[str(b), c] for b, c in zip(self._bounds, self._counts, strict=True)], "sum": self._sum}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Saved buckets go where their bound falls now, so max_staleness may change between runs."""
        self._counts = [0] * len(self._bounds)
        for bound, count in state["counts"]:
            self._add(float(bound), int(count))
        self._sum = float(state["sum"])


@dataclass(slots=True)
class _VersionSums:
    tokens: int = 0
    lag_sum: int = 0
    lag_max: int = 0
    kl_tokens: int = 0
    k1_sum: float = 0.0
    k3_sum: float = 0.0


class VersionWindow:
    """Staleness and KL to the reference by the policy version of the token, for the newest versions consumed.

    A version's numbers run over all tokens of it consumed so far, over several batches if need be.
    """

    def __init__(self) -> None:
        self._sums: dict[int, _VersionSums] = {}

    def add(self, versions: NDArray[np.int64], lags: NDArray[np.int64], log_ratio: NDArray[np.float64]) -> None:
        """All (T,): token versions, lags at consumption, behaviour minus reference log-prob in nats.

        KL by Schulman 2020, "Approximating KL divergence": k1 = d, k3 = exp(-d) - 1 + d. A token whose log-ratio is
        not finite (a member that could not be scored) counts for staleness and not for KL.
        """
        near = np.clip(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        k3 = np.expm1(-near) + near
        finite = np.isfinite(log_ratio)
        for version in np.unique(versions):
            own = versions == version
            sums = self._sums.setdefault(int(version), _VersionSums())
            sums.tokens += int(own.sum())
            sums.lag_sum += int(lags[own].sum())
            sums.lag_max = max(sums.lag_max, int(lags[own].max()))
            sums.kl_tokens += int((own & finite).sum())
            sums.k1_sum += float(log_ratio[own & finite].sum())
            sums.k3_sum += float(k3[own & finite].sum())
        for version in sorted(self._sums)[:-VERSION_WINDOW]:
            del self._sums[version]

    def series(self) -> dict[str, float]:
        values: dict[str, float] = {}
        for version, sums in sorted(self._sums.items()):
            label = {"policy_version": version}
            values[series_key("rlhf_version_staleness_mean", label)] = sums.lag_sum / sums.tokens
            values[series_key("rlhf_version_staleness_max", label)] = float(sums.lag_max)
            if sums.kl_tokens:
                for estimator, total in (("k1", sums.k1_sum), ("k3", sums.k3_sum)):
                    key = series_key("rlhf_version_kl_reference", {**label, "estimator": estimator})
                    values[key] = total / sums.kl_tokens
        return values

    def state_dict(self) -> dict[str, Any]:
        return {str(version): asdict(sums) for version, sums in self._sums.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._sums = {int(version): _VersionSums(**sums) for version, sums in state.items()}
