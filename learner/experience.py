"""From scores, log-probs and values to rewards and advantages. No model here. R rollouts, T tokens of the longest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from learner.batch_tensors import BatchTensors
from rlhf_cluster.algorithms.advantages import gae, group_advantages, whiten
from rlhf_cluster.algorithms.reductions import token_weights
from rlhf_cluster.algorithms.rewards import RunningMoments, normalize_scores, scale_scores, token_rewards
from rlhf_cluster.config import AlgorithmConfig, RewardConfig


@dataclass(frozen=True, slots=True)
class Experience:
    """What the losses of one row set need, each (R, T) float32 but the mask (bool).

    ``returns`` and ``old_values`` are zeros without a critic; ``proximal`` is None when the training forward itself
    gives it; ``weights`` are those of the minibatch in training (``weighted``).
    """

    mask: Tensor
    behaviour: Tensor
    reference: Tensor
    advantages: Tensor
    returns: Tensor
    old_values: Tensor
    proximal: Tensor | None = None
    weights: Tensor | None = None

    def weighted(self, rows: Sequence[int], algorithm: AlgorithmConfig, max_new_tokens: int) -> Experience:
        """With what each token of the minibatch ``rows`` weighs in the policy loss, whatever rank it is on."""
        constant = None
        if algorithm.reduction == "constant":
            constant = float(algorithm.reduction_constant or max_new_tokens)
        weights = torch.zeros(self.mask.shape)
        weights[list(rows)] = token_weights(self.mask[list(rows)], algorithm.reduction, constant=constant)
        return replace(self, weights=weights)

    def take(self, rows: Sequence[int], width: int, device: torch.device) -> Experience:
        """The given rows cut to ``width`` tokens; without rows one row under mask 0 (the filler of ``collate``)."""
        parts = {}
        for item in fields(self):
            whole: Tensor | None = getattr(self, item.name)
            if whole is not None:
                part = whole[list(rows), :width] if rows else whole.new_zeros((1, width))
                parts[item.name] = part.to(device)
        return Experience(**parts)


def normalised_scores(tensors: BatchTensors, moments: RunningMoments, config: RewardConfig) -> Tensor:
    """(R,) scores as rewards: the batch enters ``moments`` first, so the very first batch has statistics too."""
    if config.normalize == "none":
        return tensors.scores if config.clip is None else tensors.scores.clamp(-config.clip, config.clip)
    moments.update(tensors.scores)
    change = normalize_scores if config.normalize == "running" else scale_scores
    return change(tensors.scores, moments, config.clip)


def token_advantages(
    tensors: BatchTensors,
    rewards: Tensor,
    values: Tensor,
    after_last: Tensor,
    *,
    algorithm: AlgorithmConfig,
) -> tuple[Tensor, Tensor]:
    """GAE: ((R, T) advantages, (R, T) returns) from the critic's ``values`` before the first step.

    ``after_last`` (R,) is the value after the last token. A truncated answer goes on there, so its return is
    bootstrapped from it (unless ``algorithm.bootstrap_truncated`` is off); an ended one is worth nothing more.
    """
    goes_on = tensors.truncated & algorithm.bootstrap_truncated
    bootstrap = torch.where(goes_on, after_last, torch.zeros_like(after_last))
    return gae(rewards, values, tensors.mask, gamma=algorithm.gamma, lam=algorithm.lam, bootstrap=bootstrap)


def answer_advantages(tensors: BatchTensors, scores: Tensor, penalty: Tensor, *, algorithm: AlgorithmConfig) -> Tensor:
    """(R, T) group advantages, one number an answer: scores (R,) less the (R, T) KL penalty summed over the answer.

    A rollout without tokens is a member that cannot be scored: it has no row, and the others of its group are compared
    among themselves.
    """
    if algorithm.name == "ppo":
        raise ValueError("ppo takes its advantages from a critic")
    rewards = scores - torch.where(tensors.mask, penalty, 0.0).sum(-1)
    everyone = torch.cat([rewards, torch.full((tensors.n_empty,), torch.nan)])
    by_answer = group_advantages(everyone, [*tensors.groups, *tensors.empty_groups], algorithm.name)[: len(rewards)]
    return torch.where(tensors.mask, by_answer[:, None], 0.0)


def finish_advantages(advantages: Tensor, mask: Tensor, *, algorithm: AlgorithmConfig) -> Tensor:
    """Whitened over the tokens of the batch, then clipped, each if switched on."""
    if algorithm.whitens:
        advantages = whiten(advantages, mask)
    if algorithm.advantage_clip is not None:
        advantages = advantages.clamp(-algorithm.advantage_clip, algorithm.advantage_clip)
    return advantages


def monte_carlo_returns(tensors: BatchTensors, rewards: Tensor, *, gamma: float) -> Tensor:
    """(R, T) discounted reward sums: targets for a critic whose own values mean nothing yet."""
    _, returns = gae(rewards, torch.zeros_like(rewards), tensors.mask, gamma=gamma, lam=1.0)
    return returns


def rewards_of(tensors: BatchTensors, scores: Tensor, kl: Tensor, kl_coef: float) -> Tensor:
    """(R, T): the score on the last token minus ``kl_coef`` times the KL (R, T) of every token."""
    return token_rewards(scores, kl, tensors.mask, kl_coef)
