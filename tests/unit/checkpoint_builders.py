"""Small real checkpoint sets, and a disk that fails, dies or loses power at a chosen operation."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from rlhf_cluster.checkpoint_files import Files
from rlhf_cluster.checkpoint_retention import Retention
from rlhf_cluster.checkpoint_set import step_folder
from rlhf_cluster.checkpoint_writer import CheckpointWriter

# As the learner writes them: nested folders, several files.
TENSORS = ("policy/model.safetensors", "critic/model.safetensors", "deepspeed/policy/state/rank0.pt", "learner.json")


def tensors_of(step: int, size: int = 64) -> Callable[[Path], Awaitable[None]]:
    """Writes every file of a learner, each full of ``step``, so that files of two steps are told apart."""

    async def write(folder: Path) -> None:
        for name in TENSORS:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bytes([step % 256]) * size)

    return write


def state_of(step: int) -> dict[str, Any]:
    return {"step": step, "cursor": {"frontier": 2 * step}}


def save_set(root: Path, step: int, *, metric: float | None = None, retention: Retention | None = None) -> Path:
    """One durable set of ``step``; with no retention given nothing is ever deleted."""

    async def run() -> None:
        writer = CheckpointWriter(root, retention=retention or Retention(1000))
        await writer.save(step, state_of(step), tensors_of(step), metric)
        await writer.finish()

    asyncio.run(run())
    return step_folder(root, step)


def holds_step(folder: Path, step: int) -> bool:
    """Whether policy, critic, optimizer state and run state of the set are all those of ``step``."""
    tensors = {(folder / "learner" / name).read_bytes() for name in TENSORS}
    state = (folder / "run_state.json").read_text()
    return tensors == {next(iter(tensors))} and next(iter(tensors))[0] == step % 256 and f'"step": {step},' in state


class ScriptedFiles(Files):
    """Notes every operation as (name, path); ``before(number, name, path)`` runs first, numbered from 0."""

    def __init__(self, before: Callable[[int, str, Path], None] = lambda number, name, path: None) -> None:
        self.operations: list[tuple[str, Path]] = []
        self._before = before

    def _note(self, name: str, path: Path) -> None:
        number = len(self.operations)
        self.operations.append((name, path))
        self._before(number, name, path)

    def make_folder(self, folder: Path) -> None:
        self._note("make_folder", folder)
        super().make_folder(folder)

    def write(self, path: Path, text: str) -> None:
        self._note("write", path)
        super().write(path, text)

    def digest_and_sync(self, path: Path) -> str:
        self._note("digest_and_sync", path)
        return super().digest_and_sync(path)

    def sync_folder(self, folder: Path) -> None:
        self._note("sync_folder", folder)
        super().sync_folder(folder)

    def rename(self, source: Path, target: Path) -> None:
        self._note("rename", target)
        super().rename(source, target)

    def remove(self, folder: Path) -> None:
        self._note("remove", folder)
        super().remove(folder)
