"""F07: a resume takes the newest set that is complete and undamaged, and says why it took none that is newer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rlhf_cluster.checkpoint_set import (
    CheckpointDamaged,
    clear_leftovers,
    newest_checkpoint,
    set_aside,
    sets,
    step_folder,
    survey,
    verify,
)
from tests.unit.checkpoint_builders import TENSORS, holds_step, save_set


def test_a_set_lists_every_file_with_its_size_and_hash(tmp_path: Path) -> None:
    folder = save_set(tmp_path, 3)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["step"] == 3
    names = {"run_state.json", *(f"learner/{name}" for name in TENSORS)}
    assert set(manifest["files"]) == names
    for name in names:
        content = (folder / name).read_bytes()
        assert manifest["files"][name] == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    assert verify(folder).total_bytes == sum((folder / name).stat().st_size for name in names)
    assert sorted(tmp_path.iterdir()) == [folder], "nothing but the set is left"


def _flip(folder: Path) -> None:
    path = folder / "learner/critic/model.safetensors"
    content = bytearray(path.read_bytes())
    content[17] ^= 1
    path.write_bytes(content)


def _empty(folder: Path) -> None:
    (folder / "learner/policy/model.safetensors").write_bytes(b"")


def _remove(folder: Path) -> None:
    (folder / "learner/deepspeed/policy/state/rank0.pt").unlink()


def _unreadable(folder: Path) -> None:
    path = folder / "learner/learner.json"
    path.unlink()
    path.mkdir()


def _cut_manifest(folder: Path) -> None:
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text[: len(text) // 2])


def _no_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def _other_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text('{"format": 1, "step": 5, "metric": null, "files": []}')


def _newer_format(folder: Path) -> None:
    content = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**content, "format": 2}))


def _manifest_of_step_1(folder: Path) -> None:
    text = (folder.parent / "step_00000001/manifest.json").read_text()
    (folder / "manifest.json").write_text(text)


def _manifest(text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "manifest.json").write_text(text) and None


def _unlisted(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        content = json.loads((folder / "manifest.json").read_text())
        content["files"] = {key: entry for key, entry in content["files"].items() if not key.startswith(name)}
        (folder / "manifest.json").write_text(json.dumps(content))

    return damage


_HEAD = '{"format": 1, "metric": null, '


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (_manifest("[" * 100_000), r"manifest\.json cannot be read: RecursionError"),
        (_manifest(_HEAD + '"step": 1e400, "files": {}}'), r"manifest\.json cannot be read: OverflowError"),
        (_manifest(_HEAD + '"step": 2, "files": {"a\\u0000": {"bytes": 0, "sha256": ""}}}'), r"is no file of this set"),
        (
            _manifest(_HEAD + '"step": 2, "files": {"../step_1": {"bytes": 0, "sha256": ""}}}'),
            r"is no file of this set",
        ),
        (_manifest(_HEAD + '"step": 2, "files": {"/etc/hosts": {"bytes": 0, "sha256": ""}}}'), r"no file of this set"),
        (_manifest(_HEAD + '"step": 2, "files": {}}'), r"does not list run_state\.json"),
        (_unlisted("run_state.json"), r"does not list run_state\.json"),
        (_unlisted("learner/"), r"does not list run_state\.json and the files of the learner"),
        (_flip, r"critic/model\.safetensors differs from the manifest"),
        (_empty, r"policy/model\.safetensors has 0 bytes; the manifest says 64"),
        (_remove, r"rank0\.pt is missing"),
        (_unreadable, r"learner\.json (has|cannot be read)"),
        (_cut_manifest, r"manifest\.json cannot be read: JSONDecodeError"),
        (_no_manifest, r"step_00000002 has no manifest"),
        (_other_manifest, r"manifest\.json cannot be read: AttributeError"),
        (_newer_format, r"manifest\.json cannot be read: ValueError: its format is 2, this version reads 1"),
        (_manifest_of_step_1, r"manifest\.json is that of step 1"),
    ],
)
def test_a_damaged_set_is_skipped_with_a_warning_that_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None], reason: str
) -> None:
    first, second = save_set(tmp_path, 1), save_set(tmp_path, 2)
    assert newest_checkpoint(tmp_path) == second
    assert caplog.text == ""
    damage(second)
    with pytest.raises(CheckpointDamaged, match=reason):
        verify(second)
    found = survey(tmp_path)
    assert found.newest == first
    assert holds_step(first, 1)
    assert list(found.damaged) == [second]
    [warning] = [record.getMessage() for record in caplog.records]
    assert warning == f"checkpoint step_00000002 is skipped: {found.damaged[second]}"


def test_the_newest_set_is_that_of_the_highest_step_whatever_its_digits(tmp_path: Path) -> None:
    for step in (5, 99_999_999, 100_000_000):
        save_set(tmp_path, step)
    assert newest_checkpoint(tmp_path) == tmp_path / "step_100000000"


def test_no_folder_and_an_empty_one_hold_no_set(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path / "missing") is None
    assert newest_checkpoint(tmp_path) is None


def test_other_names_are_no_sets(tmp_path: Path) -> None:
    folder = save_set(tmp_path, 4)
    for name in ("step_4", "step_00000004.damaged", ".partial_00000009_ab", ".deleting_00000009_ab", "notes"):
        (tmp_path / name).mkdir()
    (tmp_path / "step_00000012").write_text("a file")
    assert sets(tmp_path) == [folder]
    assert newest_checkpoint(tmp_path) == folder


def test_a_pin_is_no_damage(tmp_path: Path) -> None:
    folder = save_set(tmp_path, 1)
    (folder / "PINNED").touch()
    verify(folder)


def test_leftovers_of_killed_saves_and_deletions_are_deleted_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_set(tmp_path, 1)
    left = [tmp_path / ".deleting_00000001_cd", tmp_path / ".partial_00000002_ab"]
    for path in left:
        (path / "learner").mkdir(parents=True)
        (path / "manifest.json").write_text("{}")
    assert clear_leftovers(tmp_path) == left
    assert sorted(tmp_path.iterdir()) == [folder]
    assert all(path.name in caplog.text for path in left)


def test_a_damaged_set_is_set_aside_under_a_free_name(tmp_path: Path) -> None:
    for why in ("damaged", "superseded") * 2:
        save_set(tmp_path, 7)
        set_aside(step_folder(tmp_path, 7), why)
    names = ["damaged", "damaged2", "superseded", "superseded2"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step_00000007.{name}" for name in names]
    assert sets(tmp_path) == []
