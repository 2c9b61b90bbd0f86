"""One real run for all end-to-end tests: real vLLM, Ray actors and DeepSpeed on tiny random models, two ranks.

It is interrupted and resumed, because each start of the engines takes half a minute.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rlhf_cluster import checkpoint_set
from tests.driver_process import live_members
from tests.tiny_models import build_tiny_policy, build_tiny_reward_model


@dataclass
class Interrupted:
    """How the first process of the run ended: a SIGINT to its process group after the third step."""

    exit_code: int
    step: int
    """Of the newest set it left, which was whole."""
    rows: int
    """Lines of metrics.jsonl."""
    left_behind: list[str]
    """Processes of its session that outlived it."""


@dataclass
class FinishedRun:
    """What two `rlhf train` processes left behind; ``exit_code`` is that of the second one, ``output`` is of both."""

    folder: Path
    models: Path
    exit_code: int
    output: str
    interrupted: Interrupted
    scrapes: list[str]

    @property
    def steps(self) -> int:
        return self.interrupted.step + STEPS_AFTER

    def rows(self, event: str = "step") -> list[dict[str, Any]]:
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return [row for row in map(json.loads, lines) if row["event"] == event]


def rlhf(*arguments: str, timeout_s: float = 240, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command line and wait for it."""
    return subprocess.run(
        [sys.executable, "-m", "rlhf_cluster", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        cwd=cwd,
    )


def tiny_overrides(models: Path, run_dir: Path) -> list[str]:
    return [
        f"model.policy={models / 'policy'}",
        f"model.reward={models / 'reward'}",
        f"run.dir={run_dir}",
        "data.eval_prompts=configs/data/heldout_prompts.jsonl",
        "evaluation.samples_per_prompt=1",
    ]


def start_training(models: Path, run_dir: Path, *more: str) -> subprocess.Popen[str]:
    """`rlhf train` on the tiny config in a session of its own."""
    command = ["train", "configs/tiny_test.yaml", *tiny_overrides(models, run_dir), *more]
    return subprocess.Popen(
        [sys.executable, "-m", "rlhf_cluster", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@contextlib.contextmanager
def scraping(folder: Path, scrapes: list[str]) -> Iterator[None]:
    """A scraper reads /metrics, as Prometheus would."""
    done = threading.Event()
    scraper = threading.Thread(target=_scrape, args=(folder / "prometheus_url", scrapes, done))
    scraper.start()
    try:
        yield
    finally:
        done.set()
        scraper.join()


def _scrape(url_file: Path, scrapes: Sequence[str], done: threading.Event) -> None:
    assert isinstance(scrapes, list)
    while not done.wait(0.1):
        if not url_file.is_file():
            continue
        try:
            with urllib.request.urlopen(url_file.read_text().strip(), timeout=2) as reply:
                scrapes.append(reply.read().decode())
        except OSError:
            continue


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    build_tiny_policy(folder / "policy")
    build_tiny_reward_model(folder / "reward")
    return folder


STEPS_AFTER = 2


@pytest.fixture(scope="session")
def finished_run(tiny_models: Path, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    runs = tmp_path_factory.mktemp("runs")
    folder = runs / "tiny"
    scrapes: list[str] = []
    with scraping(folder, scrapes):
        # Enough steps that the interrupt always comes first.
        first = start_training(tiny_models, runs, "run.steps=100000")
        _wait_for_step(folder / "metrics.jsonl", 3, first, timeout_s=150)
        # As a terminal does it: every process of the group gets the signal.
        os.killpg(first.pid, signal.SIGINT)
        output, _ = first.communicate(timeout=90)
        left_behind = live_members(first.pid)
        checkpoint = checkpoint_set.newest_checkpoint(folder / "checkpoints")
        assert checkpoint is not None, output
        checkpoint_set.verify(checkpoint)
        rows = len((folder / "metrics.jsonl").read_text().splitlines())
        step = checkpoint_set.step_of(checkpoint)
        interrupted = Interrupted(first.returncode, step, rows, left_behind)
        second = start_training(tiny_models, runs, f"run.steps={step + STEPS_AFTER}", "--resume", "required")
        more, _ = second.communicate(timeout=240)
    return FinishedRun(folder, tiny_models, second.returncode, output + more, interrupted, scrapes)


def _wait_for_step(metrics: Path, step: int, process: subprocess.Popen[str], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and process.poll() is None:
        if metrics.is_file() and any(json.loads(line)["step"] >= step for line in metrics.read_text().splitlines()):
            return
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGKILL)
    raise AssertionError(f"{metrics} shows no step {step} after {timeout_s} s:\n{process.communicate()[0]}")
