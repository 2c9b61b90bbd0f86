"""One real run for all end-to-end tests: real vLLM, Ray actors and DeepSpeed on tiny random models, two ranks."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_models import build_tiny_policy, build_tiny_reward_model


@dataclass
class FinishedRun:
    """What a `rlhf train` process left behind."""

    folder: Path
    models: Path
    exit_code: int
    output: str
    seconds: float
    scrapes: list[str] = field(default_factory=list)

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


def train_and_scrape(models: Path, run_dir: Path, *more: str, timeout_s: float = 280) -> FinishedRun:
    """`rlhf train` on the tiny config while a scraper reads /metrics, as Prometheus would."""
    command = ["train", "configs/tiny_test.yaml", *tiny_overrides(models, run_dir), *more]
    folder = run_dir / "tiny"
    scrapes: list[str] = []
    done = threading.Event()
    scraper = threading.Thread(target=_scrape, args=(folder / "prometheus_url", scrapes, done))
    scraper.start()
    started = time.monotonic()
    try:
        result = rlhf(*command, timeout_s=timeout_s)
    finally:
        done.set()
        scraper.join()
    output = result.stdout + result.stderr
    return FinishedRun(folder, models, result.returncode, output, time.monotonic() - started, scrapes)


def start_training(models: Path, run_dir: Path, *more: str) -> subprocess.Popen[str]:
    """`rlhf train` on the tiny config in a process group of its own, for tests that stop it."""
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "rlhf_cluster",
            "train",
            "configs/tiny_test.yaml",
            *tiny_overrides(models, run_dir),
            *more,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


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


@pytest.fixture(scope="session")
def finished_run(tiny_models: Path, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    return train_and_scrape(tiny_models, tmp_path_factory.mktemp("runs"))
