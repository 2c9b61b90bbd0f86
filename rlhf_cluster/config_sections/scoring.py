"""Scoring: the actors that do it, and what a score is made of."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rlhf_cluster.config_sections.base import NonNegative, Positive, PositiveInt, Section


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
