"""One update: from the tensors of a batch to optimizer steps of policy and critic. The diagram is in ``learner``."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from learner.batch_metrics import (
    MetricSums,
    advantage_metrics,
    batch_metrics,
    exclusion_metrics,
    masked_ratio,
    ratio_metrics,
    return_metrics,
)
from learner.batch_tensors import BatchTensors
from learner.engine import TrainEngine
from learner.experience import (
    Experience,
    answer_advantages,
    finish_advantages,
    monte_carlo_returns,
    normalised_scores,
    rewards_of,
    token_advantages,
)
from learner.models import DTYPES, ModelInputs, check_vocabularies, load_critic, load_policy
from learner.objectives import Contribution, PolicyObjective, value_objective
from learner.ptx import TextTraining
from learner.ranks import Ranks
from learner.reference import ReferenceModel, load_reference
from learner.spec import LearnerSpec
from learner.trainer import Trainer, place
from rlhf_cluster.algorithms.kl import AdaptiveKL, FixedKL, kl_estimate
from rlhf_cluster.algorithms.rewards import RunningMoments
from rlhf_cluster.batching import MicroBatch, MiniBatchPlan
from rlhf_cluster.config import KLConfig
from rlhf_cluster.seeds import derive_seed
from rlhf_cluster.types import Ratio


@dataclass(frozen=True, slots=True)
class Outcome:
    """``stepped``: at least one policy optimizer step was applied; ``metrics``: sums over counts, of all ranks."""

    stepped: bool
    metrics: dict[str, Ratio]


@dataclass(frozen=True, slots=True)
class _PolicyView:
    """What the policy says of a batch before its step, each (R, T): log-probs, entropies, and the KL to the reference
    that the reward is charged (zeros when it is charged none)."""

    logprobs: Tensor
    entropies: Tensor
    kl: Tensor

    def take(self, rows: list[int]) -> _PolicyView:
        return _PolicyView(self.logprobs[rows], self.entropies[rows], self.kl[rows])


@dataclass(frozen=True, slots=True)
class _Targets:
    """What the losses aim at: (R, T) advantages before whitening, returns and the critic's old values."""

    advantages: Tensor
    returns: Tensor
    old_values: Tensor


@dataclass(slots=True)
class _Seen:
    """What the training forwards of the newest epoch said, this rank's rows: (R, T) each, (R, 1) which rows."""

    logprobs: Tensor
    entropies: Tensor
    rows: Tensor

    @classmethod
    def nothing(cls, mask: Tensor) -> _Seen:
        return cls(torch.zeros(mask.shape), torch.zeros(mask.shape), torch.zeros(len(mask), 1))

    def watch(self, rows: MicroBatch, contribution: Contribution) -> None:
        if contribution.logprobs is not None:
            place(self.logprobs, rows, contribution.logprobs)
        if contribution.entropies is not None:
            place(self.entropies, rows, contribution.entropies)
        place(self.rows, rows, torch.ones(len(rows), 1))


@dataclass(slots=True)
class _Stopwatch:
    """Seconds by stage."""

    seconds: dict[str, float] = field(default_factory=dict)
    _since: float = field(default_factory=time.perf_counter)

    def lap(self, stage: str) -> None:
        """What passed since the last lap belongs to ``stage``."""
        now = time.perf_counter()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._since
        self._since = now


class Updater:
    """Policy, critic (with ``algorithm.name: ppo``) and what their update remembers from batch to batch."""

    def __init__(self, spec: LearnerSpec, ranks: Ranks) -> None:
        self._spec = spec
        self._ranks = ranks
        algorithm, learner = spec.algorithm, spec.learner
        steps = spec.steps * learner.updates_a_batch
        policy = load_policy(
            spec.model.policy,
            spec.model,
            learner,
            temperature=spec.temperature,
            seed=derive_seed(spec.seed, "lora"),
        )
        critic = load_critic(spec.critic_path, spec.model, learner) if algorithm.uses_critic else None
        if critic is not None:
            check_vocabularies(policy, critic)
        self.policy = self._trainer(policy, learner.policy_lr, steps, "policy")
        self.critic: Trainer | None = None
        if critic is not None:
            self.critic = self._trainer(critic, learner.critic_lr, steps + learner.critic_pretrain_steps, "critic")
        self._reference: ReferenceModel | None = None
        if algorithm.needs_reference_model:
            reference = load_reference(spec.model.reference_path, spec.model, learner)
            self._reference = reference.to(ranks.device)
        self._text: TextTraining | None = None
        if algorithm.ptx is not None:
            self._text = TextTraining.from_spec(spec, algorithm.ptx, ranks, packed=self.policy.packed)
        self._charges_reward = algorithm.kl.place == "reward" and algorithm.kl.coef > 0
        self._needs_policy_pass = self._charges_reward or learner.updates_a_batch > 1
        self._objective = PolicyObjective(
            algorithm, measures_entropy=not self._needs_policy_pass, reference=self._reference
        )
        self._moments = RunningMoments()
        self._kl = _kl_controller(algorithm.kl)
        self._critic_pretrained = learner.critic_pretrain_steps == 0

    def run(self, tensors: BatchTensors, step: int) -> Outcome:
        """Train on a batch; the order of its rows hangs on ``step``, the learner steps taken so far.

        Raises:
            BadData: more than ``guardrails.max_unscorable_fraction`` of the batch is not finite.
        """
        clock = _Stopwatch()
        # What every rank computes alike, and what is a rank's share of a sum.
        whole, share = MetricSums(), MetricSums()
        seed = derive_seed(self._spec.seed, "minibatches", step)
        view = None
        if self._needs_policy_pass and tensors.pairs:
            tensors, view = self._policy_pass(tensors, seed, share)
        tensors.check_excluded(self._spec.max_unscorable_fraction)
        if not tensors.pairs:
            empty = {"empty_fraction": Ratio(tensors.n_empty, tensors.n_empty)}
            return Outcome(False, {**empty, **exclusion_metrics(tensors)})
        clock.lap("policy_pass")

        moments_before = self._moments.state_dict()
        scores = normalised_scores(tensors, self._moments, self._spec.reward)
        kl_coef = self._kl.coef
        if self.critic is None:
            penalty = torch.zeros(tensors.mask.shape) if view is None else kl_coef * view.kl
            advantages = answer_advantages(tensors, scores, penalty, algorithm=self._spec.algorithm)
            nothing = torch.zeros_like(advantages)
            targets = _Targets(advantages, nothing, nothing)
        else:
            kl = torch.zeros(tensors.mask.shape) if view is None else view.kl
            rewards = rewards_of(tensors, scores, kl, kl_coef if self._charges_reward else 0.0)
            if not self._critic_pretrained:
                self._pretrain_critic(self.critic, tensors, rewards, seed, whole)
            clock.lap("critic_pretrain")
            values, after_last = self._critic_pass(self.critic, tensors, seed, share)
            bad = sorted({*tensors.bad_rows(values), *tensors.bad_rows(after_last)})
            if bad:
                kept = tensors.kept_without(bad)
                tensors = tensors.without(bad, "values")
                tensors.check_excluded(self._spec.max_unscorable_fraction)
                scores, rewards, values, after_last = (part[kept] for part in (scores, rewards, values, after_last))
                view = None if view is None else view.take(kept)
            advantages, returns = token_advantages(tensors, rewards, values, after_last, algorithm=self._spec.algorithm)
            targets = _Targets(advantages, returns, values)
            whole.add(return_metrics(values, returns, tensors.mask))
            clock.lap("critic_pass")
        whole.add(advantage_metrics(targets.advantages, tensors.mask))

        seen = self._optimise(tensors, targets, view, seed, whole, share, clock)
        stepped = whole["optimizer_steps_policy"].total > 0
        self._measure(tensors, view, seen, scores, whole)
        if stepped:
            self._kl.update(whole["kl_reference_k1"].value, len(tensors.pairs))
        else:
            # Its prompts come again, and their scores with them.
            self._moments.load_state_dict(moments_before)
        whole.add({"kl_coef": Ratio(kl_coef, 1.0), "train_seconds": Ratio(sum(clock.seconds.values()), 1.0)})
        whole.add({f"{stage}_seconds": Ratio(seconds, 1.0) for stage, seconds in clock.seconds.items()})
        return Outcome(stepped, {**whole, **self._ranks.metrics(share)})

    def state_dict(self) -> dict[str, Any]:
        """Everything but tensors, as JSON values, the same on every rank."""
        return {
            "critic_pretrained": self._critic_pretrained,
            "moments": self._moments.state_dict(),
            "kl": self._kl.state_dict(),
            "optimizer_steps": {trainer.engine.name: trainer.engine.schedule.applied for trainer in self.trainers},
            "warmup_steps": {trainer.engine.name: trainer.engine.schedule.warmup_steps for trainer in self.trainers},
            "planned_steps": self._spec.steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Exact to the bit; the engines' tensors are the checkpoint's business."""
        self._critic_pretrained = bool(state["critic_pretrained"])
        self._moments.load_state_dict(state["moments"])
        self._kl.load_state_dict(state["kl"])
        for trainer in self.trainers:
            name, schedule = trainer.engine.name, trainer.engine.schedule
            # Older checkpoints do not say how long the warm-up is.
            warmup_steps = int(state.get("warmup_steps", {}).get(name, schedule.warmup_steps))
            schedule.go_on(int(state["optimizer_steps"][name]), warmup_steps)

    @property
    def trainers(self) -> list[Trainer]:
        """Policy, then critic if there is one."""
        return [self.policy] if self.critic is None else [self.policy, self.critic]

    def _trainer(self, model: Any, lr: float, steps: int, name: str) -> Trainer:
        learner = self._spec.learner
        module: nn.Module = model.to(self._ranks.device)
        engine = TrainEngine(
            module,
            lr=lr,
            total_optimizer_steps=steps,
            config=learner,
            dtype=DTYPES[self._spec.model.dtype],
            name=name,
        )
        return Trainer(engine, self._ranks, packed=model.packed, micro_batch_tokens=learner.micro_batch_tokens)

    def _plan(self, trainer: Trainer, tensors: BatchTensors, seed: int, epoch: int) -> tuple[MiniBatchPlan, ...]:
        return trainer.plan(tensors, minibatches=self._spec.learner.minibatches, seed=seed, epoch=epoch)

    def _policy_pass(self, tensors: BatchTensors, seed: int, share: MetricSums) -> tuple[BatchTensors, _PolicyView]:
        """The policy before its step, over the micro-batches of the first epoch, so that the first policy step sees
        exactly these numbers again and all its ratios are 1. Groups with numbers that are not finite leave."""
        kl = self._spec.algorithm.kl
        full = self._charges_reward and kl.estimator == "full"

        def compute(engine: TrainEngine, inputs: ModelInputs) -> tuple[Tensor, ...]:
            rows = self._reference.rows(inputs) if full and self._reference is not None else None
            outputs = engine(inputs, with_entropy=True, reference=rows)
            return (outputs.logprobs, outputs.entropy, *((outputs.kl,) if full else ()))

        width = tensors.mask.shape[1]
        widths = (width,) * (3 if full else 2)
        logprobs, entropies, *rest = self.policy.collect(
            tensors, self._plan(self.policy, tensors, seed, 0), compute, widths, share
        )
        if full:
            charged = rest[0]
        elif self._charges_reward and kl.estimator != "full":
            charged = kl_estimate(logprobs, tensors.reference, kl.estimator)
        else:
            charged = torch.zeros_like(logprobs)
        view = _PolicyView(logprobs, entropies, charged)
        bad = tensors.bad_rows(logprobs)
        if not bad:
            return tensors, view
        return tensors.without(bad, "proximal_logprobs"), view.take(tensors.kept_without(bad))

    def _critic_pass(
        self, critic: Trainer, tensors: BatchTensors, seed: int, share: MetricSums
    ) -> tuple[Tensor, Tensor]:
        """(R, T) values before each token and (R,) values after the last one."""

        def compute(engine: TrainEngine, inputs: ModelInputs) -> tuple[Tensor, ...]:
            before, after = engine(inputs)
            return before, after[:, None]

        plan = self._plan(critic, tensors, seed, 0)
        values, after_last = critic.collect(tensors, plan, compute, (tensors.mask.shape[1], 1), share)
        return values, after_last[:, 0]

    def _pretrain_critic(
        self, critic: Trainer, tensors: BatchTensors, rewards: Tensor, seed: int, whole: MetricSums
    ) -> None:
        """Passes over the batch until the steps are used up or the loss of a pass is low enough. The batch is trained
        as any other afterwards, and what is sampled meanwhile waits in the queue: nothing is wasted."""
        learner = self._spec.learner
        returns = monte_carlo_returns(tensors, rewards, gamma=self._spec.algorithm.gamma)
        nothing = torch.zeros_like(returns)
        targets = Experience(tensors.mask, nothing, nothing, nothing, returns, nothing)
        done, applied, epoch, low_enough = 0, 0, 0, False
        # Its losses are far from those of training and would hide them, so they get metrics of their own.
        kept, mean_loss = MetricSums(), Ratio(0.0, 0.0)
        while done < learner.critic_pretrain_steps and not low_enough:
            losses = MetricSums()
            for minibatch in self._plan(critic, tensors, seed, epoch)[: learner.critic_pretrain_steps - done]:
                objective = functools.partial(value_objective, n_tokens=_tokens(minibatch, tensors), clip=None)
                applied += critic.step(minibatch, tensors, targets, objective, kept, losses).stepped
                done += 1
            mean_loss = self._ranks.metrics(losses)["value_loss"]
            low_enough = learner.critic_pretrain_loss is not None and mean_loss.value < learner.critic_pretrain_loss
            epoch += 1
        self._critic_pretrained = applied > 0
        whole.add({name: kept[name] for name in kept if name.startswith("optimizer_steps")})
        whole.add({"critic_pretrain_loss": mean_loss, "critic_pretrain_steps": Ratio(float(done), 1.0)})

    def _optimise(
        self,
        tensors: BatchTensors,
        targets: _Targets,
        view: _PolicyView | None,
        seed: int,
        whole: MetricSums,
        share: MetricSums,
        clock: _Stopwatch,
    ) -> _Seen:
        """All epochs and minibatches; returns what the policy's newest epoch saw, summed over ranks."""
        learner, algorithm = self._spec.learner, self._spec.algorithm
        experience = Experience(
            mask=tensors.mask,
            behaviour=tensors.behaviour,
            reference=tensors.reference,
            advantages=finish_advantages(targets.advantages, tensors.mask, algorithm=algorithm),
            returns=targets.returns,
            old_values=targets.old_values,
            proximal=None if view is None else view.logprobs,
        )
        objective = functools.partial(self._objective, kl_coef=self._kl.coef)
        seen, far_enough, left_out = _Seen.nothing(tensors.mask), False, 0
        for epoch in range(learner.epochs):
            if not far_enough:
                seen = _Seen.nothing(tensors.mask)
            critic_plan = self._plan(self.critic, tensors, seed, epoch) if self.critic is not None else ()
            for index, minibatch in enumerate(self._plan(self.policy, tensors, seed, epoch)):
                stepped = far_enough
                if far_enough:
                    left_out += 1
                else:
                    result = self.policy.step(
                        minibatch,
                        tensors,
                        experience.weighted(minibatch.samples, algorithm, self._spec.max_new_tokens),
                        objective,
                        whole,
                        share,
                        extras=self._text.of_step(self.policy.engine.schedule.applied) if self._text else (),
                        watch=seen.watch,
                    )
                    stepped = result.stepped
                    far_enough = self._beyond_target(result.share)
                clock.lap("policy_train")
                if self.critic is not None and stepped:  # what the policy had to skip changes nothing at all
                    value = functools.partial(
                        value_objective, n_tokens=_tokens(minibatch, tensors), clip=algorithm.value_clip
                    )
                    self.critic.step(critic_plan[index], tensors, experience, value, whole, share)
                    clock.lap("critic_train")
        if learner.target_kl is not None:
            planned = learner.epochs * min(learner.minibatches, len(tensors.pairs))
            whole.add({"target_kl_left_out": Ratio(float(left_out), float(planned))})
        total = self._ranks.total
        return _Seen(total(seen.logprobs), total(seen.entropies), total(seen.rows))

    def _beyond_target(self, share: MetricSums) -> bool:
        """Whether the policy has moved so far on this batch that it takes no further step on it. Collective."""
        target = self._spec.learner.target_kl
        return target is not None and self._ranks.metrics(share)["approx_kl"].value > target

    def _measure(
        self, tensors: BatchTensors, view: _PolicyView | None, seen: _Seen, scores: Tensor, whole: MetricSums
    ) -> None:
        if view is None:
            view = _PolicyView(seen.logprobs, seen.entropies, torch.zeros_like(seen.logprobs))
        algorithm = self._spec.algorithm
        whole.add(batch_metrics(tensors, view.logprobs, view.entropies, scores, max_staleness=self._spec.max_staleness))
        whole.add(exclusion_metrics(tensors))
        if self._charges_reward and algorithm.kl.estimator == "full":
            whole.add({"kl_reference_full": masked_ratio(view.kl, tensors.mask)})
        proximal = {"recomputed": view.logprobs, "behaviour": tensors.behaviour, "reference": tensors.reference}
        trained = tensors.mask & (seen.rows > 0)
        whole.add(ratio_metrics(seen.logprobs, proximal[algorithm.proximal], trained))


def _tokens(minibatch: MiniBatchPlan, tensors: BatchTensors) -> int:
    return int(tensors.mask[list(minibatch.samples)].sum())


def _kl_controller(config: KLConfig) -> FixedKL | AdaptiveKL:
    if config.controller == "fixed":
        return FixedKL(config.coef)
    if config.target is None or config.horizon is None:
        raise ValueError("algorithm.kl.controller: adaptive needs target and horizon")
    return AdaptiveKL(config.coef, config.target, config.horizon)
