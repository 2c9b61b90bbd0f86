"""Checkpoints as one set: complete or not there, verified, pruned only when something newer is complete."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from rlhf_cluster import run_state


async def _save_learner(folder: Path) -> None:
    folder.mkdir()
    (folder / "weights.safetensors").write_bytes(b"abcdef")


def save(root: Path, step: int) -> Path:
    return asyncio.run(run_state.save_checkpoint(root, step, {"step": step, "note": "x"}, _save_learner))


def test_a_saved_set_is_complete_verified_and_reads_back(tmp_path: Path) -> None:
    folder = save(tmp_path, 3)
    assert run_state.newest_checkpoint(tmp_path) == folder
    run_state.verify(folder)
    assert run_state.load_state(folder) == {"step": 3, "note": "x"}
    manifest = json.loads((folder / "manifest.json").read_text())
    assert set(manifest["files"]) == {"learner/weights.safetensors", "run_state.json"}


def test_a_save_that_dies_half_way_leaves_the_older_set_the_newest(tmp_path: Path) -> None:
    first = save(tmp_path, 1)

    async def dies(folder: Path) -> None:
        folder.mkdir()
        (folder / "weights.safetensors").write_bytes(b"abc")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        asyncio.run(run_state.save_checkpoint(tmp_path, 2, {}, dies))
    assert run_state.newest_checkpoint(tmp_path) == first
    assert run_state.newest_checkpoint(tmp_path / "empty") is None


def test_a_folder_without_manifest_is_skipped_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = save(tmp_path, 1)
    (run_state.step_folder(tmp_path, 9) / "learner").mkdir(parents=True)
    assert run_state.newest_checkpoint(tmp_path) == first
    assert "step_00000009 has no manifest" in caplog.text


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_file_is_named(tmp_path: Path, damage: str) -> None:
    folder = save(tmp_path, 1)
    weights = folder / "learner" / "weights.safetensors"
    if damage == "flip":
        weights.write_bytes(b"abcdeX")
    elif damage == "cut":
        weights.write_bytes(b"abc")
    else:
        weights.unlink()
    with pytest.raises(run_state.CheckpointDamaged, match=r"weights\.safetensors"):
        run_state.verify(folder)


def test_pruning_keeps_the_newest_complete_sets_and_clears_what_an_interrupted_save_left(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    (tmp_path / ".partial_00000004").mkdir()
    run_state.prune(tmp_path, keep_last=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000002", "step_00000003"]


def test_saving_a_step_again_changes_nothing(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    before = (folder / "manifest.json").stat().st_mtime_ns
    assert save(tmp_path, 1) == folder
    assert (folder / "manifest.json").stat().st_mtime_ns == before
