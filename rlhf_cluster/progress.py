"""Progress of long work outside training: a bar on a terminal, a plain line every tenth elsewhere."""

from __future__ import annotations

from rich.console import Console
from rich.progress import Progress, TaskID


class ProgressView:
    """Use as a context manager; ``update(stage, done, total)`` may be called as often as one likes."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._bar = Progress(console=self._console, transient=True, disable=not self._console.is_terminal)
        self._tasks: dict[str, TaskID] = {}
        self._tenths: dict[str, int] = {}

    def __enter__(self) -> ProgressView:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, stage: str, done: int, total: int) -> None:
        """``done`` of ``total`` units of ``stage`` are finished."""
        if stage not in self._tasks:
            self._tasks[stage] = self._bar.add_task(stage, total=total)
        self._bar.update(self._tasks[stage], completed=done, total=total)
        tenth = 10 * done // max(1, total)
        if not self._console.is_terminal and tenth > self._tenths.get(stage, 0):
            self._tenths[stage] = tenth
            self._console.print(f"{stage}: {done} of {total}", markup=False, highlight=False, soft_wrap=True)
