"""A checkpoint on disk: one folder a step, complete or not there, with a manifest of sizes and hashes.

    checkpoints/
        step_00000010/           a complete set
            learner/             policy/ and critic/ as Hugging Face folders, DeepSpeed state, learner.json
            run_state.json       step, cursor, queue, metric totals
            manifest.json        written last: step, metric, and bytes and SHA-256 of every other file
            PINNED               optional, made by hand: retention never deletes this set
        step_00000005.damaged/   a set that failed its check, set aside by the run that resumed from an older one
        step_00000005.superseded/  a set of steps that the run took back and trained again
        .partial_00000015_a1b2   a save in progress, or what a killed one left
        .deleting_00000005_c3d4  a set that retention is deleting, or was when it was killed

The whole folder gets its name in one rename when every file in it is on disk, so no kill leaves half a set under a
``step_*`` name; the manifest finds what a rename cannot prevent (lost pages, bit rot, hands).

SHA-256 because it is in the standard library, known to every tool (``sha256sum``), and with the SHA instructions of
current CPUs faster than the disks that checkpoints are written to.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from rlhf_cluster.checkpoint_files import Files

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
STATE = "run_state.json"
LEARNER = "learner"
PINNED = "PINNED"
DAMAGED = "damaged"
SUPERSEDED = "superseded"

_FORMAT = 1
_STEP = re.compile(r"step_(\d{8,})")
_PARTIAL = ".partial_"
_DELETING = ".deleting_"


class CheckpointDamaged(RuntimeError):
    """A set has no manifest, or a file of it is missing, unreadable or not what the manifest says."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """What the manifest says about one file."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Metric:
    """The value by which sets are compared, e.g. ("rlhf_score_mean", 0.61). Always finite."""

    name: str
    value: float


@dataclass(frozen=True, slots=True)
class Manifest:
    """``files`` is keyed by path relative to the set, with forward slashes."""

    step: int
    metric: Metric | None
    files: Mapping[str, FileEntry]

    @property
    def total_bytes(self) -> int:
        return sum(entry.bytes for entry in self.files.values())

    def to_json(self) -> str:
        files = {name: asdict(entry) for name, entry in self.files.items()}
        metric = None if self.metric is None else asdict(self.metric)
        return json.dumps({"format": _FORMAT, "step": self.step, "metric": metric, "files": files}, indent=1)

    @staticmethod
    def from_json(text: str) -> Manifest:
        """Raises ValueError, KeyError, TypeError, AttributeError, OverflowError or RecursionError: ``text`` is no
        manifest of this format."""
        content: dict[str, Any] = json.loads(text)
        if content["format"] != _FORMAT:
            raise ValueError(f"its format is {content['format']}, this version reads {_FORMAT}")
        metric = None if content["metric"] is None else Metric(**content["metric"])
        for name in content["files"]:
            if PurePosixPath(name).is_absolute() or ".." in name.split("/") or "\0" in name:
                raise ValueError(f"{name!r} is no file of this set")
        files = {name: FileEntry(**entry) for name, entry in content["files"].items()}
        return Manifest(int(content["step"]), metric, files)


@dataclass(frozen=True, slots=True)
class Survey:
    """What a folder of checkpoints holds: the newest set that passed its check, and the newer ones that did not."""

    newest: Path | None
    damaged: Mapping[Path, str]
    """Why each set newer than ``newest`` cannot be used."""

    @property
    def all_lost(self) -> bool:
        """Whether there were finished sets, and none of them can be used. One without a manifest never was finished."""
        return self.newest is None and any((folder / MANIFEST).exists() for folder in self.damaged)


def step_folder(root: Path, step: int) -> Path:
    return root / f"step_{step:08d}"


def step_of(folder: Path) -> int:
    """The learner step in a set's name. Raises ValueError: it is no name of a set."""
    match = _STEP.fullmatch(folder.name)
    if match is None:
        raise ValueError(f"{folder.name} is no name of a checkpoint (step_ and eight digits)")
    return int(match[1])


def partial_folder(root: Path, step: int) -> Path:
    """Where a save of ``step`` is put together.

    A new name a save: learner ranks that outlive a killed driver may still be writing into the old one.
    """
    return root / f"{_PARTIAL}{step:08d}_{secrets.token_hex(4)}"


def deleting_folder(folder: Path) -> Path:
    """What the set ``folder`` is called while it is deleted, so that half of it never looks like a set."""
    return folder.with_name(f"{_DELETING}{step_of(folder):08d}_{secrets.token_hex(4)}")


def sets(root: Path) -> list[Path]:
    """Every folder with the name of a set, oldest step first, unchecked."""
    if not root.is_dir():
        return []
    return sorted((path for path in root.iterdir() if path.is_dir() and _STEP.fullmatch(path.name)), key=step_of)


def read_manifest(folder: Path) -> Manifest:
    """Raises CheckpointDamaged: there is none, it cannot be read, or it is that of another step."""
    path = folder / MANIFEST
    try:
        manifest = Manifest.from_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointDamaged(f"{folder} has no manifest (it was not finished)") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointDamaged(f"{path} cannot be read: {type(error).__name__}: {error}") from None
    if manifest.step != step_of(folder):
        raise CheckpointDamaged(f"{path} is that of step {manifest.step}; the folder was renamed or mixed with another")
    return manifest


def verify(folder: Path) -> Manifest:
    """Compare every file with the manifest, which is returned.

    Raises:
        CheckpointDamaged: naming the first file that is missing, unreadable or different.
    """
    manifest = read_manifest(folder)
    if STATE not in manifest.files or not any(name.startswith(f"{LEARNER}/") for name in manifest.files):
        raise CheckpointDamaged(f"{folder / MANIFEST} does not list {STATE} and the files of the learner")
    for name, entry in manifest.files.items():
        size = _size(folder / name)
        if size != entry.bytes:
            raise CheckpointDamaged(f"{folder / name} has {size} bytes; the manifest says {entry.bytes}")
    for name, entry in manifest.files.items():
        try:
            with (folder / name).open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise CheckpointDamaged(f"{folder / name} cannot be read: {error}") from None
        if digest != entry.sha256:
            raise CheckpointDamaged(f"{folder / name} differs from the manifest (SHA-256)")
    return manifest


def survey(root: Path) -> Survey:
    """Check the sets under ``root``, newest first, up to the first good one; each bad one is named in a warning."""
    damaged: dict[Path, str] = {}
    for folder in reversed(sets(root)):
        try:
            verify(folder)
        except CheckpointDamaged as error:
            log.warning("checkpoint %s is skipped: %s", folder.name, error)
            damaged[folder] = str(error)
            continue
        return Survey(folder, damaged)
    return Survey(None, damaged)


def newest_checkpoint(root: Path) -> Path | None:
    """The newest complete and undamaged set under ``root``; those skipped on the way are named in warnings."""
    return survey(root).newest


def set_aside(folder: Path, why: str = DAMAGED) -> Path:
    """Rename a set to the first free ``step_*.WHY``, where it stands in nobody's way; returns that."""
    target = folder.with_name(f"{folder.name}.{why}")
    number = 1
    while target.exists():
        number += 1
        target = folder.with_name(f"{folder.name}.{why}{number}")
    folder.rename(target)
    return target


def clear_leftovers(root: Path, files: Files | None = None) -> list[Path]:
    """Delete what killed saves and killed deletions left; returns what was found. Not while a save is running.

    What cannot be deleted stays, with a warning: learner ranks that outlive a killed driver may still be writing there.
    """
    files = files or Files()
    found = sorted(path for mark in (_PARTIAL, _DELETING) for path in root.glob(f"{mark}*"))
    for path in found:
        log.warning("deleting %s: a save or deletion that was killed left it", path)
        try:
            files.remove(path)
        except OSError as error:
            log.warning("%s could not be deleted: %s; the next start tries again", path, error)
    return found


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        raise CheckpointDamaged(f"{path} is missing; the manifest lists it") from None
    except OSError as error:
        raise CheckpointDamaged(f"{path} cannot be read: {error}") from None
