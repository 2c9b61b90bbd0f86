"""Scored groups as plain JSON values and back, exact to the bit.

float32 widens to a Python float without loss and JSON keeps every digit of it; NaN and infinities pass as the
``NaN``/``Infinity`` tokens of Python's json.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from rlhf_cluster.types import Rollout, Sampling, ScoredGroup, ScoredRollout, VersionSpan


def group_to_json(group: ScoredGroup) -> dict[str, Any]:
    return {"group_id": group.group_id, "rollouts": [_member_to_json(member) for member in group.rollouts]}


def group_from_json(state: Mapping[str, Any]) -> ScoredGroup:
    """Raises ValueError when the arrays do not fit together (the checks of the records run again)."""
    return ScoredGroup(state["group_id"], tuple(_member_from_json(member) for member in state["rollouts"]))


def _member_to_json(member: ScoredRollout) -> dict[str, Any]:
    rollout = member.rollout
    return {
        "rollout_id": rollout.rollout_id,
        "attempt": rollout.attempt,
        "group_id": rollout.group_id,
        "prompt_token_ids": rollout.prompt_token_ids.tolist(),
        "token_ids": rollout.token_ids.tolist(),
        "behaviour_logprobs": rollout.behaviour_logprobs.tolist(),
        "version_spans": [list(span) for span in rollout.version_spans],
        "finish_reason": rollout.finish_reason,
        "sampling": asdict(rollout.sampling),
        "score": float(member.score),
        "score_components": {name: float(value) for name, value in member.score_components.items()},
        "ref_logprobs": member.ref_logprobs.tolist(),
    }


def _member_from_json(state: Mapping[str, Any]) -> ScoredRollout:
    rollout = Rollout(
        rollout_id=state["rollout_id"],
        attempt=state["attempt"],
        group_id=state["group_id"],
        prompt_token_ids=np.asarray(state["prompt_token_ids"], dtype=np.int32),
        token_ids=np.asarray(state["token_ids"], dtype=np.int32),
        behaviour_logprobs=np.asarray(state["behaviour_logprobs"], dtype=np.float32),
        version_spans=tuple(VersionSpan(*span) for span in state["version_spans"]),
        finish_reason=state["finish_reason"],
        sampling=Sampling(**state["sampling"]),
    )
    ref_logprobs = np.asarray(state["ref_logprobs"], dtype=np.float32)
    return ScoredRollout(rollout, state["score"], dict(state["score_components"]), ref_logprobs)
