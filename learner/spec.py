"""What a learner rank is told: the parts of the configuration it needs. Imports neither torch nor Ray."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlhf_cluster.checkpoint_layout import checkpoint_layout
from rlhf_cluster.config import AlgorithmConfig, Config, LearnerConfig, ModelConfig, RewardConfig


@dataclass(frozen=True, slots=True)
class LearnerSpec:
    """The parts of the configuration a rank needs."""

    model: ModelConfig
    algorithm: AlgorithmConfig
    learner: LearnerConfig
    reward: RewardConfig
    temperature: float
    max_new_tokens: int
    seed: int
    steps: int
    """Learner steps the run plans; the warm-up is a share of them."""
    max_staleness: int
    max_skipped_steps: int
    max_unscorable_fraction: float
    device: Literal["cpu", "cuda"]
    snapshot_dir: Path
    """Folder in shared memory for weight snapshots; rank 0 writes there."""

    @classmethod
    def from_config(cls, config: Config, snapshot_dir: Path) -> LearnerSpec:
        return cls(
            model=config.model,
            algorithm=config.algorithm,
            learner=config.learner,
            reward=config.reward,
            temperature=config.rollout.temperature,
            max_new_tokens=config.rollout.max_new_tokens,
            seed=config.run.seed,
            steps=config.run.steps,
            max_staleness=config.queue.max_staleness,
            max_skipped_steps=config.guardrails.max_skipped_steps,
            max_unscorable_fraction=config.guardrails.max_unscorable_fraction,
            device=config.cluster.device,
            snapshot_dir=snapshot_dir,
        )

    @property
    def critic_path(self) -> str:
        path = self.model.critic or self.model.reward
        if path is None:
            raise ValueError("the critic has nothing to start from: set model.critic or model.reward")
        return path

    @property
    def layout(self) -> dict[str, Any]:
        """What the tensors of a checkpoint are cut for, by the key that decides it."""
        return checkpoint_layout(self.model, self.algorithm, self.learner)
