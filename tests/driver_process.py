"""Drivers as real processes that start in milliseconds: forked from one server that has imported everything.

Each is the leader of a session of its own and a parent that may kill it, by its pid, at any moment.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["rlhf_cluster.launch", "learner.learner_group", "learner.learner", "tests.toy_run"])


class Driver:
    """``target(report, *arguments)`` in a process whose exit code it returns and whose output goes to ``output``."""

    def __init__(self, output: Path, target: Callable[..., int], *arguments: Any) -> None:
        self._output = output
        self._reports, theirs = _CONTEXT.Pipe(duplex=False)
        self._process = _CONTEXT.Process(target=_run, args=(output, target, theirs, arguments))
        self._process.start()
        theirs.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def output(self) -> str:
        return self._output.read_text() if self._output.exists() else ""

    def wait_for(self, report: Any, timeout_s: float = 30.0) -> None:
        """Until the process has reported ``report``; what it reports meanwhile is dropped."""
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0 and self._reports.poll(left):
            try:
                if self._reports.recv() == report:
                    return
            except EOFError:
                break
        raise AssertionError(f"process {self.pid} did not report {report!r}:\n{self.output}")

    @staticmethod
    def each_report(drivers: Sequence[Driver], timeout_s: float = 30.0) -> Iterator[tuple[Driver, Any]]:
        """What the drivers report, as it comes, until each has closed its end."""
        waiting = {driver._reports: driver for driver in drivers}
        while waiting:
            ready = connection.wait(list(waiting), timeout_s)
            if not ready:
                raise AssertionError(f"nothing from processes {[driver.pid for driver in waiting.values()]}")
            for reports in ready:
                try:
                    yield waiting[reports], reports.recv()  # type: ignore[index, union-attr]
                except EOFError:
                    del waiting[reports]  # type: ignore[arg-type]

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """As the kernel does it when memory is short: no last word. Nothing when it has ended already."""
        with contextlib.suppress(ProcessLookupError):
            self.send(signal.SIGKILL)
        self.end()

    def end(self, timeout_s: float = 60.0) -> int:
        """The exit code, once it has ended."""
        self._process.join(timeout_s)
        code = self._process.exitcode
        if code is None:
            os.killpg(self.pid, signal.SIGKILL)
            raise AssertionError(f"process {self.pid} did not end within {timeout_s} s:\n{self.output}")
        return code


def live_members(session: int) -> list[str]:
    """Command lines of the processes of a session that are alive (zombies have none)."""
    members = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            if os.getsid(int(folder.name)) == session:
                members.append((folder / "cmdline").read_text().replace("\0", " ").strip())
        except (OSError, ProcessLookupError):
            continue
    return [member for member in members if member]


def outliving_members(session: int, seconds: float) -> list[str]:
    """Those of ``live_members`` that are still there after that time.

    The kernel kills what shares the fate of a process (Ray's, that of the driver) a moment after it.
    """
    deadline = time.monotonic() + seconds
    while (members := live_members(session)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return members


def _run(output: Path, target: Callable[..., int], reports: Any, arguments: tuple[Any, ...]) -> None:
    os.setsid()
    log = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    # Semaphores of the other methods have names, which a killed process (tqdm's, say) would leave in /dev/shm.
    multiprocessing.set_start_method("fork", force=True)
    # The server that this was forked from ignores it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(target(reports.send, *arguments))
