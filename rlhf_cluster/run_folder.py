"""The folder of a run: resolved config, metrics, samples, checkpoints, evaluations."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from rlhf_cluster.checkpoint_set import Survey, clear_leftovers, set_aside, survey
from rlhf_cluster.config import Config
from rlhf_cluster.config_io import changed_settings, dump_config
from rlhf_cluster.diagnosis.preflight import PreflightError, check_run_folder

log = logging.getLogger(__name__)

PUBLISHED_VERSION = "published_version"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """``checkpoint`` is the newest complete, undamaged set to resume from, or None for a fresh run.

    The folder is this process's alone while it lives: two drivers would delete each other's unfinished saves.
    """

    path: Path
    checkpoint: Path | None
    damaged: tuple[Path, ...] = ()
    """Newer sets that cannot be used."""
    _lock: IO[str] | None = field(default=None, repr=False)

    @staticmethod
    def open(config: Config, *, resume: str) -> RunFolder:
        """Find out what ``run.dir/run.name`` holds, and lock it. ``begin`` makes it this run's.

        Raises:
            PreflightError: ``--resume`` and what the folder holds do not go together, no set of it can be used,
                another process runs in it, or it is no folder that can be used.
        """
        path = Path(config.run.dir) / config.run.name
        if not path.exists():
            check_run_folder(path, resume=resume, has_checkpoint=False)
        try:
            path.mkdir(parents=True, exist_ok=True)
            # Before the sets are looked at: another process may be about to save one.
            lock = _lock(path)
            try:
                found = _look(path / "checkpoints")
                check_run_folder(path, resume=resume, has_checkpoint=found.newest is not None)
            except BaseException:
                if lock is not None:
                    lock.close()
                raise
        except OSError as error:
            raise PreflightError(
                f"run folder {path} cannot be used: {error}; choose another run.dir or run.name"
            ) from None
        return RunFolder(path, found.newest, tuple(found.damaged), lock)

    def begin(self, config: Config) -> list[str]:
        """Write the resolved config; from here on the folder is that of this run.

        A fresh run moves an older run's metrics aside instead of mixing the two. What a killed save left is deleted,
        and damaged sets newer than the one to resume from are set aside, each with a warning.

        Returns:
            What a resumed run has set otherwise than before, as ``key: old -> new``.

        Raises:
            PreflightError: the folder cannot be written.
        """
        try:
            clear_leftovers(self.checkpoints)
            for folder in self.damaged:
                log.warning("%s becomes %s", folder, set_aside(folder).name)
            written = self.path / "config.yaml"
            changes = [] if self.checkpoint is None else changed_settings(written, config)
            if self.checkpoint is None:
                for name in ("metrics.jsonl", "samples.jsonl", PUBLISHED_VERSION):
                    _move_aside(self.path / name)
            partial = written.with_suffix(".partial")
            partial.write_text(dump_config(config), encoding="utf-8")
            partial.replace(written)
        except OSError as error:
            raise PreflightError(f"run folder {self.path} cannot be used: {error}") from None
        return changes

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        return self.path / "samples.jsonl"

    def write_evaluation(self, name: str, content: dict[str, Any]) -> Path:
        """Write ``evaluation_NAME.json``, readable by its owner only because it holds answers in clear."""
        path = self.path / f"evaluation_{name}.json"
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1, ensure_ascii=False)
        return path


def _look(checkpoints: Path) -> Survey:
    """Starting afresh beside sets that are all damaged would hide a loss that a backup may still repair."""
    if (checkpoints.exists() or checkpoints.is_symlink()) and not checkpoints.is_dir():
        raise PreflightError(f"{checkpoints} is no folder; is the disk that should hold it mounted?")
    found = survey(checkpoints)
    if found.all_lost:
        reasons = "\n".join(f"  {folder.name}: {reason}" for folder, reason in found.damaged.items())
        raise PreflightError(
            f"{checkpoints} holds {len(found.damaged)} checkpoints and none of them can be used:\n{reasons}\n"
            "restore one of them, or choose another run.name to start fresh"
        )
    return found


def _lock(path: Path) -> IO[str] | None:
    """A lock on the run folder that the system frees when this process ends, however it ends.

    Raises:
        PreflightError: another process holds it (named).
    """
    file = (path / "run.lock").open("a+", encoding="utf-8")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.seek(0)
        owner = file.read().strip() or "another process"
        file.close()
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            log.warning("%s cannot be locked (%s): make sure that no other process runs in it", path, error)
            return None
        raise PreflightError(f"{path} is in use by {owner}; wait for it, stop it, or choose another run.name") from None
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return file


def _move_aside(path: Path) -> None:
    """Rename ``path`` to the first free ``path.N``."""
    if not path.exists():
        return
    number = 1
    while (target := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    path.rename(target)
