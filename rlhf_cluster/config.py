"""The whole configuration: frozen pydantic models, one section a component, unknown keys refused at every level.

Importing this file loads no torch, ray, vllm, transformers or deepspeed. Each section checks itself
(``config_sections``), ``Config`` what only shows across sections. ``config_io.load_config`` reads YAML and dotted
overrides into one; every field's description says its unit and what it changes, and ``docs/config.md`` is generated
from them.
"""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import model_validator

from rlhf_cluster.config_sections.algorithm import AlgorithmConfig, EntropyConfig, GroupMethod, KLConfig, PtxConfig
from rlhf_cluster.config_sections.base import Section, changed
from rlhf_cluster.config_sections.inputs import DataConfig, ModelConfig
from rlhf_cluster.config_sections.learner import Decay, LearnerConfig, LoraConfig
from rlhf_cluster.config_sections.rollout import EngineConfig, PublishConfig, QueueConfig, RolloutConfig
from rlhf_cluster.config_sections.run import (
    CheckpointConfig,
    ClusterConfig,
    EvaluationConfig,
    GuardrailConfig,
    MetricsConfig,
    PrometheusConfig,
    RunConfig,
    SupervisionConfig,
)
from rlhf_cluster.config_sections.scoring import RewardComponent, RewardConfig, ScorerConfig

__all__ = [
    "AlgorithmConfig",
    "CheckpointConfig",
    "ClusterConfig",
    "Config",
    "DataConfig",
    "Decay",
    "EngineConfig",
    "EntropyConfig",
    "EvaluationConfig",
    "GroupMethod",
    "GuardrailConfig",
    "KLConfig",
    "LearnerConfig",
    "LoraConfig",
    "MetricsConfig",
    "ModelConfig",
    "PrometheusConfig",
    "PtxConfig",
    "PublishConfig",
    "QueueConfig",
    "RewardComponent",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "ScorerConfig",
    "SupervisionConfig",
]


class Config(Section):
    """The root. ``Config.model_validate`` checks each section, then what only shows across sections."""

    run: RunConfig
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    queue: QueueConfig
    scorers: ScorerConfig = ScorerConfig()
    supervision: SupervisionConfig = SupervisionConfig()
    reward: RewardConfig
    algorithm: AlgorithmConfig = AlgorithmConfig()
    learner: LearnerConfig = LearnerConfig()
    publish: PublishConfig = PublishConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig | None = None
    metrics: MetricsConfig = MetricsConfig()
    guardrails: GuardrailConfig = GuardrailConfig()
    cluster: ClusterConfig = ClusterConfig()

    @model_validator(mode="after")
    def _sections_agree(self) -> Config:
        problems = list(self._disagreements())
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def _disagreements(self) -> Iterator[str]:
        has_model_component = any(component.kind == "model" for component in self.reward.components)
        if has_model_component and self.model.reward is None:
            yield ("reward.components has kind: model but model.reward is null; name the reward model's folder")
        starts_critic = self.algorithm.uses_critic and self.model.critic is None
        if self.model.reward is not None and not has_model_component and not starts_critic:
            yield "model.reward is used by nothing: add a component of kind: model, or remove model.reward"
        yield from self._method_disagreements()
        if self.publish.kv_cache == "keep" and self.rollout.engine.prefix_caching:
            yield (
                "publish.kv_cache: keep with rollout.engine.prefix_caching: true would answer new prompts from a cache "
                "of older weights; set publish.kv_cache: recompute or rollout.engine.prefix_caching: false"
            )
        if self.cluster.device == "cpu":
            if self.publish.backend == "nccl":
                yield "publish.backend: nccl needs cluster.device: cuda; use shared_memory on cpu"
            if self.rollout.engine.tensor_parallel > 1:
                yield "rollout.engine.tensor_parallel > 1 needs cluster.device: cuda; use more rollout.workers on cpu"
            if self.model.attention == "flash_attention_2":
                yield "model.attention: flash_attention_2 needs cluster.device: cuda; use eager or sdpa on cpu"
        samples = self.queue.groups_per_batch * self.rollout.samples_per_prompt
        if self.learner.minibatches > samples:
            yield (
                f"learner.minibatches {self.learner.minibatches} exceeds the {samples} samples of a batch "
                "(queue.groups_per_batch x rollout.samples_per_prompt)"
            )
        kl = self.algorithm.kl
        if kl.controller == "adaptive" and kl.horizon is not None and kl.horizon <= 0.2 * samples:
            yield (
                f"algorithm.kl.horizon {kl.horizon:g} must be above {0.2 * samples:g}, a fifth of the {samples} "
                "samples of a batch (queue.groups_per_batch x rollout.samples_per_prompt), or one update could take "
                "algorithm.kl.coef to 0"
            )
        if self.rollout.timeout_s >= self.queue.group_deadline_s:
            yield (
                f"rollout.timeout_s {self.rollout.timeout_s:g} must be below queue.group_deadline_s "
                f"{self.queue.group_deadline_s:g}: a worker that hangs is ended by its own deadline, before its groups "
                "are issued again"
            )
        if self.guardrails.no_progress_s <= self.learner.timeout_s:
            yield (
                f"guardrails.no_progress_s {self.guardrails.no_progress_s:g} must be above learner.timeout_s "
                f"{self.learner.timeout_s:g}, or a long learner step would be taken for a hang"
            )
        if self.evaluation is not None and self.data.eval_prompts is None:
            yield "evaluation does nothing without data.eval_prompts; name the file or remove the section"
        if self.data.eval_prompts is not None and self.evaluation is None:
            yield "data.eval_prompts does nothing without the section evaluation; add it or remove the file"

    def _method_disagreements(self) -> Iterator[str]:
        """What the method of ``algorithm.name`` lacks, and what it has no use for."""
        algorithm, learner = self.algorithm, self.learner
        if algorithm.uses_critic:
            if self.model.reward is None and self.model.critic is None:
                yield "the critic has nothing to start from: set model.critic or model.reward"
            return
        if self.rollout.samples_per_prompt < 2:
            yield (
                f"algorithm.name: {algorithm.name} compares the samples of a prompt, but rollout.samples_per_prompt is "
                f"{self.rollout.samples_per_prompt}; sample at least 2"
            )
        critic_fields = ("critic_lr", "critic_decay", "critic_pretrain_steps", "critic_pretrain_loss", "critic_layers")
        idle = [f"learner.{name}" for name in critic_fields if changed(learner, name)]
        if self.model.critic is not None:
            idle.append("model.critic")
        if idle:
            yield (
                f"{', '.join(idle)} does nothing with algorithm.name: {algorithm.name}, which has no critic; remove it"
            )
        charges_reward = algorithm.kl.place == "reward" and algorithm.kl.coef > 0
        divides_again = algorithm.name in ("grpo", "reinforce_baseline") and not charges_reward
        if self.reward.normalize == "scale" and self.reward.clip is None and divides_again:
            yield (
                f"reward.normalize: scale does nothing with algorithm.name: {algorithm.name} and reward.clip: null, "
                "which divides by the std itself; set normalize: none, or a clip"
            )
        if learner.final_lr_fraction and learner.policy_decay == "constant":
            yield "learner.final_lr_fraction does nothing with learner.policy_decay: constant; remove it"

    @property
    def max_model_len(self) -> int:
        """Longest sequence in tokens an engine must hold."""
        return self.data.max_prompt_tokens + self.rollout.max_new_tokens
