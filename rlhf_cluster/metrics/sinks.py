"""Where rows go: the protocol that prometheus.py, jsonl.py, tensorboard.py and console.py fulfil."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class Sink(Protocol):
    """Takes what the recorder closes. Called from the event loop, so it must be quick; errors end the run."""

    def step(self, step: int, version: int, row: Mapping[str, float]) -> None:
        """One learner step: series key -> value, as ``names.py`` has them."""
        ...

    def live(self, values: Mapping[str, float]) -> None:
        """All gauges that describe the present, whenever one changes; they are also part of the next row."""
        ...

    def evaluation(self, name: str, step: int, version: int, values: Mapping[str, float]) -> None:
        """One held-out evaluation of ``version``."""
        ...

    def close(self) -> None:
        """Flush and release everything. Safe to repeat."""
        ...
