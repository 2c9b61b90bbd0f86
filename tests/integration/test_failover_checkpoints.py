"""F04: a rebuilt learner goes on from the newest set that is whole, and what it trains again is saved again."""

from __future__ import annotations

import errno
import functools
import hashlib
import itertools
import json
import signal
from collections import Counter
from pathlib import Path

import pytest

from rlhf_cluster.checkpoint_set import MANIFEST, PINNED, STATE, sets, step_folder, step_of, verify
from rlhf_cluster.config import Config
from rlhf_cluster.run_state import load_state
from tests import toy_run
from tests.driver_process import Driver
from tests.toy_run import Hold, ToyFleet, toy_config

STEPS = 6


def config_of(folder: Path, name: str, *overrides: str) -> Config:
    base = [f"run.steps={STEPS}", "checkpoint.every_steps=2", "queue.max_staleness=1"]
    return toy_config(folder, f"run.name={name}", *base, *overrides)


def checkpoints(config: Config) -> Path:
    return Path(config.run.dir) / config.run.name / "checkpoints"


def spoil(root: Path, step: int) -> None:
    state = step_folder(root, step) / "learner" / "learner.json"
    state.write_text(state.read_text().replace("trained", "trainee"))


def loses_the_learner_in_step_6(root: Path, spoilt: tuple[int, ...], pinned: int | None, fleet: ToyFleet) -> None:
    trainings = itertools.count(1)
    save = fleet.learner.save

    async def pins(folder: Path) -> None:
        if pinned is not None and step_folder(root, pinned).is_dir():
            (step_folder(root, pinned) / PINNED).touch()
        await save(folder)

    def lost(call: str) -> bool:
        if call != "train" or next(trainings) != STEPS:
            return False
        for step in spoilt:
            spoil(root, step)
        return True

    fleet.learner.save = pins  # type: ignore[method-assign]
    fleet.learner.lost = lost


@pytest.mark.parametrize(("keep_last", "pinned"), [(2, None), (1, 2)])
def test_steps_after_a_damaged_set_are_trained_and_saved_again(
    tmp_path: Path, keep_last: int, pinned: int | None
) -> None:
    config = config_of(tmp_path, "spoilt", f"checkpoint.keep_last={keep_last}")
    change = functools.partial(loses_the_learner_in_step_6, checkpoints(config), (4,), pinned)
    driver = Driver(tmp_path / "out.txt", toy_run.train, config, None, False, change)
    assert driver.end(30) == 0, driver.output
    kept = {step_of(folder) for folder in sets(checkpoints(config))}
    assert kept == ({4, 6} if pinned is None else {2, 6})
    for folder in sets(checkpoints(config)):
        verify(folder)
    assert (checkpoints(config) / "step_00000004.damaged").is_dir()
    trained = json.loads((step_folder(checkpoints(config), STEPS) / "learner/learner.json").read_text())["trained"]
    assert set(Counter(trained).values()) == {1}, "each prompt once an epoch"
    assert len(trained) == STEPS * config.queue.groups_per_batch


def test_a_resumed_run_still_goes_back_to_an_older_set(tmp_path: Path) -> None:
    config = config_of(tmp_path, "older", "checkpoint.keep_last=2", "run.steps=4")
    assert Driver(tmp_path / "first.txt", toy_run.train, config).end(30) == 0
    config = config_of(tmp_path, "older", "checkpoint.keep_last=2", "checkpoint.every_steps=9")
    change = functools.partial(loses_the_learner_at_once, checkpoints(config), (4,))
    driver = Driver(tmp_path / "second.txt", toy_run.train, config, None, False, change)
    assert driver.end(30) == 0, driver.output
    assert (checkpoints(config) / "step_00000004.damaged").is_dir()
    trained = json.loads((step_folder(checkpoints(config), STEPS) / "learner/learner.json").read_text())["trained"]
    assert set(Counter(trained).values()) == {1}, "each prompt once an epoch"
    assert len(trained) == STEPS * config.queue.groups_per_batch


def test_a_resumed_run_remembers_no_attempt_that_no_set_issues_again(tmp_path: Path) -> None:
    overrides = ["queue.max_staleness=0", "checkpoint.keep_last=1"]
    config = config_of(tmp_path, "short", *overrides, "run.steps=4")
    assert Driver(tmp_path / "first.txt", toy_run.train, config).end(30) == 0
    config = config_of(tmp_path, "short", *overrides)
    assert Driver(tmp_path / "second.txt", toy_run.train, config).end(30) == 0
    queue = load_state(step_folder(checkpoints(config), STEPS))["queue"]
    assert len(queue["last_attempt"]) == 2 * config.queue.groups_per_batch, "those of steps 5 and 6"


def test_a_fresh_run_counts_its_own_versions_and_notes_a_rebuilt_learners_before_anyone_holds_it(
    tmp_path: Path,
) -> None:
    config = config_of(tmp_path, "noted")
    published = checkpoints(config).parent / "published_version"
    published.parent.mkdir(parents=True)
    published.write_text("70\n")
    change = functools.partial(loses_the_learner_at_once, checkpoints(config), ())
    driver = Driver(tmp_path / "out.txt", toy_run.train, config, Hold("publication of 1", seconds=20), False, change)
    driver.wait_for("publication of 1")
    driver.kill()
    assert "the learner is lost" in driver.output
    assert published.read_text().strip() == "1"


def test_a_stop_while_the_learner_is_rebuilt_ends_the_run_at_once(tmp_path: Path) -> None:
    config = config_of(tmp_path, "rebuilding")
    change = functools.partial(loses_the_learner_at_once, checkpoints(config), ())
    driver = Driver(tmp_path / "out.txt", toy_run.train, config, Hold("start-up", 2, seconds=25), False, change)
    driver.wait_for("start-up")
    driver.send(signal.SIGTERM)
    assert driver.end(10) == 143, driver.output
    assert "the learner is lost" in driver.output


def test_a_save_that_failed_in_a_past_that_was_taken_back_fails_no_stop(tmp_path: Path) -> None:
    config = config_of(tmp_path, "full")
    change = cannot_save_step_4_and_loses_the_learner_in_step_5
    driver = Driver(tmp_path / "out.txt", toy_run.train, config, Hold("training", 6), False, change)
    driver.wait_for("training")
    driver.send(signal.SIGTERM)
    assert driver.end(30) == 143, driver.output
    assert "checkpoint of step 4 FAILED" in driver.output
    assert [step_of(folder) for folder in sets(checkpoints(config))] == [2, 3]


def cannot_save_step_4_and_loses_the_learner_in_step_5(fleet: ToyFleet) -> None:
    trainings = itertools.count(1)
    save = fleet.learner.save

    async def full(folder: Path) -> None:
        if fleet.learner.version == 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        await save(folder)

    fleet.learner.save = full  # type: ignore[method-assign]
    fleet.learner.lost = lambda call: call == "train" and next(trainings) == 5


def test_a_set_of_before_references_and_draws_were_kept_is_resumed(tmp_path: Path) -> None:
    config = config_of(tmp_path, "before", "run.steps=4")
    assert Driver(tmp_path / "first.txt", toy_run.train, config).end(30) == 0
    folder = step_folder(checkpoints(config), 4)
    state, manifest = (json.loads((folder / name).read_text()) for name in (STATE, MANIFEST))
    del state["reference"], state["queue"]["draws"], state["queue"]["places"]
    text = json.dumps(state).encode()
    manifest["files"][STATE] = {"bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()}
    (folder / STATE).write_bytes(text)
    (folder / MANIFEST).write_text(json.dumps(manifest))
    driver = Driver(tmp_path / "second.txt", toy_run.train, config_of(tmp_path, "before"))
    assert driver.end(30) == 0, driver.output
    assert not (checkpoints(config) / "step_00000004.damaged").exists()
    assert step_of(sets(checkpoints(config))[-1]) == STEPS


def loses_the_learner_at_once(root: Path, spoilt: tuple[int, ...], fleet: ToyFleet) -> None:
    trainings = itertools.count(1)

    def lost(call: str) -> bool:
        if call != "train" or next(trainings) != 1:
            return False
        for step in spoilt:
            spoil(root, step)
        return True

    fleet.learner.lost = lost


def test_a_learner_whose_sets_are_all_damaged_is_not_started_afresh_in_silence(tmp_path: Path) -> None:
    config = config_of(tmp_path, "all")
    change = functools.partial(loses_the_learner_in_step_6, checkpoints(config), (2, 4), None)
    driver = Driver(tmp_path / "out.txt", toy_run.train, config, None, False, change)
    assert driver.end(30) == 1, driver.output
    assert "failed: RunFailed: the learner cannot be rebuilt: no checkpoint can be used" in driver.output
    assert [step_of(folder) for folder in sets(checkpoints(config))] == [2, 4], "a backup may still repair them"


def test_a_run_that_lost_its_learner_more_often_than_a_prompt_may_fail_goes_on(tmp_path: Path) -> None:
    config = config_of(
        tmp_path, "often", "guardrails.max_attempts=1", "guardrails.max_learner_restarts=3", "checkpoint.every_steps=6"
    )
    change = loses_the_learner_three_times
    driver = Driver(tmp_path / "out.txt", toy_run.train, config, None, False, change)
    assert driver.end(30) == 0, driver.output
    assert "time 3 of at most 3" in driver.output
    verified = [event["published"] for event in toy_run.events(config) if event.get("verify")]
    assert len(verified) == 3, "each set of restored weights, and nothing else"


def test_a_learner_lost_too_often_ends_the_run_with_the_first_loss(tmp_path: Path) -> None:
    config = config_of(tmp_path, "too_often", "guardrails.max_learner_restarts=1")
    driver = Driver(tmp_path / "out.txt", toy_run.train, config, None, False, loses_the_learner_twice)
    assert driver.end(30) == 1, driver.output
    assert (
        "failed: LearnerLost: learner rank 1 failed in 'train': it died; it was rebuilt 1 times "
        "(guardrails.max_learner_restarts), then: learner rank 1 failed in 'save': it died"
    ) in driver.output


def loses_the_learner_twice(fleet: ToyFleet) -> None:
    calls: Counter[str] = Counter()

    def lost(call: str) -> bool:
        calls[call] += 1
        return (call, calls[call]) in (("train", 1), ("save", 1))

    fleet.learner.lost = lost


def loses_the_learner_three_times(fleet: ToyFleet) -> None:
    trainings = itertools.count(1)
    fleet.learner.lost = lambda call: call == "train" and next(trainings) in (2, 4, 6)


def test_a_refused_resume_leaves_the_config_of_the_run_as_it_was(tmp_path: Path) -> None:
    config = config_of(tmp_path, "refused")
    assert Driver(tmp_path / "first.txt", toy_run.train, config).end(30) == 0
    written = checkpoints(config).parent / "config.yaml"
    before = written.read_text()
    other = config.model_copy(update={"run": config.run.model_copy(update={"seed": 99, "steps": 8})})
    driver = Driver(tmp_path / "second.txt", toy_run.train, other)
    assert driver.end(30) == 2, driver.output
    assert "run.seed" in driver.output
    assert written.read_text() == before


def test_a_resume_says_what_is_set_otherwise_and_refuses_another_reference(tmp_path: Path) -> None:
    config = config_of(tmp_path, "changed")
    assert Driver(tmp_path / "first.txt", toy_run.train, config).end(30) == 0
    longer = config.model_copy(update={"run": config.run.model_copy(update={"steps": 8})})
    driver = Driver(tmp_path / "second.txt", toy_run.train, longer)
    assert driver.end(30) == 0, driver.output
    assert "set otherwise than before the resume: run.steps: 6 -> 8" in driver.output
    weights = tmp_path / "policy" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    driver = Driver(tmp_path / "third.txt", toy_run.train, longer)
    assert driver.end(30) == 2, driver.output
    assert "is not the model that the run of" in driver.output
