"""Ctrl-C ends a run cleanly with its state saved, and `--resume` goes on from the saved step and version."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from rlhf_cluster import checkpoint_set
from tests.e2e.conftest import start_training, train_and_scrape


def _wait_for_step(metrics: Path, step: int, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if metrics.is_file() and any(json.loads(line)["step"] >= step for line in metrics.read_text().splitlines()):
            return
        time.sleep(0.1)
    raise TimeoutError(f"{metrics} shows no step {step} after {timeout_s} s")


def _members_of_session(session: int) -> list[str]:
    """Command lines of live processes in a session (zombies have none)."""
    members = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            if os.getsid(int(folder.name)) == session:
                members.append((folder / "cmdline").read_text().replace("\0", " ").strip())
        except (OSError, ProcessLookupError):
            continue
    return [member for member in members if member]


@pytest.mark.timeout(400)
def test_an_interrupted_run_saves_exits_130_leaves_nothing_behind_and_goes_on(
    tiny_models: Path, tmp_path: Path
) -> None:
    # Enough steps that the interrupt always comes first.
    process = start_training(tiny_models, tmp_path, "run.steps=100000", "data.eval_prompts=null", "evaluation=null")
    folder = tmp_path / "tiny"
    _wait_for_step(folder / "metrics.jsonl", 3, timeout_s=150)
    # As a terminal does it: every process of the group gets the signal.
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 130, output
    assert _members_of_session(process.pid) == []

    checkpoint = checkpoint_set.newest_checkpoint(folder / "checkpoints")
    assert checkpoint is not None
    checkpoint_set.verify(checkpoint)
    step = int(checkpoint.name.removeprefix("step_"))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == step >= 3

    resumed = train_and_scrape(
        tiny_models,
        tmp_path,
        f"run.steps={step + 2}",
        "data.eval_prompts=null",
        "evaluation=null",
        "--resume",
        "required",
    )
    assert resumed.exit_code == 0, resumed.output
    assert f"resuming from step_{step:08d}" in resumed.output
    assert [(row["step"], row["version"]) for row in resumed.rows()] == [(n, n) for n in range(1, step + 3)]
    last = resumed.rows()[-1]
    assert last['rlhf_attempts_total{state="trained",reason="none"}'] == 4 * (step + 2)
    assert last['rlhf_optimizer_steps_total{model="policy"}'] == 2 * (step + 2)
    assert last['rlhf_worker_policy_version{worker="0"}'] >= step
