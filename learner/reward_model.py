"""Fits a reward model: a Bradley-Terry linear head on the frozen last-token features of a base language model.

The result is a standard Hugging Face sequence classifier with one label, the start of the critic as well. Because it
has no bias, the head is kept orthogonal to the mean feature, so that scores have mean 0 over the training answers;
they are scaled to standard deviation 1.

Accuracy is cross-validated by prompt: each fold of the prompts is judged by a head that saw nothing of them, the
strength of its penalty included, so every pair is held out once. The head that is saved is fitted on all pairs.
"""

from __future__ import annotations

import math
import os
import random
import shutil
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
    """What was fitted. Accuracies are shares of the pairs whose chosen answer scores higher.

    ``held_out_accuracy``: each pair by a head fitted without its prompt. ``train_accuracy``: by the weights as saved.
    """

    train_accuracy: float
    held_out_accuracy: float
    pairs: int
    l2: float


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
    folds: int = 5,
    seed: int = 0,
    device: str = "cpu",
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> RewardFit:
    """Fit the head on ``pairs`` and save the reward model with its tokenizer as the folder ``output``.

    Prompts, not pairs, are split into folds, so no held-out prompt was trained on. The strength of the L2 penalty is
    the one with the least cross-validated loss.

    Args:
        base: folder of an instruct model; its chat template renders the pairs.
        batch_tokens: most tokens (padding included) in one forward.
        folds: parts the prompts are cut into for ``held_out_accuracy``.

    Raises:
        ValueError: fewer prompts than folds, an answer over ``max_tokens``, an ``output`` that exists, or features
            that are not finite or do not tell the answers apart.
    """
    output = Path(output)
    if output.exists():
        raise ValueError(f"{output} exists; remove it or name another folder for the reward model")
    report: Progress = progress or (lambda stage, done, total: None)
    tokenizer = AutoTokenizer.from_pretrained(base, trust_remote_code=trust_remote_code)
    indexed, conversations = _render(pairs, ChatRenderer(tokenizer), max_tokens)
    parts = _folds(indexed.group.tolist(), folds, seed)

    model = AutoModelForSequenceClassification.from_pretrained(
        base, num_labels=1, dtype=DTYPES[dtype], attn_implementation=attention, trust_remote_code=trust_remote_code
    ).to(device)
    model.eval().requires_grad_(False)
    features = _last_token_features(model, conversations, batch_tokens, report)
    if not bool(features.isfinite().all()):
        raise ValueError(f"{base} gives features that are not finite in {dtype}; use dtype float32")

    l2 = choose_l2(features, indexed, folds, seed)
    head = fit_bradley_terry(features, indexed, l2)
    spread = float((features[indexed.rows()] @ head).std(correction=0))
    if not spread > 1e-12:
        raise ValueError(f"the features of {base} do not tell the chosen answers from the rejected ones")
    head = (head / spread).to(DTYPES[dtype])
    model.score.weight.copy_(head[None, :])
    _save(model, tokenizer, output)
    saved = features @ head.double()  # as rounded
    return RewardFit(
        train_accuracy=_accuracy(saved, indexed),
        held_out_accuracy=_held_out_accuracy(features, indexed, parts, folds, seed, report),
        pairs=len(indexed),
        l2=l2,
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
    chosen_rows, rejected_rows, group_of = torch.tensor(indexed, dtype=torch.long).unbind(dim=1)
    return _Pairs(chosen_rows, rejected_rows, group_of), list(rows)


def _folds(groups: Sequence[int], count: int, seed: int) -> list[list[int]]:
    """The distinct groups (prompts) at random in ``count`` parts whose sizes differ by at most one."""
    shuffled = sorted(set(groups))
    if len(shuffled) < count:
        raise ValueError(f"a reward model needs pairs of at least {count} prompts, one a fold; got {len(shuffled)}")
    random.Random(seed).shuffle(shuffled)
    return [shuffled[start::count] for start in range(count)]


def _without(folds: Sequence[Sequence[int]], left_out: int) -> list[int]:
    return [group for index, fold in enumerate(folds) if index != left_out for group in fold]


@torch.inference_mode()
def _last_token_features(
    model: Any, conversations: Sequence[Sequence[int]], batch_tokens: int, report: Progress
) -> Tensor:
    """(N, H) float64: the hidden state after the final norm at the last token of each conversation."""
    lengths = [len(conversation) for conversation in conversations]
    features = torch.empty(len(conversations), model.score.in_features, dtype=torch.float64)
    done, total = 0, sum(lengths)
    plan = forward_plan(lengths, ranks=1, micro_batch_tokens=batch_tokens, padding_share=1.0)
    for batch in plan.ranks[0]:
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


def _held_out_accuracy(
    features: Tensor, pairs: _Pairs, parts: Sequence[Sequence[int]], folds: int, seed: int, report: Progress
) -> float:
    right = 0.0
    for index, part in enumerate(parts):
        seen, held_out = pairs.of(_without(parts, index)), pairs.of(part)
        # The inner folds are as many as the prompts that are left allow.
        inner = min(folds, len(set(seen.group.tolist())))
        head = fit_bradley_terry(features, seen, choose_l2(features, seen, inner, seed + 1))
        right += _accuracy(features @ head, held_out) * len(held_out)
        report("judging held-out prompts (folds)", index + 1, len(parts))
    return right / len(pairs)


def choose_l2(features: Tensor, pairs: _Pairs, folds: int, seed: int) -> float:
    """The strength of the penalty with the least loss over pairs of prompts that the head did not see."""
    parts = _folds(pairs.group.tolist(), folds, seed)
    losses = dict.fromkeys(L2_GRID, 0.0)
    for index, part in enumerate(parts):
        seen, held_out = pairs.of(_without(parts, index)), pairs.of(part)
        for l2 in L2_GRID:
            losses[l2] += _loss(features @ fit_bradley_terry(features, seen, l2), held_out) * len(held_out)
    return min(losses, key=lambda strength: losses[strength])


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
