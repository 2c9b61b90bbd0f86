"""One incarnation of a Ray actor as ``supervision.Member``: calls with deadlines, deaths told at once, stacks.

Ray itself never restarts these actors (``max_restarts`` 0): it would run the constructor again behind the same handle,
with the state gone and nobody told. Every life is an actor of its own, with a handle of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import (
    ActorUnschedulableError,
    LocalRayletDiedError,
    NodeDiedError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    RuntimeEnvSetupError,
    WorkerCrashedError,
)

from actors.health import Pulse
from rlhf_cluster.causes import death_cause, first_line
from rlhf_cluster.protocols import WorkerFailed
from rlhf_cluster.supervision import Life
from rlhf_cluster.watchdog import Wait

NO_RAY_RESTARTS = {"max_restarts": 0, "max_task_retries": 0}

# The actor is gone, or as good as gone: nobody can tell whether an unreachable one still works.
_DEATHS = (
    RayActorError,
    WorkerCrashedError,
    OutOfMemoryError,
    NodeDiedError,
    LocalRayletDiedError,
    ActorUnschedulableError,
    RuntimeEnvSetupError,
)
_STACKS_TIMEOUT_S = 10.0


class WorkerDied(WorkerFailed):
    """The process died, or could not be reached: the transport failed, not the work."""


class ActorMember:
    """A handle with a name. ``fatal``: errors raised in the actor after which it is of no more use."""

    fatal: tuple[type[BaseException], ...] = ()

    def __init__(self, name: str, incarnation: int, handle: Any) -> None:
        self.name = name
        self.incarnation = incarnation
        self.handle = handle
        self.life = Life()
        self.pulse: Pulse | None = None
        self._waiting: dict[object, tuple[str, float]] = {}

    async def call(self, method: str, *args: Any, timeout_s: float, what: str) -> Any:
        """One call of the actor.

        Raises:
            WorkerDied: it is dead, or died meanwhile; at once, also when Ray has not noticed yet. A reply that comes
                after the death is dropped.
            WorkerFailed: it raised. TimeoutError: no answer within ``timeout_s``. All name the actor and ``what``.
        """
        self._check_alive(what)
        reference = getattr(self.handle, method).remote(*args)
        answer = asyncio.ensure_future(_value(reference))
        key = object()
        self._waiting[key] = (what, time.monotonic())
        try:
            await asyncio.wait([answer, self.life.told], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            self._check_alive(what)
            if not answer.done():
                _cancel(reference)
                raise TimeoutError(f"{self.name} did not finish {what} within {timeout_s:g} s")
            return self._result(answer, what)
        except asyncio.CancelledError:
            _cancel(reference)
            raise
        finally:
            del self._waiting[key]
            answer.cancel()

    async def ping(self) -> None:
        """See ``supervision.Member``; the deadline is the supervisor's."""
        answer = asyncio.ensure_future(_value(self.handle.ping.remote()))
        try:
            await asyncio.wait([answer, self.life.told], return_when=asyncio.FIRST_COMPLETED)
            self._check_alive("a heartbeat")
            self.pulse = self._result(answer, "a heartbeat")
        finally:
            answer.cancel()

    def kill(self) -> None:
        if ray.is_initialized():  # Ray would start itself again for it
            with contextlib.suppress(Exception):  # it is gone already
                ray.kill(self.handle, no_restart=True)

    def waits(self) -> list[Wait]:
        """Who waits for this actor, since when (monotonic seconds)."""
        return [Wait(what, self.name, since) for what, since in self._waiting.values()]

    async def stacks(self) -> str:
        """Its own stacks; when it does not answer, what py-spy sees from outside on the same machine."""
        try:
            return str(await self.call("dump_stacks", timeout_s=_STACKS_TIMEOUT_S, what="a dump of its stacks"))
        except (WorkerFailed, TimeoutError) as error:
            if self.pulse is None or self.pulse.host != socket.gethostname():
                return f"unknown: {error}"
            seen = await asyncio.to_thread(stacks_from_outside, self.pulse.pid)
            return f"{error}; from outside:\n{seen}"

    def _check_alive(self, what: str) -> None:
        if self.life.cause is not None:
            raise WorkerDied(f"{self.name} died during {what}: {self.life.cause}")

    def _result(self, answer: asyncio.Future[Any], what: str) -> Any:
        try:
            return answer.result()
        except RayTaskError as error:  # before TimeoutError: an error raised in the actor may itself be one
            cause = error.cause if isinstance(error.cause, BaseException) else error
            if isinstance(cause, self.fatal):
                self.life.end(f"{type(cause).__name__}: {first_line(cause)}")
                raise WorkerDied(f"{self.name} died during {what}: {self.life.cause}") from error
            self.raised(cause)
            raise WorkerFailed(f"{self.name}, {what}: {type(cause).__name__}: {first_line(cause)}") from error
        except _DEATHS as error:
            self.life.end(death_cause(error))
            raise WorkerDied(f"{self.name} died during {what}: {self.life.cause}") from error
        except RayError as error:
            raise WorkerFailed(f"{self.name}, {what}: {type(error).__name__}: {first_line(error)}") from error

    def raised(self, cause: BaseException) -> None:
        """Told of every error that the actor raised and survived."""


async def all_or_cancel(*calls: Any) -> list[Any]:
    """All results; the first error cancels the other calls, so that no scorer works for nobody."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


async def dump_all(members: Iterable[ActorMember]) -> dict[str, str]:
    """Name -> stacks, of all side by side."""
    asked = list(members)
    stacks = await asyncio.gather(*(member.stacks() for member in asked))
    return {member.name: text for member, text in zip(asked, stacks, strict=True)}


def stacks_from_outside(pid: int, timeout_s: float = _STACKS_TIMEOUT_S) -> str:
    """py-spy's view of process ``pid`` on this machine; says why when there is none."""
    beside = Path(sys.executable).with_name("py-spy")
    program = str(beside) if beside.exists() else shutil.which("py-spy")
    if program is None:
        return "py-spy is not installed"
    try:
        done = subprocess.run(
            [program, "dump", "--nonblocking", "--pid", str(pid)],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"py-spy gave nothing: {error}"
    return done.stdout or f"py-spy gave nothing: {done.stderr.strip()}"


def _cancel(reference: Any) -> None:
    if ray.is_initialized():
        with contextlib.suppress(Exception):  # the actor may have ended meanwhile
            ray.cancel(reference)


async def _value(reference: Any) -> Any:
    return await reference
