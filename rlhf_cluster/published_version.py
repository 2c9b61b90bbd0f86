"""The highest policy version a run ever published, on disk before the workers hear of it: versions only grow, also when
a learner or a driver dies and goes on from an older checkpoint."""

from __future__ import annotations

import os
from pathlib import Path


class PublishedVersion:
    """A number in a file that only grows.

    Args:
        path: made at the first ``note``.
        fresh: what the file says is that of an earlier run.

    Raises:
        ValueError: the file cannot be read, or holds no number.
    """

    def __init__(self, path: Path, *, fresh: bool = False) -> None:
        self._path = path
        self.highest = 0
        if path.exists() and not fresh:
            try:
                text = path.read_text(encoding="utf-8", errors="replace").strip()
            except OSError as error:
                raise ValueError(f"{path}, the highest version published so far, cannot be read: {error}") from None
            if not text.isdecimal():
                raise ValueError(f"{path} should hold the highest version published so far, but holds {text!r}")
            self.highest = int(text)

    def note(self, version: int) -> None:
        """``version`` is about to be published."""
        if version <= self.highest:
            return
        partial = self._path.with_suffix(".partial")
        with partial.open("w", encoding="utf-8") as file:
            file.write(f"{version}\n")
            file.flush()
            # A power loss may take the newest number, but must not leave a file without one.
            os.fsync(file.fileno())
        os.replace(partial, self._path)
        self.highest = version

    def above(self, saved: int) -> int:
        """The version under which weights saved as ``saved`` go on: the same when nothing newer was published."""
        return saved if self.highest <= saved else self.highest + 1
