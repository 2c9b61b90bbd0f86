"""``metrics.jsonl``: one JSON object a line, readable while the run goes on.

A learner step is ``{"event": "step", "step": 3, "version": 3, "<series key>": value, ...}``; a held-out evaluation is
``{"event": "evaluation", "name": "after", "step": ..., "version": ..., "<value>": ...}``. A value that is not
finite is ``null``, since JSON has no NaN. After a resume from an older checkpoint steps repeat: the last line of a
step counts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path


class JsonlSink:
    """Appends to ``path`` and flushes every line.

    A line that a killed run left torn at the end of the file is cut off first, so that every line parses.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            cut_torn_line(path)
        self._file = path.open("a", encoding="utf-8")

    def step(self, step: int, version: int, row: Mapping[str, float]) -> None:
        self._write({"event": "step", "step": step, "version": version}, row)

    def live(self, values: Mapping[str, float]) -> None:
        """Nothing: live values are in the rows."""

    def evaluation(self, name: str, step: int, version: int, values: Mapping[str, float]) -> None:
        self._write({"event": "evaluation", "name": name, "step": step, "version": version}, values)

    def close(self) -> None:
        self._file.close()

    def _write(self, head: dict[str, str | int], values: Mapping[str, float]) -> None:
        body = {key: float(value) if math.isfinite(value) else None for key, value in values.items()}
        self._file.write(json.dumps({**head, **body}, allow_nan=False) + "\n")
        self._file.flush()


def cut_torn_line(path: Path) -> None:
    """Cut off what a killed run left of its last line."""
    with path.open("r+b") as file:
        content = file.read()
        complete = content.rfind(b"\n") + 1
        if complete != len(content):
            file.truncate(complete)
