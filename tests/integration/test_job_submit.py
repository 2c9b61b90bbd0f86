"""`rlhf submit` and `ray job stop` against a real Ray head with token authentication on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from rlhf_cluster.checkpoint_set import newest_checkpoint, step_of
from rlhf_cluster.submit import submit_job
from tests.driver_process import live_members
from tests.integration import long_driver
from tests.tiny_models import build_tiny_policy, build_tiny_reward_model

ROOT = Path(__file__).resolve().parents[2]
RAY = (sys.executable, "-m", "ray.scripts.scripts")
HEAD_START_S = 90


@dataclass(frozen=True)
class Head:
    address: str
    temp_dir: Path
    session: int
    """Of the head's processes, and so of every actor."""


@pytest.fixture(scope="module")
def monkeypatch_module() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def head(monkeypatch_module: pytest.MonkeyPatch) -> Iterator[Head]:
    """A Ray head on free loopback ports. It is stopped by its own process group: `ray stop` would stop every Ray."""
    # Ray's socket paths must stay under 107 bytes, which pytest's tmp_path does not promise.
    temp_dir = Path(tempfile.mkdtemp(prefix="rj"))
    token = temp_dir / "auth_token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    monkeypatch_module.setenv("RAY_AUTH_MODE", "token")
    monkeypatch_module.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    monkeypatch_module.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch_module.delenv("RAY_ADDRESS", raising=False)
    # The job's `python` is the one of this environment.
    monkeypatch_module.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    port, dashboard, agent, client = _free_ports(4)
    options = {
        "--node-ip-address": "127.0.0.1",
        "--port": port,
        "--dashboard-host": "127.0.0.1",
        "--dashboard-port": dashboard,
        "--dashboard-agent-listen-port": agent,
        "--ray-client-server-port": client,
        "--temp-dir": temp_dir / "ray",
        "--num-cpus": 8,
        "--object-store-memory": 300 * 2**20,
    }
    command = [*RAY, "start", "--head", "--block", *(str(part) for option in options.items() for part in option)]
    log = (temp_dir / "head.log").open("w")
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        address = f"http://127.0.0.1:{dashboard}"
        _wait_for_job_server(address, process, temp_dir / "head.log")
        yield Head(address, temp_dir / "ray", process.pid)
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=30)
        log.close()
        shutil.rmtree(temp_dir, ignore_errors=True)


def _free_ports(count: int) -> list[int]:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports


def _wait_for_job_server(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + HEAD_START_S
    while time.monotonic() < deadline:
        assert process.poll() is None, f"the Ray head ended:\n{log.read_text()}"
        listed = subprocess.run([*RAY, "job", "list", "--address", address], capture_output=True, check=False)
        if listed.returncode == 0:
            return
        time.sleep(1)
    pytest.fail(f"the Ray head served no jobs within {HEAD_START_S} s:\n{log.read_text()}")


def _job_status(address: str, submission_id: str) -> str:
    done = subprocess.run(
        [*RAY, "job", "status", "--address", address, submission_id],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout + done.stderr


def _project_copy(folder: Path) -> Path:
    """What a user submits: the code and the configs, and beside them files that must not leave the machine."""
    for name in ("rlhf_cluster", "actors", "learner", "configs", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in (".env", "server.pem", "models/old/model.safetensors", "runs/old/samples.jsonl"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("private")
    return folder


@pytest.mark.timeout(480)
def test_the_tiny_config_succeeds_as_a_job_and_private_files_stay_here(head: Head, tmp_path: Path) -> None:
    project = _project_copy(tmp_path / "project")
    overrides = [
        f"model.policy={build_tiny_policy(tmp_path / 'policy')}",
        f"model.reward={build_tiny_reward_model(tmp_path / 'reward')}",
        f"run.dir={tmp_path / 'runs'}",
        "run.steps=2",
        "learner.ranks=1",
    ]
    submission_id = submit_job(
        project / "configs" / "tiny_test.yaml", overrides, address=head.address, working_dir=project
    )
    assert "succeeded" in _job_status(head.address, submission_id).lower()
    assert len((tmp_path / "runs" / "tiny" / "metrics.jsonl").read_text().splitlines()) == 2

    received = {path.name for path in head.temp_dir.rglob("*") if "working_dir_files" in path.parts}
    assert "tiny_test.yaml" in received
    assert not received & {".env", "server.pem", "models", "runs", "model.safetensors", "samples.jsonl"}


@pytest.mark.timeout(240)
def test_without_the_token_the_job_server_takes_no_job(
    head: Head, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    project = _project_copy(tmp_path / "project")
    wrong = tmp_path / "wrong_token"
    wrong.write_text(secrets.token_hex(32))
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(wrong))
    with pytest.raises(RuntimeError, match="was not accepted"):
        submit_job(
            project / "configs" / "tiny_test.yaml",
            ["model.policy=/shared/policy", "model.reward=/shared/reward"],
            address=head.address,
            working_dir=project,
            follow=False,
        )
    assert "authentication is enabled" in capfd.readouterr().err


def _actors(head: Head) -> list[str]:
    return [command for command in live_members(head.session) if command.startswith(("ray::Long", "ray::Fake"))]


@pytest.mark.timeout(120)
def test_a_stopped_job_saves_what_it_trained_and_leaves_no_process(head: Head, tmp_path: Path) -> None:
    """`rlhf train` as a job, over actors without models, so that it is at work in seconds."""
    project = _project_copy(tmp_path / "project")
    overrides = [*long_driver.overrides(tmp_path), "run.steps=100000", "cluster.address=auto"]
    build_tiny_policy(tmp_path / "policy")
    job = [*RAY, "job"]
    address = ["--address", head.address]
    subprocess.run(
        [
            *(*job, "submit", *address, "--no-wait", "--submission-id", "stopped", "--working-dir", str(project)),
            *("--", "python", "-m", "tests.integration.long_driver", *overrides),
        ],
        check=True,
        timeout=60,
        capture_output=True,
    )
    run = tmp_path / "runs" / "tiny"
    deadline = time.monotonic() + 60
    while _last_step(run) < 12:
        assert time.monotonic() < deadline, subprocess.run([*job, "logs", *address, "stopped"], check=False)
        time.sleep(0.1)
    driver = int((run / "run.lock").read_text().split()[1])
    assert len(_actors(head)) == 4
    stopped = subprocess.run(
        [*job, "stop", *address, "stopped"], capture_output=True, text=True, timeout=60, check=True
    )
    assert "stopped" in _job_status(head.address, "stopped").lower(), stopped.stdout
    newest = newest_checkpoint(run / "checkpoints")
    assert newest is not None
    assert step_of(newest) == _last_step(run), "saved after the step in progress"
    assert not Path(f"/proc/{driver}").exists()
    assert _actors(head) == []


def _last_step(run: Path) -> int:
    metrics = run / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return max((json.loads(line)["step"] for line in lines), default=0)
