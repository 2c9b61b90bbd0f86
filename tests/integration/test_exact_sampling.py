"""F06: with max_staleness 0 a resumed run trains the same answers, sampled with the same seeds, in the same order."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from rlhf_cluster.checkpoint_set import step_folder
from rlhf_cluster.config import Config
from rlhf_cluster.run_state import load_state
from tests import toy_run
from tests.driver_process import Driver
from tests.toy_run import Hold, toy_config

STEPS = 5


def config_of(folder: Path, name: str, *, every_steps: int = 1) -> Config:
    overrides = [f"run.steps={STEPS}", f"checkpoint.every_steps={every_steps}", "checkpoint.keep_last=9"]
    return toy_config(folder, f"run.name={name}", "queue.max_staleness=0", *overrides)


def run_folder(config: Config) -> Path:
    return Path(config.run.dir) / config.run.name


def batches(config: Config) -> list[tuple[Any, Any]]:
    """Group ids and seeds of every trained batch."""
    return [(event["trained"], event["seeds"]) for event in toy_run.events(config) if "trained" in event]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sampling")


@pytest.fixture(scope="module")
def straight(folder: Path) -> Config:
    config = config_of(folder, "straight")
    driver = Driver(folder / "straight.txt", toy_run.train, config)
    assert driver.end(60) == 0, driver.output
    return config


@pytest.mark.parametrize("step", range(1, STEPS))
def test_a_run_that_goes_on_from_any_set_samples_what_the_first_run_sampled(
    folder: Path, straight: Config, step: int
) -> None:
    resumed = config_of(folder, f"resumed{step}")
    saved = step_folder(run_folder(straight) / "checkpoints", step)
    shutil.copytree(saved, run_folder(resumed) / "checkpoints" / saved.name)
    driver = Driver(folder / f"{step}.txt", toy_run.train, resumed)
    assert driver.end(60) == 0, driver.output
    assert batches(resumed) == batches(straight)[step:]


@pytest.mark.parametrize("group", [2, 7, 10])
def test_a_run_that_was_stopped_while_groups_were_on_workers_goes_on_with_the_same_samples(
    folder: Path, straight: Config, group: int
) -> None:
    # No set is there when the signal comes: the one that it leads to is of a moment between two steps.
    config = config_of(folder, f"stopped{group}", every_steps=STEPS)
    output = folder / f"stopped{group}.txt"
    first = Driver(output, toy_run.train, config, Hold("generation", group, seconds=20))
    first.wait_for("generation")
    first.send(signal.SIGTERM)
    assert first.end(60) == 143, first.output
    if steps := len(batches(config)):
        entries = load_state(step_folder(run_folder(config) / "checkpoints", steps))["queue"]["entries"]
        assert any(entry["group"] is None for entry in entries), "the set has a group that was on a worker"
    second = Driver(output, toy_run.train, config)
    assert second.end(60) == 0, second.output
    assert batches(config) == batches(straight)
