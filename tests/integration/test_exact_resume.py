"""F06, F04: a driver that is killed by SIGKILL at any moment and resumed ends where one that lived would have ended."""

from __future__ import annotations

import json
import random
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from safetensors.torch import load_file

from learner.checkpoint import WeightsOnlyCheckpointEngine
from rlhf_cluster.checkpoint_set import newest_checkpoint, sets, step_folder, verify
from rlhf_cluster.clock import SystemClock
from rlhf_cluster.config import Config
from rlhf_cluster.config_io import load_config
from rlhf_cluster.experience_queue import ExperienceQueue
from rlhf_cluster.run_state import load_state
from tests import toy_run
from tests.driver_process import Driver
from tests.integration import exact_driver
from tests.tiny_models import build_tiny_policy, build_tiny_reward_model
from tests.toy_run import Hold, toy_config

STEPS = 10


def exact_config(folder: Path, name: str, *overrides: str) -> Config:
    return load_config(
        Path("configs/tiny_test.yaml"),
        [
            f"model.policy={folder / 'policy'}",
            f"model.reward={folder / 'reward'}",
            f"run.dir={folder / 'runs'}",
            f"run.name={name}",
            f"run.steps={STEPS}",
            "queue.max_staleness=0",
            "rollout.max_new_tokens=6",
            "learner.critic_pretrain_steps=1",
            "learner.minibatches=1",
            "learner.warmup_fraction=0.3",
            "algorithm.kl.controller=adaptive",
            "algorithm.kl.target=0.01",
            "algorithm.kl.horizon=100",
            "reward.normalize=running",
            "checkpoint.every_steps=5",
            "metrics.prometheus=null",
            *overrides,
        ],
    )


def checkpoints(config: Config) -> Path:
    return Path(config.run.dir) / config.run.name / "checkpoints"


@dataclass(frozen=True)
class Runs:
    """One run that lived, and one with three lives: killed after the set of step 5, and in its last save."""

    straight: Config
    resumed: Config


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("exact")
    build_tiny_policy(folder / "policy")
    build_tiny_reward_model(folder / "reward")
    straight, resumed = exact_config(folder, "straight"), exact_config(folder, "resumed")
    driver = Driver(folder / "straight.txt", exact_driver.train, straight)
    assert driver.end(120) == 0, driver.output
    output = folder / "resumed.txt"

    first = Driver(output, exact_driver.train, resumed)
    first.wait_for(6)
    wait_for_set(resumed, 5)
    # A step takes about 0.1 s on two free cores.
    time.sleep(random.Random(1).uniform(0, 0.3))
    first.kill()

    second = Driver(output, exact_driver.train, resumed, Hold("tensors written", 1, seconds=60))
    second.wait_for("tensors written")
    second.kill()
    assert not step_folder(checkpoints(resumed), STEPS).exists()

    third = Driver(output, exact_driver.train, resumed)
    assert third.end(120) == 0, third.output
    assert third.output.count("resuming from step_00000005") == 2
    return Runs(straight, resumed)


def wait_for_set(config: Config, step: int, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not step_folder(checkpoints(config), step).is_dir():
        assert time.monotonic() < deadline, f"no set of step {step}"
        time.sleep(0.002)


def wait_for_any_set(config: Config, timeout_s: float = 30.0) -> None:
    """Whatever its step: a run that nobody stops meanwhile deletes its older ones."""
    deadline = time.monotonic() + timeout_s
    while not sets(checkpoints(config)):
        assert time.monotonic() < deadline, "no set"
        time.sleep(0.002)


def content(path: Path) -> Any:
    """JSON as it is, tensors and DeepSpeed's state as Python objects, text as text."""
    if path.suffix == ".json":
        return json.loads(path.read_text())
    if path.suffix == ".pt":
        return WeightsOnlyCheckpointEngine().load(str(path))
    return load_file(path) if path.suffix == ".safetensors" else path.read_text()


def differences(left: Any, right: Any, where: str = "") -> Iterator[str]:
    """Where two nested values differ by a bit."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        if left.dtype != right.dtype or not torch.equal(left, right):
            yield where
    elif isinstance(left, dict) and isinstance(right, dict):
        for key in {**left, **right}:
            if key in left and key in right:
                yield from differences(left[key], right[key], f"{where}/{key}")
            else:
                yield f"{where}/{key} is in one of them only"
    elif isinstance(left, list | tuple) and isinstance(right, list | tuple) and len(left) == len(right):
        for index, (one, other) in enumerate(zip(left, right, strict=True)):
            yield from differences(one, other, f"{where}[{index}]")
    elif isinstance(left, LossScaler) and isinstance(right, LossScaler):
        yield from differences(vars(left), vars(right), where)
    elif left != right:
        yield f"{where}: {left} and {right}"


def comparable(state: dict[str, Any], *, resumed: bool) -> dict[str, Any]:
    """The run state without what may differ: seconds, one more publication, and versions that had been published.

    A resumed run goes on above every version ever published, so its versions are higher from step 6 on.
    """
    metrics = state["metrics"]
    jump = metrics["version"] - STEPS
    del metrics["elapsed_s"]
    # The restored weights were published once more, to workers that held the base weights.
    metrics["counters"]["rlhf_publications_total"] -= resumed
    # How many calls were timed is no matter of time.
    metrics["seconds"] = {
        stage: sum(count for _, count in histogram["counts"]) - (resumed and stage == "publish")
        for stage, histogram in metrics["seconds"].items()
    }
    metrics["version"] -= jump
    metrics["versions"] = {
        str(int(version) - (jump if int(version) >= 5 else 0)): window
        for version, window in metrics["versions"].items()
    }
    state["queue"]["learner_version"] -= jump
    return state


@pytest.mark.timeout(300)
def test_a_killed_and_resumed_run_ends_with_the_same_checkpoint_to_the_bit(runs: Runs) -> None:
    straight, resumed = (step_folder(checkpoints(config), STEPS) for config in (runs.straight, runs.resumed))
    names = set(verify(straight).files)
    assert set(verify(resumed).files) == names
    assert sum("optim_states" in name for name in names) == 4, "moments of policy and critic, of two ranks"
    jump = load_state(resumed)["metrics"]["version"] - STEPS
    assert jump >= 6, "version 10 had been published: step 6 goes on as 12"
    assert comparable(load_state(straight), resumed=False) == comparable(load_state(resumed), resumed=True)
    for name in names - {"run_state.json"}:
        left, right = content(straight / name), content(resumed / name)
        if name == "learner/learner.json":
            right["version"] -= jump
            assert left["update"]["kl"]["coef"] != 0.05, "the controller of the coefficient has moved it"
            assert left["update"]["moments"]["count"] == STEPS * 4 * 2
            assert left["update"]["critic_pretrained"]
        assert not list(differences(left, right)), name


# What the learner says of its batch. What a row counts between two steps depends on when the workers answered.
OF_THE_BATCH = re.compile(
    r"rlhf_(batch_tokens|steps|optimizer_steps|learning_rate|grad_norm|policy_loss|value_|explained_variance|entropy|"
    r"kl_reference|kl_coef|kl_behaviour|approx_kl|ratio|clip|trained_score|normalised_score|learner_(return|advantage))"
)


def test_every_step_has_the_losses_and_the_kl_to_the_original_reference_of_the_run_that_lived(runs: Runs) -> None:
    straight, resumed = ({row["step"]: row for row in rows_of(config)} for config in (runs.straight, runs.resumed))
    assert sorted(straight) == sorted(resumed) == list(range(1, STEPS + 1))
    for step, row in straight.items():
        names = [name for name in row if OF_THE_BATCH.match(name)]
        assert len(names) > 20
        assert {name: row[name] for name in names} == {name: resumed[step].get(name) for name in names}, step
    kl = [row['rlhf_kl_reference{estimator="k3"}'] for row in straight.values()]
    assert kl[0] < 1e-9 < 1e-6 < kl[5], "a reference reloaded from the checkpoint would start at 0 again"


def rows_of(config: Config) -> list[dict[str, Any]]:
    lines = (Path(config.run.dir) / config.run.name / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["event"] == "step"]


def test_another_number_of_ranks_is_refused_by_name_before_anything_starts(runs: Runs, tmp_path: Path) -> None:
    run = runs.straight.run.model_copy(update={"steps": STEPS + 1})
    learner = runs.straight.learner.model_copy(update={"ranks": 1})
    driver = Driver(
        tmp_path / "ranks.txt",
        exact_driver.train,
        runs.straight.model_copy(update={"run": run, "learner": learner}),
    )
    assert driver.end(60) == 2
    assert "learner.ranks is 1 but the checkpoint was saved with 2" in driver.output
    assert "starting Ray" not in driver.output


EPOCH = [f"p{index}" for index in range(12)]


def asynchronous_config(folder: Path, name: str) -> Config:
    """16 steps of 3 groups: four epochs of 12 prompts."""
    overrides = ["run.steps=16", "queue.groups_per_batch=3", "queue.max_staleness=2", "checkpoint.every_steps=2"]
    return toy_config(folder, f"run.name={name}", *overrides)


def trained_groups(config: Config) -> list[str]:
    """What the newest weights were trained on."""
    newest = newest_checkpoint(checkpoints(config))
    assert newest is not None
    trained: list[str] = json.loads((newest / "learner" / "learner.json").read_text())["trained"]
    return trained


@pytest.mark.timeout(120)
def test_an_asynchronous_run_killed_again_and_again_trains_each_prompt_once_an_epoch(tmp_path: Path) -> None:
    configs = [asynchronous_config(tmp_path, f"seed{seed}") for seed in range(6)]
    generators = [random.Random(seed) for seed in range(len(configs))]
    lives = 3
    for life in range(lives):
        drivers = [Driver(tmp_path / f"{c.run.name}.txt", toy_run.train, c) for c in configs]
        moments = sorted((generator.uniform(0.05, 0.5), index) for index, generator in enumerate(generators))
        started = time.monotonic()
        for moment, index in moments:
            # Every second run has a set when it dies first, however busy the machine is; the others may have none.
            if life == 0 and index % 2:
                wait_for_any_set(configs[index])
            time.sleep(max(0.0, started + moment - time.monotonic()))
            drivers[index].kill()
    finished = [Driver(tmp_path / f"{config.run.name}.txt", toy_run.train, config) for config in configs]
    for config, driver in zip(configs, finished, strict=True):
        assert driver.end(30) == 0, driver.output
        trained = trained_groups(config)
        assert Counter(trained) == Counter(f"{epoch}:{prompt}" for epoch in range(4) for prompt in EPOCH), (
            config.run.name
        )
        events = toy_run.events(config)
        # A run that was killed before its first set starts afresh.
        fresh = max(index for index, event in enumerate(events) if event.get("life") == "fresh")
        published = [(event["published"], event["weights"]) for event in events[fresh:] if "published" in event]
        versions = [version for version, _ in published]
        assert versions == sorted(versions)
        assert len({version: weights for version, weights in published}) == len({repr(pair) for pair in published}), (
            "a version means the same weights in every life"
        )
        newest = newest_checkpoint(checkpoints(config))
        assert newest is not None
        queue = ExperienceQueue(groups_per_batch=3, max_staleness=2, clock=SystemClock(), group_deadline_s=1.0)
        queue.load_state_dict(load_state(newest)["queue"])
        queue.ledger.check()
        assert queue.ledger.counts["trained"].groups == 48
        assert queue.outstanding == 0
    resumed_from = [re.findall(r"resuming from step_(\d+)", driver.output) for driver in finished]
    print(f"resumed from {resumed_from}")
    assert all(resumed_from[1::2]), "at least the last life, which was not killed, went on from a set"


def test_queued_groups_of_the_checkpoint_are_trained_and_not_sampled_again(tmp_path: Path) -> None:
    # Killed in the step after the first set, so that nothing newer was published: all that was queued is within the
    # bound, and the first batch of the new life comes from it.
    config = asynchronous_config(tmp_path, "queued")
    first = Driver(tmp_path / "queued.txt", toy_run.train, config, Hold("training", 3, seconds=30))
    first.wait_for("training")
    wait_for_set(config, 2)
    first.kill()
    newest = newest_checkpoint(checkpoints(config))
    assert newest is not None
    entries = load_state(newest)["queue"]["entries"]
    queued = {entry["group_id"] for entry in entries if entry["group"] is not None}
    lost = {entry["group_id"] for entry in entries} - queued
    print(f"queued {sorted(queued)}, on workers {sorted(lost)}")
    assert queued, "an asynchronous run has finished groups when it saves"
    second = Driver(tmp_path / "queued.txt", toy_run.train, config)
    assert second.end(30) == 0, second.output
    mine = [event for event in toy_run.events(config) if event["pid"] == second.pid]
    generated = [event["generated"] for event in mine if "generated" in event]
    trained = [group for event in mine if "trained" in event for group in event["trained"]]
    assert queued <= set(trained)
    assert not queued & set(generated)
    assert lost <= set(generated)
