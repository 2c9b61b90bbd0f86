"""An engine whose worker is killed while it starts ends too: nobody is left who would end it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.tiny_models import build_tiny_policy

pytest.importorskip("vllm")


def engine_of(worker: psutil.Process, *, at_least_bytes: int) -> list[psutil.Process]:
    """The engine's process, once it has grown so large."""
    children = [child for child in worker.children() if "resource_tracker" not in " ".join(child.cmdline())]
    return [child for child in children if child.memory_info().rss >= at_least_bytes]


def test_an_engine_that_starts_ends_with_its_worker(tmp_path: Path) -> None:
    folder = build_tiny_policy(tmp_path / "policy")
    with subprocess.Popen(
        [sys.executable, "-m", "tests.integration.starting_worker", str(folder)], stdout=subprocess.PIPE, text=True
    ) as worker:
        deadline = time.monotonic() + 120
        # It has read what it was started with and imports torch and vLLM.
        while not (engine := engine_of(psutil.Process(worker.pid), at_least_bytes=150 * 2**20)):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        worker.kill()
        _, left = psutil.wait_procs(engine, timeout=45)
        for process in left:
            process.kill()
        assert left == []
        assert worker.stdout is not None and "started" not in worker.stdout.read()
