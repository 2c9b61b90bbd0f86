"""The learning rate of one model: linear warm-up to its peak, then constant, cosine or linear decay."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlhf_cluster.config import Decay


@dataclass(slots=True)
class Schedule:
    """``applied`` counts real optimizer steps: a skipped one does not advance it.

    The first of w warm-up steps has peak / w, step w has the peak. A decay reaches ``final_fraction * peak`` when all
    ``total_steps`` are done (so that the last step is still worth taking when that is 0), and stays there.
    """

    peak: float
    warmup_steps: int
    total_steps: int
    decay: Decay = "constant"
    final_fraction: float = 0.0
    applied: int = 0

    def go_on(self, applied: int, warmup_steps: int) -> None:
        """Continue after ``applied`` steps of a run whose warm-up has ``warmup_steps``.

        A plan of more steps would have a longer one, and begin it again.
        """
        self.applied = applied
        self.warmup_steps = min(self.warmup_steps, warmup_steps)

    @property
    def next_lr(self) -> float:
        """The rate of the next step."""
        if self.applied < self.warmup_steps:
            return self.peak * (self.applied + 1) / self.warmup_steps
        if self.decay == "constant":
            return self.peak
        left = max(1, self.total_steps - self.warmup_steps)
        progress = min(1.0, (self.applied - self.warmup_steps) / left)
        share = 0.5 * (1.0 + math.cos(math.pi * progress)) if self.decay == "cosine" else 1.0 - progress
        return self.peak * (self.final_fraction + (1.0 - self.final_fraction) * share)
