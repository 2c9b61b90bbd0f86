"""Long runs: what a driver and its actors hold does not grow with the steps."""

from __future__ import annotations

import json
import os
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from rlhf_cluster.config_io import load_config
from tests.driver_process import Driver, live_members
from tests.integration import long_driver
from tests.tiny_models import build_tiny_policy

MIB = 2**20


def run(folder: Path, *overrides: str) -> list[dict[str, Any]]:
    """Samples of all runs so far, each with what long_driver.usage says of driver and actors."""
    build_tiny_policy(folder / "policy")
    config = load_config(Path("configs/tiny_test.yaml"), [*long_driver.overrides(folder), *overrides])
    output = folder / "output.txt"
    driver = Driver(output, long_driver.train, config, folder / "samples.jsonl")
    assert driver.end(200) == 0, driver.output
    assert live_members(driver.pid) == []
    with (folder / "samples.jsonl").open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


@pytest.mark.timeout(300)
def test_nothing_grows_after_step_50_of_500_and_the_run_goes_on_with_more_workers(tmp_path: Path) -> None:
    samples = run(tmp_path, "run.steps=500", "rollout.workers=2")
    early = [sample for sample in samples if 50 < sample["step"] <= 150]
    late = [sample for sample in samples if sample["step"] > 400]
    assert (len(early), len(late)) == (10, 10)
    parts = [name for name, found in late[-1].items() if isinstance(found, dict)]
    assert sorted(name.split(" ")[0] for name in parts) == [
        *("FakeReferenceScorer", "FakeRewardScorer", "LongRank", "LongWorker", "LongWorker", "driver")
    ]
    for name in parts:
        growth = {
            what: median(sample[name][what] for sample in late) - median(sample[name][what] for sample in early)
            for what in ("resident", "files", "threads")
        }
        print(name, growth)
        # In 300 steps; one batch is 0.25 MiB. The driver's windows for calibration.json take 1 KiB a step until they
        # are full, and Ray takes as much in every process.
        assert growth["resident"] < 10 * MIB, (name, growth)
        assert growth["files"] <= 2, (name, growth)
        assert growth["threads"] <= 2, (name, growth)
    # Outstanding are at most (K + 1) B = 2 groups, and as much again is on its way to scorers and learner.
    assert max(sample["store"] for sample in late) < 8 * MIB
    assert len(os.listdir(tmp_path / "runs" / "tiny" / "checkpoints")) == 2

    samples = run(tmp_path, "run.steps=510", "rollout.workers=3")
    assert "resuming from step_00000500" in (tmp_path / "output.txt").read_text()
    assert samples[-1]["step"] == 510
    assert sum(name.startswith("LongWorker") for name in samples[-1]) == 3
