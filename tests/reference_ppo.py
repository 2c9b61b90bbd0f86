"""PPO as one plain loop: no Ray, no queue, no DeepSpeed, no code of ours but seeds, prompt order and the sampler.

Synchronous, one process, one sample after another, formulas written out. What the whole system does at
``max_staleness: 0`` is compared with this, weight by weight.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForSequenceClassification

from rlhf_cluster.data.cursor import PromptCursor
from rlhf_cluster.seeds import derive_seed, sample_seed
from rlhf_cluster.types import Prompt, Sampling
from tests.deterministic_engine import load_policy, sample, score, token_logprobs


@dataclass
class Settings:
    """As in the configuration of the run it is compared with."""

    seed: int
    steps: int
    groups: int
    samples: int
    max_new_tokens: int
    temperature: float
    minibatches: int
    epochs: int
    policy_lr: float
    critic_lr: float
    kl_coef: float
    gamma: float
    lam: float
    clip: float = 0.2
    value_clip: float = 0.2
    grad_clip: float = 1.0
    score_clip: float = 5.0


def train(folder: Path, prompts: list[Prompt], settings: Settings) -> tuple[Any, Any, list[list[tuple[int, ...]]]]:
    """(policy, critic, the answers of every batch) after ``settings.steps`` steps."""
    policy, reference = load_policy(folder / "policy"), load_policy(folder / "policy")
    critic = AutoModelForSequenceClassification.from_pretrained(folder / "reward", attn_implementation="eager").eval()
    adam = [
        torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
        for model, lr in ((policy, settings.policy_lr), (critic, settings.critic_lr))
    ]
    cursor, all_scores, batches = PromptCursor(prompts, seed=settings.seed), [], []
    for step in range(settings.steps):
        rows = []
        for _ in range(settings.groups):
            issue = cursor.next()
            for index in range(settings.samples):
                seed = sample_seed(settings.seed, issue.group_id, 0, index)
                sampling = Sampling(settings.temperature, settings.max_new_tokens, seed)
                prompt = list(issue.prompt.token_ids)
                answer, _ = sample(policy, prompt, sampling)
                rows.append({"prompt": prompt, "answer": answer, "score": score(answer)})
        batches.append([tuple(row["answer"]) for row in rows])
        all_scores += [row["score"] for row in rows]
        mean, std = np.mean(all_scores), np.std(all_scores)
        for row in rows:
            row["old"] = token_logprobs(policy, row["prompt"], row["answer"], settings.temperature)
            row["ref"] = token_logprobs(reference, row["prompt"], row["answer"], settings.temperature)
            with torch.no_grad():
                row["values"] = values(critic, row).tolist()
            z = (row["score"] - mean) / std if std else row["score"] - mean
            rewards = [-settings.kl_coef * (o - r) for o, r in zip(row["old"], row["ref"], strict=True)]
            rewards[-1] += min(max(z, -settings.score_clip), settings.score_clip)
            # Generalised advantage estimation; a truncated answer goes on after its last token.
            following = row["values"][-1] if row["answer"][-1] != 2 else 0.0
            carried, advantages = 0.0, []
            for reward, value in zip(reversed(rewards), reversed(row["values"][:-1]), strict=True):
                carried = reward + settings.gamma * following - value + settings.gamma * settings.lam * carried
                following = value
                advantages.insert(0, carried)
            row["raw"] = advantages
            row["returns"] = [a + v for a, v in zip(advantages, row["values"], strict=False)]
        everything = np.concatenate([row["raw"] for row in rows])
        for row in rows:
            row["advantages"] = [(a - everything.mean()) / everything.std() for a in row["raw"]]
        for epoch in range(settings.epochs):
            order = np.random.default_rng((derive_seed(settings.seed, "minibatches", step), epoch))
            for part in np.array_split(order.permutation(len(rows)), settings.minibatches):
                chosen = [rows[index] for index in part]
                tokens = sum(len(row["answer"]) for row in chosen)
                policy_loss = sum(surrogate(policy, row, settings) for row in chosen) / tokens
                value_loss = sum(squared_error(critic, row, settings) for row in chosen) / tokens
                for model, optimizer, loss in ((policy, adam[0], policy_loss), (critic, adam[1], value_loss)):
                    optimizer.zero_grad()
                    loss.backward()
                    torch.nn.utils.clip_grad_norm_(model.parameters(), settings.grad_clip)
                    optimizer.step()
    return policy, critic, batches


def values(critic: Any, row: dict[str, Any]) -> torch.Tensor:
    """The state before each token of the answer, and the one after the last: len(answer) + 1."""
    hidden = critic.model(torch.tensor([[*row["prompt"], *row["answer"]]])).last_hidden_state[0]
    return critic.score(hidden[len(row["prompt"]) - 1 :])[:, 0]


def surrogate(policy: Any, row: dict[str, Any], settings: Settings) -> torch.Tensor:
    """Clipped surrogate, summed over the answer."""
    ids = torch.tensor([[*row["prompt"], *row["answer"]]])
    logits = policy(ids).logits[0, len(row["prompt"]) - 1 : -1] / settings.temperature
    current = torch.log_softmax(logits, -1)[torch.arange(len(row["answer"])), torch.tensor(row["answer"])]
    ratio = (current - torch.tensor(row["old"])).exp()
    advantage = torch.tensor(row["advantages"], dtype=torch.float32)
    clipped = ratio.clamp(1 - settings.clip, 1 + settings.clip)
    return -torch.minimum(advantage * ratio, advantage * clipped).sum()


def squared_error(critic: Any, row: dict[str, Any], settings: Settings) -> torch.Tensor:
    """Clipped value loss, summed over the answer."""
    now, old = values(critic, row)[:-1], torch.tensor(row["values"][:-1])
    target = torch.tensor(row["returns"], dtype=torch.float32)
    near = old + (now - old).clamp(-settings.value_clip, settings.value_clip)
    assert math.isfinite(float(now.detach().sum()))
    return 0.5 * torch.maximum((now - target) ** 2, (near - target) ** 2).sum()
