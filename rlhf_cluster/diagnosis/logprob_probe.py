"""The log-prob probe: the learner scores fixed token ids under every version, and each engine must score them alike.

The learner's answers travel in the snapshot's manifest, so a worker can be probed at any time under the version it was
told to hold, also one that comes back hours later, and nobody has to ask a learner that has trained on since.

    manifest["probe"] = {"sequences": [[id, ...], ...], "logprobs": [[nats of ids 1, 2, ...], ...]}

Parameters can be right while the copies that an engine computes with are not; log-probs come from those copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlhf_cluster.types import Floats

SEQUENCES = 2
TOKENS = 24
"""Ids a sequence; the first is given, the others are scored."""
# Random ids are improbable ones (-15 nats), where bfloat16 engines and learners differ more than on sampled tokens:
# 0.06 to 0.09 nats was seen with SmolLM2-135M.
TOLERANCE_NATS = {"float32": 0.01, "bfloat16": 0.25}


class ProbeFailed(RuntimeError):
    """An engine scores the probe otherwise than the learner did: it does not compute with the learner's weights."""


def sequences(vocab_size: int) -> list[list[int]]:
    """The probe of a model with so many token ids; the same at every call, on every machine."""
    generator = np.random.Generator(np.random.PCG64(20_017))
    return [generator.integers(0, vocab_size, TOKENS).tolist() for _ in range(SEQUENCES)]


def manifest_entry(probed: Sequence[Sequence[int]], logprobs: Sequence[Floats]) -> dict[str, Any]:
    """``manifest["probe"]``: the learner's log-probs at temperature 1 of every id but a sequence's first, in nats."""
    return {
        "sequences": [list(ids) for ids in probed],
        "logprobs": [[float(value) for value in row] for row in logprobs],
    }


def tolerance_nats(dtype: str, configured: float | None) -> float:
    """``publish.probe_tolerance_nats``, by dtype when it is not set."""
    return TOLERANCE_NATS[dtype] if configured is None else configured


def check(
    entry: Mapping[str, Any], engine_logprobs: Sequence[Floats], *, worker: str, version: int, tolerance: float
) -> float:
    """Mean |engine - learner| in nats a token. An engine too short for a sequence scores its beginning.

    Raises:
        ProbeFailed: above ``tolerance``, a log-prob that is not finite, or no token to compare.
    """
    total, count = 0.0, 0
    for mine, theirs in zip(engine_logprobs, entry["logprobs"], strict=True):
        total += float(np.abs(np.asarray(mine, np.float64) - np.asarray(theirs[: len(mine)], np.float64)).sum())
        count += len(mine)
    mean = total / count if count else float("nan")
    if not mean <= tolerance:
        raise ProbeFailed(
            f"{worker} and the learner differ by {mean:.4f} nats a token on the probe of version {version} (limit "
            f"{tolerance:g}, publish.probe_tolerance_nats): the engine does not compute with the weights it was sent"
        )
    return mean
