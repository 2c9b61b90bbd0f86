"""What can be found wrong before anything starts: model folders that are missing or contradict one another."""

from __future__ import annotations

import glob
import json
import logging
from pathlib import Path
from typing import Any

from rlhf_cluster.checkpoint_layout import checkpoint_layout, saved_layout
from rlhf_cluster.config import Config

log = logging.getLogger(__name__)


class PreflightError(ValueError):
    """The run cannot start as configured. The message names key, value and fix."""


def check_model_folders(config: Config) -> None:
    """Every model folder exists, holds a config and weights, and policy and reference share a vocabulary.

    Raises:
        PreflightError: naming the config key and the fix.
    """
    folders = {
        "model.policy": config.model.policy,
        "model.reference": config.model.reference,
        "model.reward": config.model.reward,
        "model.critic": config.model.critic,
    }
    configs = {key: _model_config(key, Path(folder)) for key, folder in folders.items() if folder is not None}
    if glob.escape(config.model.policy) != config.model.policy:
        raise PreflightError(
            f"model.policy: vLLM takes [, * and ? in {config.model.policy} for a pattern and finds no weights; rename "
            "the folder, or give a link to it"
        )
    policy = configs["model.policy"]
    reference = configs.get("model.reference", policy)
    if policy.get("vocab_size") != reference.get("vocab_size"):
        raise PreflightError(
            f"model.reference has a vocabulary of {reference.get('vocab_size')} and model.policy of "
            f"{policy.get('vocab_size')}; log-probabilities of the same token ids need the same vocabulary"
        )
    longest = policy.get("max_position_embeddings")
    if longest is not None and config.max_model_len > longest:
        raise PreflightError(
            f"data.max_prompt_tokens + rollout.max_new_tokens is {config.max_model_len} tokens, but model.policy "
            f"({config.model.policy}) reads {longest}; lower one of them"
        )


def check_run_folder(folder: Path, *, resume: str, has_checkpoint: bool) -> None:
    """``--resume required`` needs a checkpoint, ``never`` needs a folder without one.

    Raises:
        PreflightError: naming the folder and the fix.
    """
    if resume == "required" and not has_checkpoint:
        raise PreflightError(
            f"--resume required: {folder / 'checkpoints'} holds no complete checkpoint; "
            "check run.dir and run.name, or use --resume auto to start fresh"
        )
    if resume == "never" and has_checkpoint:
        raise PreflightError(
            f"--resume never: {folder} already holds a checkpoint, which a fresh run would overwrite; "
            "choose another run.name, or use --resume auto to continue it"
        )


def check_learner_layout(folder: Path, config: Config) -> None:
    """The optimizer state of a checkpoint is cut for its number of ranks, ZeRO stage and dtype. A ``run.steps`` that
    changes the learning rates of the steps to come is warned of.

    Raises:
        PreflightError: naming the setting, its saved value and the fix.
    """
    state = json.loads((folder / "learner.json").read_text(encoding="utf-8"))
    saved = saved_layout(state)
    for key, value in checkpoint_layout(config.model, config.algorithm, config.learner).items():
        if saved.get(key, value) != value:
            raise PreflightError(
                f"{key} is {value} but the checkpoint was saved with {saved[key]}, and its optimizer state is cut for "
                f"that; set it as before, or start a new run from {folder / 'policy'}"
            )
    # Older checkpoints do not say it.
    planned = state.get("update", {}).get("planned_steps", config.run.steps)
    if planned != config.run.steps and (decaying := _decaying(config)):
        log.warning(
            "run.steps is %d, the checkpoint was saved under %d: the decay (%s) is spread anew, so that the "
            "learning rate jumps here",
            config.run.steps,
            planned,
            ", ".join(decaying),
        )


def _decaying(config: Config) -> list[str]:
    """Keys of the decays that hang on ``run.steps``."""
    learner = config.learner
    decays = {"learner.policy_decay": learner.policy_decay}
    if config.algorithm.uses_critic:
        decays["learner.critic_decay"] = learner.critic_decay
    return [key for key, decay in decays.items() if decay != "constant"]


def _model_config(key: str, folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise PreflightError(f"{key}: no folder {folder}; give the path of a Hugging Face model folder")
    path = folder / "config.json"
    if not path.is_file():
        raise PreflightError(f"{key}: {folder} has no config.json, so it is no Hugging Face model folder")
    if not any(folder.glob("*.safetensors")):
        raise PreflightError(f"{key}: {folder} has no *.safetensors; save the weights with save_pretrained")
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise PreflightError(f"{key}: {path} is not valid JSON: {error}") from None
    return config
