"""Weights that the learner wrote on another node, brought to this one once, however many workers it has.

They lie under the learner's own path, so that all workers of a node share one copy:

    /dev/shm/rlhf-NAME-RUN.DRIVER/v12.safetensors      complete; older versions go when a newer one came
    /dev/shm/rlhf-NAME-RUN.DRIVER/.v12.safetensors.PID what the worker PID is writing
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_cluster.protocols import WeightSnapshot
from rlhf_cluster.stale_snapshots import remove_stale_snapshots

_FETCH_TIMEOUT_S = 120.0


def from_object_store(reference: Any) -> np.ndarray:
    """The uint8 array behind a Ray object reference. Raises ray.exceptions.GetTimeoutError."""
    import ray

    return np.asarray(ray.get(reference, timeout=_FETCH_TIMEOUT_S))


class FetchedSnapshots:
    """What one worker fetched. ``fetch`` turns ``transport["object"]`` into the file's bytes."""

    def __init__(self, fetch: Callable[[Any], np.ndarray] = from_object_store) -> None:
        self._fetch = fetch
        self._folder: Path | None = None

    def path(self, snapshot: WeightSnapshot) -> Path:
        """Path of the snapshot on this node.

        Raises:
            FileNotFoundError: it is not here and carries no object to fetch it from. What ``fetch`` raises.
        """
        path = snapshot.path
        if path.exists():
            return path
        if "object" not in snapshot.transport:
            raise FileNotFoundError(f"snapshot {path} is not on this node and carries no object to fetch it from")
        content = self._fetch(snapshot.transport["object"])
        if self._folder is None:
            remove_stale_snapshots(path.parent)
        self._folder = path.parent
        path.parent.mkdir(parents=True, exist_ok=True)
        # Workers of one node may fetch at once: each writes its own file, the rename is atomic and they are the same.
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        content.tofile(partial)
        partial.replace(path)
        # An older version that a neighbour still reads stays readable to it: only its name goes.
        for older in path.parent.glob("v*.safetensors"):
            if older != path:
                older.unlink(missing_ok=True)
        for abandoned in path.parent.glob(".v*.safetensors.*"):
            if not _alive(int(abandoned.suffix[1:])):
                abandoned.unlink(missing_ok=True)
        return path

    def close(self) -> None:
        """Remove what was fetched; a neighbour that still needs it fetches it again."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
