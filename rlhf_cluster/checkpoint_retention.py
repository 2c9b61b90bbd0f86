"""Which sets may go: never the newest, the best or a pinned one, and only when something newer is durable.

Example, keep_last 2, best by the highest value, sets 1 (0.9), 2 (0.1, pinned), 3 (0.2), 4 (0.3), 5 (no value): 4 and 5
are the newest two, 1 is the best, 2 is pinned, so 3 goes.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from rlhf_cluster.checkpoint_files import Files
from rlhf_cluster.checkpoint_set import (
    PINNED,
    CheckpointDamaged,
    Manifest,
    deleting_folder,
    read_manifest,
    sets,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BestBy:
    """The metric that makes a set the best one."""

    name: str
    highest: bool = True


@dataclass(frozen=True, slots=True)
class Retention:
    """``keep_last`` newest sets stay, and the best by ``best_by`` (None: there is no best one).

    Raises:
        ValueError: ``keep_last`` below 1 would delete the only set there is.
    """

    keep_last: int
    best_by: BestBy | None = None

    def __post_init__(self) -> None:
        if self.keep_last < 1:
            raise ValueError(f"checkpoint.keep_last must be at least 1, got {self.keep_last}: a run keeps one set")


def best_checkpoint(root: Path, best_by: BestBy) -> Path | None:
    """The set whose manifest records the best value of that metric; the newest of equals; None when none records it.

    Sets are compared by what their manifests say, so there is no second record that could contradict them.
    """
    return _best(_complete(root), best_by)


@dataclass(frozen=True, slots=True)
class Sorted:
    """The sets that stay and those that go, oldest first."""

    stay: list[Path]
    go: list[Path]


def sort_out(root: Path, retention: Retention, *, newest: int | None = None) -> Sorted:
    """What ``retention`` says of each set under ``root``.

    Folders without a readable manifest are no sets: they neither count nor go. Nor does what lies above ``newest``,
    the step of the set that was just made.
    """
    complete = {
        folder: manifest for folder, manifest in _complete(root).items() if newest is None or manifest.step <= newest
    }
    last = list(complete)[-retention.keep_last :]
    best = None if retention.best_by is None else _best(complete, retention.best_by)
    found = Sorted([], [])
    for folder in complete:
        stays = folder in last or folder == best or (folder / PINNED).exists()
        (found.stay if stays else found.go).append(folder)
    return found


def prune(root: Path, retention: Retention, files: Files | None = None, *, newest: int | None = None) -> list[Path]:
    """Delete what ``retention`` lets go (``sort_out``); returns the sets deleted. Call it when the newest is durable.

    Raises:
        OSError: a set could not be deleted; those after it are still there.
    """
    files = files or Files()
    deleted = []
    for folder in sort_out(root, retention, newest=newest).go:
        # A kill during the deletion must not leave a manifest beside half of the files.
        going = deleting_folder(folder)
        files.rename(folder, going)
        files.remove(going)
        deleted.append(folder)
    return deleted


def _complete(root: Path) -> dict[Path, Manifest]:
    """Every set with a readable manifest, oldest first."""
    found = {}
    for folder in sets(root):
        try:
            found[folder] = read_manifest(folder)
        except CheckpointDamaged as error:
            log.warning("retention leaves %s alone: %s", folder.name, error)
    return found


def _best(complete: dict[Path, Manifest], best_by: BestBy) -> Path | None:
    best: tuple[float, Path] | None = None
    for folder, manifest in complete.items():
        if manifest.metric is None or manifest.metric.name != best_by.name:
            continue
        value = manifest.metric.value if best_by.highest else -manifest.metric.value
        if best is None or value >= best[0]:
            best = (value, folder)
    return None if best is None else best[1]
