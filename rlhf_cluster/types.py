"""Records passed between stages, in the order a rollout meets them. Numpy only.

``Prompt -> Rollout -> ScoredRollout -> ScoredGroup -> TrainBatch -> UpdateResult``: every stage returns a
new record and never fills in another stage's fields.

Shapes: P = prompt tokens, T = generated tokens (EOS included when it was sampled).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

FinishReason = Literal["stop", "length", "abort"]
FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length", "abort")

Ids = NDArray[np.int32]
Floats = NDArray[np.float32]


class VersionSpan(NamedTuple):
    """Generated tokens ``start <= t < end`` were sampled under policy ``version``."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Sampling:
    """What the engine was asked for. Training always samples neutrally: top_p 1, no top_k, no penalties."""

    temperature: float
    max_new_tokens: int
    seed: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, rendered through the chat template.

    ``text`` is the user's own words (what a reward model re-renders with its own template); ``metadata`` holds
    the other fields of the row. When the row was a conversation, ``metadata["messages"]`` is that conversation.
    """

    prompt_id: str
    token_ids: tuple[int, ...]
    text: str = field(repr=False)
    metadata: Mapping[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """One sampled answer, exactly as the engine produced it.

    ``token_ids`` (T,) are the ids that were sampled, never re-tokenised text; ``behaviour_logprobs`` (T,) are the
    engine's log-probabilities at sampling, in nats, temperature applied. ``version_spans`` cover [0, T) without
    gaps, versions growing; a rollout without tokens carries one empty span ``(start_version, 0, 0)``.

    Raises:
        ValueError: when lengths disagree or the spans do not cover the tokens.
    """

    rollout_id: str
    attempt: int
    group_id: str
    prompt_token_ids: Ids = field(repr=False)
    token_ids: Ids = field(repr=False)
    behaviour_logprobs: Floats = field(repr=False)
    version_spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    sampling: Sampling

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_token_ids", np.asarray(self.prompt_token_ids, dtype=np.int32))
        object.__setattr__(self, "token_ids", np.asarray(self.token_ids, dtype=np.int32))
        object.__setattr__(self, "behaviour_logprobs", np.asarray(self.behaviour_logprobs, dtype=np.float32))
        object.__setattr__(self, "version_spans", tuple(VersionSpan(*span) for span in self.version_spans))
        if self.token_ids.shape != self.behaviour_logprobs.shape:
            raise ValueError(
                f"rollout {self.rollout_id}: {self.token_ids.shape} token ids against "
                f"{self.behaviour_logprobs.shape} behaviour log-probs; they must be one each"
            )
        if self.finish_reason not in FINISH_REASONS:
            raise ValueError(
                f"rollout {self.rollout_id}: finish_reason {self.finish_reason!r} is not one of {FINISH_REASONS}"
            )
        self._check_spans()

    def _check_spans(self) -> None:
        position, version = 0, -1
        for span in self.version_spans:
            if span.start != position or span.end < span.start or span.version < version:
                raise ValueError(
                    f"rollout {self.rollout_id}: version spans {list(self.version_spans)} must follow one another "
                    "without gaps, versions growing"
                )
            position, version = span.end, span.version
        if not self.version_spans or position != len(self.token_ids):
            raise ValueError(
                f"rollout {self.rollout_id}: version spans {list(self.version_spans)} cover {position} of "
                f"{len(self.token_ids)} tokens"
            )

    @property
    def min_version(self) -> int:
        """The oldest version that sampled a token (the start version when there is none)."""
        return min(span.version for span in self.version_spans)

    @property
    def max_version(self) -> int:
        return max(span.version for span in self.version_spans)

    @property
    def n_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def truncated(self) -> bool:
        """True when the length limit ended it, so the value after its last token is not 0."""
        return self.finish_reason == "length"

    def token_versions(self) -> NDArray[np.int64]:
        """(T,) the policy version that sampled each token."""
        versions = np.empty(self.n_tokens, dtype=np.int64)
        for version, start, end in self.version_spans:
            versions[start:end] = version
        return versions


@dataclass(frozen=True, slots=True, eq=False)
class ScoredRollout:
    """A rollout with its score (one number), the named components it was made of, and (T,) log pi_ref in nats."""

    rollout: Rollout
    score: float
    score_components: Mapping[str, float]
    ref_logprobs: Floats = field(repr=False)
    unscorable: str | None = None
    """Why the score is NaN, in the scorer's words (a closed set); None when there is a score."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "ref_logprobs", np.asarray(self.ref_logprobs, dtype=np.float32))
        if self.ref_logprobs.shape != self.rollout.token_ids.shape:
            raise ValueError(
                f"rollout {self.rollout.rollout_id}: {self.rollout.token_ids.shape} token ids against "
                f"{self.ref_logprobs.shape} reference log-probs; they must be one each"
            )

    @property
    def finite(self) -> bool:
        return math.isfinite(self.score) and bool(np.isfinite(self.ref_logprobs).all())


@dataclass(frozen=True, slots=True, eq=False)
class ScoredGroup:
    """All samples of one issue of one prompt. Trained whole or retired whole.

    Raises:
        ValueError: when it is empty or its members do not share group id and attempt.
    """

    group_id: str
    rollouts: tuple[ScoredRollout, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "rollouts", tuple(self.rollouts))
        if not self.rollouts:
            raise ValueError(f"group {self.group_id}: a group without rollouts")
        owners = {(member.rollout.group_id, member.rollout.attempt) for member in self.rollouts}
        if len(owners) != 1 or next(iter(owners))[0] != self.group_id:
            raise ValueError(f"group {self.group_id}: members belong to {sorted(owners)}; a group has one dispatch")

    @property
    def attempt(self) -> int:
        return self.rollouts[0].rollout.attempt

    @property
    def min_version(self) -> int:
        return min(member.rollout.min_version for member in self.rollouts)

    @property
    def max_version(self) -> int:
        return max(member.rollout.max_version for member in self.rollouts)

    @property
    def n_tokens(self) -> int:
        return sum(member.rollout.n_tokens for member in self.rollouts)


@dataclass(frozen=True, slots=True, eq=False)
class TrainBatch:
    """What one learner step trains: the groups handed out for ``learner_version``, in admission order."""

    learner_version: int
    groups: tuple[ScoredGroup, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", tuple(self.groups))

    @property
    def rollouts(self) -> list[ScoredRollout]:
        return [member for group in self.groups for member in group.rollouts]

    @property
    def n_tokens(self) -> int:
        return sum(group.n_tokens for group in self.groups)


@dataclass(frozen=True, slots=True)
class Ratio:
    """A mean that is not divided yet: add the parts, divide at export."""

    total: float
    count: float

    def __add__(self, other: Ratio) -> Ratio:
        return Ratio(self.total + other.total, self.count + other.count)

    @property
    def value(self) -> float:
        """total / count, NaN when nothing was counted."""
        return self.total / self.count if self.count else math.nan


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """The outcome of one learner step.

    ``version`` is the version the learner holds now: ``learner_version + 1`` when ``stepped``, else unchanged.
    ``metrics`` maps metric names to sums over counts.
    """

    version: int
    stepped: bool
    metrics: Mapping[str, Ratio]
