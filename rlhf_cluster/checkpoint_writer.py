"""Saves checkpoints beside the training: the learner writes its tensors, the rest happens in a thread.

    save(step, state, write_tensors)
      training waits   state -> JSON text | free space | write_tensors(.partial_*/learner): every rank its files
      training goes on in a thread: run_state.json | SHA-256 and fsync of every file | manifest.json | fsync of every
                       folder | rename to step_* | fsync of the parent | only then retention

While training waits, the learner's files go into the page cache, at memory speed until the system holds too many dirty
pages; hashing and waiting for the disk are off the critical path. One save at a time: the next save, and the end of
the run, wait for the one before.

A save that fails on the disk (full, slow, broken) is logged, counted and reported, its partial folder is deleted, and
the older sets stay as they are; the run goes on, and ``finish`` raises when the last save is the one that failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import math
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from rlhf_cluster.checkpoint_files import Files, disk_error
from rlhf_cluster.checkpoint_retention import Retention, prune, sort_out
from rlhf_cluster.checkpoint_set import (
    LEARNER,
    MANIFEST,
    STATE,
    SUPERSEDED,
    CheckpointDamaged,
    FileEntry,
    Manifest,
    Metric,
    partial_folder,
    read_manifest,
    set_aside,
    sets,
    step_folder,
    step_of,
)
from rlhf_cluster.disk_thread import in_disk_thread

log = logging.getLogger(__name__)

T = TypeVar("T")

# Queue and ledger grow over a run, and so does the next set.
_GROWTH = 1.1


class CheckpointFailed(RuntimeError):
    """The newest state of the run is in no complete set; the message names step and cause."""


class _Abandoned(Exception):
    """Nobody waits for this save any more."""


@dataclass(frozen=True, slots=True)
class SaveReport:
    """How one save ended: ``path`` of the new set, or the ``error`` that left the older ones the newest.

    ``blocked_s``: seconds that training waited in ``save``; ``total_s``: from the call to the durable set; ``stay``:
    the steps of the sets that retention leaves then.
    """

    step: int
    path: Path | None
    error: str | None
    bytes: int
    blocked_s: float
    total_s: float
    stay: tuple[int, ...] = ()


class CheckpointWriter:
    """Writes the sets under ``root``. Used from one event loop; one process writes a root at a time.

    Steps only grow, unless ``go_back`` says otherwise. So a set above the step being saved is of a past that did not
    happen (a save that was given up and came through later, say), and is set aside.

    Args:
        root: made when it is missing.
        retention: what is deleted after each durable set; its metric is the one that ``save`` takes.
        first_bytes: size to expect of the first set, when there is none to take it from; None: not checked.
        wait_s: how long a save or ``finish`` waits for the save before it. On a hung disk only that can end the wait.
        on_report: called in the event loop once a save, however it ended.

    Attributes:
        saved, failed: saves of this process that ended with a durable set, and without one.
        late: saves that found the one before still being written, so that training waited for the disk.
    """

    def __init__(
        self,
        root: Path,
        *,
        retention: Retention,
        first_bytes: int | None = None,
        wait_s: float = 600.0,
        on_report: Callable[[SaveReport], None] | None = None,
        files: Files | None = None,
    ) -> None:
        self._root = root
        self._retention = retention
        self._first_bytes = first_bytes
        self._wait_s = wait_s
        self._on_report = on_report
        self._files = files or Files()
        self._running: asyncio.Future[None] | None = None
        self._running_step = 0
        self._clock = _Stopwatch()
        self._gave_up = False
        self._abandon = threading.Event()
        """Of the newest save alone: one that was given up stays so, the next has a chance of its own."""
        self._failure: str | None = None
        self._failed_step = 0
        self._left: Path | None = None
        self._newest: Path | None = None
        self._durable_step = 0
        self._pasts = 0
        self.saved = 0
        self.failed = 0
        self.late = 0

    def go_back(self, step: int) -> None:
        """The run goes on from the set of ``step``, or from the start when that is 0; no later save is missed."""
        self._durable_step = step
        self._failure, self._failed_step = None, 0
        self._pasts += 1

    @property
    def busy(self) -> bool:
        """Whether a save is in progress, also one that nobody waits for any more."""
        return self._running is not None and not self._running.done()

    async def save(
        self,
        step: int,
        state: Mapping[str, Any],
        write_tensors: Callable[[Path], Awaitable[None]],
        metric: float | None = None,
    ) -> None:
        """Save ``step``; returns when the tensors are written, and the set completes while training goes on.

        ``state`` (JSON values, with its own "step") is copied before anything is waited for. ``write_tensors`` makes
        the folder it is given and fills it. ``metric`` is the value of the retention's metric; None or not finite:
        this set is never the best. The step that was saved last, or gone back to, is not saved again.

        Raises:
            ValueError: ``state`` is that of another step.
            CheckpointFailed: the learner's files are not on a file system that this node sees.
            Exception: whatever ``write_tensors`` raised that is not about the disk.
        """
        if state["step"] != step:
            raise ValueError(f"a checkpoint of step {step} was given the state of step {state['step']}")
        text = json.dumps(state)
        clock = _Stopwatch()
        final = step_folder(self._root, step)
        if not await self._previous_is_over():
            self._fail(step, f"the save of step {self._running_step} still waits for the disk", clock)
            return
        partial = partial_folder(self._root, step)
        try:
            if await self._on_disk(lambda: self._is_saved(final)) and step == self._durable_step:
                self._newest = final
                return
            await self._on_disk(lambda: self._prepare(partial, step))
            await write_tensors(partial / LEARNER)
            if not any((partial / LEARNER).glob("*")):
                raise CheckpointFailed(
                    f"the learner saved into {partial / LEARNER}, but nothing is there: run.dir must be a folder that "
                    "every node of the learner shares with this one"
                )
        except asyncio.CancelledError:
            # Ranks may still be writing: what they leave is the next start's to delete.
            self._fail(step, "the run was stopped", clock)
            raise
        except Exception as error:
            await self._discard(partial)
            if self._tolerate(step, error, clock):
                return
            raise
        clock.unblock()
        self._gave_up = False
        self._running_step = step
        self._abandon = threading.Event()
        manifest = Manifest(step, self._metric(step, metric), {})
        self._running = asyncio.ensure_future(self._complete(partial, text, manifest, clock))

    async def finish(self, timeout_s: float | None = None) -> Path | None:
        """Wait for the save in progress; returns the newest set of this process, None when it saved none.

        Args:
            timeout_s: seconds until the save is given up; None: ``wait_s``.

        Raises:
            CheckpointFailed: the last save failed, or is not done in time (it is abandoned and its files are leftovers
                for the next start).
        """
        if not await self._previous_is_over(timeout_s, ends=True) and self._durable_step != self._running_step:
            self._abandon.set()
            self._fail(self._running_step, f"the disk under {self._root} did not take it in time", self._clock)
        if self._failure is not None:
            raise CheckpointFailed(f"{self._failure}; {self._what_is_left()}")
        return self._newest

    # -- in the event loop -------------------------------------------------------------------------------------------

    async def _previous_is_over(self, timeout_s: float | None = None, *, ends: bool = False) -> bool:
        """Wait for the save in progress, if there is one, and raise what it raised that is not about the disk."""
        if self._running is None:
            return True
        if not self._running.done() and not ends:
            self.late += 1
            log.warning(
                "checkpoint of step %d is still being written when the next is due; training waits for the disk under "
                "%s (save less often, or on a faster disk)",
                self._running_step,
                self._root,
            )
        # Who waited in vain once does not wait as long again: the run would crawl from one deadline to the next.
        patience = 0.0 if self._gave_up and not ends else self._wait_s if timeout_s is None else timeout_s
        await asyncio.wait([self._running], timeout=patience)
        if not self._running.done():
            self._gave_up = True
            return False
        running, self._running = self._running, None
        running.result()
        return True

    async def _complete(self, partial: Path, text: str, begun: Manifest, clock: _Stopwatch) -> None:
        """``begun`` is the manifest without its files."""
        self._clock = clock
        abandon, past = self._abandon, self._pasts
        try:
            manifest = await in_disk_thread(lambda: self._make_set(partial, text, begun, abandon))
            sorted_out = await in_disk_thread(lambda: sort_out(self._root, self._retention, newest=begun.step))
        except asyncio.CancelledError:
            # The thread is still at work in the partial folder: deleting it now could leave half a set with a name.
            abandon.set()
            raise
        except _Abandoned:
            await self._discard(partial)
            return
        except Exception as error:
            await self._discard(partial)
            if self._tolerate(begun.step, error, clock):
                return
            raise
        if past != self._pasts:
            folder = step_folder(self._root, begun.step)
            renamed = await in_disk_thread(lambda: _aside(folder))
            log.warning("%s came too late, the run went back before it; it becomes %s", folder, renamed)
            return
        self.saved += 1
        if begun.step >= self._failed_step:
            self._failure = None
        self._newest = self._left = step_folder(self._root, begun.step)
        self._durable_step = begun.step
        size, stay = manifest.total_bytes, tuple(map(step_of, sorted_out.stay))
        self._report(SaveReport(begun.step, self._newest, None, size, clock.blocked_s(), clock.total_s(), stay))
        await in_disk_thread(lambda: self._prune(begun.step))

    def _tolerate(self, step: int, error: Exception, clock: _Stopwatch) -> bool:
        """Count and report a failed save; whether the run goes on, because the disk alone is to blame."""
        cause = disk_error(error)
        self._fail(step, str(cause or error) or type(error).__name__, clock)
        return cause is not None

    def _fail(self, step: int, reason: str, clock: _Stopwatch) -> None:
        self.failed += 1
        self._failed_step = step
        self._failure = f"checkpoint of step {step} was not saved: {reason}"
        log.error("%s; %s", self._failure, self._what_is_left())
        self._report(SaveReport(step, None, reason, 0, clock.blocked_s(), clock.total_s()))

    def _what_is_left(self) -> str:
        return f"there is no set under {self._root}" if self._left is None else f"the newest set is {self._left}"

    def _report(self, report: SaveReport) -> None:
        if self._on_report is not None:
            self._on_report(report)

    def _metric(self, step: int, value: float | None) -> Metric | None:
        if self._retention.best_by is None or value is None:
            return None
        name = self._retention.best_by.name
        if not math.isfinite(value):
            log.warning("checkpoint of step %d: %s is %s, so this set is never the best", step, name, value)
            return None
        return Metric(name, float(value))

    async def _on_disk(self, work: Callable[[], T]) -> T:
        """``work`` in a thread, for ``wait_s`` at most: a hung disk must not stop the event loop of the run."""
        try:
            # Before Python 3.12 wait_for drops a cancellation that comes with the answer: a run that is to end goes on.
            async with asyncio.timeout(self._wait_s):
                return await in_disk_thread(work)
        except TimeoutError:
            raise OSError(errno.EIO, f"the disk under {self._root} did not answer within {self._wait_s:g} s") from None

    async def _discard(self, partial: Path) -> None:
        try:
            await self._on_disk(lambda: self._files.remove(partial))
        except OSError as error:
            log.warning("%s could not be deleted: %s; the next start does it", partial, error)

    # -- in a thread -------------------------------------------------------------------------------------------------

    def _is_saved(self, final: Path) -> bool:
        found = sets(self._root)
        self._left = found[-1] if found else None
        try:
            read_manifest(final)
        except CheckpointDamaged:
            return False
        return True

    def _prepare(self, partial: Path, step: int) -> None:
        files = self._files
        for folder in sets(self._root):
            if step_of(folder) > step:
                log.warning("%s is of a past that this run took back; it becomes %s", folder, _aside(folder))
        if not self._root.is_dir():
            files.make_folder(self._root)
            files.sync_folder(self._root.parent)
        needed = self._bytes_needed()
        free = files.free_bytes(self._root)
        if needed is not None and free < needed:
            raise OSError(
                errno.ENOSPC,
                f"a set needs about {_readable(needed)} and {self._root} has {_readable(free)} free; free some, or "
                "lower checkpoint.keep_last",
            )
        files.make_folder(partial)

    def _bytes_needed(self) -> float | None:
        for folder in reversed(sets(self._root)):
            with contextlib.suppress(CheckpointDamaged):
                return _GROWTH * read_manifest(folder).total_bytes
        return self._first_bytes

    def _make_set(self, partial: Path, text: str, begun: Manifest, abandon: threading.Event) -> Manifest:
        files = self._files
        final = step_folder(self._root, begun.step)
        files.write(partial / STATE, text)
        entries = {}
        folders = [partial]
        for path in sorted(partial.rglob("*")):
            if abandon.is_set():
                raise _Abandoned
            if path.is_dir():
                folders.append(path)
                continue
            digest = files.digest_and_sync(path)
            entries[path.relative_to(partial).as_posix()] = FileEntry(path.stat().st_size, digest)
        manifest = replace(begun, files=entries)
        files.write(partial / MANIFEST, manifest.to_json())
        for folder in reversed(folders):
            files.sync_folder(folder)
        if abandon.is_set():
            raise _Abandoned
        if final.exists():
            log.warning("%s is no set of this run's last life; it becomes %s", final, _aside(final))
        files.rename(partial, final)
        files.sync_folder(self._root)
        return manifest

    def _prune(self, step: int) -> None:
        try:
            for folder in prune(self._root, self._retention, self._files, newest=step):
                log.info("deleted %s (checkpoint.keep_last %d)", folder, self._retention.keep_last)
        except OSError as error:
            log.error("old checkpoints under %s could not be deleted: %s", self._root, error)


class _Stopwatch:
    """Seconds since it was made, and how many of them training waited."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._unblocked: float | None = None

    def unblock(self) -> None:
        self._unblocked = time.monotonic()

    def blocked_s(self) -> float:
        return (self._unblocked or time.monotonic()) - self._start

    def total_s(self) -> float:
        return time.monotonic() - self._start


def _aside(folder: Path) -> str:
    return set_aside(folder, SUPERSEDED).name


def _readable(count: float) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.2f} MiB"
