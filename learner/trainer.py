"""One engine and the micro-batches that reach it: passes over a batch without gradient, and optimizer steps."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from learner.batch_metrics import MetricSums
from learner.batch_tensors import BatchTensors
from learner.engine import TrainEngine
from learner.experience import Experience
from learner.models import ModelInputs, collate
from learner.objectives import Contribution
from learner.ranks import Ranks
from rlhf_cluster.batching import MicroBatch, MiniBatchPlan, plan_minibatches
from rlhf_cluster.types import Ratio

Objective = Callable[[TrainEngine, ModelInputs, Experience], Contribution]
Extra = Callable[[TrainEngine], Contribution]
"""A further micro-batch of an optimizer step that is no part of the batch (text)."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """``stepped``: whether the step was applied, the same on every rank; ``share``: this rank's part of its metrics."""

    stepped: bool
    share: MetricSums


class Trainer:
    """Every public method but ``plan`` is collective: all ranks call it alike.

    ``micro_batches_run`` counts forward passes, so that somebody else can see whether this rank goes on.

    Args:
        packed: whether this model takes samples laid end to end.
        micro_batch_tokens: ``learner.micro_batch_tokens``.
    """

    def __init__(self, engine: TrainEngine, ranks: Ranks, *, packed: bool, micro_batch_tokens: int) -> None:
        self.engine = engine
        self.packed = packed
        self.micro_batches_run = 0
        self._ranks = ranks
        self._micro_batch_tokens = micro_batch_tokens

    def plan(self, tensors: BatchTensors, *, minibatches: int, seed: int, epoch: int) -> tuple[MiniBatchPlan, ...]:
        """Which rows make an optimizer step depends on ``seed`` and ``epoch`` alone, so it is the same for every
        model."""
        return plan_minibatches(
            tensors.lengths,
            ranks=self._ranks.world_size,
            minibatches=min(minibatches, len(tensors.pairs)),
            micro_batch_tokens=self._micro_batch_tokens,
            seed=seed,
            epoch=epoch,
            packed=self.packed,
        )

    def collect(
        self,
        tensors: BatchTensors,
        plan: Sequence[MiniBatchPlan],
        compute: Callable[[TrainEngine, ModelInputs], tuple[Tensor, ...]],
        widths: Sequence[int],
        share: MetricSums,
    ) -> list[Tensor]:
        """``compute`` over every row, without gradient: CPU tensors (R, width), one a width and result of ``compute``,
        which has (B, at most width) each.

        The micro-batches are those of the optimizer steps of ``plan``, so that a step sees exactly these numbers again.
        """
        collected = [torch.zeros(len(tensors.pairs), width) for width in widths]
        for micro_batch in self._mine(plan):
            inputs = self._inputs(tensors, micro_batch)
            self._measure_padding(inputs, micro_batch, share)
            with torch.no_grad():
                results = compute(self.engine, inputs)
            for target, computed in zip(collected, results, strict=True):
                place(target, micro_batch, computed)
            self.micro_batches_run += 1
        return [self._ranks.total(part) for part in collected]

    def step(
        self,
        minibatch: MiniBatchPlan,
        tensors: BatchTensors,
        experience: Experience,
        objective: Objective,
        whole: MetricSums,
        share: MetricSums,
        *,
        extras: Sequence[Extra] = (),
        watch: Callable[[MicroBatch, Contribution], None] | None = None,
    ) -> StepResult:
        """One optimizer step: this rank's micro-batches, whose losses come divided by what the whole minibatch counts.

        ``extras`` are accumulated into the same step, equally many on every rank; ``watch`` sees each contribution.
        ``share`` gets this rank's part of the metrics, ``whole`` what every rank knows alike.
        """
        mine = minibatch.ranks[self._ranks.rank]
        seen, means = MetricSums(), Counter[str]()

        def loss_of(compute: Callable[[], Contribution], rows: MicroBatch | None = None) -> Tensor:
            contribution = compute()
            seen.add(contribution.metrics)
            means.update(contribution.means)
            if watch is not None and rows is not None:
                watch(rows, contribution)
            self.micro_batches_run += 1
            return contribution.loss

        for index, micro_batch in enumerate(mine):
            inputs = self._inputs(tensors, micro_batch)
            self._measure_padding(inputs, micro_batch, share)
            part = experience.take(micro_batch, inputs.response_ids.shape[1], self._ranks.device)
            compute = functools.partial(objective, self.engine, inputs, part)
            last = not extras and index == len(mine) - 1
            self.engine.accumulate(functools.partial(loss_of, compute, rows=micro_batch), last=last)
        for index, extra in enumerate(extras):
            compute = functools.partial(extra, self.engine)
            self.engine.accumulate(functools.partial(loss_of, compute), last=index == len(extras) - 1)
        # A mean of the step is whole on no rank, so its one count comes from the first.
        seen.add({name: Ratio(part, float(self._ranks.rank == 0)) for name, part in means.items()})
        share.add(seen)
        lr = self.engine.schedule.next_lr
        outcome = self.engine.step()
        name = self.engine.name
        whole.add(
            {
                f"optimizer_steps_{name}": Ratio(float(outcome.stepped), 1.0),
                f"optimizer_steps_skipped_{name}": Ratio(float(not outcome.stepped), 1.0),
                f"grad_norm_{name}": Ratio(outcome.grad_norm, 1.0) if outcome.stepped else Ratio(0.0, 0.0),
                f"lr_{name}": Ratio(lr, 1.0),
            }
        )
        return StepResult(outcome.stepped, seen)

    def _inputs(self, tensors: BatchTensors, micro_batch: MicroBatch) -> ModelInputs:
        inputs = collate([tensors.pairs[row] for row in micro_batch], self._ranks.device, packed=self.packed)
        sampled = [token for row in micro_batch for token in tensors.pairs[row][1].tolist()]
        # A filler has a row, but no token of anybody.
        if micro_batch and inputs.response_ids[inputs.response_mask].tolist() != sampled:
            raise RuntimeError(f"rollouts {[tensors.ids[row] for row in micro_batch]}: other ids than were sampled")
        return inputs

    def _mine(self, plan: Sequence[MiniBatchPlan]) -> list[MicroBatch]:
        return [micro_batch for minibatch in plan for micro_batch in minibatch.ranks[self._ranks.rank]]

    def _measure_padding(self, inputs: ModelInputs, micro_batch: MicroBatch, share: MetricSums) -> None:
        real, slots = inputs.tokens
        share.add({f"padding_{self.engine.name}": Ratio(slots - real, slots) if micro_batch else Ratio(slots, slots)})


def place(target: Tensor, rows: MicroBatch, computed: Tensor) -> None:
    """Write the rows of a micro-batch into the (R, width) ``target``."""
    if rows:
        target[list(rows), : computed.shape[1]] = computed.detach().float().cpu()
