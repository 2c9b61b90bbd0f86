"""What the tensors of a checkpoint are cut for: what a resume must have in common with the run that saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_cluster.config import AlgorithmConfig, LearnerConfig, ModelConfig


def checkpoint_layout(model: ModelConfig, algorithm: AlgorithmConfig, learner: LearnerConfig) -> dict[str, Any]:
    """What the tensors of a checkpoint are cut for, by the key that decides it; a resume needs the same."""
    return {
        "learner.ranks": learner.ranks,
        "learner.zero_stage": learner.zero_stage,
        "model.dtype": model.dtype,
        "a critic (algorithm.name: ppo)": algorithm.uses_critic,
        "learner.lora": None if learner.lora is None else learner.lora.model_dump(mode="json"),
    }


def saved_layout(state: Mapping[str, Any]) -> dict[str, Any]:
    """``checkpoint_layout`` of the learner state of a checkpoint; those of before adapters do not name them."""
    return {"learner.lora": None, **state["layout"]}
