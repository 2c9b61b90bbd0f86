"""One rank of the learner, a plain class: a train batch in, one policy version and its metrics out.

    batch -> policy pass (proximal log-probs, entropy) -> score normalisation
          -> with a critic:  token rewards -> critic pass (old values) -> GAE
             without one:    group advantages
          -> whitening, clipping -> epochs x minibatches of (policy step, critic step)

Passes without gradient are shared: each rank computes its part and all ranks add up to the whole batch. With one
optimizer step a batch and no KL in the reward nothing needs the policy pass: the training forward is the proximal one.
The critic may first be fitted to Monte-Carlo returns (``learner.critic_pretrain_steps``): one that comes from a reward
model knows nothing of the returns yet, and its advantages would be noise. ``updater`` has the code of this diagram.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from learner.batch_tensors import BatchTensors
from learner.checkpoint import load_engine, load_json, raise_together, save_engine, save_json
from learner.engine import TrainEngine
from learner.models import collate
from learner.ranks import Ranks
from learner.spec import LearnerSpec
from learner.updater import Updater
from learner.weight_publisher import WeightBroadcaster, WeightPublisher
from rlhf_cluster.checkpoint_layout import saved_layout
from rlhf_cluster.protocols import WeightBroadcast, WeightSnapshot
from rlhf_cluster.types import Floats, Rollout, TrainBatch, UpdateResult

_STATE_FILE = "learner.json"


class LearnerDiverged(RuntimeError):
    """Too many learner steps in a row had gradients that are not finite."""


class LearnerRank:
    """Policy and, with ``algorithm.name: ppo``, critic of one data-parallel rank.

    Every public method is collective: all ranks call it alike. ``torch.distributed`` is to be up before
    (``engine.init_distributed``).
    """

    def __init__(self, spec: LearnerSpec, *, rank: int, world_size: int) -> None:
        self.spec = spec
        self.version = 0
        self.steps = 0
        """Learner steps that changed the policy. Seeds hang on it, not on the version, which jumps when a group that
        died is restored."""
        self._rank = rank
        self._device = torch.device(spec.device)
        self._updater = Updater(spec, Ranks(rank, world_size, self._device))
        self._skipped_in_a_row = 0
        self._publisher = WeightPublisher(self.policy, spec.snapshot_dir, rank=rank)
        self._broadcaster = WeightBroadcaster(self.policy, rank=rank)

    @property
    def policy(self) -> TrainEngine:
        return self._updater.policy.engine

    @property
    def critic(self) -> TrainEngine:
        """Raises RuntimeError when the method has none."""
        if self._updater.critic is None:
            raise RuntimeError(f"algorithm.name: {self.spec.algorithm.name} has no critic")
        return self._updater.critic.engine

    @property
    def progress(self) -> int:
        """Micro-batches run so far; may be read from another thread while ``train`` runs. Not collective."""
        return sum(trainer.micro_batches_run for trainer in self._updater.trainers)

    def train(self, batch: TrainBatch) -> UpdateResult:
        """One learner step. The version grows by one when at least one policy optimizer step was applied.

        Groups that hold a number which is not finite are left out whole and counted by kind.

        Raises:
            ValueError: the batch is for another version, or holds tokens staler than the bound.
            BadData: more than ``guardrails.max_unscorable_fraction`` of the batch is not finite.
            LearnerDiverged: ``guardrails.max_skipped_steps`` learner steps in a row changed nothing.
        """
        if batch.learner_version != self.version:
            raise ValueError(f"a batch for version {batch.learner_version} came to a learner at version {self.version}")
        tensors = BatchTensors.from_batch(batch, self.spec.max_staleness)
        outcome = self._updater.run(tensors, self.steps)
        # A batch without anything to train says nothing about gradients.
        if "optimizer_steps_policy" in outcome.metrics:
            self._close(outcome.stepped)
        return UpdateResult(self.version, outcome.stepped, outcome.metrics)

    def logprobs(self, rollouts: Sequence[Rollout]) -> list[Floats]:
        """(T,) log-probs of each rollout's tokens under the current policy, nats, temperature applied.

        Every rank computes all of them, so that no rank is missing in a gather of sharded weights.
        """
        answered = [(rollout.prompt_token_ids, rollout.token_ids) for rollout in rollouts]
        inputs = collate(answered, self._device, packed=self._updater.policy.packed)
        with torch.no_grad():
            logprobs = self.policy(inputs).logprobs
        return [row[: len(tokens)].float().cpu().numpy() for row, (_, tokens) in zip(logprobs, answered, strict=True)]

    def snapshot(self) -> WeightSnapshot | None:
        """Write the policy as the current version; rank 0 returns where, the others None."""
        return self._publisher.write(self.version)

    def announce(self) -> WeightSnapshot:
        """What ``broadcast`` will send, without sending or writing anything. Not collective."""
        version = self.version
        return WeightSnapshot(version, self._publisher.path(version), self._broadcaster.announcement(version))

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
        for engine, source in self._engines():
            save_engine(engine, folder, source=source, rank=self._rank)
        error = None
        if self._rank == 0:
            try:
                save_json(folder / _STATE_FILE, self.state())
            except OSError as refused:
                error = refused
        raise_together(error, self._rank, self._device)

    def load(self, folder: Path, *, version: int | None = None) -> None:
        """Go on exactly where ``save`` stood; as ``version``, when the saved one was already published beyond.

        Raises:
            ValueError: it was written by another number of ranks, ZeRO stage or dtype, or with a critic or without one.
            FileNotFoundError: there is no such checkpoint.
        """
        state = load_json(folder / _STATE_FILE)
        saved = saved_layout(state)
        for key, mine in self.spec.layout.items():
            if saved.get(key, mine) != mine:
                raise ValueError(
                    f"checkpoint {folder} has {key} {saved[key]}, the configuration {mine}; optimizer state "
                    f"is cut for {key}, so set it as before, or start a new run from {folder}/policy"
                )
        for engine, _ in self._engines():
            load_engine(engine, folder)
        self.version = int(state["version"]) if version is None else version
        self.steps = int(state["steps"])
        self._skipped_in_a_row = int(state["skipped_in_a_row"])
        self._updater.load_state_dict(state["update"])
        torch.set_rng_state(torch.frombuffer(bytearray.fromhex(state["torch_rng"]), dtype=torch.uint8))

    def state(self) -> dict[str, Any]:
        """Everything but tensors, as JSON values, the same on every rank."""
        return {
            "layout": self.spec.layout,
            "version": self.version,
            "steps": self.steps,
            "skipped_in_a_row": self._skipped_in_a_row,
            "update": self._updater.state_dict(),
            "torch_rng": torch.get_rng_state().numpy().tobytes().hex(),
        }

    def close(self) -> None:
        """Remove the snapshots and free the engines."""
        self._publisher.close()
        for engine, _ in self._engines():
            engine.close()

    def _engines(self) -> list[tuple[TrainEngine, str]]:
        """Every engine and the model folder it started from."""
        sources = {"policy": self.spec.model.policy}
        if self._updater.critic is not None:
            sources["critic"] = self.spec.critic_path
        return [(trainer.engine, sources[trainer.engine.name]) for trainer in self._updater.trainers]

    def _close(self, stepped: bool) -> None:
        if stepped:
            self.version += 1
            self.steps += 1
            self._skipped_in_a_row = 0
            return
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row >= self.spec.max_skipped_steps:
            raise LearnerDiverged(
                f"{self._skipped_in_a_row} learner steps in a row had gradients that are not finite (version "
                f"{self.version}; guardrails.max_skipped_steps is {self.spec.max_skipped_steps}); lower "
                "learner.policy_lr, or look for broken scores or log-probs in metrics.jsonl"
            )
