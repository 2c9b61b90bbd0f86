"""Opening a run folder decides what a start goes on from, and refuses before it changes anything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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
    assert names(tmp_path / "a_run") == ["checkpoints"]


def test_a_run_killed_in_its_first_save_starts_fresh(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints = tmp_path / "a_run/checkpoints"
    (checkpoints / ".partial_00000001_ab/learner").mkdir(parents=True)
    assert RunFolder.open(config_for(tmp_path), resume="auto").checkpoint is None
    assert names(checkpoints) == []
    assert ".partial_00000001_ab" in caplog.text


def test_required_needs_a_set_and_never_needs_none(tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match=r"--resume required: .*holds no complete checkpoint"):
        RunFolder.open(config_for(tmp_path), resume="required")
    assert list(tmp_path.iterdir()) == [], "a refusal makes no folder"
    save_set(tmp_path / "a_run/checkpoints", 1)
    with pytest.raises(PreflightError, match=r"--resume never: .*already holds a checkpoint"):
        RunFolder.open(config_for(tmp_path), resume="never")


def test_a_fresh_run_moves_older_metrics_aside_and_a_resumed_one_goes_on_in_them(tmp_path: Path) -> None:
    run = tmp_path / "a_run"
    run.mkdir()
    (run / "metrics.jsonl").write_text("old\n")
    RunFolder.open(config_for(tmp_path), resume="auto")
    assert (run / "metrics.jsonl.1").read_text() == "old\n"
    (run / "metrics.jsonl").write_text("new\n")
    save_set(run / "checkpoints", 1)
    RunFolder.open(config_for(tmp_path), resume="auto")
    assert (run / "metrics.jsonl").read_text() == "new\n"


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
    RunFolder.open(config_for(tmp_path), resume="auto")
    assert not saving.exists()
