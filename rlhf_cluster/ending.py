"""How a command ends: signals, the first cause of a failure, and the exit code that says it.

guard(action)            any moment: SIGTERM raises Stopped, as SIGINT raises KeyboardInterrupt
  run_async(body)        in the event loop: the first signal asks the run to end well, within a grace period
  hold_signals()         around what must not be cut short: a signal waits until it is done
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from rlhf_cluster.config_io import ConfigError
from rlhf_cluster.data.chat import ChatTemplateError
from rlhf_cluster.data.jsonl import DataError
from rlhf_cluster.diagnosis.preflight import PreflightError

log = logging.getLogger(__name__)

REFUSED = (ConfigError, DataError, ChatTemplateError, PreflightError)


_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(BaseException):
    """A signal ended the run. No Exception: no library that tolerates failures may swallow it."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.exit_code = 128 + number


def guard(action: Callable[[], Any]) -> int:
    """Run ``action`` and turn how it ends into an exit code and one readable message. In the main thread."""
    try:
        with _handling(stop_at_once, (signal.SIGTERM,)):
            action()
    except REFUSED as error:
        print(f"error: {error}", flush=True)
        return 2
    except Stopped as stop:
        return stop.exit_code
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        log.debug("failed", exc_info=True)
        cause = first_cause(error)
        print(f"failed: {type(cause).__name__}: {cause}", flush=True)
        return 1
    return 0


def stop_at_once(number: int, frame: FrameType | None = None) -> None:
    """A handler that ends the command where it stands: everything open is closed on the way out."""
    raise Stopped(signal.Signals(number))


@contextlib.contextmanager
def hold_signals() -> Iterator[list[signal.Signals]]:
    """SIGINT and SIGTERM do nothing inside but join the list, first one first."""
    held: list[signal.Signals] = []
    with _handling(lambda number, frame: held.append(signal.Signals(number)), _SIGNALS):
        yield held


@contextlib.contextmanager
def _handling(
    handler: Callable[[int, FrameType | None], object], numbers: tuple[signal.Signals, ...]
) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old if old is not None else signal.SIG_DFL)


def first_cause(error: BaseException) -> BaseException:
    """The exception that came first, out of exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


# Shells, make and timeout pass a signal on to their children, so that one Ctrl-C may arrive twice.
_SAME_SIGNAL_S = 2.0


class Signals:
    """SIGINT and SIGTERM: the first asks the run to end after its step, a later one (not its echo) ends it at once.

    Args:
        task: what is cancelled.
        grace_s: seconds from the first signal after which the run is ended where it stands.
    """

    def __init__(self, task: asyncio.Task[Any], grace_s: float = math.inf) -> None:
        self.received: signal.Signals | None = None
        self.on_first: Callable[[], object] = self.cancel
        self.expired = False
        """Whether the grace period is over."""
        self._task = task
        self._grace_s = grace_s
        self._received_at = 0.0
        self._loop = asyncio.get_running_loop()

    def cancel(self) -> None:
        """End the run where it stands."""
        self._task.cancel()

    def caught(self, number: int, frame: FrameType | None = None) -> None:
        """The handler. Not the loop's own kind, which leaves the default behind when the loop closes."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the run has ended
            self._loop.call_soon_threadsafe(self._handle, signal.Signals(number))

    def _handle(self, number: signal.Signals) -> None:
        now = self._loop.time()
        if self.received is not None:
            if now - self._received_at >= _SAME_SIGNAL_S:
                self._task.cancel()
            return
        self.received, self._received_at = number, now
        if math.isfinite(self._grace_s):
            self._loop.call_later(self._grace_s, self._expire)
        self.on_first()

    def _expire(self) -> None:
        assert self.received is not None
        log.warning("%g s after %s the run has not ended; it ends now", self._grace_s, self.received.name)
        self.expired = True
        self._task.cancel()


def run_async(body: Callable[[Signals], Any], *, grace_s: float = math.inf) -> Any:
    """``asyncio.run(body(signals))``; a run that a signal ended raises ``Stopped``."""

    async def main() -> Any:
        task = asyncio.current_task()
        assert task is not None
        signals = Signals(task, grace_s)
        with _handling(signals.caught, _SIGNALS):
            try:
                result = await body(signals)
            except asyncio.CancelledError:
                if signals.received is None:
                    raise
                raise Stopped(signals.received) from None
        if signals.received is not None:
            raise Stopped(signals.received)
        return result

    return asyncio.run(main())
