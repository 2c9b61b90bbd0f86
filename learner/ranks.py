"""The data-parallel ranks of the learner: who this process is, and sums over all of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from learner.batch_metrics import MetricSums
from rlhf_cluster.types import Ratio


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among ``world_size``; ``device`` is where collectives find their tensors."""

    rank: int
    world_size: int
    device: torch.device

    def total(self, part: Tensor) -> Tensor:
        """The sum of every rank's CPU tensor. Collective.

        Where every row belongs to one rank and is 0 elsewhere nothing is rounded.
        """
        if self.world_size == 1:
            return part
        on_device = part.to(self.device)
        dist.all_reduce(on_device)
        return on_device.cpu()

    def metrics(self, share: MetricSums) -> dict[str, Ratio]:
        """Every rank's share added up; all ranks have the same names. Collective."""
        names = sorted(share)
        sums = torch.tensor([[share[name].total, share[name].count] for name in names], dtype=torch.float64)
        totals = self.total(sums).tolist()
        return {name: Ratio(total, count) for name, (total, count) in zip(names, totals, strict=True)}
