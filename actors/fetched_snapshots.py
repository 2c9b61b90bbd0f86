"""Weights that the learner wrote on another node, brought to this one once, however many workers it has.

They lie in a folder of their own inside the learner's path, so that all workers of a node share one copy, each under a
name that it alone removes (hard links). A copy that no living worker holds goes:

    /dev/shm/rlhf-NAME-RUN.DRIVER/fetched/v12.safetensors            complete, for neighbours to take
    /dev/shm/rlhf-NAME-RUN.DRIVER/fetched/v12.safetensors.HOLDER.PID what a holder in process PID writes, then reads
"""

from __future__ import annotations

import contextlib
import os
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


def this_node() -> str:
    """Ray's id of the node that this process runs on."""
    import ray

    return str(ray.get_runtime_context().get_node_id())


class FetchedSnapshots:
    """What one worker holds. ``fetch`` turns ``transport["object"]`` into the file's bytes, ``node_id`` names this node
    as ``transport["node_id"]`` names the learner's."""

    def __init__(
        self, fetch: Callable[[Any], np.ndarray] = from_object_store, node_id: Callable[[], str] = this_node
    ) -> None:
        self._fetch = fetch
        self._node_id = node_id
        self._held: Path | None = None

    def path(self, snapshot: WeightSnapshot) -> Path:
        """Path of the snapshot on this node; one that was fetched stays until the next call or ``close``.

        Raises:
            FileNotFoundError: it is not here and carries no object to fetch it from, or the learner, whose node this
                is, has removed it. What ``fetch`` raises.
        """
        if snapshot.path.exists():
            return snapshot.path
        if "object" not in snapshot.transport:
            raise FileNotFoundError(
                f"snapshot {snapshot.path} is not on this node and carries no object to fetch it from"
            )
        learners_node = snapshot.transport.get("node_id")
        if learners_node is not None and learners_node == self._node_id():
            raise FileNotFoundError(f"snapshot {snapshot.path} is no longer on the learner's node, which this is")
        folder = snapshot.path.parent / "fetched"
        own = folder / f"{snapshot.path.name}.{id(self):x}.{os.getpid()}"
        if own != self._held:
            self._take(folder / snapshot.path.name, own, snapshot.transport["object"])
            previous, self._held = self._held, own
            if previous is not None:
                previous.unlink(missing_ok=True)
            _remove_unheld(folder)
        return own

    def _take(self, shared: Path, own: Path, reference: Any) -> None:
        """Make ``own`` a name of the file that a neighbour fetched already, or fetch it and let neighbours have it."""
        own.unlink(missing_ok=True)
        try:
            os.link(shared, own)
        except FileNotFoundError:
            content = self._fetch(reference)
            if self._held is None:
                remove_stale_snapshots(shared.parent.parent)
            shared.parent.mkdir(parents=True, exist_ok=True)
            try:
                content.tofile(own)
            except BaseException:
                own.unlink(missing_ok=True)
                raise
            # Workers of one node may fetch at once: the first one's is shared, they are the same.
            with contextlib.suppress(FileExistsError):
                os.link(own, shared)

    def close(self) -> None:
        """Give up what is held; what a neighbour holds, or the learner put here, stays."""
        held, self._held = self._held, None
        if held is None:
            return
        held.unlink(missing_ok=True)
        _remove_unheld(held.parent)
        # Only folders that are empty go.
        with contextlib.suppress(OSError):
            held.parent.rmdir()
            held.parent.parent.rmdir()


def _remove_unheld(folder: Path) -> None:
    """Remove what dead processes held in ``folder``, then the files that nobody holds."""
    for held in folder.glob("v*.safetensors.*"):
        if not _alive(int(held.suffix[1:])):
            held.unlink(missing_ok=True)
    for shared in folder.glob("v*.safetensors"):
        with contextlib.suppress(FileNotFoundError):
            if shared.stat().st_nlink == 1:
                shared.unlink()


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
