"""One drill from its plan to its report: start a driver, kill, wait until the run has ended by itself, check."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil

from rlhf_cluster.launch import snapshot_folder
from tests.drills import driver, invariants
from tests.drills.driver import Order
from tests.drills.plan import Plan
from tests.drills.processes import current, descendants, kill, outlive, registered

_RUN_DEADLINE_S = 120.0
_GONE_DEADLINE_S = 20.0
_LOOK_S = 0.004


@dataclass
class Report:
    """What became of one drill. ``failures`` is empty when every promise held.

    ``noticed_s``: from the kill until the driver knew (worker, scorer, learner). ``recovered_s``: until the part served
    again; for learner and driver until the first learner step after it was closed. ``gone_s``: until no process of a
    dead driver was left.
    """

    plan: Plan
    folder: Path
    failures: list[str] = field(default_factory=list)
    hit: bool = False
    noticed_s: float | None = None
    recovered_s: float | None = None
    gone_s: float | None = None
    seconds: float = 0.0
    score: tuple[float, float] = (0.0, 0.0)
    last_words: str = ""

    def __str__(self) -> str:
        verdict = "ok" if not self.failures else "FAILED"
        times = ", ".join(
            f"{name} {value:.2f} s"
            for name, value in (
                ("noticed", self.noticed_s),
                ("recovered", self.recovered_s),
                ("gone", self.gone_s),
                ("all", self.seconds),
            )
            if value is not None
        )
        lines = [f"{verdict}: {self.plan}{'' if self.hit else ' (came too late)'}; {times}"]
        lines += [f"    {failure}" for failure in self.failures]
        if self.failures:
            lines.append(f"    logs: {self.folder}/driver_*.log")
        return "\n".join(lines)


def forks() -> Any:
    """Where drivers come from: a server that has imported everything, so that a driver is there in a moment.

    Before the first driver; the caller must not have started Ray in a forked way.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.drills.driver"])
    return context


def run(plan: Plan, folder: Path, *, address: str | None) -> Report:
    """Run the drill of ``plan`` in ``folder`` (made here, emptied when it went well).

    ``address``: a Ray cluster to join. Every other driver that is killed starts Ray itself, and must take it along.
    """
    folder.mkdir(parents=True)
    report = Report(plan, folder)
    started = time.monotonic()
    drill = _Drill(plan, folder, None if plan.victim == "driver" and plan.seed % 2 == 0 else address, report)
    try:
        drill.run()
    except Exception as error:
        report.failures.append(f"{type(error).__name__}: {error}")
    finally:
        drill.close()
    report.seconds = time.monotonic() - started
    if not report.failures:
        shutil.rmtree(folder)
    return report


class _Drill:
    def __init__(self, plan: Plan, folder: Path, address: str | None, report: Report) -> None:
        self._plan = plan
        self._folder = folder
        self._order = Order(folder, plan.seed, address, "", plan.overrides)
        self._run_folder = self._order.run_folder
        self._in_memory_of_one = snapshot_folder(driver.configuration(self._order))
        self._report = report
        self._context = forks()
        self._driver: BaseProcess | None = None
        self._starts = 0
        self._killed_at: float | None = None
        self._steps_before = 0
        self._seen: dict[int, psutil.Process] = {}

    def run(self) -> None:
        plan, report = self._plan, self._report
        process = self._start()
        report.hit = self._wait_for_the_moment(process)
        report.hit = report.hit and self._kill()
        if plan.victim == "driver" and report.hit:
            process.join(10)
            assert process.exitcode == -signal.SIGKILL, f"the killed driver ended with {process.exitcode}"
            assert self._killed_at is not None
            if left := outlive(list(self._seen.values()), _GONE_DEADLINE_S):
                report.failures.append(f"processes of the dead driver are left: {left}")
            report.gone_s = time.time() - self._killed_at
            self._seen.clear()
            process = self._start()
        known = invariants.rows(self._run_folder)[-1:]
        deadline = time.monotonic() + _RUN_DEADLINE_S
        while process.exitcode is None and time.monotonic() < deadline:
            self._look(process)
            self._look_at_the_steps(known)
            process.join(0.05)
        self._finish(process)

    def _look_at_the_steps(self, known: list[dict[str, Any]]) -> None:
        """Learner and driver are back when a step was closed that needed the new one."""
        victim = self._plan.victim
        if self._killed_at is None or self._report.recovered_s is not None or not victim.startswith(("le", "dr")):
            return
        last = invariants.rows(self._run_folder)[-1:]
        if last and last != known and (victim == "driver" or last[0]['rlhf_restarts_total{kind="learner"}']):
            self._report.recovered_s = time.time() - self._killed_at

    def close(self) -> None:
        """Whatever happened, nothing of this drill runs on."""
        for process in [*self._seen.values(), *registered(self._folder).values()]:
            kill(process)
        for folder in self._in_memory():
            shutil.rmtree(folder, ignore_errors=True)

    def _in_memory(self) -> list[Path]:
        """Folders of weights that the run published, of every driver that it had."""
        return list(self._in_memory_of_one.parent.glob(f"{self._in_memory_of_one.stem}.*"))

    def _start(self) -> BaseProcess:
        self._starts += 1
        order = replace(self._order, log=f"driver_{self._starts}.log")
        self._driver = self._context.Process(target=driver.main, args=(order,), daemon=False)
        self._driver.start()
        return self._driver

    def _look(self, process: BaseProcess) -> None:
        """Remember every process below the driver, and every one that said it belongs to the drill."""
        assert process.pid is not None
        for found in [*descendants(process.pid), *registered(self._folder).values()]:
            self._seen.setdefault(found.pid, found)

    def _wait_for_the_moment(self, process: BaseProcess) -> bool:
        """False when the run ended first."""
        plan, looked = self._plan, 0.0
        deadline = time.monotonic() + _RUN_DEADLINE_S
        sightings = self._sightings()
        for count in sightings:
            if process.exitcode is not None:
                return False
            if time.monotonic() > deadline:
                raise TimeoutError(f"{plan.moment} {plan.number} was not seen within {_RUN_DEADLINE_S:g} s")
            if count >= plan.number and (plan.moment == "start" or current(self._folder, plan.victim) is not None):
                break
            if time.monotonic() - looked > 0.5:
                looked = time.monotonic()
                self._look(process)
            time.sleep(_LOOK_S)
        self._look(process)
        time.sleep(plan.delay_s)
        self._look(process)
        return process.exitcode is None

    def _sightings(self) -> Iterator[int]:
        """How often the plan's moment was seen so far."""
        path, moment = self._run_folder, self._plan.moment
        seen: set[str] = set()
        while True:
            if moment == "step":
                yield len(invariants.rows(path))
                continue
            if moment == "save":
                # Also once it is over: a look every few milliseconds may miss one.
                for name in (".partial_*", "step_*"):
                    seen |= {found.name.split("_")[1] for found in (path / "checkpoints").glob(name)}
            elif moment == "publication":
                seen |= {found.name for folder in self._in_memory() for found in folder.glob("v*.safetensors")}
            yield len(seen)

    def _kill(self) -> bool:
        """False when the victim had ended by itself, because the run did."""
        pid = current(self._folder, self._plan.victim)
        assert pid is not None
        self._steps_before = len(invariants.rows(self._run_folder))
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
        self._killed_at = time.time()
        return True

    def _finish(self, process: BaseProcess) -> None:
        plan, report = self._plan, self._report
        report.last_words = self._log_tail()
        if process.exitcode != plan.exit_code:
            report.failures.append(f"the run ended with {process.exitcode}; its log ends: {report.last_words}")
        if left := outlive(list(self._seen.values()), _GONE_DEADLINE_S):
            report.failures.append(f"processes are left: {left}")
        if kept := self._in_memory():
            report.failures.append(f"weights are left in memory: {kept}")
        if process.exitcode == 0:
            failures, report.score = invariants.check(
                self._run_folder, plan, killed_after=self._steps_before if report.hit else None
            )
            report.failures += failures
            self._measure()

    def _measure(self) -> None:
        if self._killed_at is None:
            return
        role = "learner" if self._plan.victim.startswith("learner") else self._plan.victim
        events = [json.loads(line) for line in (self._folder / "events.jsonl").read_text().splitlines()]
        after = [event for event in events if event["role"] == role and event["at"] >= self._killed_at]
        down = next((event["at"] for event in after if event["kind"] == "down"), None)
        if down is not None:
            self._report.noticed_s = down - self._killed_at
        back = next((event["at"] for event in after if event["kind"] == "up" and event["at"] > (down or 0)), None)
        if back is not None:
            self._report.recovered_s = back - self._killed_at

    def _log_tail(self) -> str:
        text = (self._folder / f"driver_{self._starts}.log").read_text(errors="replace")
        return "\n".join(text.splitlines()[-12:])
