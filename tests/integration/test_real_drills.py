"""One `rlhf train` with real vLLM and real DeepSpeed loses its engine and a learner rank, each twice, in the middle of
something, and reaches its last step by itself.

Who is killed is stopped first (SIGSTOP): what it was doing is then certain, and still going on when it dies.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest
from safetensors.numpy import load_file

from rlhf_cluster.checkpoint_set import newest_checkpoint, step_folder, verify
from rlhf_cluster.config_io import load_config
from rlhf_cluster.launch import snapshot_folder
from tests.drills.processes import command_line, descendants, engines, kill, outlive, titled
from tests.tiny_models import build_tiny_policy, build_tiny_reward_model

STEPS, GROUPS, SAMPLES, MAX_STALENESS = 5, 4, 2, 1
NAME = "realdrill"
T = TypeVar("T")


@dataclass
class Ended:
    exit_code: int
    output: str
    folder: Path
    left: list[str]
    restored: tuple[Path, Path]
    """The weights that went out after the first rebuild, and those of the newest set at that time."""
    seconds: float

    def rows(self) -> list[dict[str, Any]]:
        return rows_of(self.folder)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    complete = path.read_text().rpartition("\n")[0] if path.is_file() else ""
    return [row for row in map(json.loads, complete.splitlines()) if row["event"] == "step"]


class Run:
    """A driver in a process group of its own, and its processes by what they are called."""

    def __init__(self, models: Path, folder: Path) -> None:
        self.folder = folder / NAME
        self._log = folder / "output.txt"
        self._killed_at = 0.0
        command = [sys.executable, "-m", "rlhf_cluster", "train", "configs/tiny_test.yaml"]
        overrides = [
            f"model.policy={models / 'policy'}",
            f"model.reward={models / 'reward'}",
            f"run.dir={folder}",
            f"run.name={NAME}",
            f"run.steps={STEPS}",
            f"rollout.samples_per_prompt={SAMPLES}",
            f"queue.groups_per_batch={GROUPS}",
            f"queue.max_staleness={MAX_STALENESS}",
            "checkpoint.every_steps=2",
            # One group after the other, half a second each: one is running whenever the queue has room.
            "rollout.max_new_tokens=200",
            "rollout.engine.max_num_seqs=2",
            "metrics.prometheus=null",
            "metrics.samples_per_step=1000",
        ]
        # Every driver of this run writes its weights into a folder of that name, each with a suffix of its own.
        self._in_memory = snapshot_folder(load_config(Path("configs/tiny_test.yaml"), overrides))
        with self._log.open("w") as log:
            self.driver = subprocess.Popen(
                [*command, *overrides], stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def until(self, look: Callable[[], T | None], seconds: float, what: str) -> T:
        deadline = time.monotonic() + seconds
        while (found := look()) is None:
            assert self.driver.poll() is None, f"the run ended before {what}:\n{self.output()[-3000:]}"
            assert time.monotonic() < deadline, f"no {what} within {seconds} s:\n{self.output()[-3000:]}"
            time.sleep(0.002)
        return found

    def kill(self, victim: psutil.Process) -> None:
        """What was asked of it while it stood still is under way when it dies."""
        time.sleep(0.5)
        victim.send_signal(signal.SIGKILL)
        self._killed_at = time.monotonic()

    def until_another_row(self) -> None:
        """A learner step is closed again; says how long after the last kill."""
        known = len(rows_of(self.folder))
        self.until(lambda: len(rows_of(self.folder)) > known or None, 120, "next step")
        print(f"the next learner step was closed {time.monotonic() - self._killed_at:.1f} s after the kill")

    def until_told(self, what: str) -> None:
        self.until(lambda: what in self.output() or None, 30, f"word of {what!r}")

    def engine(self) -> psutil.Process:
        return self.until(lambda: engines(self.driver.pid) or None, 60, "engine")[0]

    def ranks(self) -> list[psutil.Process]:
        def look() -> list[psutil.Process] | None:
            found = titled(self.driver.pid, "ray::RankActor")
            return found if len(found) == 2 else None

        return self.until(look, 30, "two learner ranks")

    def stop_a_rank_in(self, method: str, ranks: list[psutil.Process]) -> psutil.Process | None:
        """A learner rank that stands still inside ``method``, which Ray shows as the title of its process."""
        for rank in ranks:
            if not _is_in(rank, method):
                continue
            rank.suspend()
            if _is_in(rank, method):
                return rank
            rank.resume()
        return None

    def newest_snapshot(self) -> int:
        """The newest version that the learner wrote for the workers."""
        written = self._in_memory.parent.glob(f"{self._in_memory.stem}.*/v*.safetensors")
        return max((int(path.stem[1:]) for path in written), default=0)

    def keep(self, version: int, *, step: int) -> tuple[Path, Path]:
        """Copies of what the learner wrote as ``version`` and of what the set of ``step`` holds; both go later."""
        (written,) = self._in_memory.parent.glob(f"{self._in_memory.stem}.*/v{version}.safetensors")
        saved = step_folder(self.folder / "checkpoints", step) / "learner" / "policy" / "model.safetensors"
        kept = self.folder.parent / "written.safetensors", self.folder.parent / "saved.safetensors"
        shutil.copyfile(written, kept[0])
        shutil.copyfile(saved, kept[1])
        return kept

    def wait(self, seconds: float) -> int:
        return self.driver.wait(seconds)

    def end(self) -> None:
        for process in descendants(self.driver.pid):
            kill(process)
        self.driver.kill()
        self.driver.wait()
        for folder in self._in_memory.parent.glob(f"{self._in_memory.stem}.*"):
            shutil.rmtree(folder, ignore_errors=True)


def _is_in(rank: psutil.Process, method: str) -> bool:
    return command_line(rank) == f"ray::RankActor.{method}"


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ended]:
    models = tmp_path_factory.mktemp("models")
    build_tiny_policy(models / "policy")
    build_tiny_reward_model(models / "reward")
    started = time.monotonic()
    run = Run(models, tmp_path_factory.mktemp("real_drills"))
    try:
        # 1. The engine in the middle of generating, and a rank in the middle of the step after the first set.
        run.until(lambda: any(row["step"] == 2 for row in rows_of(run.folder)) or None, 150, "step 2")
        ranks = run.ranks()
        engine = run.engine()
        rank = run.until(lambda: run.stop_a_rank_in("train", ranks), 30, "step in progress")
        # The groups that the batch made room for are on their way to it, and the version before them is in.
        time.sleep(0.5)
        engine.suspend()
        seen = {process.pid: process for process in descendants(run.driver.pid)}
        run.kill(engine)
        trained = run.newest_snapshot()
        # Only then the rank: rebuilding the learner takes back every group, those of the dead engine too.
        run.until_told("rollout worker 0 died during group")
        run.kill(rank)

        # 2. The engine in the middle of an update, and a rank in the middle of the save that goes on beside it.
        # The restored weights go out under the next version; from then on each step is one.
        run.until(lambda: run.newest_snapshot() == trained + 1 or None, 60, "restored weights")
        restored = run.keep(trained + 1, step=2)
        ranks = run.ranks()
        engine = run.engine()
        run.until_another_row()
        run.until(lambda: run.newest_snapshot() == trained + 3 or None, 60, "weights of step 4")
        engine.suspend()
        rank = run.until(lambda: run.stop_a_rank_in("save", ranks), 30, "save in progress")
        seen |= {process.pid: process for process in descendants(run.driver.pid)}
        run.kill(engine)
        run.until_told("rollout worker 0 died during the update to version")
        run.kill(rank)
        run.until_another_row()

        exit_code = run.wait(150)
        left = outlive(list(seen.values()), 15)
        yield Ended(exit_code, run.output(), run.folder, left, restored, time.monotonic() - started)
    finally:
        if run.driver.poll() is None:
            run.end()


@pytest.mark.timeout(400)
def test_the_run_reaches_its_last_step_by_itself_and_leaves_no_process(ended: Ended) -> None:
    assert ended.exit_code == 0, ended.output[-4000:]
    assert [row["step"] for row in ended.rows()][-1] == STEPS
    assert ended.left == []


def test_each_death_is_told_in_one_line_that_names_what_it_interrupted(ended: Ended) -> None:
    lines = ended.output.splitlines()
    assert len([line for line in lines if "rollout worker 0, incarnation" in line and ": down: " in line]) == 2
    assert any(re.search(r"is issued again: .*worker 0 died during group .*EngineDied", line) for line in lines)
    assert any(re.search(r"worker 0 died during the update to version \d+: EngineDied", line) for line in lines)
    lost = [line for line in lines if line.startswith("the learner is lost")]
    assert [re.findall(r"learner rank \d failed in '(\w+)': ActorDiedError \(pid: \d+\)", line) for line in lost] == [
        ["train"],
        ["save"],
    ]


def test_versions_grow_and_no_token_is_staler_than_the_bound(ended: Ended) -> None:
    rows = ended.rows()
    versions = [row["version"] for row in rows]
    assert versions == sorted(set(versions))
    assert max(row["rlhf_batch_max_lag"] for row in rows) <= MAX_STALENESS
    assert rows[-1]['rlhf_restarts_total{kind="learner"}'] == 2
    assert rows[-1]['rlhf_restarts_total{kind="rollout_worker"}'] == 2
    assert rows[-1]['rlhf_supervision_events_total{kind="rollout_worker",event="down"}'] == 2


def test_a_rebuilt_learner_goes_on_from_the_weights_of_the_newest_set(ended: Ended) -> None:
    written, saved = map(load_file, ended.restored)
    assert written.keys() == saved.keys()
    assert all((written[name] == saved[name]).all() for name in saved)


def test_the_final_weights_were_trained_on_every_prompt_once(ended: Ended) -> None:
    # Not splitlines: answers of a random policy hold characters such as U+0085, which JSON leaves as they are.
    with (ended.folder / "samples.jsonl").open(encoding="utf-8") as file:
        answers = [json.loads(line) for line in file]
    # A step that was done again counts as it was done last.
    batches = {step: [a for a in answers if a["step"] == step][-GROUPS * SAMPLES :] for step in range(1, STEPS + 1)}
    groups = Counter(
        answer["rollout_id"].rpartition("/")[0].rpartition("/")[0] for b in batches.values() for answer in b
    )
    assert len(groups) == STEPS * GROUPS
    assert set(groups.values()) == {SAMPLES}


def test_the_newest_set_is_whole_and_that_of_the_last_step(ended: Ended) -> None:
    newest = newest_checkpoint(ended.folder / "checkpoints")
    assert newest is not None
    assert verify(newest).step == STEPS
    assert not list((ended.folder / "checkpoints").glob(".*")), "what a killed save left is gone"
