"""Tensor state of one engine on disk: DeepSpeed's optimizer state, and the model as a Hugging Face folder.

Layout under a checkpoint folder, for a model called policy: ``policy/`` (safetensors, config, tokenizer), which
transformers and vLLM load as it is, and ``deepspeed/policy/`` (master weights, moments), one part a rank.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from learner.engine import TrainEngine
from learner.weight_publisher import hugging_face_model, iterate_weights

_TAG = "state"
_TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "generation_config.json",
    "*.model",
)


# The plain value classes that DeepSpeed's optimizer state holds besides tensors.
_STATE_CLASSES = [LossScaler, ZeroStageEnum, fragment_address]


class WeightsOnlyCheckpointEngine(TorchCheckpointEngine):
    """DeepSpeed's own loader unpickles anything; this one runs no code from a checkpoint."""

    def load(self, path: str, map_location: Any = None) -> Any:
        with torch.serialization.safe_globals(_STATE_CLASSES):
            return torch.load(path, map_location=map_location, weights_only=True)


def save_engine(engine: TrainEngine, folder: Path, *, source: str, rank: int) -> None:
    """Save ``engine`` under ``folder``; tokenizer files are copied from the model folder ``source``. Collective."""
    engine.deepspeed.save_checkpoint(str(_state_folder(engine, folder)), tag=_TAG, save_latest=False)
    weights = {}
    for name, weight in iterate_weights(engine):
        if rank == 0:
            weights[name] = weight.to("cpu", copy=True)
    if rank == 0:
        target = folder / engine.name
        hugging_face_model(engine).save_pretrained(target, state_dict=weights)
        _copy_tokenizer(Path(source), target)
    dist.barrier()


def load_engine(engine: TrainEngine, folder: Path) -> None:
    """Restore weights, master weights and moments saved by ``save_engine`` with the same ranks and stage. Collective.

    Raises:
        FileNotFoundError: there is no such checkpoint.
    """
    state = _state_folder(engine, folder)
    if not state.is_dir():
        raise FileNotFoundError(f"checkpoint {folder} has no {engine.name} state ({state})")
    engine.deepspeed.checkpoint_engine = WeightsOnlyCheckpointEngine()
    engine.deepspeed.load_checkpoint(str(state), tag=_TAG)


def save_json(path: Path, state: Mapping[str, Any]) -> None:
    """Write ``state`` so that the file is complete or absent."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(state, indent=1), encoding="utf-8")
    os.replace(partial, path)


def load_json(path: Path) -> dict[str, Any]:
    """Raises FileNotFoundError when there is no such file."""
    return json.loads(path.read_text(encoding="utf-8"))


def _state_folder(engine: TrainEngine, folder: Path) -> Path:
    return folder / "deepspeed" / engine.name


def _copy_tokenizer(source: Path, target: Path) -> None:
    for pattern in _TOKENIZER_FILES:
        for file in source.glob(pattern):
            if file.is_file():
                shutil.copy2(file, target / file.name)
