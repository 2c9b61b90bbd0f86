"""Rewards of sampled answers: the reward model and function rewards, as named components of one score.

What cannot be scored (over-long, unrenderable, a function that fails) has score NaN and a reason, never 0.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from transformers import AutoTokenizer

from actors.frozen_model import FrozenModel, PaddedBatch, pad_right
from actors.micro_batcher import MicroBatcher
from rlhf_cluster.config import ModelConfig, RewardComponent, RewardConfig, ScorerConfig
from rlhf_cluster.data.chat import ChatRenderer, messages_of
from rlhf_cluster.data.jsonl import RowError
from rlhf_cluster.rewards.compose import compose
from rlhf_cluster.rewards.functions import Answer, ComponentFunction, component_function
from rlhf_cluster.types import Prompt, Rollout

logger = logging.getLogger(__name__)

Unscorable = Literal["too_long", "unrenderable", "function_error", "not_finite", "scorer_died"]
"""``scorer_died`` is the pool's: scorers died over the group again and again."""


class Reward(NamedTuple):
    """The reply for one rollout. ``reason`` says why ``score`` is NaN, and is None for a score."""

    rollout_id: str
    score: float
    components: dict[str, float]
    reason: Unscorable | None


class _Value(NamedTuple):
    value: float
    reason: Unscorable | None = None


class RewardScorer:
    """Scores answers by the configured components. Function rewards may be called from several threads.

    Args:
        model: names the policy (its tokenizer decodes the sampled ids) and the reward model.
        reward: the components.
        scorers: batch window, token budget and the reward model's length limit.

    Raises:
        ValueError: a function reward that cannot be loaded, or a reward model without a trained head or template.
    """

    def __init__(self, model: ModelConfig, reward: RewardConfig, scorers: ScorerConfig, *, device: str = "cpu") -> None:
        self._components = reward.components
        self._functions = {c.name: component_function(c) for c in self._components if c.kind != "model"}
        self._policy_tokenizer = AutoTokenizer.from_pretrained(model.policy, trust_remote_code=model.trust_remote_code)
        self._special_ids = frozenset(self._policy_tokenizer.all_special_ids)
        self._models = {c.name: _ModelReward(model, scorers, device) for c in self._components if c.kind == "model"}

    async def score(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[Reward]:
        """One reward per rollout of ``prompt``, same order, each carrying its rollout id."""
        answers = [self._answer(rollout) for rollout in rollouts]
        columns, model_column = await asyncio.gather(
            asyncio.to_thread(self._function_columns, prompt, answers), self._model_column(prompt, answers)
        )
        columns |= model_column
        return [
            _reward(self._components, rollout.rollout_id, {name: column[row] for name, column in columns.items()})
            for row, rollout in enumerate(rollouts)
        ]

    async def _model_column(self, prompt: Prompt, answers: Sequence[Answer]) -> dict[str, list[_Value]]:
        return {name: await model.values(prompt, answers) for name, model in self._models.items()}

    def _answer(self, rollout: Rollout) -> Answer:
        ids = rollout.token_ids.tolist()
        # The token that ended the answer is no part of its text. Other special tokens stay visible: the policy wrote
        # them, and the renderer passes them on as plain text.
        ended = rollout.finish_reason == "stop" and bool(ids) and ids[-1] in self._special_ids
        text = self._policy_tokenizer.decode(
            ids[:-1] if ended else ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return Answer(text, ids, rollout.finish_reason, rollout.sampling.max_new_tokens)

    def _function_columns(self, prompt: Prompt, answers: Sequence[Answer]) -> dict[str, list[_Value]]:
        return {
            name: [_call(name, function, prompt, answer) for answer in answers]
            for name, function in self._functions.items()
        }


class _ModelReward:
    """The reward model with its own tokenizer and template: text, never policy ids, crosses between tokenizers."""

    def __init__(self, model: ModelConfig, scorers: ScorerConfig, device: str) -> None:
        if model.reward is None:
            raise ValueError("a component of kind: model needs model.reward, the reward model's folder")
        tokenizer = AutoTokenizer.from_pretrained(model.reward, trust_remote_code=model.trust_remote_code)
        self._renderer = ChatRenderer(tokenizer)
        self._max_tokens = scorers.max_tokens
        frozen = FrozenModel(
            model.reward,
            "score",
            dtype=model.dtype,
            attention=model.attention,
            device=device,
            trust_remote_code=model.trust_remote_code,
        )
        self._batcher: MicroBatcher[tuple[int, ...], float] = MicroBatcher(
            lambda rows: last_token_scores(frozen, pad_right(rows)),
            length=len,
            batch_tokens=scorers.batch_tokens,
            window_s=scorers.batch_window_ms / 1000,
        )

    async def values(self, prompt: Prompt, answers: Sequence[Answer]) -> list[_Value]:
        """A score each; NaN with its reason for an answer that cannot be rendered or is over the length limit."""
        rendered = [self._render(prompt, answer) for answer in answers]
        scores = iter(await self._batcher.submit([row for row in rendered if isinstance(row, tuple)]))
        return [_Value(next(scores)) if isinstance(row, tuple) else _Value(math.nan, row) for row in rendered]

    def _render(self, prompt: Prompt, answer: Answer) -> tuple[int, ...] | Unscorable:
        try:
            ids = self._renderer.conversation_ids(messages_of(prompt), answer.text, answer.finish_reason == "stop")
        except RowError:
            return "unrenderable"
        # Cutting would take the end of the answer, or of the question, from the model and score something else.
        return tuple(ids) if len(ids) <= self._max_tokens else "too_long"


def last_token_scores(model: FrozenModel, batch: PaddedBatch) -> list[float]:
    """The score at the last real token of each row, found by mask; ids are never compared (pad may equal EOS)."""
    positions = torch.arange(batch.mask.shape[1]).masked_fill(~batch.mask, -1).amax(dim=-1)
    hidden = model.hidden_states(batch)
    last = hidden[torch.arange(len(positions)), positions.to(hidden.device)]
    scores: list[float] = model.apply_head(last, float32=True).squeeze(-1).tolist()
    return scores


def _call(name: str, function: ComponentFunction, prompt: Prompt, answer: Answer) -> _Value:
    try:
        return _Value(float(function(prompt, answer)))
    # One answer that a user's function cannot judge must not end the run, nor exit() in it the actor; it is counted.
    except (Exception, SystemExit) as error:
        # The message is left out: it may quote the answer.
        logger.warning("reward function %r failed with %s; the answer is unscorable", name, type(error).__name__)
        return _Value(math.nan, "function_error")


def _reward(components: Sequence[RewardComponent], rollout_id: str, values: dict[str, _Value]) -> Reward:
    score, parts = compose(components, {name: value.value for name, value in values.items()})
    if math.isfinite(score):
        return Reward(rollout_id, score, parts, None)
    weighted = (values[component.name] for component in components if component.weight != 0)
    reason: Unscorable = next((value.reason for value in weighted if value.reason is not None), "not_finite")
    return Reward(rollout_id, score, parts, reason)
