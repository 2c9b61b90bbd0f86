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
from rlhf_cluster.config_io import dump_config
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
    _lock: IO[str] | None = field(default=None, repr=False)

    @staticmethod
    def open(config: Config, *, resume: str) -> RunFolder:
        """Create or reopen ``run.dir/run.name`` and write the resolved config into it.

        A fresh run moves an older run's metrics aside instead of mixing the two. What a killed save left is deleted,
        and damaged sets newer than the one to resume from are set aside, each with a warning. A refusal changes
        nothing.

        Raises:
            PreflightError: ``--resume`` and what the folder holds do not go together, no set of it can be used, or
                another process runs in it.
        """
        path = Path(config.run.dir) / config.run.name
        checkpoints = path / "checkpoints"
        found = survey(checkpoints)
        _check_usable(checkpoints, found)
        check_run_folder(path, resume=resume, has_checkpoint=found.newest is not None)
        path.mkdir(parents=True, exist_ok=True)
        lock = _lock(path)
        clear_leftovers(checkpoints)
        for folder in found.damaged:
            log.warning("%s becomes %s", folder, set_aside(folder).name)
        if found.newest is None:
            for name in ("metrics.jsonl", "samples.jsonl", PUBLISHED_VERSION):
                _move_aside(path / name)
        (path / "config.yaml").write_text(dump_config(config), encoding="utf-8")
        return RunFolder(path, found.newest, lock)

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


def _check_usable(checkpoints: Path, found: Survey) -> None:
    """Starting afresh beside sets that are all damaged would hide a loss that a backup may still repair."""
    if found.damaged and found.newest is None:
        reasons = "\n".join(f"  {folder.name}: {reason}" for folder, reason in found.damaged.items())
        raise PreflightError(
            f"{checkpoints} holds {len(found.damaged)} checkpoints and none of them can be used:\n{reasons}\n"
            "restore one of them, or choose another run.name to start fresh"
        )


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
