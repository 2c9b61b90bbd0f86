"""What a training run asks of its fleet: the workers, scorers and learner that ``launch.py`` starts."""

from __future__ import annotations

from typing import Any, Protocol

from rlhf_cluster.watchdog import Wait


class Fleet(Protocol):
    """Workers, scorers and learner (``launch.Fleet``), started side by side and each awaited when it is needed."""

    pool: Any
    """A Generator."""
    sink: Any
    """A WeightSink."""
    scorers: Any
    """A Scorer."""
    learner: Any
    """A Learner that can also ``load`` a checkpoint and ``restart``."""

    async def ready(self, *names: str) -> None: ...

    async def watch(self) -> None: ...

    def waits(self) -> list[Wait]: ...

    async def dump_stacks(self) -> dict[str, str]: ...

    async def close(self) -> None: ...
