"""Preference pairs with known truth: the model's own answers, labelled by the written rule of rewards/friendly.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations

from rlhf_cluster.data.chat import messages_of
from rlhf_cluster.data.preferences import PreferencePair
from rlhf_cluster.rewards.friendly import friendly_and_complete
from rlhf_cluster.types import FinishReason, Prompt

# Pairs whose truth is nearer than this teach the head mostly noise.
MARGIN = 0.75


@dataclass(frozen=True, slots=True)
class SampledAnswer:
    """One answer of the model to be labelled."""

    prompt: Prompt
    text: str = field(repr=False)
    finish_reason: FinishReason


def label_pairs(groups: Sequence[Sequence[SampledAnswer]], *, margin: float = MARGIN) -> list[PreferencePair]:
    """Every pair of answers to one prompt whose rule scores differ by at least ``margin``, the better one chosen."""
    pairs: list[PreferencePair] = []
    for group in groups:
        ranked = sorted(
            ((friendly_and_complete(a.prompt, a.text, a.finish_reason), a) for a in group), key=lambda item: -item[0]
        )
        for (better_score, better), (worse_score, worse) in combinations(ranked, 2):
            if better_score - worse_score < margin:
                continue
            prompt = better.prompt
            pairs.append(
                PreferencePair(
                    pair_id=f"{prompt.prompt_id}-{len(pairs)}",
                    messages=tuple(messages_of(prompt)),
                    chosen=better.text,
                    rejected=worse.text,
                    chosen_complete=better.finish_reason == "stop",
                    rejected_complete=worse.finish_reason == "stop",
                    metadata={"prompt_id": prompt.prompt_id},
                )
            )
    return pairs
