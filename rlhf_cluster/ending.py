"""How a command ends: signals, the first cause of a failure, and the exit code that says it."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from typing import Any

from rlhf_cluster.config_io import ConfigError
from rlhf_cluster.data.chat import ChatTemplateError
from rlhf_cluster.data.jsonl import DataError
from rlhf_cluster.diagnosis.preflight import PreflightError

log = logging.getLogger(__name__)

REFUSED = (ConfigError, DataError, ChatTemplateError, PreflightError)


class Stopped(Exception):
    """A signal ended the run."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.exit_code = 128 + number


def guard(action: Callable[[], Any]) -> int:
    """Run ``action`` and turn how it ends into an exit code and one readable message."""
    try:
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


def first_cause(error: BaseException) -> BaseException:
    """The exception that came first, out of exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


# Shells, make and timeout pass a signal on to their children, so that one Ctrl-C may arrive twice.
_SAME_SIGNAL_S = 2.0


class Signals:
    """SIGINT and SIGTERM: the first asks the run to end after its step, a later one (not its echo) ends it at once."""

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self.received: signal.Signals | None = None
        self.on_first: Callable[[], object] = self.cancel
        self._task = task
        self._received_at = 0.0
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._handle, number)

    def cancel(self) -> None:
        """End the run where it stands."""
        self._task.cancel()

    def _handle(self, number: signal.Signals) -> None:
        now = asyncio.get_running_loop().time()
        if self.received is not None:
            if now - self._received_at >= _SAME_SIGNAL_S:
                self._task.cancel()
            return
        self.received, self._received_at = number, now
        self.on_first()


def run_async(body: Callable[[Signals], Any]) -> Any:
    """``asyncio.run(body(signals))``; a run that a signal ended raises ``Stopped``."""

    async def main() -> Any:
        task = asyncio.current_task()
        assert task is not None
        signals = Signals(task)
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
