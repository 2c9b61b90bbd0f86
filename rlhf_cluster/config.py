"""The whole configuration: frozen pydantic models, one section a component, unknown keys refused at every level.

Importing this file loads no torch, ray, vllm, transformers or deepspeed. ``config_io.load_config`` reads YAML and
dotted overrides into a ``Config``; every field's description says its unit and what it changes, and
``docs/config.md`` is generated from them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
UnitInterval = Annotated[float, Field(ge=0, le=1)]
PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]


class Section(BaseModel):
    """Base of every section: frozen, extras forbidden, defaults validated."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, protected_namespaces=())


class RunConfig(Section):
    name: str = Field(min_length=1, description="Name of the run; its folder is dir/name.")
    dir: str = Field("runs", min_length=1, description="Folder that holds run folders.")
    seed: NonNegativeInt = Field(0, description="Every other seed (workers, samples, shuffling) is derived from it.")
    steps: PositiveInt = Field(description="Learner steps (policy versions) to train.")


class ModelConfig(Section):
    policy: str = Field(description="Hugging Face folder of the policy (the SFT model).")
    reference: str | None = Field(None, description="Folder of the frozen reference; the policy folder when null.")
    reward: str | None = Field(
        None, description="Folder of the reward model (sequence classification, one label); null: no model reward."
    )
    critic: str | None = Field(None, description="Folder the critic starts from; the reward model when null.")
    dtype: Literal["bfloat16", "float32"] = Field(
        "bfloat16", description="Compute dtype of every model; bfloat16 trains over float32 master weights."
    )
    attention: Literal["eager", "sdpa", "flash_attention_2"] = Field(
        "sdpa", description="Attention of learner and scorers; eager is faster to train on CPU."
    )
    trust_remote_code: bool = Field(False, description="Run code that ships inside a model folder.")

    @property
    def reference_path(self) -> str:
        return self.reference or self.policy


class DataConfig(Section):
    prompts: str = Field(description="JSONL of training prompts.")
    prompt_field: str = Field("prompt", min_length=1, description="Field of a row that holds the prompt.")
    eval_prompts: str | None = Field(None, description="JSONL of held-out prompts; null: no evaluation.")
    max_prompt_tokens: PositiveInt = Field(512, description="Longest prompt in tokens, chat template included.")
    too_long: Literal["error", "drop", "truncate_left"] = Field(
        "error",
        description="What happens to a longer prompt: refuse the file, drop the row, or cut its text on the left.",
    )


class EngineConfig(Section):
    tensor_parallel: PositiveInt = Field(1, description="GPUs an engine is spread over.")
    max_num_seqs: PositiveInt = Field(64, description="Sequences an engine decodes at once.")
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = Field(
        0.85, description="Share of a GPU's memory an engine may take (cuda only)."
    )
    cpu_kv_cache_gib: Positive = Field(1.0, description="KV cache of an engine in GiB (cpu only).")
    cpu_threads: PositiveInt = Field(1, description="OpenMP threads of an engine (cpu only).")
    enforce_eager: bool = Field(True, description="Start without compiling or capturing graphs.")
    prefix_caching: bool = Field(False, description="Share the KV cache of equal prompt beginnings.")


class RolloutConfig(Section):
    workers: PositiveInt = Field(1, description="vLLM engines, each in its own actor.")
    samples_per_prompt: PositiveInt = Field(1, description="Answers sampled for a prompt; they form one group.")
    max_new_tokens: PositiveInt = Field(256, description="Longest answer in tokens.")
    temperature: Positive = Field(1.0, description="Sampling temperature; learner and reference use the same.")
    timeout_s: Positive = Field(600.0, description="Seconds a group may take on a worker before the worker is failed.")
    engine: EngineConfig = EngineConfig()


class QueueConfig(Section):
    groups_per_batch: PositiveInt = Field(description="Groups (prompts) a learner step trains.")
    max_staleness: NonNegativeInt = Field(
        1, description="Hard bound on versions between sampling and training; 0: synchronous."
    )
    group_deadline_s: Positive = Field(
        900.0, description="Seconds from admission to a scored group before it is re-issued."
    )


class ScorerConfig(Section):
    reward_replicas: PositiveInt = Field(1, description="Reward scorer actors.")
    reference_replicas: PositiveInt = Field(1, description="Reference scorer actors.")
    batch_window_ms: NonNegative = Field(5.0, description="Milliseconds a scorer waits for more work to batch.")
    batch_tokens: PositiveInt = Field(8192, description="Most tokens (padding included) in one scorer forward.")
    max_tokens: PositiveInt = Field(
        2048, description="Longest conversation the reward model accepts; longer ones are unscorable and counted."
    )
    cpu_threads: PositiveInt = Field(1, description="OpenMP threads of a scorer (cpu only).")
    timeout_s: Positive = Field(300.0, description="Seconds a scoring call may take.")


class RewardComponent(Section):
    name: str = Field(min_length=1, pattern=r"^[a-z][a-z0-9_]*$", description="Name in metrics and records.")
    kind: Literal["model", "length", "repetition", "function"] = Field(
        description="model: the reward model; length: answer tokens / max_new_tokens; repetition: repeated 3-gram "
        "share; function: what `function` names."
    )
    weight: Annotated[float, Field(allow_inf_nan=False)] = Field(
        1.0, description="Factor in the score; 0 keeps the component as a metric only."
    )
    function: str | None = Field(
        None, description="`module:name` of a function (prompt, answer, finish_reason) -> float."
    )

    @model_validator(mode="after")
    def _function_goes_with_kind(self) -> RewardComponent:
        if (self.kind == "function") != (self.function is not None):
            raise ValueError(
                f"component {self.name!r}: `function: module:name` goes with kind: function and with no other kind"
            )
        if self.function is not None and self.function.count(":") != 1:
            raise ValueError(f"component {self.name!r}: function is `module:name`, got {self.function!r}")
        return self


class RewardConfig(Section):
    components: tuple[RewardComponent, ...] = Field(min_length=1, description="Named parts of the score; weighted sum.")
    normalize: Literal["running", "none"] = Field(
        "running", description="z-score by running statistics, or leave the score."
    )
    clip: Positive | None = Field(
        5.0, description="Scores are clipped to [-clip, clip] after normalisation; null: off."
    )

    @model_validator(mode="after")
    def _names_and_weights(self) -> RewardConfig:
        names = [component.name for component in self.components]
        doubled = sorted({name for name in names if names.count(name) > 1})
        if doubled:
            raise ValueError(f"component names must differ; {doubled} appear more than once")
        if sum(component.kind == "model" for component in self.components) > 1:
            raise ValueError("there is one reward model, so at most one component of kind: model")
        if all(component.weight == 0 for component in self.components):
            raise ValueError("every component has weight 0, so the score would always be 0; give one a weight")
        return self


class KLConfig(Section):
    place: Literal["reward"] = Field("reward", description="The penalty is taken from the reward, token by token.")
    estimator: Literal["k1", "k2", "k3"] = Field("k1", description="Per-token estimator of KL(policy || reference).")
    coef: NonNegative = Field(0.05, description="Penalty in reward units a nat (the start value when adaptive).")
    controller: Literal["fixed", "adaptive"] = Field("fixed", description="Whether coef follows target.")
    target: Positive | None = Field(None, description="Nats a token the adaptive controller steers to.")
    horizon: Positive | None = Field(None, description="Samples over which the adaptive controller moves coef.")

    @model_validator(mode="after")
    def _adaptive_needs_target(self) -> KLConfig:
        given = self.target is not None, self.horizon is not None
        if self.controller == "adaptive" and not all(given):
            raise ValueError("controller: adaptive needs both target (nats a token) and horizon (samples)")
        if self.controller == "fixed" and any(given):
            raise ValueError(
                "target and horizon do nothing with controller: fixed; remove them or set controller: adaptive"
            )
        return self


class AlgorithmConfig(Section):
    name: Literal["ppo"] = Field("ppo", description="Policy optimisation method.")
    gamma: UnitInterval = Field(1.0, description="Discount a token.")
    lam: UnitInterval = Field(0.95, description="GAE lambda.")
    clip_low: Annotated[float, Field(gt=0, lt=1)] = Field(0.2, description="Ratios are clipped from 1 - clip_low.")
    clip_high: Positive = Field(0.2, description="Ratios are clipped to 1 + clip_high.")
    importance_cap: Annotated[float, Field(ge=1, allow_inf_nan=False)] = Field(
        2.0, description="Upper bound of the importance weight exp(proximal - behaviour)."
    )
    kl: KLConfig = KLConfig()
    value_clip: Positive | None = Field(
        0.2, description="Values move at most this far from the old ones in the loss; null: off."
    )
    advantage_norm: bool = Field(True, description="Whiten advantages over the batch.")
    advantage_clip: Positive | None = Field(None, description="Clip advantages to [-x, x] after whitening; null: off.")


class LearnerConfig(Section):
    ranks: PositiveInt = Field(1, description="Data-parallel learner processes.")
    zero_stage: Literal[0, 1, 2, 3] = Field(1, description="DeepSpeed ZeRO stage of policy and critic.")
    epochs: PositiveInt = Field(1, description="Passes over a batch.")
    minibatches: PositiveInt = Field(1, description="Optimizer steps a pass.")
    micro_batch_tokens: PositiveInt = Field(
        4096, description="Most tokens (padding included) in one forward and backward."
    )
    policy_lr: Positive = Field(5e-7, description="Peak learning rate of the policy.")
    critic_lr: Positive = Field(1.65e-6, description="Peak learning rate of the critic.")
    warmup_fraction: UnitInterval = Field(
        0.1, description="Share of all optimizer steps over which the rates rise linearly."
    )
    grad_clip: Positive | None = Field(1.0, description="Global gradient norm limit; null: off.")
    critic_pretrain_steps: NonNegativeInt = Field(
        0, description="Critic optimizer steps on the first batch before the policy takes its first step."
    )
    critic_layers: PositiveInt | None = Field(
        None, description="Top layers of the critic that are trained, the rest stays as loaded; null: the whole critic."
    )
    gradient_checkpointing: bool = Field(
        False, description="Recompute activations in backward: less memory, more time."
    )
    cpu_threads: PositiveInt = Field(1, description="OpenMP threads of a rank (cpu only).")
    timeout_s: Positive = Field(1800.0, description="Seconds a learner call (step, save, snapshot) may take.")


class PublishConfig(Section):
    backend: Literal["shared_memory", "nccl"] = Field(
        "shared_memory", description="How weights reach the engines; nccl needs GPUs."
    )
    kv_cache: Literal["recompute", "keep"] = Field(
        "recompute", description="Whether unfinished requests recompute their KV cache under the new weights."
    )
    timeout_s: Positive = Field(300.0, description="Seconds an engine may take to apply an update before it is fenced.")


class CheckpointConfig(Section):
    every_steps: PositiveInt = Field(
        50, description="Learner steps between checkpoints; the last step is always saved."
    )
    keep_last: PositiveInt = Field(
        2, description="Checkpoints kept; older ones are deleted after the new one is complete."
    )


class EvaluationConfig(Section):
    samples_per_prompt: PositiveInt = Field(1, description="Answers a held-out prompt, before and after training.")


class PrometheusConfig(Section):
    host: str = Field("127.0.0.1", min_length=1, description="Address the exporter binds to.")
    port: Annotated[int, Field(ge=0, le=65535)] = Field(9464, description="Port of the exporter; 0 picks a free one.")


class MetricsConfig(Section):
    prometheus: PrometheusConfig | None = Field(PrometheusConfig(), description="Exporter; null: off.")
    tensorboard: bool = Field(False, description="Also write TensorBoard event files into the run folder.")
    samples_per_step: NonNegativeInt = Field(
        0, description="Answers a step written in clear to samples.jsonl (owner-only file)."
    )


class GuardrailConfig(Section):
    max_skipped_steps: PositiveInt = Field(
        5, description="Learner steps in a row with non-finite gradients before the run ends."
    )
    max_unscorable_fraction: UnitInterval = Field(
        0.1, description="Share of unscorable rollouts over a batch's worth that ends the run."
    )
    max_attempts: PositiveInt = Field(5, description="Times one prompt is issued in an epoch before the run ends.")
    self_check_tolerance: Positive | None = Field(
        None, description="Mean |engine - learner| log-prob in nats allowed at start-up; by dtype when null."
    )


class ClusterConfig(Section):
    address: str | None = Field(None, description="Ray cluster to join (`auto` or host:port); null: start Ray here.")
    device: Literal["cpu", "cuda"] = Field("cpu", description="Where engines, scorers and learner ranks run.")
    start_timeout_s: Positive = Field(600.0, description="Seconds every actor has to come up.")


class Config(Section):
    """The root. ``Config.model_validate`` checks each section, then what only shows across sections."""

    run: RunConfig
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    queue: QueueConfig
    scorers: ScorerConfig = ScorerConfig()
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
        if self.model.reward is not None and not has_model_component and self.model.critic is not None:
            yield "model.reward is used by nothing: add a component of kind: model, or remove model.reward"
        if self.model.reward is None and self.model.critic is None:
            yield "the critic has nothing to start from: set model.critic or model.reward"
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
        if self.rollout.timeout_s >= self.queue.group_deadline_s:
            yield (
                f"rollout.timeout_s {self.rollout.timeout_s:g} must be below queue.group_deadline_s "
                f"{self.queue.group_deadline_s:g}: a worker that hangs is ended by its own deadline, before its groups "
                "are issued again"
            )
        if self.evaluation is not None and self.data.eval_prompts is None:
            yield "evaluation does nothing without data.eval_prompts; name the file or remove the section"
        if self.data.eval_prompts is not None and self.evaluation is None:
            yield "data.eval_prompts does nothing without the section evaluation; add it or remove the file"

    @property
    def max_model_len(self) -> int:
        """Longest sequence in tokens an engine must hold."""
        return self.data.max_prompt_tokens + self.rollout.max_new_tokens


def derived_table(config: Config) -> Mapping[str, int]:
    """What the configuration comes to, for ``--dry-run`` and the run's first log lines.

    ``micro_batches_a_rank`` is the upper bound a minibatch reaches when every sample has the longest length.
    """
    samples = config.queue.groups_per_batch * config.rollout.samples_per_prompt
    rows_per_micro_batch = max(1, config.learner.micro_batch_tokens // config.max_model_len)
    rows_per_rank = math.ceil(samples / config.learner.minibatches / config.learner.ranks)
    steps_a_batch = config.learner.epochs * config.learner.minibatches
    return {
        "groups_a_batch": config.queue.groups_per_batch,
        "samples_a_batch": samples,
        "minibatches": config.learner.minibatches,
        "samples_a_minibatch": math.ceil(samples / config.learner.minibatches),
        "micro_batches_a_rank": math.ceil(rows_per_rank / rows_per_micro_batch),
        "optimizer_steps_a_batch": steps_a_batch,
        "optimizer_steps": steps_a_batch * config.run.steps,
        "outstanding_groups_bound": (config.queue.max_staleness + 1) * config.queue.groups_per_batch,
        "longest_sequence_tokens": config.max_model_len,
    }
