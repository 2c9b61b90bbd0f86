"""What a run may forget because of its checkpoints, and what it goes back to."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from rlhf_cluster import checkpoint_writer
from rlhf_cluster.checkpoint_files import Files
from rlhf_cluster.checkpoint_set import PINNED, step_folder
from rlhf_cluster.checkpoint_writer import CheckpointFailed
from rlhf_cluster.config import CheckpointConfig
from rlhf_cluster.run_checkpoints import RunCheckpoints
from tests.unit.builders import async_test
from tests.unit.checkpoint_builders import save_set, state_of, tensors_of


def checkpoints_of(root: Path, forgotten: list[int], *, keep_last: int = 2) -> RunCheckpoints:
    config = CheckpointConfig(keep_last=keep_last)
    return RunCheckpoints(root, config, forget=forgotten.append, on_report=lambda report: None)


@async_test
async def test_the_oldest_set_that_stays_says_below_what_no_prompt_comes_again(tmp_path: Path) -> None:
    forgotten: list[int] = []
    checkpoints = checkpoints_of(tmp_path, forgotten)
    for step in (1, 2, 3):
        await checkpoints.save(step, state_of(step), tensors_of(step))
        await checkpoints.finish()
    # The frontier of step n is 2 n; two sets are kept.
    assert forgotten == [2, 2, 4]


@async_test
async def test_a_pinned_set_is_one_that_stays(tmp_path: Path) -> None:
    forgotten: list[int] = []
    checkpoints = checkpoints_of(tmp_path, forgotten, keep_last=1)
    for step in (1, 2, 3):
        await checkpoints.save(step, state_of(step), tensors_of(step))
        await checkpoints.finish()
        if step == 1:
            (step_folder(tmp_path, 1) / PINNED).touch()
    assert forgotten == [2, 2, 2]


def test_a_resumed_run_knows_the_frontiers_of_the_sets_before_it(tmp_path: Path) -> None:
    for step in (3, 4, 5):
        save_set(tmp_path, step)
    forgotten: list[int] = []
    checkpoints_of(tmp_path, forgotten).resumed_from(5)
    assert forgotten == [8], "of step 4: the third newest goes with the next set"


@async_test
async def test_a_save_that_waits_for_the_one_before_keeps_its_frontier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()

    class Gated(Files):
        def digest_and_sync(self, path: Path) -> str:
            assert gate.wait(10)
            return super().digest_and_sync(path)

    monkeypatch.setattr(checkpoint_writer, "Files", Gated)
    forgotten: list[int] = []
    checkpoints = checkpoints_of(tmp_path, forgotten, keep_last=1)
    await checkpoints.save(1, state_of(1), tensors_of(1))
    second = asyncio.ensure_future(checkpoints.save(2, state_of(2), tensors_of(2)))
    await asyncio.sleep(0.05)
    gate.set()
    await second
    await checkpoints.finish()
    assert forgotten == [2, 4]


@async_test
async def test_what_a_broken_off_save_left_is_deleted_once_nobody_writes(tmp_path: Path) -> None:
    checkpoints = checkpoints_of(tmp_path, [])
    reached = asyncio.Event()

    async def never_ends(folder: Path) -> None:
        folder.mkdir(parents=True)
        reached.set()
        await asyncio.Event().wait()

    saving = asyncio.ensure_future(checkpoints.save(1, state_of(1), never_ends))
    await reached.wait()
    saving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await saving
    assert [path.name[:9] for path in tmp_path.iterdir()] == [".partial_"]
    await checkpoints.clear()
    assert list(tmp_path.iterdir()) == []


@async_test
async def test_sets_that_are_all_damaged_are_named_and_stay(tmp_path: Path) -> None:
    folder = await asyncio.to_thread(save_set, tmp_path, 1)
    (folder / "run_state.json").write_text("{}")
    with pytest.raises(CheckpointFailed, match=r"no checkpoint can be used: .*step_00000001"):
        await checkpoints_of(tmp_path, []).newest()
    assert folder.is_dir()
