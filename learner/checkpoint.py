"""Tensor state of one engine on disk: DeepSpeed's optimizer state, and the model as a Hugging Face folder.

Layout under a checkpoint folder, for a model called policy: ``policy/`` (safetensors, config, tokenizer), which
transformers and vLLM load as it is, and ``deepspeed/policy/`` (master weights, moments), one part a rank.

Ranks hand their files to the page cache and go on training; whoever turns the folder into a checkpoint
(``rlhf_cluster.checkpoint_writer``) waits until they are on disk. A rank whose disk is full says so to the others
instead of leaving them in a collective: all raise, and all can go on training.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from safetensors import SafetensorError

from learner.engine import TrainEngine
from learner.weight_publisher import hugging_face_model, iterate_weights, take_part

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


# Packs error number and rank into one integer, so that one all-reduce tells every rank both.
_RANKS = 1_000_000


class WeightsOnlyCheckpointEngine(TorchCheckpointEngine):
    """DeepSpeed's own loader unpickles anything; this one runs no code from a checkpoint.

    A write that the disk refuses is kept in ``error``, because DeepSpeed's save goes on with collectives.
    """

    def __init__(self) -> None:
        super().__init__()
        self.error: OSError | None = None

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self.attempt(lambda: os.makedirs(path, exist_ok=exist_ok))

    def save(self, state_dict: Any, path: str) -> None:
        def write() -> None:
            # An open file, because torch hides the system's error behind its own when it opens the path itself.
            with open(path, "wb") as file:
                torch.save(state_dict, file)

        self.attempt(write)

    def load(self, path: str, map_location: Any = None) -> Any:
        with torch.serialization.safe_globals(_STATE_CLASSES):
            return torch.load(path, map_location=map_location, weights_only=True)

    def attempt(self, write: Callable[[], None]) -> None:
        """Run ``write`` unless an earlier one failed; keep what the disk says against it, raise everything else."""
        if self.error is not None:
            return
        try:
            write()
        except (OSError, RuntimeError, SafetensorError) as error:
            self.error = _disk_error(error)
            if self.error is None:
                raise


def save_engine(engine: TrainEngine, folder: Path, *, source: str, rank: int) -> None:
    """Save ``engine`` under ``folder``; tokenizer files are copied from the model folder ``source``. Collective.

    Raises:
        OSError: on every rank, when the disk of any rank refused a file; the engine is as before.
    """
    files = WeightsOnlyCheckpointEngine()
    engine.deepspeed.checkpoint_engine = files
    # A program to run from inside a checkpoint that nobody here runs, copied by rank 0 alone between two collectives.
    engine.deepspeed._copy_recovery_script = lambda save_path: None
    engine.deepspeed.save_checkpoint(str(_state_folder(engine, folder)), tag=_TAG, save_latest=False)
    weights = {}
    if rank == 0:
        weights = {name: weight.to("cpu", copy=True) for name, weight in iterate_weights(engine)}
    else:
        take_part(engine)

    def write_model() -> None:
        target = folder / engine.name
        hugging_face_model(engine).save_pretrained(target, state_dict=weights)
        _copy_tokenizer(Path(source), target)

    if rank == 0:
        files.attempt(write_model)
    raise_together(files.error, rank, next(engine.module.parameters()).device)


def raise_together(error: OSError | None, rank: int, device: torch.device) -> None:
    """Every rank raises when any rank has an ``error``: the one that has it its own, the others naming it. Collective.

    A rank that raised alone would leave the others in their next collective until its deadline.
    """
    code = 0 if error is None else (error.errno or errno.EIO) * _RANKS + rank
    shared = torch.tensor([code], dtype=torch.int64, device=device)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    if error is not None:
        raise error
    if shared.item():
        number, failed_rank = divmod(int(shared.item()), _RANKS)
        raise OSError(number, f"learner rank {failed_rank} could not write its part: {os.strerror(number)}")


def load_engine(engine: TrainEngine, folder: Path) -> None:
    """Restore weights, master weights and moments saved by ``save_engine`` with the same ranks and stage. Collective.

    Raises:
        FileNotFoundError: there is no such checkpoint.
    """
    state = _state_folder(engine, folder)
    if not state.is_dir():
        raise FileNotFoundError(f"checkpoint {folder} has no {engine.name} state ({state})")
    deepspeed = engine.deepspeed
    deepspeed.checkpoint_engine = WeightsOnlyCheckpointEngine()
    # A rank reads one file of known name; DeepSpeed's glob for it takes [ ] * ? in the name of a run for a pattern.
    deepspeed._get_all_ckpt_names = lambda path, tag: [deepspeed._get_ckpt_name(path, tag)]
    loaded, _ = deepspeed.load_checkpoint(str(state), tag=_TAG)
    if loaded is None:
        raise FileNotFoundError(f"checkpoint {folder}: DeepSpeed found no state of the {engine.name} in {state}")


def save_json(path: Path, state: Mapping[str, Any]) -> None:
    """Write ``state`` so that the file is complete or absent, also after a power loss."""
    partial = path.with_suffix(".partial")
    with partial.open("w", encoding="utf-8") as file:
        json.dump(state, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def load_json(path: Path) -> dict[str, Any]:
    """Raises FileNotFoundError when there is no such file."""
    return json.loads(path.read_text(encoding="utf-8"))


def _disk_error(error: Exception) -> OSError | None:
    """The system's error behind what torch or safetensors made of it; None when it is about something else."""
    if isinstance(error, OSError):
        return error
    if isinstance(error.__context__, OSError):
        return error.__context__
    number = re.search(r"\(os error (\d+)\)", str(error))
    return None if number is None else OSError(int(number[1]), f"{os.strerror(int(number[1]))}: {error}")


def _state_folder(engine: TrainEngine, folder: Path) -> Path:
    return folder / "deepspeed" / engine.name


def _copy_tokenizer(source: Path, target: Path) -> None:
    for pattern in _TOKENIZER_FILES:
        for file in source.glob(pattern):
            if file.is_file():
                shutil.copy2(file, target / file.name)
