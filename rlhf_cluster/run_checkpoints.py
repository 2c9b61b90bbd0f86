"""What a run saves and goes back to: one writer, the step that is saved, and what may be forgotten because of it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from rlhf_cluster import run_state
from rlhf_cluster.checkpoint_retention import BestBy, Retention, sort_out
from rlhf_cluster.checkpoint_set import Survey, clear_leftovers, set_aside, step_of, survey
from rlhf_cluster.checkpoint_writer import CheckpointFailed, CheckpointWriter, SaveReport
from rlhf_cluster.config import CheckpointConfig
from rlhf_cluster.disk_thread import in_disk_thread

log = logging.getLogger(__name__)


class RunCheckpoints:
    """The checkpoints under ``root`` of one run.

    Args:
        forget: takes a frontier of the prompt cursor. No set that stays goes back below it, so no prompt below it comes
            again.
        on_report: told how each save ended.

    Attributes:
        saved_step: what the newest set, or the one in the making, is of; -1 when that one failed.
    """

    def __init__(
        self,
        root: Path,
        config: CheckpointConfig,
        *,
        forget: Callable[[int], None],
        on_report: Callable[[SaveReport], None],
    ) -> None:
        self.saved_step = 0
        self._root = root
        self._patience_s = config.save_timeout_s
        best = None if config.best_metric is None else BestBy(config.best_metric, highest=config.best_is == "highest")
        self._retention = Retention(config.keep_last, best)
        self._forget = forget
        self._on_report = on_report
        self._frontiers: dict[int, int] = {}
        """The cursor's frontier in each set that a rebuilt learner may go back to, by step."""
        self._writer = CheckpointWriter(
            root, retention=self._retention, wait_s=config.save_timeout_s, on_report=self._reported
        )

    def resumed_from(self, step: int) -> None:
        """The run goes on from the set of ``step`` in a new process."""
        self.go_back(step)
        stay = sort_out(self._root, self._retention, newest=step).stay
        self._know({step_of(folder): run_state.frontier(folder) for folder in stay})

    def go_back(self, step: int) -> None:
        """The run goes on from the set of ``step``, or from the start when that is 0."""
        self.saved_step = step
        self._writer.go_back(step)

    async def save(
        self,
        step: int,
        state: Mapping[str, Any],
        write_tensors: Callable[[Path], Awaitable[None]],
        metric: float | None = None,
    ) -> None:
        """See ``CheckpointWriter.save``; ``state`` is that of ``run_state.snapshot``."""
        self.saved_step = step
        self._frontiers[step] = state["cursor"]["frontier"]
        await self._writer.save(step, state, write_tensors, metric=metric)

    async def finish(self, timeout_s: float | None = None) -> None:
        """Wait for the save in progress. Raises CheckpointFailed: the last one failed, or is not done in time."""
        await self._writer.finish(timeout_s)

    async def newest(self) -> Path | None:
        """What a rebuilt learner goes on from; damaged sets that are newer are set aside.

        Raises:
            CheckpointFailed: the disk does not answer, or there are sets and none can be used.
        """
        try:
            async with asyncio.timeout(self._patience_s):
                found = await in_disk_thread(self._look)
        except TimeoutError:
            raise CheckpointFailed(
                f"the disk did not list the checkpoints in {self._root} within {self._patience_s:g} s "
                "(checkpoint.save_timeout_s)"
            ) from None
        if found.all_lost:
            raise CheckpointFailed(f"no checkpoint can be used: {dict(found.damaged)}")
        return found.newest

    async def clear(self) -> None:
        """Delete what a save that was broken off left, once nobody writes into it any more."""
        if not self._writer.busy:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._patience_s):
                    await in_disk_thread(lambda: clear_leftovers(self._root))

    def _look(self) -> Survey:
        found = survey(self._root)
        for folder in () if found.all_lost else found.damaged:
            log.warning("%s becomes %s", folder, set_aside(folder).name)
        return found

    def _reported(self, report: SaveReport) -> None:
        if report.path is None:
            # The run's end tries this step again.
            self.saved_step = -1
        else:
            # A later save may have begun, and wait for this one.
            begun = {step: frontier for step, frontier in self._frontiers.items() if step > report.step}
            self._know({step: self._frontiers.get(step, 0) for step in report.stay})
            self._frontiers |= begun
        self._on_report(report)

    def _know(self, frontiers: dict[int, int]) -> None:
        self._frontiers = frontiers
        self._forget(min(frontiers.values(), default=0))
