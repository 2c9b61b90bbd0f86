"""SIGTERM and SIGINT in every phase of a real process: saved or left intact, 143 or 130, and nothing stays behind."""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from rlhf_cluster.checkpoint_set import newest_checkpoint, sets, step_of, verify
from rlhf_cluster.config import Config
from rlhf_cluster.protocols import LearnerLost, PublishReport, WeightSnapshot, WorkerSlot
from rlhf_cluster.types import TrainBatch, UpdateResult
from tests import toy_run
from tests.driver_process import Driver, live_members, outliving_members
from tests.toy_run import Hold, ToyFleet, toy_config

SIGNALS = {signal.SIGTERM: 143, signal.SIGINT: 130}


@dataclass(frozen=True)
class Case:
    """Four synchronous steps, saved at 2 and 4: where the signal comes, and the newest set afterwards."""

    hold: Hold
    newest_step: int | None


CASES = [
    Case(Hold("reading"), None),
    Case(Hold("start of Ray"), None),
    Case(Hold("start-up"), None),
    Case(Hold("evaluation"), None),
    # The first of the four groups of step 2.
    Case(Hold("generation", 5), 1),
    Case(Hold("training", 3), 3),
    Case(Hold("publication of 3"), 3),
    Case(Hold("save", 1), 2),
    Case(Hold("save", 2), 4),
    Case(Hold("evaluation", 2), 4),
    Case(Hold("closing"), 4),
    Case(Hold("end of Ray"), 4),
]


def config_of(folder: Path, name: str, *overrides: str) -> Config:
    base = ["run.steps=4", "queue.max_staleness=0", "data.eval_prompts=held_out.jsonl"]
    return toy_config(folder, f"run.name={name}", *base, "evaluation.samples_per_prompt=1", *overrides)


def newest_step(config: Config) -> int | None:
    """Of the run, whose sets must be whole."""
    root = Path(config.run.dir) / config.run.name / "checkpoints"
    assert not list(root.glob(".*")), "an unfinished save was left"
    for folder in sets(root):
        verify(folder)
    newest = newest_checkpoint(root)
    return None if newest is None else step_of(newest)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("signals")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_signal_in_any_phase_saves_or_leaves_the_last_set_and_no_process(
    folder: Path, number: signal.Signals
) -> None:
    configs = [config_of(folder, f"{number.name}_{index}") for index in range(len(CASES))]
    drivers = [
        Driver(folder / f"{config.run.name}.txt", toy_run.train, config, case.hold)
        for case, config in zip(CASES, configs, strict=True)
    ]
    for driver, _ in Driver.each_report(drivers):
        driver.send(number)
    for case, config, driver in zip(CASES, configs, drivers, strict=True):
        what = f"{case.hold.phase}, visit {case.hold.visit}:\n{driver.output}"
        assert driver.end(20) == SIGNALS[number], what
        assert live_members(driver.pid) == [], what
        assert newest_step(config) == case.newest_step, what
        assert "failed" not in driver.output, what


@pytest.mark.timeout(120)
@pytest.mark.parametrize("moment", ["start of Ray", "end of Ray"])
def test_a_signal_while_ray_starts_or_ends_leaves_no_process_of_it(folder: Path, moment: str) -> None:
    config = config_of(folder, f"ray_{moment}")
    driver = Driver(folder / f"{config.run.name}.txt", toy_run.train, config, None, True)
    driver.wait_for(moment)
    # Ray has processes of its own about now.
    time.sleep(1.0 if moment == "start of Ray" else 0.1)
    assert len(live_members(driver.pid)) > 1
    driver.send(signal.SIGTERM)
    assert driver.end(30) == 143, driver.output
    assert outliving_members(driver.pid, 3.0) == [], driver.output
    assert newest_step(config) == (None if moment == "start of Ray" else 4)


def test_a_step_that_outlasts_the_grace_period_is_given_up_and_the_last_set_stays(folder: Path) -> None:
    config = config_of(folder, "grace", "run.stop_grace_s=0.3")
    driver = Driver(folder / "grace.txt", toy_run.train, config, Hold("training", 4, seconds=60))
    driver.wait_for("training")
    driver.send(signal.SIGTERM)
    assert driver.end(10) == 143, driver.output
    assert "runs/grace: starting fresh, no checkpoint here" in driver.output
    assert "0.3 s after SIGTERM the run has not ended" in driver.output
    assert newest_step(config) == 2
    assert live_members(driver.pid) == []


def learner_raises_and_closing_too(fleet: ToyFleet) -> None:
    async def train(batch: TrainBatch) -> UpdateResult:
        raise RuntimeError("learner rank 1 failed in 'train': the loss is not finite")

    async def close() -> None:
        await ToyFleet.close(fleet)
        raise OSError("the scorers are gone too")

    fleet.learner.train, fleet.close = train, close  # type: ignore[method-assign]


def test_a_failed_run_exits_1_with_the_first_cause_and_leaves_no_process(folder: Path) -> None:
    driver = Driver(
        folder / "failed.txt", toy_run.train, config_of(folder, "failed"), None, False, learner_raises_and_closing_too
    )
    assert driver.end(20) == 1
    assert "failed: RuntimeError: learner rank 1 failed in 'train': the loss is not finite" in driver.output
    assert live_members(driver.pid) == []


def one_worker_holds_other_weights(fleet: ToyFleet) -> None:
    async def publish(snapshot: WeightSnapshot) -> PublishReport:
        return PublishReport(snapshot.version, (0,), {1: "rollout worker 1: 3 parameters held differ"}, 0.0, 0.0)

    fleet.sink.publish = publish  # type: ignore[method-assign]


def test_nothing_is_sampled_for_training_before_every_worker_holds_version_0(folder: Path) -> None:
    config = config_of(folder, "unverified")
    driver = Driver(folder / "unverified.txt", toy_run.train, config, None, False, one_worker_holds_other_weights)
    assert driver.end(20) == 1, driver.output
    assert "failed: RunFailed: rollout workers do not hold the learner's version 0: {1: " in driver.output
    assert not [event for event in toy_run.events(config) if "generated" in event]


def learner_dies_in_the_last_save(fleet: ToyFleet) -> None:
    """Two times: in the save of step 4, and in the one that the rebuilt group makes up for it."""
    saves = itertools.count(1)
    fleet.learner.lost = lambda call: call == "save" and next(saves) in (2, 3)


@pytest.mark.parametrize(("restarts", "code"), [(3, 0), (1, 1)])
def test_a_learner_that_dies_in_the_last_save_is_rebuilt_trains_what_is_missing_and_saves(
    folder: Path, restarts: int, code: int
) -> None:
    config = config_of(folder, f"lost{restarts}", f"guardrails.max_learner_restarts={restarts}")
    driver = Driver(folder / f"lost{restarts}.txt", toy_run.train, config, None, False, learner_dies_in_the_last_save)
    assert driver.end(20) == code, driver.output
    if code:
        assert "failed: LearnerLost: learner rank 1 failed in 'save': it died" in driver.output
        assert newest_step(config) == 2
        return
    assert all(f"time {number} of at most 3" in driver.output for number in (1, 2))
    assert newest_step(config) == 4
    assert "evaluation after (version 10)" in driver.output, "4 + failover 5, steps 6, 7 + failover 8, steps 9, 10"
    checkpoint = newest_checkpoint(Path(config.run.dir) / config.run.name / "checkpoints")
    assert checkpoint is not None
    trained = json.loads((checkpoint / "learner" / "learner.json").read_text())["trained"]
    assert len(trained) == len(set(trained)) == 16


def sending_fails_between_two_publications(fleet: ToyFleet) -> None:
    """Once, while every worker is fenced: nobody generates, so nothing is trained until the learner is rebuilt."""
    lost = asyncio.Event()
    choose, restart = fleet.pool.choose, fleet.learner.restart

    def choose_until_lost() -> WorkerSlot | None:
        if fleet.learner.version < 2:
            return choose()
        lost.set()
        return None

    async def watch() -> None:
        await lost.wait()
        raise LearnerLost("version 2 could not be broadcast: learner rank 0 failed in 'broadcast'")

    async def restart_and_go_on(*, version: int) -> None:
        fleet.pool.choose, fleet.watch = choose, asyncio.Event().wait  # type: ignore[method-assign,assignment]
        await restart(version=version)

    fleet.pool.choose, fleet.watch = choose_until_lost, watch  # type: ignore[method-assign]
    fleet.learner.restart = restart_and_go_on  # type: ignore[method-assign]


def test_a_learner_that_is_lost_while_nobody_calls_it_is_rebuilt(folder: Path) -> None:
    config = config_of(folder, "unsent")
    driver = Driver(folder / "unsent.txt", toy_run.train, config, None, False, sending_fails_between_two_publications)
    assert driver.end(20) == 0, driver.output
    assert "the learner is lost (version 2 could not be broadcast" in driver.output
    assert newest_step(config) == 4


def learner_dies_at_first(call: str, fleet: ToyFleet) -> None:
    calls = itertools.count(1)
    fleet.learner.lost = lambda name: name == call and next(calls) == 1


def test_a_learner_that_dies_before_the_first_step_is_rebuilt(folder: Path) -> None:
    """In the check of version 0 of a fresh run, then while the checkpoint of its last step is loaded again."""
    fresh = config_of(folder, "early")
    driver = Driver(
        folder / "early1.txt", toy_run.train, fresh, None, False, functools.partial(learner_dies_at_first, "snapshot")
    )
    assert driver.end(20) == 0, driver.output
    assert "the learner is lost (learner rank 1 failed in 'snapshot': it died)" in driver.output
    run = Path(fresh.run.dir) / fresh.run.name
    assert (run / "evaluation_before.json").is_file() and (run / "evaluation_after.json").is_file()
    assert "self-check at version" in driver.output
    longer = config_of(folder, "early", "run.steps=6")
    driver = Driver(
        folder / "early2.txt", toy_run.train, longer, None, False, functools.partial(learner_dies_at_first, "load")
    )
    assert driver.end(20) == 0, driver.output
    assert "the learner is lost (learner rank 1 failed in 'load': it died)" in driver.output
    checkpoint = newest_checkpoint(Path(longer.run.dir) / longer.run.name / "checkpoints")
    assert checkpoint is not None
    assert newest_step(longer) == 6
    trained = json.loads((checkpoint / "learner" / "learner.json").read_text())["trained"]
    assert len(trained) == len(set(trained)) == 24


def test_a_stop_that_took_the_learner_too_is_a_stop(folder: Path) -> None:
    """SIGTERM to every process of a cluster: the learner is gone before the driver can save."""
    config = config_of(folder, "both")
    driver = Driver(folder / "both.txt", toy_run.train, config, Hold("training", 4), False, learner_dies_with_a_step)
    driver.wait_for("training")
    driver.send(signal.SIGTERM)
    assert driver.end(20) == 143, driver.output
    assert "stopped by SIGTERM; meanwhile LearnerLost: learner rank 1 failed in 'train': it died" in driver.output
    assert newest_step(config) == 2
    assert live_members(driver.pid) == []


def learner_dies_with_a_step(fleet: ToyFleet) -> None:
    trainings = itertools.count(1)
    fleet.learner.lost = lambda call: call == "train" and next(trainings) == 4


def workers_die_with_step_3(fleet: ToyFleet) -> None:
    publish = fleet.sink.publish

    async def published(snapshot: WeightSnapshot) -> PublishReport:
        if snapshot.version < 3:
            return await publish(snapshot)
        return PublishReport(snapshot.version, (), {0: "rollout worker 0: its process died"}, 0.0, 0.0)

    fleet.sink.publish = published  # type: ignore[method-assign]


def test_a_stop_that_took_the_workers_saves_the_step_that_the_learner_finished(folder: Path) -> None:
    config = config_of(folder, "workers")
    driver = Driver(folder / "workers.txt", toy_run.train, config, Hold("training", 3), False, workers_die_with_step_3)
    driver.wait_for("training")
    driver.send(signal.SIGTERM)
    assert driver.end(20) == 143, driver.output
    assert "stopped by SIGTERM; meanwhile RunFailed: no rollout worker took version 3" in driver.output
    assert newest_step(config) == 3
    rows = (Path(config.run.dir) / config.run.name / "metrics.jsonl").read_text().splitlines()
    steps = [row["step"] for row in map(json.loads, rows) if row["event"] == "step"]
    assert steps == [1, 2, 3], "what is saved has its row"


def fails_a_second_after_step_3(error: Exception, fleet: ToyFleet) -> None:
    async def watch() -> None:
        while fleet.learner.version < 3:
            await asyncio.sleep(0.01)
        await asyncio.sleep(1.0)
        raise error

    fleet.watch = watch  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("hold", "error"),
    [
        (Hold("training", 4, seconds=8), RuntimeError("rollout worker 0: its process died")),
        (Hold("publication of 3", seconds=8), LearnerLost("version 3 could not be broadcast")),
    ],
    ids=["learner_trains", "learner_lost"],
)
def test_a_stop_in_which_a_part_fails_saves_nothing_of_a_learner_that_trains_or_is_lost(
    folder: Path, hold: Hold, error: Exception
) -> None:
    config = config_of(folder, f"half_{hold.phase.split()[0]}")
    change = functools.partial(fails_a_second_after_step_3, error)
    driver = Driver(folder / f"{config.run.name}.txt", toy_run.train, config, hold, False, change)
    driver.wait_for(hold.phase)
    driver.send(signal.SIGTERM)
    assert driver.end(20) == 143, driver.output
    assert f"stopped by SIGTERM; meanwhile {type(error).__name__}: {error}" in driver.output
    assert "the newest checkpoint stays what it is" in driver.output
    assert newest_step(config) == 2


def start_up_fails_on_its_way_out(fleet: ToyFleet) -> None:
    ready = fleet.ready

    async def ready_or_broken(*names: str) -> None:
        try:
            await ready(*names)
        except asyncio.CancelledError:
            raise RuntimeError("rollout worker 0: its process died") from None

    fleet.ready = ready_or_broken  # type: ignore[method-assign]


def test_a_stop_before_the_first_step_in_which_a_part_fails_is_a_stop(folder: Path) -> None:
    config = config_of(folder, "none_yet")
    change = start_up_fails_on_its_way_out
    driver = Driver(folder / "none_yet.txt", toy_run.train, config, Hold("start-up"), False, change)
    driver.wait_for("start-up")
    driver.send(signal.SIGTERM)
    assert driver.end(20) == 143, driver.output
    assert "stopped by SIGTERM; meanwhile RuntimeError: rollout worker 0: its process died" in driver.output
    assert newest_step(config) is None


def test_without_a_signal_the_loss_of_all_workers_is_a_failure(folder: Path) -> None:
    config = config_of(folder, "no_workers")
    driver = Driver(folder / "no_workers.txt", toy_run.train, config, None, False, workers_die_with_step_3)
    assert driver.end(20) == 1, driver.output
    assert "failed: RunFailed: no rollout worker took version 3" in driver.output
