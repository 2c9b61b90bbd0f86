"""A softmax policy small enough for a drill: one distribution over 16 tokens for each of four kinds of prompt.

Even tokens are what the reward likes, so a policy that learns drifts to them. Numpy only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhf_cluster.weight_manifest import check_names, check_tensor, tensor_entry

VOCABULARY, KINDS = 16, 4
Weights = dict[str, NDArray[np.float32]]


def initial_weights() -> Weights:
    """The uniform policy: version 0, and the reference."""
    return {"head": np.zeros(VOCABULARY, np.float32), "kind": np.zeros((KINDS, VOCABULARY), np.float32)}


def log_distribution(weights: Mapping[str, NDArray[np.float32]], kind: int, temperature: float) -> NDArray[np.float64]:
    """(V,) log-probabilities, nats."""
    logits = (weights["head"].astype(np.float64) + weights["kind"][kind]) / temperature
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def kind_of(prompt_token_ids: Any) -> int:
    return int(prompt_token_ids[0]) % KINDS


def score(token_ids: NDArray[np.int32]) -> float:
    """The share of even tokens."""
    return float(np.mean(token_ids % 2 == 0))


def manifest(version: int, weights: Weights) -> dict[str, Any]:
    return {"version": version, "tensors": {name: _entry(value) for name, value in weights.items()}}


def check(weights: Weights, promised: Mapping[str, Any]) -> None:
    """Raises WeightMismatch: names, shapes or bytes are not those of the manifest."""
    check_names(promised["tensors"], weights, what="a snapshot")
    for name, value in weights.items():
        check_tensor(name, promised["tensors"][name], "float32", value.shape, _raw(value))


def _entry(value: NDArray[np.float32]) -> dict[str, Any]:
    return tensor_entry("float32", value.shape, _raw(value))


def _raw(value: NDArray[np.float32]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8)
