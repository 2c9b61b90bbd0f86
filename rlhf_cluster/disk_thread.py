"""Work on a disk that may hang, in a thread that the end of the process does not wait for."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def in_disk_thread(work: Callable[[], T]) -> T:
    """``asyncio.to_thread`` in a daemon thread: a hung disk never answers, and must not keep the process."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def deliver(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result: T | None = None
        caught: BaseException | None = None
        try:
            result = work()
        except BaseException as error:
            caught = error
        # The loop is closed when nobody waits any more.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(deliver, result, caught)

    threading.Thread(target=run, name="checkpoint", daemon=True).start()
    return await future
