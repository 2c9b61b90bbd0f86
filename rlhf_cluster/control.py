"""A control seam in the run folder: files that ask the running driver for something, and files that answer.

    rlhf scale RUN workers=3 --request-ID.json--> RUN/control/ --> driver (polls) --reply-ID.json--> rlhf scale

Files rather than a socket: they work from every machine that sees the run folder, whatever the length of its path, and
survive a driver that is busy. Folder and files belong to the owner alone; a request by anybody else is not obeyed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from rlhf_cluster.protocols import Clock

log = logging.getLogger(__name__)

FOLDER = "control"
_POLL_S = 0.5
_LARGEST_REQUEST_BYTES = 64 * 1024
_REQUEST = re.compile(r"request-([0-9a-f]{16})\.json")

Handler = Callable[[Mapping[str, Any]], Awaitable[str]]
"""Arguments -> one line about what was done. ValueError: refused, with the reason; nothing was changed."""


class ControlRefused(RuntimeError):
    """The driver did not do what was asked; the message is its reason."""


class ControlServer:
    """The driver's side. ``await serve()`` in a task of its own; cancel it to stop.

    Args:
        run_folder: the folder of the run; ``control/`` is made inside it, for its owner only.
        handlers: command -> what does it. One request at a time, oldest first.
    """

    def __init__(
        self, run_folder: Path, handlers: Mapping[str, Handler], *, clock: Clock, poll_s: float = _POLL_S
    ) -> None:
        self._folder = run_folder / FOLDER
        self._handlers = dict(handlers)
        self._clock = clock
        self._poll_s = poll_s

    async def serve(self) -> None:
        """Answer requests until cancelled. A request that cannot be obeyed is answered with the reason."""
        ready = warned = False
        while True:
            try:
                if not ready:
                    self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                    self._folder.chmod(0o700)
                for path in self._waiting():
                    await self._answer(path)
                ready, warned = True, False
            except OSError as error:
                # Nobody can ask anything meanwhile, which is no reason to stop training.
                if not warned:
                    log.warning("control requests cannot be served, until this is over: %s", error)
                ready, warned = False, True
            await self._clock.sleep(self._poll_s)

    def _waiting(self) -> list[Path]:
        """Requests, oldest first. One that disappears meanwhile was withdrawn by who asked."""
        found: list[tuple[float, Path]] = []
        for path in self._folder.iterdir():
            if _REQUEST.fullmatch(path.name):
                try:
                    status = path.lstat()
                except FileNotFoundError:
                    continue
                if not stat.S_ISDIR(status.st_mode):
                    found.append((status.st_mtime, path))
        return [path for _, path in sorted(found)]

    async def _answer(self, path: Path) -> None:
        try:
            request = _read_own(path)
        except FileNotFoundError:
            return
        except (ValueError, OSError, RecursionError) as error:
            log.warning("control request %s was ignored: %s", path.name, error)
            path.unlink(missing_ok=True)
            return
        # Taken before it is obeyed: a request is carried out at most once, also when the driver dies over it.
        path.unlink(missing_ok=True)
        if time.time() > request["expires_at"]:
            log.warning("control request %s came too late and was ignored", path.name)
            return
        reply = path.with_name(path.name.replace("request-", "reply-"))
        _write(reply, await self._obey(request))

    async def _obey(self, request: Mapping[str, Any]) -> dict[str, Any]:
        command = request["command"]
        handler = self._handlers.get(command)
        if handler is None:
            known = ", ".join(sorted(self._handlers)) or "none"
            return {"done": False, "message": f"unknown command {command!r}; this run knows {known}"}
        try:
            message = await handler(request["arguments"])
        except asyncio.CancelledError:
            raise
        except Exception as error:  # a command that fails must not take the run with it; who asked is told
            log.warning("control command %s failed: %s", command, error)
            return {"done": False, "message": str(error)}
        log.info("control command %s %s: %s", command, dict(request["arguments"]), message)
        return {"done": True, "message": message}


def ask(run_folder: Path, command: str, arguments: Mapping[str, Any], *, timeout_s: float, poll_s: float = 0.1) -> str:
    """Ask the driver of ``run_folder`` and wait for its answer; blocking, for the command line.

    Raises:
        ControlRefused: the driver refused or failed (its reason), or the folder has never had a driver that listens.
        TimeoutError: nobody answered within ``timeout_s``; a request that was not taken yet is withdrawn.
    """
    folder = run_folder / FOLDER
    if not folder.is_dir():
        raise ControlRefused(f"no run in {run_folder} listens: {folder} does not exist")
    number = secrets.token_hex(8)
    request, reply = folder / f"request-{number}.json", folder / f"reply-{number}.json"
    _write(request, {"command": command, "arguments": dict(arguments), "expires_at": time.time() + timeout_s})
    deadline = time.monotonic() + timeout_s
    while not reply.exists():
        if time.monotonic() > deadline:
            taken = not request.exists()
            request.unlink(missing_ok=True)
            raise TimeoutError(
                f"the run in {run_folder} took the request and did not finish {command} within {timeout_s:g} s"
                if taken
                else f"no running driver answered in {folder} within {timeout_s:g} s; is the run alive?"
            )
        time.sleep(poll_s)
    answer = _read(reply)
    reply.unlink(missing_ok=True)
    if not answer["done"]:
        raise ControlRefused(answer["message"])
    return str(answer["message"])


def scale_handler(scale: Callable[[int], Awaitable[str]]) -> Handler:
    """The ``scale`` command: ``{"workers": N}`` with N of at least 1."""

    async def handle(arguments: Mapping[str, Any]) -> str:
        workers = arguments.get("workers")
        if set(arguments) != {"workers"} or isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
            raise ValueError(f"scale takes workers=N with N of at least 1; got {dict(arguments)}")
        return await scale(workers)

    return handle


def _read_own(path: Path) -> dict[str, Any]:
    """The request in ``path``. Raises ValueError when it is not the owner's, no regular file, or not a request."""
    # A symbolic link could name any file of the owner's; the file that is checked must be the one that is read.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(descriptor, encoding="utf-8") as file:
        status = os.fstat(descriptor)
        if status.st_uid != os.getuid():
            raise ValueError("it belongs to another user")
        if status.st_size > _LARGEST_REQUEST_BYTES:
            raise ValueError(f"{status.st_size} bytes are more than any request has")
        content = json.load(file)
    if (
        not isinstance(content, dict)
        or not isinstance(content.get("command"), str)
        or not isinstance(content.get("arguments"), dict)
        or not isinstance(content.get("expires_at"), int | float)
    ):
        raise ValueError("it is no request")
    return content


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def _write(path: Path, content: Mapping[str, Any]) -> None:
    """Whole or not at all, readable by the owner only."""
    partial = path.with_name(f".{path.name}.partial")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        json.dump(content, file)
    partial.replace(path)
