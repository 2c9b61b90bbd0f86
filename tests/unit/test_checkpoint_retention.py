"""F08: retention never deletes the newest, the best or a pinned set, and nothing before its successor is durable."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import pytest

from rlhf_cluster.checkpoint_retention import BestBy, Retention, best_checkpoint, prune
from rlhf_cluster.checkpoint_set import newest_checkpoint, sets, verify
from rlhf_cluster.checkpoint_writer import CheckpointWriter
from tests.unit.checkpoint_builders import ScriptedFiles, save_set, state_of, tensors_of

SCORE = BestBy("rlhf_score_mean")


def steps(root: Path) -> list[int]:
    return [int(path.name.removeprefix("step_")) for path in sets(root)]


def test_the_newest_sets_stay(tmp_path: Path) -> None:
    for step in (1, 2, 3, 9, 10):
        save_set(tmp_path, step)
    assert [path.name for path in prune(tmp_path, Retention(2))] == ["step_00000001", "step_00000002", "step_00000003"]
    assert steps(tmp_path) == [9, 10]
    assert prune(tmp_path, Retention(5)) == []
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step_00000009", "step_00000010"]


def test_the_best_and_the_pinned_set_stay(tmp_path: Path) -> None:
    by_score = Retention(2, SCORE)
    for step, score in ((1, 0.9), (2, 0.1), (3, 0.2), (4, 0.3), (5, None)):
        folder = save_set(tmp_path, step, metric=score, retention=Retention(1000, SCORE))
        if step == 2:
            (folder / "PINNED").touch()
    prune(tmp_path, by_score)
    assert steps(tmp_path) == [1, 2, 4, 5]
    assert best_checkpoint(tmp_path, SCORE) == tmp_path / "step_00000001"


@pytest.mark.parametrize(
    ("highest", "values", "best"),
    [
        (True, [0.1, 0.5, 0.3], 2),
        (False, [0.1, 0.5, 0.3], 1),
        (True, [-3.0, -1.0, -2.0], 2),
        (True, [0.5, 0.5, 0.1], 2),
        (True, [0.5, math.nan, math.inf], 1),
        (True, [None, None, None], None),
    ],
)
def test_the_best_set_is_that_of_the_best_finite_value_the_newest_of_equals(
    tmp_path: Path, highest: bool, values: list[float | None], best: int | None
) -> None:
    best_by = BestBy("rlhf_score_mean", highest)
    for step, value in enumerate(values, 1):
        save_set(tmp_path, step, metric=value, retention=Retention(1, best_by))
    kept = {best, 3} - {None}
    assert steps(tmp_path) == sorted(kept)
    found = best_checkpoint(tmp_path, best_by)
    assert (None if found is None else int(found.name[-1])) == best


def test_the_value_of_another_metric_makes_no_set_the_best(tmp_path: Path) -> None:
    save_set(tmp_path, 1, metric=9.0, retention=Retention(9, BestBy("rlhf_kl")))
    save_set(tmp_path, 2, metric=0.2, retention=Retention(9, SCORE))
    assert best_checkpoint(tmp_path, SCORE) == tmp_path / "step_00000002"


def test_keeping_no_set_is_refused() -> None:
    with pytest.raises(ValueError, match=r"checkpoint\.keep_last must be at least 1, got 0"):
        Retention(0)


def test_a_folder_without_a_manifest_neither_counts_nor_goes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = save_set(tmp_path, 1)
    (tmp_path / "step_00000009").mkdir()
    assert prune(tmp_path, Retention(1)) == []
    assert newest_checkpoint(tmp_path) == first
    assert "retention leaves step_00000009 alone" in caplog.text


def test_a_crash_in_the_middle_of_a_save_leaves_the_only_set(tmp_path: Path) -> None:
    keep_one = Retention(1)
    first = save_set(tmp_path, 1, retention=keep_one)

    async def dies(folder: Path) -> None:
        await tensors_of(2)(folder)
        raise RuntimeError("learner rank 1 died")

    async def run() -> None:
        writer = CheckpointWriter(tmp_path, retention=keep_one)
        with pytest.raises(RuntimeError, match="rank 1 died"):
            await writer.save(2, state_of(2), dies)

    asyncio.run(run())
    verify(first)
    assert newest_checkpoint(tmp_path) == first


def test_nothing_is_deleted_before_the_new_set_is_durable(tmp_path: Path) -> None:
    save_set(tmp_path, 1)
    files = ScriptedFiles()

    async def run() -> None:
        writer = CheckpointWriter(tmp_path, retention=Retention(1), files=files)
        await writer.save(2, state_of(2), tensors_of(2))
        await writer.finish()

    asyncio.run(run())
    assert steps(tmp_path) == [2]
    partial = next(path for name, path in files.operations if name == "make_folder")
    after_manifest = files.operations[files.operations.index(("write", partial / "manifest.json")) :]
    last = [(name, "partial" if partial in (path, *path.parents) else path.name) for name, path in after_manifest]
    assert last[:-2] == [
        ("write", "partial"),
        *[("sync_folder", "partial")] * 7,
        ("rename", "step_00000002"),
        ("sync_folder", tmp_path.name),
    ], "manifest, the 7 folders of the set, its name, the parent that holds the name"
    assert [(name, path[:18]) for name, path in last[-2:]] == [
        ("rename", ".deleting_00000001"),
        ("remove", ".deleting_00000001"),
    ]
    digested = [path for name, path in files.operations if name == "digest_and_sync"]
    assert len(digested) == 5, "every file but the manifest, which is written durably itself"
