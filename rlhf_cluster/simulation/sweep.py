"""Predictions over a grid of settings: ``rollout.workers=2,4,8`` times ``queue.max_staleness=0,1``.

Keys are those of the config; with the prefix ``simulate.`` those of the cluster description
(``simulate.learner.tokens_per_s=1e4,2e4``).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_cluster.config import Config
from rlhf_cluster.config_io import ConfigError
from rlhf_cluster.config_yaml import parse_yaml
from rlhf_cluster.simulation.cluster_model import ClusterModel, cluster_from_config
from rlhf_cluster.simulation.predict import Prediction, simulate

CLUSTER_PREFIX = "simulate."


@dataclass(frozen=True, slots=True)
class Point:
    """One setting of the grid and what it comes to."""

    settings: dict[str, str]
    cluster: ClusterModel
    prediction: Prediction


def parse_sweep(text: str) -> tuple[str, list[str]]:
    """``key=a,b,c`` as (key, values).

    Raises:
        ConfigError: no key or no values.
    """
    key, separator, values = text.partition("=")
    listed = [value.strip() for value in values.split(",") if value.strip()]
    if not separator or not key.strip() or not listed:
        raise ConfigError(f"--sweep {text!r}: write key=a,b,c, e.g. rollout.workers=2,4,8")
    return key.strip(), listed


def describe(
    load: Callable[[Sequence[str]], Config], overrides: Sequence[str], overlay: Mapping[str, Any], source: str
) -> tuple[Config, ClusterModel]:
    """Config and cluster under ``overrides``; those with the prefix ``simulate.`` go to the cluster.

    Args:
        load: the config under its own overrides.
        overlay: see ``cluster_model``; overrides beat it.
        source: where the overlay comes from, for errors.

    Raises:
        ConfigError: an unknown key or an impossible value.
    """
    config = load([text for text in overrides if not text.startswith(CLUSTER_PREFIX)])
    layered: dict[str, Any] = {
        section: dict(values) if isinstance(values, Mapping) else values for section, values in overlay.items()
    }
    for text in overrides:
        if text.startswith(CLUSTER_PREFIX):
            _put(layered, text.removeprefix(CLUSTER_PREFIX))
    return config, cluster_from_config(config, layered, source=source or "cluster")


def sweep(
    describe_point: Callable[[Sequence[str]], tuple[Config, ClusterModel]],
    axes: Sequence[tuple[str, Sequence[str]]],
    *,
    steps: int,
    seed: int,
) -> list[Point]:
    """One prediction for every combination of the axes' values, the last axis fastest."""
    points = []
    for values in itertools.product(*(values for _, values in axes)):
        settings = dict(zip((key for key, _ in axes), values, strict=True))
        _, cluster = describe_point([f"{key}={value}" for key, value in settings.items()])
        points.append(Point(settings, cluster, simulate(cluster, steps, seed=seed)))
    return points


def _put(overlay: dict[str, Any], text: str) -> None:
    key, separator, value = text.partition("=")
    section, dot, field = key.partition(".")
    if not separator or not dot or not field:
        raise ConfigError(f"override {CLUSTER_PREFIX}{text!r}: write {CLUSTER_PREFIX}section.key=value")
    current = overlay.get(section)
    kept = current if isinstance(current, dict) else {}
    overlay[section] = {**kept, field: parse_yaml(value, f"override {CLUSTER_PREFIX}{text!r}")}
