"""The run itself: its name and length, where it runs, what it saves, evaluates and tells, and when it gives up."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rlhf_cluster.config_sections.base import (
    NonNegative,
    NonNegativeInt,
    Positive,
    PositiveInt,
    Section,
    UnitInterval,
    changed,
)


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


class ClusterConfig(Section):
    address: str | None = Field(None, description="Ray cluster to join (`auto` or host:port); null: start Ray here.")
    device: Literal["cpu", "cuda"] = Field("cpu", description="Where engines, scorers and learner ranks run.")
    start_timeout_s: Positive = Field(600.0, description="Seconds every actor has to come up.")


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
        if self.best_metric is None and changed(self, "best_is"):
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
    max_attempts: PositiveInt = Field(
        5,
        description="Times one prompt is issued in an epoch before the run ends. Attempts that a stop or a lost learner"
        " aborted do not count.",
    )
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
