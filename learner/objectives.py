"""What a micro-batch adds to the loss of policy and critic: the formulas of ``algorithms`` over one forward pass."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from learner.engine import TrainEngine
from learner.experience import Experience
from learner.models import ModelInputs
from learner.reference import ReferenceModel
from rlhf_cluster.algorithms.kl import kl_estimate
from rlhf_cluster.algorithms.losses import TokenLoss, clipped_entropy, policy_loss, value_loss, weighted_sum
from rlhf_cluster.config import AlgorithmConfig
from rlhf_cluster.types import Ratio


@dataclass(frozen=True, slots=True)
class Contribution:
    """``loss``: what the micro-batch adds to the optimizer step, denominators applied.

    ``metrics`` are sums over counts; ``means`` are parts of numbers that are whole when those of all micro-batches are
    added. ``logprobs`` and ``entropies`` (B, T), of a policy's forward, are for whoever has no other pass to take them
    from.
    """

    loss: Tensor
    metrics: dict[str, Ratio]
    means: dict[str, float] = field(default_factory=dict)
    logprobs: Tensor | None = field(default=None, repr=False)
    entropies: Tensor | None = field(default=None, repr=False)


class PolicyObjective:
    """Clipped surrogate, KL term and entropy bonus, all under the same reduction.

    Args:
        measures_entropy: take the entropy from this forward, because no other pass measures it.
        reference: the frozen reference for ``kl.estimator: full`` in the loss, else None.
    """

    def __init__(
        self, config: AlgorithmConfig, *, measures_entropy: bool = False, reference: ReferenceModel | None = None
    ) -> None:
        self._config = config
        self._measures_entropy = measures_entropy
        self._reference = reference if config.kl.place == "loss" else None

    def __call__(self, engine: TrainEngine, inputs: ModelInputs, part: Experience, *, kl_coef: float) -> Contribution:
        """``part`` with weights. Without ``part.proximal`` this forward is the proximal one, and every ratio is 1."""
        config = self._config
        if part.weights is None:
            raise ValueError("the policy's objective needs the weights of its minibatch (Experience.weighted)")
        outputs = engine(
            inputs,
            with_entropy=self._measures_entropy or config.entropy.coef > 0,
            entropy_gradient=config.entropy.coef > 0,
            reference=self._reference.rows(inputs) if self._reference is not None else None,
        )
        recomputed = outputs.logprobs.detach() if part.proximal is None else part.proximal
        kind = config.importance_kind
        proximal = {"recomputed": recomputed, "behaviour": part.behaviour, "reference": part.reference}
        surrogate = policy_loss(
            outputs.logprobs,
            proximal[config.proximal],
            part.advantages,
            part.mask,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            dual_clip=config.dual_clip,
            behaviour_logprobs=None if kind == "none" else part.behaviour,
            importance="token" if kind == "none" else kind,
            importance_cap=None if kind == "none" else config.importance_cap,
            weights=part.weights,
        )
        loss = surrogate.total
        means = {"policy_loss": float(surrogate.total.detach())}
        if config.kl.place == "loss" and kl_coef > 0:
            estimator = config.kl.estimator
            kl = outputs.kl if estimator == "full" else kl_estimate(outputs.logprobs, part.reference, estimator)
            penalty = weighted_sum(kl, part.weights, part.mask)
            loss = loss + kl_coef * penalty
            means[f"kl_loss_{estimator}"] = float(penalty.detach())
        if config.entropy.coef > 0:
            bonus = weighted_sum(clipped_entropy(outputs.entropy, config.entropy.clip), part.weights, part.mask)
            loss = loss - config.entropy.coef * bonus
            means["entropy_bonus"] = float(bonus.detach())
        entropies = None if outputs.entropy is None else outputs.entropy.detach()
        return Contribution(loss, surrogate.metrics, means, outputs.logprobs.detach(), entropies)


def value_objective(
    engine: TrainEngine, inputs: ModelInputs, part: Experience, *, n_tokens: int, clip: float | None
) -> Contribution:
    """The critic's loss, a mean over the ``n_tokens`` of the minibatch."""
    values, _ = engine(inputs)
    loss: TokenLoss = value_loss(
        values, part.returns, part.mask, old_values=None if clip is None else part.old_values, clip=clip
    )
    return Contribution(loss.total / n_tokens, loss.metrics)


def text_objective(
    engine: TrainEngine, inputs: ModelInputs, *, filler: bool, coef: float, n_tokens: int
) -> Contribution:
    """PPO-ptx: ``coef`` times the negative log-likelihood at temperature 1, a mean over ``n_tokens``.

    ``filler``: the row is nobody's text, only there so that this rank takes part, and weighs nothing.
    """
    logprobs = engine(inputs, temperature=1.0).logprobs
    if filler:
        return Contribution(0.0 * logprobs.sum(), {"ptx_nll": Ratio(0.0, 0.0)})
    # Outside the response mask log-probs are exact zeros.
    nll = -logprobs.sum()
    return Contribution(
        coef * nll / n_tokens, {"ptx_nll": Ratio(float(nll.detach()), float(inputs.response_mask.sum()))}
    )
