"""Checkpoints as one atomic set: tensors, run state, and a manifest of sizes and hashes written last.

    checkpoints/step_00000010/
        learner/         policy/ and critic/ as Hugging Face folders, DeepSpeed state, learner.json
        run_state.json   step, version, cursor, queue, metric totals, baseline evaluation
        manifest.json    {"files": {path: {"bytes", "sha256"}}}; present only in a complete set

A set is written under a temporary name and renamed when its manifest is on disk, so a folder called ``step_*`` with a
manifest is complete. Older sets are deleted only after that.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from rlhf_cluster.data.cursor import PromptCursor
from rlhf_cluster.experience_queue import ExperienceQueue
from rlhf_cluster.metrics.recorder import MetricsRecorder

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
STATE = "run_state.json"
LEARNER = "learner"


class CheckpointDamaged(RuntimeError):
    """A file of a checkpoint is missing or differs from the manifest."""


def step_folder(root: Path, step: int) -> Path:
    return root / f"step_{step:08d}"


async def save_checkpoint(
    root: Path, step: int, state: Mapping[str, Any], save_learner: Callable[[Path], Awaitable[None]]
) -> Path:
    """Write the set for ``step`` and return its folder. ``save_learner`` fills the folder it is given."""
    final = step_folder(root, step)
    if is_complete(final):
        return final
    root.mkdir(parents=True, exist_ok=True)
    partial = root / f".partial_{step:08d}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    await save_learner(partial / LEARNER)
    await asyncio.to_thread(_complete, partial, final, step, json.dumps(state))
    return final


def _complete(partial: Path, final: Path, step: int, state: str) -> None:
    """Hashes of a large set take minutes, so this runs in a thread."""
    _write_durably(partial / STATE, state)
    files = {
        str(path.relative_to(partial)): {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(partial.rglob("*"))
        if path.is_file()
    }
    _write_durably(partial / MANIFEST, json.dumps({"step": step, "files": files}, indent=1))
    shutil.rmtree(final, ignore_errors=True)
    os.replace(partial, final)
    _sync_folder(final.parent)


def is_complete(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def newest_checkpoint(root: Path) -> Path | None:
    """The newest complete set under ``root``; incomplete ones are named in a warning and skipped."""
    for folder in sorted(root.glob("step_*"), reverse=True):
        if is_complete(folder):
            return folder
        log.warning("checkpoint %s has no manifest (it was not finished); skipped", folder)
    return None


def verify(folder: Path) -> None:
    """Raise CheckpointDamaged naming the first file that is missing or differs from the manifest."""
    manifest = json.loads((folder / MANIFEST).read_text())
    for name, entry in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            raise CheckpointDamaged(f"{path} is missing; the manifest of {folder.name} lists it")
        if path.stat().st_size != entry["bytes"] or _sha256(path) != entry["sha256"]:
            raise CheckpointDamaged(f"{path} differs from the manifest of {folder.name} (size or hash)")


def load_state(folder: Path) -> dict[str, Any]:
    return json.loads((folder / STATE).read_text())


def restore(state: Mapping[str, Any], *, cursor: PromptCursor, queue: ExperienceQueue) -> int:
    """Put the parts back where ``snapshot`` found them and return the step to go on from.

    Attempts that were on workers are aborted, and the cursor yields their prompts again; queued groups stay queued.
    The recorder goes on from ``state["metrics"]``.

    Raises:
        ValueError: seed, prompts, batch size or staleness bound are not those of the saved run.
    """
    queue.load_state_dict(state["queue"])
    for attempt in queue.dispatched():
        queue.retire(attempt.group_id, attempt.attempt, "aborted")
    queued = [entry["group_id"] for entry in state["queue"]["entries"] if entry["group"] is not None]
    cursor.load_state_dict(state["cursor"], outstanding=queued)
    return int(state["step"])


def snapshot(
    step: int, *, cursor: PromptCursor, queue: ExperienceQueue, recorder: MetricsRecorder, **more: Any
) -> dict[str, Any]:
    """A JSON-able copy of the parts between two learner steps; ``more`` is kept beside them."""
    return {
        "step": step,
        "cursor": cursor.state_dict(),
        "queue": queue.state_dict(),
        "metrics": recorder.state_dict(),
        **more,
    }


def prune(root: Path, keep_last: int) -> None:
    """Delete complete sets beyond the newest ``keep_last``, and what interrupted saves left behind."""
    complete = [folder for folder in sorted(root.glob("step_*")) if is_complete(folder)]
    for folder in [*complete[:-keep_last], *root.glob(".partial_*")]:
        shutil.rmtree(folder, ignore_errors=True)


def _write_durably(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
