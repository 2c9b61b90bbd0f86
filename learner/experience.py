"""From a train batch to what the losses need: padded arrays, rewards, advantages and batch statistics. No model here.

Every rank builds the same tensors for the whole batch, on the CPU: statistics over the batch then need no communication
and cannot depend on how samples are spread over ranks. R = rollouts with tokens, T = longest response.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from learner.models import TokenPair
from rlhf_cluster.algorithms.advantages import gae, whiten
from rlhf_cluster.algorithms.kl import kl_estimate
from rlhf_cluster.algorithms.losses import explained_variance, explained_variance_sums
from rlhf_cluster.algorithms.rewards import RunningMoments, normalize_scores, token_rewards
from rlhf_cluster.config import AlgorithmConfig, RewardConfig
from rlhf_cluster.types import Ratio, ScoredRollout, TrainBatch


@dataclass(frozen=True, slots=True)
class BatchTensors:
    """The rollouts of a batch that have tokens, padded on the right."""

    pairs: tuple[TokenPair, ...]
    """(prompt ids, response ids) of each row."""
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
    n_empty: int
    """Rollouts without a token; they take no part in anything."""

    @property
    def lengths(self) -> list[int]:
        """Prompt + response tokens of each row."""
        return [len(prompt) + len(response) for prompt, response in self.pairs]

    @property
    def n_tokens(self) -> int:
        return int(self.mask.sum())

    @classmethod
    def from_batch(cls, batch: TrainBatch, max_staleness: int) -> BatchTensors:
        """Raises ValueError naming the rollout when a score or reference log-prob is not finite, or a token's lag lies
        outside 0..max_staleness: such data may never reach a gradient."""
        members = [member for member in batch.rollouts if member.rollout.n_tokens]
        lags = [batch.learner_version - member.rollout.token_versions() for member in members]
        for member, lag in zip(members, lags, strict=True):
            _check_trainable(member, lag, max_staleness)
        shape = (len(members), max((member.rollout.n_tokens for member in members), default=0))
        return cls(
            pairs=tuple((member.rollout.prompt_token_ids, member.rollout.token_ids) for member in members),
            mask=_pad([np.ones(member.rollout.n_tokens, dtype=np.bool_) for member in members], shape),
            behaviour=_pad([member.rollout.behaviour_logprobs for member in members], shape),
            reference=_pad([member.ref_logprobs for member in members], shape),
            lags=_pad(lags, shape),
            scores=torch.tensor([member.score for member in members], dtype=torch.float32),
            truncated=torch.tensor([member.rollout.truncated for member in members], dtype=torch.bool),
            n_empty=len(batch.rollouts) - len(members),
        )


@dataclass(frozen=True, slots=True)
class Experience:
    """What the losses of one row set need, each (R, T) float32 but the mask (bool)."""

    mask: Tensor
    behaviour: Tensor
    proximal: Tensor
    advantages: Tensor
    returns: Tensor
    old_values: Tensor

    def take(self, rows: Sequence[int], width: int, device: torch.device) -> Experience:
        """The given rows cut to ``width`` tokens; without rows one row under mask 0 (the filler of ``collate``)."""
        parts = {}
        for item in fields(self):
            whole: Tensor = getattr(self, item.name)
            part = whole[list(rows), :width] if rows else whole.new_zeros((1, width))
            parts[item.name] = part.to(device)
        return Experience(**parts)


def normalised_scores(tensors: BatchTensors, moments: RunningMoments, config: RewardConfig) -> Tensor:
    """(R,) scores as rewards: the batch enters ``moments`` first, so the very first batch has statistics too."""
    if config.normalize == "none":
        return tensors.scores if config.clip is None else tensors.scores.clamp(-config.clip, config.clip)
    moments.update(tensors.scores)
    return normalize_scores(tensors.scores, moments, config.clip)


def rewards_of(
    tensors: BatchTensors, proximal: Tensor, scores: Tensor, *, algorithm: AlgorithmConfig, kl_coef: float
) -> Tensor:
    """(R, T): the score on the last token minus ``kl_coef`` times the KL(proximal, reference) of every token."""
    kl = kl_estimate(proximal, tensors.reference, algorithm.kl.estimator)
    return token_rewards(scores, kl, tensors.mask, kl_coef)


def monte_carlo_returns(tensors: BatchTensors, rewards: Tensor, *, gamma: float) -> Tensor:
    """(R, T) discounted reward sums: targets for a critic whose own values mean nothing yet."""
    _, returns = gae(rewards, torch.zeros_like(rewards), tensors.mask, gamma=gamma, lam=1.0)
    return returns


def build_experience(
    tensors: BatchTensors,
    proximal: Tensor,
    rewards: Tensor,
    values: Tensor,
    after_last: Tensor,
    *,
    algorithm: AlgorithmConfig,
) -> tuple[Experience, dict[str, Ratio]]:
    """GAE, whitening and clipping over the whole batch; and the statistics of returns and advantages.

    ``values`` (R, T) and ``after_last`` (R,) are the critic's before the first step. A truncated answer goes on after
    its last token, so its return is bootstrapped from there; an ended one is worth nothing more.
    """
    bootstrap = torch.where(tensors.truncated, after_last, torch.zeros_like(after_last))
    raw, returns = gae(rewards, values, tensors.mask, gamma=algorithm.gamma, lam=algorithm.lam, bootstrap=bootstrap)
    advantages = whiten(raw, tensors.mask) if algorithm.advantage_norm else raw
    if algorithm.advantage_clip is not None:
        advantages = advantages.clamp(-algorithm.advantage_clip, algorithm.advantage_clip)
    fit = explained_variance(explained_variance_sums(values, returns, tensors.mask))
    metrics = {
        "advantage_mean": masked_ratio(raw, tensors.mask),
        "advantage_std": Ratio(float(raw[tensors.mask].double().std(correction=0)), 1.0),
        "return_mean": masked_ratio(returns, tensors.mask),
        "explained_variance": Ratio(fit, 1.0) if fit == fit else Ratio(0.0, 0.0),
    }
    experience = Experience(tensors.mask, tensors.behaviour, proximal, advantages, returns, values)
    return experience, metrics


def batch_metrics(
    tensors: BatchTensors, proximal: Tensor, entropies: Tensor, scores: Tensor, *, max_staleness: int
) -> dict[str, Ratio]:
    """Statistics of a batch before its step. KL metrics in nats a token: ``kl_reference_*`` of KL(proximal, reference),
    ``kl_behaviour`` the mean |behaviour - proximal|, over all tokens and by lag."""
    mask = tensors.mask
    gap = tensors.behaviour - proximal
    rows = len(tensors.pairs)
    metrics = {
        "kl_reference_k1": masked_ratio(kl_estimate(proximal, tensors.reference, "k1"), mask),
        "kl_reference_k3": masked_ratio(kl_estimate(proximal, tensors.reference, "k3"), mask),
        "kl_behaviour": masked_ratio(gap.abs(), mask),
        "kl_behaviour_signed": masked_ratio(gap, mask),
        "nll": masked_ratio(-proximal, mask),
        "entropy": masked_ratio(entropies, mask),
        "score_mean": Ratio(float(tensors.scores.double().sum()), rows),
        "normalised_score_mean": Ratio(float(scores.double().sum()), rows),
        "response_length": Ratio(tensors.n_tokens, rows),
        "truncated_fraction": Ratio(int(tensors.truncated.sum()), rows),
        "empty_fraction": Ratio(tensors.n_empty, tensors.n_empty + rows),
    }
    for lag in range(max_staleness + 1):
        metrics[f"kl_behaviour_lag{lag}"] = masked_ratio(gap.abs(), mask & (tensors.lags == lag))
    return metrics


def masked_ratio(x: Tensor, mask: Tensor) -> Ratio:
    """Sum and count over masked-in tokens."""
    return Ratio(float(x[mask].double().sum()), int(mask.sum()))


class MetricSums(Mapping[str, Ratio]):
    """Ratios added up by name."""

    def __init__(self) -> None:
        self._sums: dict[str, Ratio] = {}

    def add(self, metrics: Mapping[str, Ratio]) -> None:
        for name, ratio in metrics.items():
            self._sums[name] = self._sums.get(name, Ratio(0.0, 0.0)) + ratio

    def __getitem__(self, name: str) -> Ratio:
        return self._sums[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sums)

    def __len__(self) -> int:
        return len(self._sums)


def _check_trainable(member: ScoredRollout, lags: np.ndarray, max_staleness: int) -> None:
    if not member.finite:
        raise ValueError(
            f"rollout {member.rollout.rollout_id}: its score or a reference log-prob is not finite; unscorable "
            "rollouts are to be retired, not trained"
        )
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
