"""The algorithm: advantages, losses, and the penalty that keeps the policy near its reference."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from rlhf_cluster.config_sections.base import NonNegative, Positive, PositiveInt, Section, UnitInterval, changed


class KLConfig(Section):
    place: Literal["reward", "loss"] = Field(
        "reward",
        description="reward: the penalty is taken from the reward; loss: it is a term of the policy loss. Never both.",
    )
    estimator: Literal["k1", "k2", "k3", "full"] = Field(
        "k1",
        description="Estimator of KL(policy || reference) a token: k1, k2, k3 from the sampled token, full over the "
        "whole vocabulary (the learner then holds a copy of the reference).",
    )
    coef: NonNegative = Field(
        0.05, description="Penalty in reward units a nat (the start value when adaptive); 0: no penalty."
    )
    controller: Literal["fixed", "adaptive"] = Field("fixed", description="Whether coef follows target.")
    target: Positive | None = Field(None, description="Nats a token (k1) the adaptive controller steers to.")
    horizon: Positive | None = Field(None, description="Samples over which the adaptive controller moves coef.")

    @field_validator("place", mode="before")
    @classmethod
    def _one_place(cls, place: Any) -> Any:
        if place == "both" or isinstance(place, list | tuple | set):
            raise ValueError(
                "the KL penalty goes into the reward or into the loss, never into both (it would count twice); "
                "choose place: reward or place: loss"
            )
        return place

    @model_validator(mode="after")
    def _options_have_an_effect(self) -> KLConfig:
        if self.place == "loss" and self.estimator == "k1":
            raise ValueError(
                "estimator: k1 does nothing with place: loss, since its gradient is zero in expectation; use k2 (the "
                "gradient of KL(policy || reference)), full, k3 (that of the forward KL), or place: reward"
            )
        given = self.target is not None, self.horizon is not None
        if self.controller == "adaptive" and not all(given):
            raise ValueError("controller: adaptive needs both target (nats a token) and horizon (samples)")
        if self.controller == "fixed" and any(given):
            raise ValueError(
                "target and horizon do nothing with controller: fixed; remove them or set controller: adaptive"
            )
        if self.coef == 0:
            idle = changed(self, "place", "estimator", "controller")
            if idle:
                raise ValueError(f"{idle} does nothing with coef: 0; remove it or set a coef")
        return self


class EntropyConfig(Section):
    coef: NonNegative = Field(0.0, description="Bonus in the policy loss a nat of entropy; 0: none.")
    clip: Positive | None = Field(
        None, description="Nats a token above which more entropy earns no more bonus; null: no threshold."
    )

    @model_validator(mode="after")
    def _clip_needs_a_bonus(self) -> EntropyConfig:
        if self.clip is not None and self.coef == 0:
            raise ValueError("clip does nothing with coef: 0; set algorithm.entropy.coef or remove the clip")
        return self


class PtxConfig(Section):
    file: str = Field(min_length=1, description="Text file (UTF-8) of the language-model loss mixed in (PPO-ptx).")
    coef: Positive = Field(description="Weight of its mean negative log-likelihood a token in the policy loss.")
    block_tokens: Annotated[int, Field(ge=2)] = Field(256, description="Tokens of one block of text.")
    blocks_per_step: PositiveInt = Field(8, description="Blocks an optimizer step, over all ranks.")


GroupMethod = Literal["grpo", "dr_grpo", "rloo", "reinforce_baseline"]


class AlgorithmConfig(Section):
    name: Literal["ppo", "grpo", "dr_grpo", "rloo", "reinforce_baseline"] = Field(
        "ppo",
        description="Where advantages come from: ppo: a critic; the others: the samples of the same prompt, no critic.",
    )
    gamma: UnitInterval = Field(1.0, description="Discount a token (ppo).")
    lam: UnitInterval = Field(0.95, description="GAE lambda (ppo).")
    bootstrap_truncated: bool = Field(
        True, description="A truncated answer goes on after its last token and is worth the critic's value there (ppo)."
    )
    clip_low: Annotated[float, Field(gt=0, lt=1)] = Field(0.2, description="Ratios are clipped from 1 - clip_low.")
    clip_high: Positive = Field(0.2, description="Ratios are clipped to 1 + clip_high.")
    dual_clip: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = Field(
        None, description="With a negative advantage A the loss of a token is at most -dual_clip * A; null: off."
    )
    proximal: Literal["recomputed", "behaviour", "reference"] = Field(
        "recomputed",
        description="The policy that ratios are taken to: the learner's before the step, the engine's at sampling, or "
        "the reference.",
    )
    importance: Literal["token", "sequence", "none"] | None = Field(
        None,
        description="Correction for staleness and engine mismatch, exp(proximal - behaviour). token: truncated a "
        "token; sequence: of the whole answer, which is left out above the cap; null: token with proximal: recomputed, "
        "none otherwise.",
    )
    importance_cap: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = Field(
        2.0, description="Upper bound of the importance weight; null: unbounded."
    )
    kl: KLConfig = KLConfig()
    entropy: EntropyConfig = EntropyConfig()
    ptx: PtxConfig | None = Field(None, description="Language-model loss mixed into the policy loss; null: none.")
    value_clip: Positive | None = Field(
        0.2, description="Values move at most this far from the old ones in the loss; null: off (ppo)."
    )
    advantage_norm: bool | None = Field(
        None, description="Whiten advantages over the tokens of the batch; null: with ppo, not with the others."
    )
    advantage_clip: Positive | None = Field(None, description="Clip advantages to [-x, x] after whitening; null: off.")
    reduction: Literal["token_mean", "sequence_mean", "constant"] = Field(
        "token_mean", description="Over what the policy loss (KL and entropy terms included) is a mean."
    )
    reduction_constant: PositiveInt | None = Field(
        None, description="Tokens by which each answer's sum is divided; null: rollout.max_new_tokens (constant only)."
    )

    @property
    def uses_critic(self) -> bool:
        return self.name == "ppo"

    @property
    def whitens(self) -> bool:
        """``advantage_norm``, resolved."""
        return self.uses_critic if self.advantage_norm is None else self.advantage_norm

    @property
    def importance_kind(self) -> Literal["token", "sequence", "none"]:
        """``importance``, resolved."""
        if self.importance is not None:
            return self.importance
        return "token" if self.proximal == "recomputed" else "none"

    @property
    def needs_reference_model(self) -> bool:
        """Whether the learner itself has to run the reference."""
        return self.kl.estimator == "full"

    @model_validator(mode="after")
    def _options_have_an_effect(self) -> AlgorithmConfig:
        if not self.uses_critic:
            idle = changed(self, "gamma", "lam", "bootstrap_truncated", "value_clip")
            if idle:
                raise ValueError(
                    f"{idle} does nothing with name: {self.name}, which has no critic; remove it or set name: ppo"
                )
        if self.proximal != "recomputed" and self.importance in ("token", "sequence"):
            raise ValueError(
                f"importance: {self.importance} goes with proximal: recomputed, which it corrects; with proximal: "
                f"{self.proximal} remove it"
            )
        if self.importance_kind == "none" and changed(self, "importance_cap"):
            raise ValueError(
                f"importance_cap does nothing without importance weights (proximal: {self.proximal}, importance: "
                f"{self.importance}); remove it"
            )
        if self.importance_kind == "sequence" and self.importance_cap is None:
            raise ValueError("importance: sequence leaves answers out above importance_cap; give it a number")
        if self.reduction_constant is not None and self.reduction != "constant":
            raise ValueError(
                f"reduction_constant does nothing with reduction: {self.reduction}; remove it or set reduction: "
                "constant"
            )
        return self
