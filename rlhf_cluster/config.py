"""The whole configuration: frozen pydantic models, one section a component, unknown keys refused at every level.

Importing this file loads no torch, ray, vllm, transformers or deepspeed. ``config_io.load_config`` reads YAML and
dotted overrides into a ``Config``; every field's description says its unit and what it changes, and
``docs/config.md`` is generated from them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
UnitInterval = Annotated[float, Field(ge=0, le=1)]
PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]


class Section(BaseModel):
    """Base of every section: frozen, extras forbidden, defaults validated."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, protected_namespaces=())


def _changed(section: Section, *names: str) -> str:
    """Those of the fields that differ from their default, as `a, b`; a default says nothing and may stay."""
    fields = type(section).model_fields
    return ", ".join(name for name in names if getattr(section, name) != fields[name].default)


class RunConfig(Section):
    name: str = Field(min_length=1, description="Name of the run; its folder is dir/name.")
    dir: str = Field("runs", min_length=1, description="Folder that holds run folders.")
    seed: NonNegativeInt = Field(0, description="Every other seed (workers, samples, shuffling) is derived from it.")
    steps: PositiveInt = Field(description="Learner steps (policy versions) to train.")
    stop_grace_s: Positive = Field(
        60.0,
        description="Seconds after SIGTERM or SIGINT for the learner step in progress to end and be saved; then the "
        "run ends with the newest checkpoint it has.",
    )


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
    attempts: PositiveInt = Field(
        3, description="Calls of one group in all when scorers die under it; then it is unscorable and counted."
    )
    retry_backoff_s: NonNegative = Field(0.5, description="Seconds before a call is repeated; doubles each time.")
    max_in_flight: PositiveInt = Field(16, description="Calls one scorer holds at once; further ones wait.")


class SupervisionConfig(Section):
    heartbeat_s: Positive = Field(
        5.0, description="Seconds between two pings of a rollout worker or scorer, and the deadline of one."
    )
    heartbeat_misses: PositiveInt = Field(3, description="Pings in a row without an answer that mean it is dead.")
    restarts: NonNegativeInt = Field(
        5, description="Deaths of one worker or scorer within window_s that are answered by a restart."
    )
    window_s: Positive = Field(900.0, description="Seconds served over which deaths are counted.")
    backoff_s: NonNegative = Field(1.0, description="Seconds before a restart; doubles with each death in the window.")
    backoff_max_s: NonNegative = Field(60.0, description="Longest wait in seconds before a restart.")
    jitter: UnitInterval = Field(0.25, description="Share by which a wait is longer or shorter at random.")

    @model_validator(mode="after")
    def _longest_wait_is_not_below_the_first(self) -> SupervisionConfig:
        if self.backoff_max_s < self.backoff_s:
            raise ValueError(
                f"backoff_max_s {self.backoff_max_s:g} must not be below backoff_s {self.backoff_s:g}, the first wait"
            )
        return self


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
    normalize: Literal["running", "scale", "none"] = Field(
        "running",
        description="running: z-score by running statistics; scale: divided by the running std alone; none: as it is.",
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
            idle = _changed(self, "place", "estimator", "controller")
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
            idle = _changed(self, "gamma", "lam", "bootstrap_truncated", "value_clip")
            if idle:
                raise ValueError(
                    f"{idle} does nothing with name: {self.name}, which has no critic; remove it or set name: ppo"
                )
        if self.proximal != "recomputed" and self.importance in ("token", "sequence"):
            raise ValueError(
                f"importance: {self.importance} goes with proximal: recomputed, which it corrects; with proximal: "
                f"{self.proximal} remove it"
            )
        if self.importance_kind == "none" and _changed(self, "importance_cap"):
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


class PublishConfig(Section):
    backend: Literal["shared_memory", "nccl"] = Field(
        "shared_memory", description="How weights reach the engines; nccl needs GPUs."
    )
    kv_cache: Literal["recompute", "keep"] = Field(
        "keep",
        description="What an update does to the KV cache of unfinished answers. keep: they go on over it, at most "
        "queue.max_staleness versions old like their tokens; recompute: it is computed again under the new weights, "
        "which on a CPU stops generation for a prefill of all that runs. Requests that begin after an update never see "
        "an older cache.",
    )
    timeout_s: Positive = Field(
        300.0, description="Seconds a worker may take to apply an update before it is ended and started again."
    )
    verify_every: PositiveInt = Field(
        10,
        description="Publications from one verification of everything an engine computes with (packed and tied copies "
        "to the bit, and the log-prob probe) to the next. The first of a worker, and the one after a failed update, is "
        "verified in any case; the bytes of a snapshot are checked every time.",
    )
    probe_tolerance_nats: Positive | None = Field(
        None,
        description="Mean |engine - learner| over the log-prob probe above which a worker is fenced, nats a token; "
        "null: 0.01 in float32, 0.25 in bfloat16.",
    )


class CheckpointConfig(Section):
    every_steps: PositiveInt = Field(
        50, description="Learner steps between checkpoints; the last step is always saved."
    )
    keep_last: PositiveInt = Field(
        2,
        description="Checkpoints kept; older ones are deleted after the new one is complete. One with a file PINNED in "
        "its folder stays.",
    )
    best_metric: str | None = Field(
        None, description="Name in metrics.jsonl whose best checkpoint is kept beside the newest; null: none."
    )
    best_is: Literal["highest", "lowest"] = Field("highest", description="Which value of best_metric is the best.")
    save_timeout_s: Positive = Field(
        600.0, description="Seconds a save, and the end of the run, wait for the save before it."
    )

    @model_validator(mode="after")
    def _best_needs_a_metric(self) -> CheckpointConfig:
        if self.best_metric is None and _changed(self, "best_is"):
            raise ValueError("best_is does nothing without best_metric; name a metric or remove it")
        return self


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
    max_learner_restarts: NonNegativeInt = Field(
        3, description="Times the learner group is rebuilt from the newest checkpoint after a rank died or hung."
    )
    max_attempts: PositiveInt = Field(5, description="Times one prompt is issued in an epoch before the run ends.")
    no_progress_s: Positive = Field(
        3600.0,
        description="Seconds without any event of the run after which it ends, with who waits for whom and stacks.",
    )
    mismatch_alarm: Positive = Field(
        0.1,
        description="Mean |engine - learner| log-prob in nats, on tokens of the version in training, above which every "
        "step logs a warning.",
    )
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
        idle = [f"learner.{name}" for name in critic_fields if _changed(learner, name)]
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


def checkpoint_layout(model: ModelConfig, algorithm: AlgorithmConfig, learner: LearnerConfig) -> dict[str, Any]:
    """What the tensors of a checkpoint are cut for, by the key that decides it; a resume needs the same."""
    return {
        "learner.ranks": learner.ranks,
        "learner.zero_stage": learner.zero_stage,
        "model.dtype": model.dtype,
        "a critic (algorithm.name: ppo)": algorithm.uses_critic,
        "learner.lora": None if learner.lora is None else learner.lora.model_dump(mode="json"),
    }


def saved_layout(state: Mapping[str, Any]) -> dict[str, Any]:
    """``checkpoint_layout`` of the learner state of a checkpoint; those of before adapters do not name them."""
    return {"learner.lora": None, **state["layout"]}


def config_warnings(config: Config) -> list[str]:
    """What is allowed but probably not meant, for the run's first log lines."""
    warnings = []
    algorithm = config.algorithm
    if algorithm.proximal == "recomputed" and config.learner.updates_a_batch == 1:
        warnings.append(
            "one optimizer step a batch (learner.epochs 1, learner.minibatches 1): every ratio is 1, so "
            "algorithm.clip_low, clip_high and dual_clip never act; raise learner.minibatches to use them"
        )
    if algorithm.reduction == "sequence_mean":
        warnings.append(
            "algorithm.reduction: sequence_mean weighs a token of a long answer less: long wrong answers are punished "
            "less (length bias, docs/numerics.md)"
        )
    return warnings
