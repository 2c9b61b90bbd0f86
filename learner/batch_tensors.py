"""A train batch as padded arrays, without what may not reach a gradient. R = rollouts with tokens, T = longest answer.

Every rank builds the same tensors for the whole batch, on the CPU: statistics over the batch then need no communication
and cannot depend on how samples are spread over ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from learner.models import TokenPair
from rlhf_cluster.types import ScoredRollout, TrainBatch


class BadData(RuntimeError):
    """So much of a batch is not finite that the run must not go on."""


@dataclass(frozen=True, slots=True)
class BatchTensors:
    """The trainable rollouts of a batch, padded on the right."""

    pairs: tuple[TokenPair, ...]
    """(prompt ids, response ids) of each row."""
    ids: tuple[str, ...]
    """The rollout id of each row."""
    groups: tuple[str, ...]
    """The group id of each row."""
    mask: Tensor
    """(R, T) bool, from lengths."""
    behaviour: Tensor
    """(R, T) float32 log pi_behaviour in nats."""
    reference: Tensor
    """(R, T) float32 log pi_ref in nats."""
    lags: Tensor
    """(R, T) int64, learner version minus the version that sampled the token."""
    scores: Tensor
    """(R,) float32."""
    truncated: Tensor
    """(R,) bool, ended by the length limit."""
    empty_groups: tuple[str, ...]
    """The group id of each rollout without a token; such a rollout takes no part in anything."""
    excluded: Mapping[str, int] = field(default_factory=dict)
    """How many rollouts were left out, by ``metrics.names.EXCLUSION_KINDS``."""

    @property
    def lengths(self) -> list[int]:
        """Prompt + response tokens of each row."""
        return [len(prompt) + len(response) for prompt, response in self.pairs]

    @property
    def n_tokens(self) -> int:
        return int(self.mask.sum())

    @property
    def n_empty(self) -> int:
        return len(self.empty_groups)

    @classmethod
    def from_batch(cls, batch: TrainBatch, max_staleness: int) -> BatchTensors:
        """Groups with a score or log-prob that is not finite are left out whole and counted in ``excluded``.

        Raises:
            ValueError: naming the rollout, when a token's lag lies outside 0..max_staleness: such data may never reach
                a gradient.
        """
        kinds = [_not_finite(member) for member in batch.rollouts]
        bad_groups = {m.rollout.group_id for m, kind in zip(batch.rollouts, kinds, strict=True) if kind}
        excluded = Counter(
            kind or "group"
            for member, kind in zip(batch.rollouts, kinds, strict=True)
            if member.rollout.group_id in bad_groups
        )
        kept = [member for member in batch.rollouts if member.rollout.group_id not in bad_groups]
        members = [member for member in kept if member.rollout.n_tokens]
        lags = [batch.learner_version - member.rollout.token_versions() for member in members]
        for member, lag in zip(members, lags, strict=True):
            _check_lags(member, lag, max_staleness)
        shape = (len(members), max((member.rollout.n_tokens for member in members), default=0))
        return cls(
            pairs=tuple((member.rollout.prompt_token_ids, member.rollout.token_ids) for member in members),
            ids=tuple(member.rollout.rollout_id for member in members),
            groups=tuple(member.rollout.group_id for member in members),
            mask=_pad([np.ones(member.rollout.n_tokens, dtype=np.bool_) for member in members], shape),
            behaviour=_pad([member.rollout.behaviour_logprobs for member in members], shape),
            reference=_pad([member.ref_logprobs for member in members], shape),
            lags=_pad(lags, shape),
            scores=torch.tensor([member.score for member in members], dtype=torch.float32),
            truncated=torch.tensor([member.rollout.truncated for member in members], dtype=torch.bool),
            empty_groups=tuple(member.rollout.group_id for member in kept if not member.rollout.n_tokens),
            excluded=dict(excluded),
        )

    def bad_rows(self, computed: Tensor) -> list[int]:
        """Rows of the (R, T) or (R,) ``computed`` that hold a number that is not finite."""
        finite = computed.isfinite()
        if computed.shape == self.mask.shape:
            finite = (finite | ~self.mask).all(-1)
        return [row for row, good in enumerate(finite.tolist()) if not good]

    def kept_without(self, bad: Sequence[int]) -> list[int]:
        """The rows that stay when the groups of ``bad`` leave."""
        leaving = {self.groups[row] for row in bad}
        return [row for row, group in enumerate(self.groups) if group not in leaving]

    def without(self, bad: Sequence[int], kind: str) -> BatchTensors:
        """The same batch without the groups of the rows ``bad``, which are counted as ``kind``. T stays."""
        kept = self.kept_without(bad)
        leaving = {self.groups[row] for row in bad}
        mates = len(self.groups) - len(kept) - len(bad)
        taken: dict[str, Any] = {
            item.name: _take(getattr(self, item.name), kept)
            for item in fields(self)
            if item.name not in ("empty_groups", "excluded")
        }
        excluded = Counter(self.excluded)
        excluded.update({kind: len(bad), "group": mates})
        return BatchTensors(
            **taken,
            empty_groups=tuple(group for group in self.empty_groups if group not in leaving),
            excluded={name: count for name, count in excluded.items() if count},
        )

    def check_excluded(self, most: float) -> None:
        """Raises BadData, with the counts by kind, when more than the share ``most`` of the batch is not finite."""
        bad = sum(count for kind, count in self.excluded.items() if kind != "group")
        everything = len(self.pairs) + self.n_empty + sum(self.excluded.values())
        if bad > most * everything:
            kinds = ", ".join(f"{count} with {kind}" for kind, count in self.excluded.items() if kind != "group")
            raise BadData(
                f"{bad} of the {everything} rollouts of a batch hold numbers that are not finite ({kinds}); "
                f"guardrails.max_unscorable_fraction is {most:g}"
            )


def _take(part: Tensor | tuple[Any, ...], rows: list[int]) -> Tensor | tuple[Any, ...]:
    return part[rows] if isinstance(part, Tensor) else tuple(part[row] for row in rows)


def _not_finite(member: ScoredRollout) -> str | None:
    """Which of what came with a rollout is not finite (the first that is), or None."""
    if not np.isfinite(member.score):
        return "score"
    if not np.isfinite(member.ref_logprobs).all():
        return "ref_logprobs"
    return None if np.isfinite(member.rollout.behaviour_logprobs).all() else "behaviour_logprobs"


def _check_lags(member: ScoredRollout, lags: np.ndarray, max_staleness: int) -> None:
    if lags.min() < 0 or lags.max() > max_staleness:
        raise ValueError(
            f"rollout {member.rollout.rollout_id}: token lags {lags.min()}..{lags.max()} leave 0..{max_staleness} "
            "(queue.max_staleness); the batch was formed wrongly"
        )


def _pad(rows: Sequence[np.ndarray], shape: tuple[int, int]) -> Tensor:
    if not rows:
        return torch.zeros(shape)
    out = np.zeros(shape, dtype=rows[0].dtype)
    for target, row in zip(out, rows, strict=True):
        target[: len(row)] = row
    return torch.from_numpy(out)
