"""Named components -> one score. What cannot be judged has no score: NaN, never 0."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rlhf_cluster.config import RewardComponent


class ComposedScore(NamedTuple):
    """``score``: the weighted sum, NaN when unscorable; ``components``: every value as it came, in config order."""

    score: float
    components: dict[str, float]


def compose(components: Sequence[RewardComponent], values: Mapping[str, float]) -> ComposedScore:
    """score = sum of weight * value over the components with a weight.

    A value that is not finite makes the score NaN, so that the rollout is left out and counted: mapped to 0 it would
    look better than an honest negative score. Components of weight 0 are metrics only and never touch the score.

    Raises:
        ValueError: a component without a value, or a value without a component.
    """
    names = [component.name for component in components]
    if set(names) != set(values):
        raise ValueError(f"one value a component: got values of {sorted(values)} for the components {sorted(names)}")
    weighted = [component.weight * values[component.name] for component in components if component.weight != 0]
    score = math.fsum(weighted) if all(map(math.isfinite, weighted)) else math.nan
    return ComposedScore(score, {name: values[name] for name in names})
