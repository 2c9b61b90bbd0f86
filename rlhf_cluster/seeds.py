"""Every random seed of a run, derived from ``run.seed`` and the name of what it is for."""

from __future__ import annotations

import hashlib


def derive_seed(run_seed: int, *purpose: str | int) -> int:
    """A 31-bit seed that depends on the run seed and on every part of ``purpose``.

    >>> derive_seed(0, "engine", 1) != derive_seed(0, "engine", 2)
    True
    """
    text = "\x1f".join(str(part) for part in (run_seed, *purpose))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1


def sample_seed(run_seed: int, group_id: str, draw: int, sample: int) -> int:
    """Seed of one answer: distinct for every group, draw (``Attempt.draw``) and sample, the same again in the same
    run."""
    return derive_seed(run_seed, "sample", group_id, draw, sample)
