"""Statistics of a batch and of its update, as sums over counts. KL metrics in nats a token, named by estimator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from learner.batch_tensors import BatchTensors
from rlhf_cluster.algorithms.kl import kl_estimate
from rlhf_cluster.algorithms.losses import explained_variance, explained_variance_sums
from rlhf_cluster.metrics.names import EXCLUSION_KINDS, MISMATCH_BOUNDS, RATIO_QUANTILES
from rlhf_cluster.types import Ratio


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


def batch_metrics(
    tensors: BatchTensors, logprobs: Tensor, entropies: Tensor, scores: Tensor, *, max_staleness: int
) -> dict[str, Ratio]:
    """Of a batch before its step. ``logprobs`` (R, T) are the learner's before the step: ``kl_reference_*`` is
    KL(learner, reference), ``kl_behaviour`` the mean |behaviour - learner|, over all tokens and by lag."""
    mask = tensors.mask
    gap = tensors.behaviour - logprobs
    rows = len(tensors.pairs)
    metrics = {
        "kl_reference_k1": masked_ratio(kl_estimate(logprobs, tensors.reference, "k1"), mask),
        "kl_reference_k3": masked_ratio(kl_estimate(logprobs, tensors.reference, "k3"), mask),
        "kl_behaviour": masked_ratio(gap.abs(), mask),
        "kl_behaviour_signed": masked_ratio(gap, mask),
        "nll": masked_ratio(-logprobs, mask),
        "entropy": masked_ratio(entropies, mask),
        "score_mean": Ratio(float(tensors.scores.double().sum()), rows),
        "normalised_score_mean": Ratio(float(scores.double().sum()), rows),
        "response_length": Ratio(tensors.n_tokens, rows),
        "truncated_fraction": Ratio(int(tensors.truncated.sum()), rows),
        "empty_fraction": Ratio(tensors.n_empty, tensors.n_empty + rows),
    }
    for bound in MISMATCH_BOUNDS:
        metrics[f"kl_behaviour_above_{bound:g}"] = masked_ratio((gap.abs() > bound).float(), mask)
    for lag in range(max_staleness + 1):
        metrics[f"kl_behaviour_lag{lag}"] = masked_ratio(gap.abs(), mask & (tensors.lags == lag))
    return metrics


def exclusion_metrics(tensors: BatchTensors) -> dict[str, Ratio]:
    """Rollouts left out of the batch, by kind; every kind is there, at 0 when there was none."""
    return {f"excluded_{kind}": Ratio(float(tensors.excluded.get(kind, 0)), 1.0) for kind in EXCLUSION_KINDS}


def advantage_metrics(raw: Tensor, mask: Tensor) -> dict[str, Ratio]:
    """Of advantages (R, T) before whitening and clipping."""
    return {
        "advantage_mean": masked_ratio(raw, mask),
        "advantage_std": Ratio(float(raw[mask].double().std(correction=0)), 1.0),
    }


def return_metrics(values: Tensor, returns: Tensor, mask: Tensor) -> dict[str, Ratio]:
    """How well the critic's values (R, T) knew the returns (R, T) before its step."""
    fit = explained_variance(explained_variance_sums(values, returns, mask))
    return {
        "return_mean": masked_ratio(returns, mask),
        "explained_variance": Ratio(fit, 1.0) if fit == fit else Ratio(0.0, 0.0),
    }


def ratio_metrics(logprobs: Tensor, proximal: Tensor, mask: Tensor) -> dict[str, Ratio]:
    """Quantiles of exp(current - proximal) over the tokens of ``mask``, those of the rows that were trained."""
    log_ratios = (logprobs - proximal)[mask].double()
    if not log_ratios.numel():
        return {name: Ratio(0.0, 0.0) for name in RATIO_QUANTILES.values()}
    points = torch.tensor([float(quantile) for quantile in RATIO_QUANTILES], dtype=torch.float64)
    # ``torch.quantile`` refuses more than 16 million numbers; a sorted lookup does not.
    ordered = log_ratios.sort().values
    found = ordered[(points * (len(ordered) - 1)).round().long()].exp()
    return {name: Ratio(value, 1.0) for name, value in zip(RATIO_QUANTILES.values(), found.tolist(), strict=True)}


def masked_ratio(x: Tensor, mask: Tensor) -> Ratio:
    """Sum and count over masked-in tokens."""
    return Ratio(float(x[mask].double().sum()), int(mask.sum()))
