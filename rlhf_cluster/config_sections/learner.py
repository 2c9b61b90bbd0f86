"""The learner: its ranks, its schedule, and which weights it trains."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from rlhf_cluster.config_sections.base import NonNegativeInt, Positive, PositiveInt, Section, UnitInterval


class LoraConfig(Section):
    rank: PositiveInt = Field(16, description="Rank of an adapter.")
    alpha: Positive = Field(32.0, description="What an adapter adds is scaled by alpha / rank.")
    target_modules: tuple[str, ...] | None = Field(
        None,
        min_length=1,
        description="Names of the linear layers that get one, as q_proj; null: every linear layer of the decoder.",
    )


Decay = Literal["constant", "cosine", "linear"]


class LearnerConfig(Section):
    ranks: PositiveInt = Field(1, description="Data-parallel learner processes.")
    zero_stage: Literal[0, 1, 2, 3] = Field(1, description="DeepSpeed ZeRO stage of policy and critic.")
    epochs: PositiveInt = Field(1, description="Passes over a batch.")
    minibatches: PositiveInt = Field(1, description="Optimizer steps a pass.")
    micro_batch_tokens: PositiveInt = Field(
        4096, description="Most tokens (padding included) in one forward and backward."
    )
    packing: bool = Field(
        True,
        description="Lay the samples of a micro-batch end to end instead of padding them, where the model allows it.",
    )
    policy_lr: Positive = Field(5e-7, description="Peak learning rate of the policy.")
    critic_lr: Positive = Field(1.65e-6, description="Peak learning rate of the critic (ppo).")
    warmup_fraction: UnitInterval = Field(
        0.1, description="Share of all optimizer steps over which the rates rise linearly."
    )
    policy_decay: Decay = Field("constant", description="The policy's rate after its warm-up.")
    critic_decay: Decay = Field("constant", description="The critic's rate after its warm-up (ppo).")
    final_lr_fraction: UnitInterval = Field(0.0, description="Share of its peak at which a decaying rate ends.")
    grad_clip: Positive | None = Field(1.0, description="Global gradient norm limit; null: off.")
    target_kl: Positive | None = Field(
        None,
        description="Nats a token (k3, proximal to current) beyond which the policy takes no further step on a batch; "
        "null: off.",
    )
    critic_pretrain_steps: NonNegativeInt = Field(
        0,
        description="Most critic optimizer steps on the first batch before the policy takes its first step; the batch "
        "is then trained as any other (ppo).",
    )
    critic_pretrain_loss: Positive | None = Field(
        None, description="Mean value loss of a pass at which critic pre-training ends early; null: steps alone (ppo)."
    )
    critic_layers: PositiveInt | None = Field(
        None,
        description="Top layers of the critic that are trained, the rest stays as loaded; null: the whole critic "
        "(ppo).",
    )
    lora: LoraConfig | None = Field(
        None,
        description="Train low-rank adapters on the policy's linear layers instead of its weights (raise policy_lr "
        "about tenfold); engines and checkpoints get the sum of both. Null: train every weight. The critic is not "
        "affected.",
    )
    gradient_checkpointing: bool = Field(
        False, description="Recompute activations in backward: less memory, more time."
    )
    cpu_threads: PositiveInt = Field(1, description="OpenMP threads of a rank (cpu only).")
    timeout_s: Positive = Field(1800.0, description="Seconds a learner call (step, save, snapshot) may take.")
    stall_timeout_s: Positive = Field(
        300.0, description="Seconds without a micro-batch on any rank, while a batch is trained, that mean it hangs."
    )

    @property
    def updates_a_batch(self) -> int:
        """Optimizer steps of the policy on one batch."""
        return self.epochs * self.minibatches

    @model_validator(mode="after")
    def _options_have_an_effect(self) -> LearnerConfig:
        if self.target_kl is not None and self.updates_a_batch == 1:
            raise ValueError(
                "target_kl does nothing with one optimizer step a batch (epochs 1, minibatches 1): there is no further "
                "step to leave out; remove it or raise learner.epochs or learner.minibatches"
            )
        if self.critic_pretrain_loss is not None and self.critic_pretrain_steps == 0:
            raise ValueError("critic_pretrain_loss does nothing with critic_pretrain_steps: 0; set how many at most")
        if self.final_lr_fraction and self.policy_decay == self.critic_decay == "constant":
            raise ValueError(
                "final_lr_fraction does nothing while policy_decay and critic_decay are constant; choose cosine or "
                "linear, or remove it"
            )
        return self
