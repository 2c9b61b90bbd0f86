"""``samples.jsonl``: a few answers of every step in clear. Off unless asked for, readable by its owner only."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from rlhf_cluster.metrics.jsonl import cut_torn_line
from rlhf_cluster.types import TrainBatch


class SampleWriter:
    """Appends the first ``per_step`` answers of each trained batch to ``path``; a torn last line is cut off first.

    Args:
        decode: token ids -> text.
    """

    def __init__(self, path: Path, *, per_step: int, decode: Callable[[Sequence[int]], str]) -> None:
        if path.exists():
            cut_torn_line(path)
        self._file = open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "a", encoding="utf-8")  # noqa: SIM115
        self._per_step = per_step
        self._decode = decode

    def write(self, step: int, batch: TrainBatch) -> None:
        for member in batch.rollouts[: self._per_step]:
            rollout = member.rollout
            row = {
                "step": step,
                "rollout_id": rollout.rollout_id,
                "versions": [list(span) for span in rollout.version_spans],
                "prompt": self._decode(rollout.prompt_token_ids.tolist()),
                "answer": self._decode(rollout.token_ids.tolist()),
                "finish_reason": rollout.finish_reason,
                "score": member.score,
                "components": dict(member.score_components),
            }
            self._file.write(json.dumps(row, ensure_ascii=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()
