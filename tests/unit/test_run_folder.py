"""Opening a run folder decides what a start goes on from, and refuses before it changes anything."""

from __future__ import annotations

import errno
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlhf_cluster import checkpoint_set, run_folder
from rlhf_cluster.checkpoint_files import Files
from rlhf_cluster.config import Config
from rlhf_cluster.config_io import load_config
from rlhf_cluster.diagnosis.preflight import PreflightError
from rlhf_cluster.run_folder import RunFolder
from tests.unit.checkpoint_builders import save_set

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs/tiny_test.yaml"


def config_for(tmp_path: Path) -> Config:
    return load_config(CONFIG, ["model.policy=policy", "model.reward=reward", f"run.dir={tmp_path}", "run.name=a_run"])


def damage(folder: Path) -> None:
    (folder / "learner/policy/model.safetensors").write_bytes(b"")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("resume", ["auto", "required"])
def test_a_run_goes_on_from_the_newest_undamaged_set_and_clears_what_is_in_its_way(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, resume: str
) -> None:
    checkpoints = tmp_path / "a_run/checkpoints"
    good, bad = save_set(checkpoints, 5), save_set(checkpoints, 10)
    damage(bad)
    (checkpoints / ".partial_00000015_ab").mkdir()
    folder = RunFolder.open(config_for(tmp_path), resume=resume)
    assert names(checkpoints) == [".partial_00000015_ab", good.name, bad.name], "looking changes nothing"
    folder.begin(config_for(tmp_path))
    assert folder.checkpoint == good
    assert names(checkpoints) == ["step_00000005", "step_00000010.damaged"]
    assert "checkpoint step_00000010 is skipped: " in caplog.text
    assert "has 0 bytes; the manifest says 64" in caplog.text


@pytest.mark.parametrize("resume", ["auto", "required", "never"])
def test_a_run_whose_sets_are_all_damaged_starts_nothing(tmp_path: Path, resume: str) -> None:
    checkpoints = tmp_path / "a_run/checkpoints"
    for step in (5, 10):
        damage(save_set(checkpoints, step))
    with pytest.raises(PreflightError) as refusal:
        RunFolder.open(config_for(tmp_path), resume=resume)
    message = str(refusal.value)
    assert f"{checkpoints} holds 2 checkpoints and none of them can be used" in message
    assert "step_00000005: " in message and "step_00000010: " in message
    assert "choose another run.name" in message
    assert names(checkpoints) == ["step_00000005", "step_00000010"], "a refusal changes nothing"
    assert names(tmp_path / "a_run") == ["checkpoints", "run.lock"]


def test_a_run_killed_in_its_first_save_starts_fresh(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints = tmp_path / "a_run/checkpoints"
    (checkpoints / ".partial_00000001_ab/learner").mkdir(parents=True)
    folder = RunFolder.open(config_for(tmp_path), resume="auto")
    folder.begin(config_for(tmp_path))
    assert folder.checkpoint is None
    assert names(checkpoints) == []
    assert ".partial_00000001_ab" in caplog.text


def test_a_set_without_a_manifest_was_never_finished_and_stops_no_fresh_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = tmp_path / "a_run/checkpoints"
    (save_set(checkpoints, 5) / "manifest.json").unlink()
    with pytest.raises(PreflightError, match="--resume required"):
        RunFolder.open(config_for(tmp_path), resume="required")
    folder = RunFolder.open(config_for(tmp_path), resume="auto")
    folder.begin(config_for(tmp_path))
    assert folder.checkpoint is None
    assert "step_00000005 has no manifest (it was not finished)" in caplog.text
    assert names(checkpoints) == ["step_00000005.damaged"]


def test_required_needs_a_set_and_never_needs_none(tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match=r"--resume required: .*holds no complete checkpoint"):
        RunFolder.open(config_for(tmp_path), resume="required")
    assert list(tmp_path.iterdir()) == [], "a refusal makes no folder"
    save_set(tmp_path / "a_run/checkpoints", 1)
    with pytest.raises(PreflightError, match=r"--resume never: .*already holds a checkpoint"):
        RunFolder.open(config_for(tmp_path), resume="never")


def test_a_fresh_run_moves_older_metrics_and_versions_aside_and_a_resumed_one_goes_on_in_them(tmp_path: Path) -> None:
    run = tmp_path / "a_run"
    run.mkdir()
    (run / "metrics.jsonl").write_text("old\n")
    (run / "published_version").write_text("7\n")
    RunFolder.open(config_for(tmp_path), resume="auto").begin(config_for(tmp_path))
    assert (run / "metrics.jsonl.1").read_text() == "old\n"
    assert not (run / "published_version").exists()
    (run / "metrics.jsonl").write_text("new\n")
    (run / "published_version").write_text("8\n")
    save_set(run / "checkpoints", 1)
    RunFolder.open(config_for(tmp_path), resume="auto").begin(config_for(tmp_path))
    assert (run / "metrics.jsonl").read_text() == "new\n"
    assert (run / "published_version").read_text() == "8\n"


def test_a_folder_that_another_process_runs_in_is_refused_until_that_process_is_dead(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from rlhf_cluster.run_folder import RunFolder\n"
        "from tests.unit.test_run_folder import config_for\n"
        "folder = RunFolder.open(config_for(Path(sys.argv[1])), resume='auto')\n"
        "print('open', flush=True)\n"
        "sys.stdin.read()\n"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdout is not None
    assert other.stdout.readline() == "open\n"
    saving = tmp_path / "a_run/checkpoints/.partial_00000001_ab"
    saving.mkdir(parents=True)
    with pytest.raises(PreflightError, match=rf"a_run is in use by process {other.pid} on .*; wait for it"):
        RunFolder.open(config_for(tmp_path), resume="auto")
    assert saving.is_dir(), "the save of the living process is not taken for a leftover"
    other.kill()
    other.communicate(timeout=20)
    RunFolder.open(config_for(tmp_path), resume="auto").begin(config_for(tmp_path))
    assert not saving.exists()


def test_a_set_that_the_other_process_saves_last_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Between a look at the sets and the lock another run could end: the lock comes first.
    checkpoints = tmp_path / "a_run/checkpoints"
    save_set(checkpoints, 1)
    lock = run_folder._lock

    def lock_after_a_last_save(path: Path) -> Any:
        save_set(checkpoints, 2)
        return lock(path)

    monkeypatch.setattr(run_folder, "_lock", lock_after_a_last_save)
    assert RunFolder.open(config_for(tmp_path), resume="auto").checkpoint == checkpoints / "step_00000002"


def test_what_cannot_be_deleted_stops_no_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints = tmp_path / "a_run/checkpoints"
    save_set(checkpoints, 1)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (checkpoints / ".deleting_00000001_ab").symlink_to(elsewhere)
    (checkpoints / ".partial_00000002_ab").touch()
    (checkpoints / ".partial_00000003_ab").mkdir()
    stubborn = checkpoints / ".partial_00000003_ab"

    class Stubborn(Files):
        def remove(self, folder: Path) -> None:
            if folder == stubborn:
                raise OSError(errno.ENOTEMPTY, "Directory not empty", str(folder))
            super().remove(folder)

    checkpoint_set.clear_leftovers(checkpoints, Stubborn())
    assert names(checkpoints) == [stubborn.name, "step_00000001"]
    assert f"{stubborn} could not be deleted" in caplog.text
    assert elsewhere.is_dir(), "of a link the link alone goes"


@pytest.mark.parametrize("obstacle", ["run folder", "checkpoints", "dangling checkpoints", "config"])
def test_a_run_folder_that_cannot_be_one_is_refused_by_name(tmp_path: Path, obstacle: str) -> None:
    run = tmp_path / "a_run"
    match obstacle:
        case "run folder":
            run.touch()
        case "checkpoints":
            run.mkdir()
            (run / "checkpoints").touch()
        case "dangling checkpoints":
            run.mkdir()
            (run / "checkpoints").symlink_to(tmp_path / "not mounted")
        case "config":
            (run / "config.yaml").mkdir(parents=True)
    with pytest.raises(PreflightError, match=str(run)):
        RunFolder.open(config_for(tmp_path), resume="auto").begin(config_for(tmp_path))


def test_a_resumed_run_says_what_is_set_otherwise_and_a_fresh_one_says_nothing(tmp_path: Path) -> None:
    config = config_for(tmp_path)
    rollout = config.rollout.model_copy(update={"temperature": 0.5})
    warmer = config.model_copy(update={"rollout": rollout})
    for fresh in (warmer, config):
        assert RunFolder.open(fresh, resume="auto").begin(fresh) == []
    save_set(tmp_path / "a_run/checkpoints", 1)
    assert RunFolder.open(config, resume="auto").begin(config) == []
    assert RunFolder.open(warmer, resume="auto").begin(warmer) == ["rollout.temperature: 1.0 -> 0.5"]
    assert load_config(tmp_path / "a_run/config.yaml") == warmer


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (None, r""),
        ("run: [", r".*/a_run/config\.yaml cannot be read: .*"),
        ("of_an_older_version: {key: 1}\n", r"of_an_older_version\.key: 1 -> null"),
        ("by_hand: 2026-11-30\n", r'by_hand: "2026-11-30" -> null'),
    ],
    ids=["missing", "torn", "older", "date"],
)
def test_a_resume_beside_a_config_that_is_not_this_versions_says_what_is_not_there_and_goes_on(
    tmp_path: Path, found: str | None, said: str
) -> None:
    config = config_for(tmp_path)
    RunFolder.open(config, resume="auto").begin(config)
    save_set(tmp_path / "a_run/checkpoints", 1)
    written = tmp_path / "a_run/config.yaml"
    whole = written.read_text()
    written.unlink()
    if found is not None:
        written.write_text(found + whole)
    changes = RunFolder.open(config, resume="auto").begin(config)
    assert re.fullmatch(said, "\n".join(changes), re.DOTALL)
    assert load_config(written) == config


def test_a_config_that_holds_nothing_is_said_to_be_none(tmp_path: Path) -> None:
    config = config_for(tmp_path)
    save_set(tmp_path / "a_run/checkpoints", 1)
    written = tmp_path / "a_run/config.yaml"
    written.touch()
    changes = RunFolder.open(config, resume="auto").begin(config)
    assert changes == [f"{written} cannot be read: it is no config"]
