"""The console view: a live panel on a terminal, one plain line a step elsewhere. Numbers only, never prompt text."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

_MISSING = "-"


class ConsoleView:
    """A sink that shows progress; start-up and other long waits are told through ``phase``.

    Args:
        console: where to print; standard output by default. The live panel is used when it is a terminal.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._phase = ""
        self._row: Mapping[str, float] = {}
        self._values: Mapping[str, float] = {}
        self._version = 0
        self._live: Live | None = None
        self._spinner = Spinner("dots")
        if self._console.is_terminal:
            self._live = Live(console=self._console, get_renderable=self._panel, refresh_per_second=4)
            self._live.start()

    def phase(self, text: str) -> None:
        """What is going on now, such as ``starting engines``; stays until the next phase."""
        if text == self._phase:
            return
        self._phase = text
        if self._live is None:
            self._plain(f"[{text}]")

    def message(self, text: str) -> None:
        """A line that stays: above the panel, or among the plain lines."""
        self._plain(text)

    def step(self, step: int, version: int, row: Mapping[str, float]) -> None:
        self._row, self._values, self._version = row, row, version
        if self._live is None:
            self._plain("  ".join(f"{name} {value}" for name, value in self._fields().items()))

    def live(self, values: Mapping[str, float]) -> None:
        self._values = {**self._row, **values}

    def evaluation(self, name: str, step: int, version: int, values: Mapping[str, float]) -> None:
        shown = ", ".join(f"{key} {value:.4g}" for key, value in values.items())
        self._plain(f"evaluation {name} (version {version}): {shown}")

    def close(self) -> None:
        if self._live is not None:
            self._phase = ""
            self._live.stop()
            self._live = None

    def _plain(self, text: str) -> None:
        # No markup: a message may hold square brackets. Soft wrap: a line in a log file stays one line.
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _fields(self) -> dict[str, str]:
        values = self._values
        lag = f"mean {_number(values, 'rlhf_batch_mean_lag', '.2f')} max {_number(values, 'rlhf_batch_max_lag', '.0f')}"
        queued, outstanding = (_number(values, f"rlhf_{name}_groups", ".0f") for name in ("queue", "outstanding"))
        published = _number(values, "rlhf_publish_seconds", ".2f")
        paused = _number(values, "rlhf_publish_paused_seconds", ".2f")
        return {
            "step": f"{values.get('rlhf_step', 0):.0f}/{_number(values, 'rlhf_planned_steps', '.0f')}",
            "version": f"{values.get('rlhf_policy_version', self._version):.0f}",
            "score": _number(values, "rlhf_trained_score_mean", ".4f"),
            "KL": _number(values, 'rlhf_kl_reference{estimator="k3"}', ".4f"),
            "lag": lag,
            "queue": f"{queued}/{outstanding}",
            "tokens/s": _number(values, 'rlhf_tokens_per_second{stage="generated"}', ".0f"),
            "published": f"in {published} s (paused {paused} s)" if published != _MISSING else _MISSING,
            "left": _duration(values.get("rlhf_time_left_seconds")),
        }

    def _panel(self) -> Panel:
        grid = Table.grid(padding=(0, 2))
        for name, value in self._fields().items():
            grid.add_row(f"[bold]{name}[/bold]", value)
        if self._phase:
            self._spinner.update(text=Text(self._phase))
            grid.add_row(self._spinner)
        return Panel(grid, title="rlhf", expand=False)


def _number(values: Mapping[str, float], key: str, spec: str) -> str:
    return format(values[key], spec) if key in values else _MISSING


def _duration(seconds: float | None) -> str:
    if seconds is None or not math.isfinite(seconds):
        return _MISSING
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s"
