"""What a resume needs besides tensors: the parts of the control loop as one JSON value, saved in ``run_state.json``.

The folder around it is ``checkpoint_set``; ``checkpoint_writer`` writes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_cluster.checkpoint_set import LEARNER, STATE, step_of
from rlhf_cluster.data.cursor import PromptCursor
from rlhf_cluster.experience_queue import ExperienceQueue
from rlhf_cluster.metrics.recorder import MetricsRecorder

__all__ = ["LEARNER", "frontier", "load_state", "restore", "snapshot"]


def load_state(folder: Path) -> dict[str, Any]:
    """The run state of a set. Raises OSError, or ValueError when it is not JSON or of another step."""
    state: dict[str, Any] = json.loads((folder / STATE).read_text(encoding="utf-8"))
    if state["step"] != step_of(folder):
        raise ValueError(f"{folder / STATE} is that of step {state['step']}")
    return state


def frontier(folder: Path) -> int:
    """The cursor's frontier in a set; 0, below which nothing lies, when it cannot be read."""
    try:
        return int(load_state(folder)["cursor"]["frontier"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def restore(
    state: Mapping[str, Any], *, cursor: PromptCursor, queue: ExperienceQueue, version: int | None = None
) -> int:
    """Put the parts back where ``snapshot`` found them and return the step to go on from.

    ``version``: what the learner goes on as, when versions above the saved one were published; queued groups that are
    too stale for it leave, and their prompts come again.

    Attempts that were on workers are aborted, and the cursor yields their prompts again, to be sampled with the same
    seeds and trained in the same place; queued groups stay queued.
    The recorder goes on from ``state["metrics"]``.

    Raises:
        ValueError: seed, prompts, batch size or staleness bound are not those of the saved run.
    """
    queue.load_state_dict(state["queue"])
    queued = queue.resume(queue.learner_version if version is None else version)
    cursor.load_state_dict(state["cursor"], outstanding=sorted(queued))
    return int(state["step"])


def snapshot(
    step: int, *, cursor: PromptCursor, queue: ExperienceQueue, recorder: MetricsRecorder, **more: Any
) -> dict[str, Any]:
    """A JSON-able copy of the parts between two learner steps; ``more`` is kept beside them."""
    return {
        "step": step,
        "cursor": cursor.state_dict(),
        "queue": queue.state_dict(),
        "metrics": recorder.state_dict(),
        **more,
    }
