"""Fits a reward model: a Bradley-Terry linear head on the frozen last-token features of a base language model.

The result is a standard Hugging Face sequence classifier with one label, the start of the critic as well. Because it
has no bias, the head is kept orthogonal to the mean feature, so that scores have mean 0 over the training answers;
they are scaled to standard deviation 1.
"""

from __future__ import annotations

import math
import os
import random
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rlhf_cluster.batching import forward_plan
from rlhf_cluster.data.chat import ChatRenderer
from rlhf_cluster.data.preferences import PreferencePair

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
L2_GRID = (1e-2, 3e-2, 1e-1, 3e-1, 1.0, 3.0, 10.0, 30.0)

Progress = Callable[[str, int, int], None]
"""(what is being done, tokens or fits done, all of them)."""


@dataclass(frozen=True, slots=True)
class RewardFit:
    """What was fitted. Accuracies are shares of pairs whose chosen answer scores higher, by the weights as saved."""

    train_accuracy: float
    held_out_accuracy: float
    train_pairs: int
    held_out_pairs: int
    l2: float
    feature_tokens: int
    feature_seconds: float


@dataclass(frozen=True, slots=True)
class _Pairs:
    """Rows of the feature matrix: ``chosen`` (N,) beats ``rejected`` (N,); ``group`` (N,) numbers the prompts."""

    chosen: Tensor
    rejected: Tensor
    group: Tensor

    def __len__(self) -> int:
        return len(self.chosen)

    def of(self, groups: Sequence[int]) -> _Pairs:
        keep = torch.isin(self.group, torch.tensor(sorted(groups), dtype=torch.long))
        return _Pairs(self.chosen[keep], self.rejected[keep], self.group[keep])

    def rows(self) -> Tensor:
        return torch.cat([self.chosen, self.rejected]).unique()


def fit_reward_head(
    base: str | Path,
    pairs: Sequence[PreferencePair],
    output: str | Path,
    *,
    dtype: str = "bfloat16",
    attention: str = "sdpa",
    batch_tokens: int = 4096,
    max_tokens: int = 2048,
    held_out_fraction: float = 0.2,
    seed: int = 0,
    device: str = "cpu",
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> RewardFit:
    """Fit the head on ``pairs`` and save the reward model with its tokenizer as the folder ``output``.

    Prompts, not pairs, are split, so no held-out prompt was trained on. The strength of the L2 penalty is the one with
    the least loss on a fifth of the training prompts; the head is then fitted on all of them.

    Args:
        base: folder of an instruct model; its chat template renders the pairs.
        batch_tokens: most tokens (padding included) in one forward.
        held_out_fraction: share of the prompts kept for ``held_out_accuracy``.

    Raises:
        ValueError: fewer than five prompts, an answer over ``max_tokens``, an ``output`` that exists, or features
            that are not finite or do not tell the answers apart.
    """
    output = Path(output)
    if output.exists():
        raise ValueError(f"{output} exists; remove it or name another folder for the reward model")
    report: Progress = progress or (lambda stage, done, total: None)
    tokenizer = AutoTokenizer.from_pretrained(base, trust_remote_code=trust_remote_code)
    indexed, conversations = _render(pairs, ChatRenderer(tokenizer), max_tokens)
    train_groups, held_out_groups = _split(range(int(indexed.group.max()) + 1), held_out_fraction, seed)
    train, held_out = indexed.of(train_groups), indexed.of(held_out_groups)

    model = AutoModelForSequenceClassification.from_pretrained(
        base, num_labels=1, dtype=DTYPES[dtype], attn_implementation=attention, trust_remote_code=trust_remote_code
    ).to(device)
    model.eval().requires_grad_(False)
    started = time.monotonic()
    features = _last_token_features(model, conversations, batch_tokens, report)
    seconds = time.monotonic() - started
    if not bool(features.isfinite().all()):
        raise ValueError(f"{base} gives features that are not finite in {dtype}; use dtype float32")

    head, l2 = _fit_and_choose(features, train, seed, report)
    spread = float((features[train.rows()] @ head).std(correction=0))
    if not spread > 1e-12:
        raise ValueError(f"the features of {base} do not tell the chosen answers from the rejected ones")
    head = (head / spread).to(DTYPES[dtype])
    model.score.weight.copy_(head[None, :])
    _save(model, tokenizer, output)
    saved = features @ head.double()  # as rounded
    return RewardFit(
        train_accuracy=_accuracy(saved, train),
        held_out_accuracy=_accuracy(saved, held_out),
        train_pairs=len(train),
        held_out_pairs=len(held_out),
        l2=l2,
        feature_tokens=sum(map(len, conversations)),
        feature_seconds=seconds,
    )


def _render(
    pairs: Sequence[PreferencePair], renderer: ChatRenderer, max_tokens: int
) -> tuple[_Pairs, list[tuple[int, ...]]]:
    """Pairs as rows of a list of distinct conversations: an answer that stands in several pairs is read once."""
    rows: dict[tuple[int, ...], int] = {}
    groups: dict[tuple[int, ...], int] = {}
    indexed: list[tuple[int, int, int]] = []
    for pair in pairs:
        chosen = tuple(renderer.conversation_ids(pair.messages, pair.chosen, pair.chosen_complete))
        rejected = tuple(renderer.conversation_ids(pair.messages, pair.rejected, pair.rejected_complete))
        longest = max(len(chosen), len(rejected))
        if longest > max_tokens:
            raise ValueError(
                f"pair {pair.pair_id!r} has {longest} tokens with its prompt, the limit is {max_tokens}; "
                "shorten it or raise the limit"
            )
        group = groups.setdefault(tuple(renderer.prompt_ids(pair.messages)), len(groups))
        indexed.append((rows.setdefault(chosen, len(rows)), rows.setdefault(rejected, len(rows)), group))
    if len(groups) < 5:
        raise ValueError(f"a reward model needs pairs of at least 5 prompts to hold some out, got {len(groups)}")
    chosen_rows, rejected_rows, group_of = torch.tensor(indexed, dtype=torch.long).unbind(dim=1)
    return _Pairs(chosen_rows, rejected_rows, group_of), list(rows)


def _split(groups: Sequence[int], fraction: float, seed: int) -> tuple[list[int], list[int]]:
    """(kept, taken out): ``fraction`` of the groups at random, at least one and never all."""
    shuffled = list(groups)
    random.Random(seed).shuffle(shuffled)
    taken = min(max(1, round(fraction * len(shuffled))), len(shuffled) - 1)
    return shuffled[taken:], shuffled[:taken]


@torch.inference_mode()
def _last_token_features(
    model: Any, conversations: Sequence[Sequence[int]], batch_tokens: int, report: Progress
) -> Tensor:
    """(N, H) float64: the hidden state after the final norm at the last token of each conversation."""
    lengths = [len(conversation) for conversation in conversations]
    features = torch.empty(len(conversations), model.score.in_features, dtype=torch.float64)
    done, total = 0, sum(lengths)
    for batch in forward_plan(lengths, ranks=1, micro_batch_tokens=batch_tokens).ranks[0]:
        width = lengths[batch[0]]
        input_ids = torch.tensor([[*conversations[i], *[0] * (width - lengths[i])] for i in batch])
        last = torch.tensor([lengths[i] - 1 for i in batch])
        mask = torch.arange(width) <= last[:, None]
        hidden = model.base_model(
            input_ids=input_ids.to(model.device),
            attention_mask=None if bool(mask.all()) else mask.long().to(model.device),
            use_cache=False,
        ).last_hidden_state
        features[list(batch)] = hidden[torch.arange(len(batch)), last.to(hidden.device)].double().cpu()
        done += sum(lengths[i] for i in batch)
        report("reading answers (tokens)", done, total)
    return features


def _fit_and_choose(features: Tensor, train: _Pairs, seed: int, report: Progress) -> tuple[Tensor, float]:
    """The head (H,) float64 fitted on all training pairs, with the L2 strength that validated best."""
    groups = sorted(set(train.group.tolist()))
    fit_groups, validation_groups = _split(groups, 0.2, seed + 1)
    fit, validation = train.of(fit_groups), train.of(validation_groups)
    losses = {}
    for done, l2 in enumerate(L2_GRID, start=1):
        scores = features @ fit_bradley_terry(features, fit, l2)
        losses[l2] = _loss(scores, validation)
        report("fitting the head (strengths of the L2 penalty)", done, len(L2_GRID))
    l2 = min(losses, key=lambda strength: losses[strength])
    return fit_bradley_terry(features, train, l2), l2


def fit_bradley_terry(features: Tensor, pairs: _Pairs, l2: float) -> Tensor:
    """w (H,) that minimises mean softplus(-(w . chosen - w . rejected)) + l2/2 |w * std|^2, w orthogonal to the mean.

    The model of Bradley and Terry (1952): P(chosen beats rejected) = sigmoid(score difference). The penalty is taken
    on standardised features, since some dimensions of a language model's features are far larger than the others.
    """
    answers = features[pairs.rows()]
    direction = answers.mean(dim=0)
    direction = direction / direction.norm().clamp(min=1e-12)
    std = answers.std(dim=0, correction=0).clamp(min=1e-6)
    difference = features[pairs.chosen] - features[pairs.rejected]
    # w orthogonal to the mean feature direction d: w.x = w.(x - (x.d) d), so d is taken out of the differences and,
    # after the fit, out of w.
    difference = (difference - (difference @ direction)[:, None] * direction) / std
    scaled = torch.zeros(features.shape[1], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([scaled], max_iter=200, tolerance_change=1e-10, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = softplus(-(difference @ scaled)).mean() + 0.5 * l2 * scaled.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    head = scaled.detach() / std
    return head - (head @ direction) * direction


def _loss(scores: Tensor, pairs: _Pairs) -> float:
    return float(softplus(scores[pairs.rejected] - scores[pairs.chosen]).mean())


def _accuracy(scores: Tensor, pairs: _Pairs) -> float:
    return float((scores[pairs.chosen] > scores[pairs.rejected]).double().mean()) if len(pairs) else math.nan


def _save(model: Any, tokenizer: Any, output: Path) -> None:
    """Write beside ``output`` and rename, so that a folder of that name is always a whole reward model."""
    # Hugging Face's own forward reads the last id that is not the pad id, so a pad id that ends answers misleads it.
    candidates = (tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.bos_token_id)
    ends = tokenizer.eos_token_id
    model.config.pad_token_id = next((i for i in candidates if i is not None and i != ends), ends)
    output.parent.mkdir(parents=True, exist_ok=True)
    unfinished = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        model.save_pretrained(unfinished, safe_serialization=True)
        tokenizer.save_pretrained(unfinished)
        unfinished.rename(output)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
