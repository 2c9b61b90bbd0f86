"""How long answers are, in tokens: distributions that turn a sampling seed into a length.

The length depends on the seed alone, so a simulated run is the same however its events fall.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]

_NORMAL = NormalDist()
_MASK = (1 << 64) - 1


def uniform(seed: int) -> float:
    """A number in (0, 1) that depends on ``seed`` only (splitmix64, Steele et al. 2014)."""
    z = (seed * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return ((z ^ (z >> 31)) + 0.5) / (1 << 64)


class _Lengths(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    def quantile(self, q: float) -> float:
        """The length in tokens that a share ``q`` in (0, 1) of the answers does not exceed; no upper limit applied."""
        raise NotImplementedError

    def sample(self, seed: int, limit: int) -> int:
        """The length of the answer with this sampling seed: 1 to ``limit`` tokens."""
        return max(1, min(limit, round(self.quantile(uniform(seed)))))


class Constant(_Lengths):
    kind: Literal["constant"] = "constant"
    tokens: Positive = Field(description="Every answer has this length.")

    def quantile(self, q: float) -> float:
        return self.tokens


class LogNormal(_Lengths):
    kind: Literal["lognormal"] = "lognormal"
    median: Positive = Field(description="Median length in tokens.")
    sigma: Positive = Field(0.8, description="Standard deviation of the natural logarithm of the length.")

    def quantile(self, q: float) -> float:
        return self.median * math.exp(self.sigma * _NORMAL.inv_cdf(q))


class Pareto(_Lengths):
    """Heavy tail: P(length > x) = (minimum / x)^alpha; the mean is infinite for alpha <= 1 (before the limit)."""

    kind: Literal["pareto"] = "pareto"
    minimum: Positive = Field(description="Shortest answer in tokens.")
    alpha: Positive = Field(1.5, description="Tail index; smaller is heavier.")

    def quantile(self, q: float) -> float:
        return self.minimum * (1 - q) ** (-1 / self.alpha)


class TwoClasses(_Lengths):
    kind: Literal["two_classes"] = "two_classes"
    short: Positive = Field(description="Length of a short answer in tokens.")
    long: Positive = Field(description="Length of a long answer in tokens.")
    long_share: Annotated[float, Field(ge=0, le=1)] = Field(0.1, description="Share of long answers.")

    def quantile(self, q: float) -> float:
        return self.long if q > 1 - self.long_share else self.short


class Empirical(_Lengths):
    kind: Literal["empirical"] = "empirical"
    tokens: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        min_length=1, description="Lengths that were seen, or evenly spaced quantiles of them; drawn alike."
    )

    @field_validator("tokens")
    @classmethod
    def _in_order(cls, tokens: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted(tokens))

    def quantile(self, q: float) -> float:
        return self.tokens[min(len(self.tokens) - 1, int(q * len(self.tokens)))]


Lengths = Annotated[Constant | LogNormal | Pareto | TwoClasses | Empirical, Field(discriminator="kind")]
