"""Which processes a drill has: each says so itself, in a folder, so that the harness can kill one and miss none."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import psutil


def register(folder: Path, role: str) -> None:
    """This process is the one in ``role`` from now on (``learner_rank_0``)."""
    pids = folder / "pids"
    pids.mkdir(parents=True, exist_ok=True)
    entry = f"{os.getpid()} {psutil.Process().create_time()}"
    for name in (f"{role}.{os.getpid()}", role):
        partial = pids / f".{role}.{os.getpid()}"
        partial.write_text(entry)
        os.replace(partial, pids / name)


def current(folder: Path, role: str) -> int | None:
    """The process in ``role``, alive or not."""
    try:
        return int((folder / "pids" / role).read_text().split()[0])
    except FileNotFoundError:
        return None


def registered(folder: Path) -> dict[str, psutil.Process]:
    """``role.pid`` -> every process that ever registered and still runs."""
    found = {}
    for path in (folder / "pids").glob("[!.]*.*"):
        pid, created = path.read_text().split()
        process = running(int(pid))
        with contextlib.suppress(psutil.NoSuchProcess):
            if process is not None and abs(process.create_time() - float(created)) < 0.1:
                found[path.name] = process
    return found


def running(pid: int) -> psutil.Process | None:
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process
    except psutil.NoSuchProcess:
        return None


def descendants(pid: int) -> list[psutil.Process]:
    """Empty when it has ended, also while this looks."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def titled(pid: int, title: str) -> list[psutil.Process]:
    """The descendants whose command line starts with ``title`` (``ray::RankActor``)."""
    return [process for process in descendants(pid) if command_line(process).startswith(title)]


def engines(pid: int) -> list[psutil.Process]:
    """The vLLM engine of every rollout worker among the descendants: its worker's child.

    Not by the title that it gives itself. setproctitle finds the command line from the first environment variable, and
    leaves it as it is when that one was set anew before (vLLM sets several); which one is first is drawn by the raylet.
    """
    workers = {process.pid for process in titled(pid, "ray::RolloutWorker")}
    found = []
    for process in descendants(pid):
        with contextlib.suppress(psutil.Error):
            name = command_line(process)
            if process.ppid() in workers and name and "resource_tracker" not in name:
                found.append(process)
    return found


def command_line(process: psutil.Process) -> str:
    """Empty when it has ended."""
    try:
        return " ".join(process.cmdline()).strip()
    except psutil.Error:
        return ""


def kill(process: psutil.Process) -> None:
    """Nothing when it has ended, or its pid is another's."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()


# Ray's agents of a node whose GCS is gone try for 60 s to tell it (a constant of Ray) and end then. They hold no GPU,
# no port that anybody asks for, and nothing of the run.
_END_LATER = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")


def outlive(processes: list[psutil.Process], seconds: float) -> list[str]:
    """Those that still run after ``seconds``, by pid and command line; Ray's own agents left out."""
    deadline = time.monotonic() + seconds
    while True:
        left = [f"{process.pid} {name}" for process in processes if (name := _name(process)) is not None]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.02)


def _name(process: psutil.Process) -> str | None:
    """Its command line; None when it has ended, or will without anybody's doing."""
    try:
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
            return None
        name = " ".join(process.cmdline()).strip()
    except psutil.NoSuchProcess:
        return None
    return None if name.startswith(_END_LATER) else name[:100]
