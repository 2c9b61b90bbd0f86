"""One rank of the learner, a plain class: a train batch in, one policy version and its metrics out.

    batch -> policy pass (proximal log-probs, entropy) -> score normalisation -> token rewards
          -> critic pass (old values) -> GAE, whitening -> epochs x minibatches of (policy step, critic step)

Passes without gradient are shared: each rank computes its part and all ranks add up to the whole batch. Before the
first batch's policy step the critic may be fitted to Monte-Carlo returns (``learner.critic_pretrain_steps``): a critic
that comes from a reward model knows nothing of the returns yet, and its advantages would be noise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from learner.checkpoint import load_engine, load_json, save_engine, save_json
from learner.engine import TrainEngine
from learner.experience import (
    BatchTensors,
    Experience,
    MetricSums,
    batch_metrics,
    build_experience,
    monte_carlo_returns,
    normalised_scores,
    rewards_of,
)
from learner.models import DTYPES, ModelInputs, check_vocabularies, collate, load_critic, load_policy
from learner.spec import LearnerSpec
from learner.weight_publisher import WeightBroadcaster, WeightPublisher
from rlhf_cluster.algorithms.kl import AdaptiveKL, FixedKL
from rlhf_cluster.algorithms.losses import TokenLoss, policy_loss, value_loss
from rlhf_cluster.algorithms.rewards import RunningMoments
from rlhf_cluster.batching import MicroBatch, MiniBatchPlan, plan_minibatches
from rlhf_cluster.config import KLConfig
from rlhf_cluster.protocols import WeightBroadcast, WeightSnapshot
from rlhf_cluster.seeds import derive_seed
from rlhf_cluster.types import Floats, Ratio, Rollout, TrainBatch, UpdateResult

_STATE_FILE = "learner.json"


class LearnerDiverged(RuntimeError):
    """Too many learner steps in a row had gradients that are not finite."""


class LearnerRank:
    """Policy and critic of one data-parallel rank. Every public method is collective: all ranks call it alike.

    ``torch.distributed`` is to be up before (``engine.init_distributed``).
    """

    def __init__(self, spec: LearnerSpec, *, rank: int, world_size: int) -> None:
        self.spec = spec
        self.version = 0
        self._rank = rank
        self._world_size = world_size
        self._device = torch.device(spec.device)
        steps = spec.steps * spec.learner.epochs * spec.learner.minibatches
        policy = load_policy(spec.model.policy, spec.model, spec.learner, temperature=spec.temperature)
        critic = load_critic(spec.critic_path, spec.model, spec.learner)
        check_vocabularies(policy, critic)
        self.policy = self._engine(policy, spec.learner.policy_lr, steps, "policy")
        self.critic = self._engine(critic, spec.learner.critic_lr, steps + spec.learner.critic_pretrain_steps, "critic")
        self._moments = RunningMoments()
        self._kl = _kl_controller(spec.algorithm.kl)
        self._critic_pretrained = spec.learner.critic_pretrain_steps == 0
        self._skipped_in_a_row = 0
        self._publisher = WeightPublisher(self.policy, spec.snapshot_dir, rank=rank)
        self._broadcaster = WeightBroadcaster(self.policy, rank=rank)

    def _engine(self, model: torch.nn.Module, lr: float, steps: int, name: str) -> TrainEngine:
        return TrainEngine(
            model.to(self._device),
            lr=lr,
            total_optimizer_steps=steps,
            config=self.spec.learner,
            dtype=DTYPES[self.spec.model.dtype],
            name=name,
        )

    def train(self, batch: TrainBatch) -> UpdateResult:
        """One learner step. The version grows by one when at least one policy optimizer step was applied.

        Raises:
            ValueError: the batch is for another version, or holds what may not be trained.
            LearnerDiverged: ``guardrails.max_skipped_steps`` learner steps in a row changed nothing.
        """
        if batch.learner_version != self.version:
            raise ValueError(f"a batch for version {batch.learner_version} came to a learner at version {self.version}")
        started = time.perf_counter()
        tensors = BatchTensors.from_batch(batch, self.spec.max_staleness)
        if not tensors.n_tokens:
            return UpdateResult(self.version, False, {"empty_fraction": Ratio(tensors.n_empty, tensors.n_empty)})
        # What every rank computes alike, and what is a rank's share of a sum.
        whole, share = MetricSums(), MetricSums()
        plan = self._plan(tensors, 0)

        moments_before = self._moments.state_dict()
        proximal, entropies = self._policy_pass(tensors, plan, share)
        scores = normalised_scores(tensors, self._moments, self.spec.reward)
        algorithm, kl_coef = self.spec.algorithm, self._kl.coef
        rewards = rewards_of(tensors, proximal, scores, algorithm=algorithm, kl_coef=kl_coef)
        whole.add(batch_metrics(tensors, proximal, entropies, scores, max_staleness=self.spec.max_staleness))
        forward_done = time.perf_counter()
        if not self._critic_pretrained:
            self._pretrain_critic(tensors, rewards, whole)
        pretrained = time.perf_counter()
        values, after_last = self._critic_pass(tensors, plan)
        experience, fit = build_experience(tensors, proximal, rewards, values, after_last, algorithm=algorithm)
        whole.add(fit)

        policy_seconds = 0.0
        critic_started = time.perf_counter()
        for epoch in range(self.spec.learner.epochs):
            for minibatch in self._plan(tensors, epoch):
                before = time.perf_counter()
                stepped = self._step(self.policy, minibatch, tensors, experience, self._policy_loss, whole, share)
                policy_seconds += time.perf_counter() - before
                if stepped:  # a minibatch that the policy had to skip changes nothing at all
                    self._step(self.critic, minibatch, tensors, experience, self._value_loss, whole, share)
        finished = time.perf_counter()

        stepped = whole["optimizer_steps_policy"].total > 0
        if not stepped:
            # Its prompts come again, and their scores with them.
            self._moments.load_state_dict(moments_before)
        self._close(stepped, tensors, whole)
        whole.add(
            {
                "kl_coef": Ratio(kl_coef, 1.0),
                "train_seconds": Ratio(finished - started, 1.0),
                "policy_pass_seconds": Ratio(forward_done - started, 1.0),
                "critic_pretrain_seconds": Ratio(pretrained - forward_done, 1.0),
                "critic_pass_seconds": Ratio(critic_started - pretrained, 1.0),
                "policy_train_seconds": Ratio(policy_seconds, 1.0),
                "critic_train_seconds": Ratio(finished - critic_started - policy_seconds, 1.0),
            }
        )
        return UpdateResult(self.version, stepped, {**whole, **self._reduced(share)})

    def logprobs(self, rollouts: Sequence[Rollout]) -> list[Floats]:
        """(T,) log-probs of each rollout's tokens under the current policy, nats, temperature applied.

        Every rank computes all of them, so that no rank is missing in a gather of sharded weights.
        """
        answered = [(rollout.prompt_token_ids, rollout.token_ids) for rollout in rollouts]
        inputs = collate(answered, self._device)
        with torch.no_grad():
            logprobs, _ = self.policy(inputs, with_entropy=False)
        return [row[: len(tokens)].float().cpu().numpy() for row, (_, tokens) in zip(logprobs, answered, strict=True)]

    def snapshot(self) -> WeightSnapshot | None:
        """Write the policy as the current version; rank 0 returns where, the others None."""
        return self._publisher.write(self.version)

    def announce(self) -> WeightSnapshot:
        """What ``broadcast`` will send, without sending or writing anything. Not collective."""
        version = self.version
        return WeightSnapshot(version, self._publisher.path(version), self._broadcaster.manifest(version))

    def broadcast(self, version: int, broadcast: WeightBroadcast, transport: Mapping[str, Any]) -> None:
        """Send the live policy weights to the engines, from rank 0.

        Raises:
            ValueError: the weights are no longer those of ``version``.
        """
        if version != self.version:
            raise ValueError(f"version {version} was to be broadcast, but the learner is at version {self.version}")
        self._broadcaster.send(version, broadcast, transport)

    def save(self, folder: Path) -> None:
        """Policy and critic as Hugging Face folders, optimizer state, and everything else as JSON, under ``folder``."""
        save_engine(self.policy, folder, source=self.spec.model.policy, rank=self._rank)
        save_engine(self.critic, folder, source=self.spec.critic_path, rank=self._rank)
        if self._rank == 0:
            save_json(folder / _STATE_FILE, self.state())
        dist.barrier()

    def load(self, folder: Path) -> None:
        """Go on exactly where ``save`` stood.

        Raises:
            ValueError: it was written by another number of ranks, ZeRO stage or dtype.
            FileNotFoundError: there is no such checkpoint.
        """
        state = load_json(folder / _STATE_FILE)
        for key, mine in self._layout().items():
            if state["layout"][key] != mine:
                raise ValueError(
                    f"checkpoint {folder} has {key} {state['layout'][key]}, the configuration {mine}; optimizer state "
                    f"is cut for {key}, so set it as before, or start a new run from {folder}/policy"
                )
        load_engine(self.policy, folder)
        load_engine(self.critic, folder)
        self.version = int(state["version"])
        self._critic_pretrained = bool(state["critic_pretrained"])
        self._skipped_in_a_row = int(state["skipped_in_a_row"])
        self._moments.load_state_dict(state["moments"])
        self._kl.load_state_dict(state["kl"])
        self.policy.schedule.applied = int(state["optimizer_steps"]["policy"])
        self.critic.schedule.applied = int(state["optimizer_steps"]["critic"])
        torch.set_rng_state(torch.frombuffer(bytearray.fromhex(state["torch_rng"]), dtype=torch.uint8))

    def state(self) -> dict[str, Any]:
        """Everything but tensors, as JSON values, the same on every rank."""
        return {
            "layout": self._layout(),
            "version": self.version,
            "critic_pretrained": self._critic_pretrained,
            "skipped_in_a_row": self._skipped_in_a_row,
            "moments": self._moments.state_dict(),
            "kl": self._kl.state_dict(),
            "optimizer_steps": {"policy": self.policy.schedule.applied, "critic": self.critic.schedule.applied},
            "torch_rng": torch.get_rng_state().numpy().tobytes().hex(),
        }

    def close(self) -> None:
        """Remove the snapshots and free both engines."""
        self._publisher.close()
        self.policy.close()
        self.critic.close()

    def _layout(self) -> dict[str, Any]:
        return {
            "learner.ranks": self._world_size,
            "learner.zero_stage": self.spec.learner.zero_stage,
            "model.dtype": self.spec.model.dtype,
        }

    def _plan(self, tensors: BatchTensors, epoch: int) -> tuple[MiniBatchPlan, ...]:
        return plan_minibatches(
            tensors.lengths,
            ranks=self._world_size,
            minibatches=min(self.spec.learner.minibatches, len(tensors.pairs)),
            micro_batch_tokens=self.spec.learner.micro_batch_tokens,
            seed=derive_seed(self.spec.seed, "minibatches", self.version),
            epoch=epoch,
        )

    def _inputs(self, tensors: BatchTensors, micro_batch: MicroBatch) -> ModelInputs:
        return collate([tensors.pairs[row] for row in micro_batch], self._device)

    def _policy_pass(
        self, tensors: BatchTensors, plan: Sequence[MiniBatchPlan], share: MetricSums
    ) -> tuple[Tensor, Tensor]:
        """(R, T) proximal log-probs and entropies. The micro-batches are those of the first epoch, so that the first
        policy step sees exactly these numbers again and all its ratios are 1."""
        logprobs, entropies = torch.zeros(tensors.mask.shape), torch.zeros(tensors.mask.shape)
        for micro_batch in self._mine(plan):
            inputs = self._inputs(tensors, micro_batch)
            real, slots = inputs.tokens
            share.add({"padding_share": Ratio(slots - real, slots) if micro_batch else Ratio(slots, slots)})
            with torch.no_grad():
                computed = self.policy(inputs, with_entropy=True)
            _place(logprobs, micro_batch, computed[0])
            _place(entropies, micro_batch, computed[1])
        return self._from_all_ranks(logprobs), self._from_all_ranks(entropies)

    def _critic_pass(self, tensors: BatchTensors, plan: Sequence[MiniBatchPlan]) -> tuple[Tensor, Tensor]:
        """(R, T) values before each token and (R,) values after the last one."""
        values, after_last = torch.zeros(tensors.mask.shape), torch.zeros(len(tensors.pairs), 1)
        for micro_batch in self._mine(plan):
            with torch.no_grad():
                before, after = self.critic(self._inputs(tensors, micro_batch))
            _place(values, micro_batch, before)
            _place(after_last, micro_batch, after[:, None])
        return self._from_all_ranks(values), self._from_all_ranks(after_last)[:, 0]

    def _pretrain_critic(self, tensors: BatchTensors, rewards: Tensor, whole: MetricSums) -> None:
        returns = monte_carlo_returns(tensors, rewards, gamma=self.spec.algorithm.gamma)
        nothing = torch.zeros_like(returns)
        targets = Experience(tensors.mask, nothing, nothing, nothing, returns, nothing)
        steps = self.spec.learner.critic_pretrain_steps
        done, applied, epoch = 0, 0, 0
        # Its losses are far from those of training and would hide them, so they get no metric.
        while done < steps:
            for minibatch in self._plan(tensors, epoch)[: steps - done]:
                applied += self._step(
                    self.critic, minibatch, tensors, targets, _unclipped_value_loss, whole, MetricSums()
                )
                done += 1
            epoch += 1
        self._critic_pretrained = applied > 0

    def _step(
        self,
        engine: TrainEngine,
        minibatch: MiniBatchPlan,
        tensors: BatchTensors,
        experience: Experience,
        loss: Callable[[TrainEngine, ModelInputs, Experience], TokenLoss],
        whole: MetricSums,
        share: MetricSums,
    ) -> bool:
        """One optimizer step: this rank's micro-batches, each divided by the token count of the whole minibatch.

        Returns whether it was applied, the same on every rank.
        """
        n_tokens = int(experience.mask[list(minibatch.samples)].sum())
        mine = minibatch.ranks[self._rank]
        for index, micro_batch in enumerate(mine):
            inputs = self._inputs(tensors, micro_batch)
            part = experience.take(micro_batch, inputs.response_ids.shape[1], self._device)

            def normalised(inputs: ModelInputs = inputs, part: Experience = part) -> Tensor:
                token_loss = loss(engine, inputs, part)
                share.add(token_loss.metrics)
                return token_loss.total / n_tokens

            engine.accumulate(normalised, last=index == len(mine) - 1)
        lr = engine.schedule.next_lr
        outcome = engine.step()
        whole.add(
            {
                f"optimizer_steps_{engine.name}": Ratio(float(outcome.stepped), 1.0),
                f"optimizer_steps_skipped_{engine.name}": Ratio(float(not outcome.stepped), 1.0),
                f"grad_norm_{engine.name}": Ratio(outcome.grad_norm, 1.0) if outcome.stepped else Ratio(0.0, 0.0),
                f"lr_{engine.name}": Ratio(lr, 1.0),
            }
        )
        return outcome.stepped

    def _policy_loss(self, engine: TrainEngine, inputs: ModelInputs, part: Experience) -> TokenLoss:
        logprobs, _ = engine(inputs)
        loss = policy_loss(
            logprobs,
            part.proximal,
            part.advantages,
            part.mask,
            clip_low=self.spec.algorithm.clip_low,
            clip_high=self.spec.algorithm.clip_high,
            behaviour_logprobs=part.behaviour,
            importance_cap=self.spec.algorithm.importance_cap,
        )
        loss.metrics["policy_loss"] = Ratio(float(loss.total.detach()), loss.n_tokens)
        return loss

    def _value_loss(self, engine: TrainEngine, inputs: ModelInputs, part: Experience) -> TokenLoss:
        values, _ = engine(inputs)
        return value_loss(
            values, part.returns, part.mask, old_values=part.old_values, clip=self.spec.algorithm.value_clip
        )

    def _close(self, stepped: bool, tensors: BatchTensors, whole: MetricSums) -> None:
        if stepped:
            self.version += 1
            self._skipped_in_a_row = 0
            self._kl.update(whole["kl_reference_k1"].value, len(tensors.pairs))
            return
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row >= self.spec.max_skipped_steps:
            raise LearnerDiverged(
                f"{self._skipped_in_a_row} learner steps in a row had gradients that are not finite (version "
                f"{self.version}; guardrails.max_skipped_steps is {self.spec.max_skipped_steps}); lower "
                "learner.policy_lr, or look for broken scores or log-probs in metrics.jsonl"
            )

    def _mine(self, plan: Sequence[MiniBatchPlan]) -> list[MicroBatch]:
        return [micro_batch for minibatch in plan for micro_batch in minibatch.ranks[self._rank]]

    def _from_all_ranks(self, part: Tensor) -> Tensor:
        """Add up what each rank filled in; every row belongs to one rank, so nothing is rounded."""
        if self._world_size == 1:
            return part
        on_device = part.to(self._device)
        dist.all_reduce(on_device)
        return on_device.cpu()

    def _reduced(self, share: MetricSums) -> dict[str, Ratio]:
        names = sorted(share)
        sums = torch.tensor([[share[name].total, share[name].count] for name in names], dtype=torch.float64)
        totals = self._from_all_ranks(sums).tolist()
        return {name: Ratio(total, count) for name, (total, count) in zip(names, totals, strict=True)}


def _unclipped_value_loss(engine: TrainEngine, inputs: ModelInputs, part: Experience) -> TokenLoss:
    values, _ = engine(inputs)
    return value_loss(values, part.returns, part.mask)


def _place(target: Tensor, rows: MicroBatch, computed: Tensor) -> None:
    if rows:
        target[list(rows), : computed.shape[1]] = computed.float().cpu()


def _kl_controller(config: KLConfig) -> FixedKL | AdaptiveKL:
    if config.controller == "fixed":
        return FixedKL(config.coef)
    if config.target is None or config.horizon is None:
        raise ValueError("algorithm.kl.controller: adaptive needs target and horizon")
    return AdaptiveKL(config.coef, config.target, config.horizon)
