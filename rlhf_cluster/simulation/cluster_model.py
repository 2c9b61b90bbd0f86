"""The description of a cluster that ``predict.simulate`` needs: counts from the config, speeds measured or assumed.

    config  ---->  counts, limits, and speeds assumed from the size of the policy and the device
    overlay ---->  whatever a file (``--cluster FILE.yaml``, ``calibration.json``) says instead

An overlay holds any part of ``ClusterModel``, as YAML or JSON. ``calibration.json`` is one: what a run measured.

    rollout: {tokens_per_s: 9500, tokens_per_s_alone: 110}
    learner: {tokens_per_s: 21000, fixed_s: 1.5}
    lengths: {kind: lognormal, median: 310, sigma: 0.9}
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rlhf_cluster.config import Config
from rlhf_cluster.config_io import ConfigError
from rlhf_cluster.simulation.lengths import Lengths

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
PositiveInt = Annotated[int, Field(ge=1)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


class RolloutModel(_Part):
    workers: PositiveInt = Field(description="Engines.")
    sequences: PositiveInt = Field(description="Sequences an engine decodes at once.")
    tokens_per_s: Positive = Field(description="Generated tokens a second of one engine with very many sequences.")
    tokens_per_s_alone: Positive = Field(description="Generated tokens a second of one engine with one sequence.")
    prefill_tokens_per_token: Positive = Field(
        20.0, description="Prompt tokens that cost an engine as much as one generated token."
    )

    @model_validator(mode="after")
    def _many_are_faster(self) -> RolloutModel:
        if self.tokens_per_s_alone > self.tokens_per_s:
            raise ValueError(
                f"tokens_per_s_alone {self.tokens_per_s_alone:g} is what one sequence gets, tokens_per_s "
                f"{self.tokens_per_s:g} what all get together; it cannot be less"
            )
        return self


class ScorerModel(_Part):
    replicas: PositiveInt = Field(1, description="Scorer actors.")
    tokens_per_s: Positive = Field(description="Tokens a second of one replica, prompts included.")
    overhead_s: NonNegative = Field(0.0, description="Seconds a group costs whatever its length.")


class LearnerModel(_Part):
    tokens_per_s: Positive = Field(description="Tokens a second of the whole learner, prompts and all epochs included.")
    fixed_s: NonNegative = Field(0.0, description="Seconds a learner step costs whatever its length.")


class WeightsModel(_Part):
    gib: Positive = Field(description="Size of the policy's weights in engine dtype, GiB.")
    snapshot_gib_per_s: Positive = Field(description="Learner gathering and writing them; no step meanwhile.")
    transfer_gib_per_s: Positive = Field(description="On their way to all workers, which generate meanwhile.")
    load_gib_per_s: Positive = Field(description="An engine loading them, which stands still meanwhile.")
    pause_s: NonNegative = Field(0.2, description="Seconds an engine takes to pause and resume.")


class BatchModel(_Part):
    groups_per_batch: PositiveInt = Field(description="Groups a learner step trains.")
    samples_per_prompt: PositiveInt = Field(description="Answers a group.")
    max_staleness: Annotated[int, Field(ge=0)] = Field(description="Versions; 0 is synchronous.")
    group_deadline_s: Positive = Field(description="Seconds from admission after which a group may be evicted.")
    max_new_tokens: PositiveInt = Field(description="Longest answer in tokens.")
    prompt_tokens: PositiveInt = Field(description="Length of every prompt in tokens.")


class ClusterModel(_Part):
    """Everything that the prediction depends on."""

    rollout: RolloutModel
    reward: ScorerModel | None = Field(description="null: rewards cost nothing (function rewards).")
    reference: ScorerModel
    learner: LearnerModel
    weights: WeightsModel
    batch: BatchModel
    lengths: Lengths = Field(description="How long answers are; cut at batch.max_new_tokens.")

    @model_validator(mode="after")
    def _a_group_fits(self) -> ClusterModel:
        if self.batch.samples_per_prompt > self.rollout.sequences:
            raise ValueError(
                f"batch.samples_per_prompt {self.batch.samples_per_prompt} exceeds rollout.sequences "
                f"{self.rollout.sequences}: a group would not fit an engine"
            )
        return self

    @property
    def groups_per_worker(self) -> int:
        return max(1, self.rollout.sequences // self.batch.samples_per_prompt)

    def synchronous(self) -> ClusterModel:
        """The same cluster with ``max_staleness`` 0."""
        return self.model_copy(update={"batch": self.batch.model_copy(update={"max_staleness": 0})})


class _Device(_Part):
    """Rough speeds of one accelerator, or of one CPU process, for a dense model of P parameters.

    Forward costs 2 P and training 6 P FLOP a token (Kaplan et al. 2020, section 2.1). They stand in for a measurement
    until there is one: expect errors of a factor of two, and calibrate before you trust an absolute number.
    """

    forward_flops: Positive
    train_flops: Positive
    decode_share: Positive
    """Part of ``forward_flops`` that decoding many sequences reaches."""
    memory_bytes_per_s: Positive
    """Decoding one sequence reads all weights once a token."""
    gib_per_s: Positive
    """Weights between processes."""
    parameters: Positive
    """Assumed when the policy folder cannot be read here."""


_DEVICES = {
    # SmolLM2-135M on 2 cores: forward 1,750 tokens/s, training 440 tokens/s, 32 sequences 210 tokens/s together.
    "cpu": _Device(
        forward_flops=4.7e11,
        train_flops=3.6e11,
        decode_share=0.12,
        memory_bytes_per_s=8e9,
        gib_per_s=2.0,
        parameters=1.35e8,
    ),
    # A current data-centre GPU at 40 % of its dense bfloat16 peak and 60 % of its memory bandwidth.
    "cuda": _Device(
        forward_flops=4e14,
        train_flops=3.5e14,
        decode_share=0.4,
        memory_bytes_per_s=2e12,
        gib_per_s=10.0,
        parameters=7e9,
    ),
}
_BYTES = {"bfloat16": 2, "float32": 4}


def cluster_from_config(config: Config, overlay: Mapping[str, Any] | None = None, *, source: str = "") -> ClusterModel:
    """The cluster that ``config`` describes, with what ``overlay`` says put over it.

    Raises:
        ConfigError: the overlay has an unknown key or an impossible value; ``source`` names where it comes from.
    """
    defaults = _defaults(config)
    for section, values in (overlay or {}).items():
        current = defaults.get(section)
        # Lengths are replaced whole: the keys of one distribution mean nothing to another.
        if section != "lengths" and isinstance(current, dict) and isinstance(values, Mapping):
            defaults[section] = {**current, **values}
        else:
            defaults[section] = values
    try:
        return ClusterModel.model_validate(defaults)
    except ValidationError as error:
        lines = [
            f"{source or 'cluster'}: {'.'.join(map(str, item['loc'])) or 'cluster'}: {item['msg']}"
            for item in error.errors(include_url=False, include_context=False)
        ]
        raise ConfigError("\n".join(lines)) from None


def _defaults(config: Config) -> dict[str, Any]:
    device = _DEVICES[config.cluster.device]
    element = _BYTES[config.model.dtype]
    weight_bytes = _weight_bytes(Path(config.model.policy)) or device.parameters * element
    parameters = weight_bytes / element
    gpus = config.rollout.engine.tensor_parallel
    decode = device.forward_flops * device.decode_share * gpus / (2 * parameters)
    alone = min(decode, device.memory_bytes_per_s * gpus / weight_bytes)
    scorer = {"tokens_per_s": device.forward_flops / (2 * parameters), "overhead_s": 0.0}
    # An epoch trains the policy and the critic, if there is one; a forward of each precedes it.
    models = 2 if config.algorithm.uses_critic else 1
    flops_per_token = parameters * models * (6 * config.learner.epochs + 2)
    longest = config.rollout.max_new_tokens
    return {
        "rollout": {
            "workers": config.rollout.workers,
            "sequences": config.rollout.engine.max_num_seqs,
            "tokens_per_s": decode,
            "tokens_per_s_alone": alone,
        },
        "reward": {"replicas": config.scorers.reward_replicas, **scorer} if config.model.reward else None,
        "reference": {"replicas": config.scorers.reference_replicas, **scorer},
        "learner": {"tokens_per_s": device.train_flops * config.learner.ranks / flops_per_token, "fixed_s": 0.0},
        "weights": {
            "gib": weight_bytes / 2**30,
            "snapshot_gib_per_s": device.gib_per_s,
            "transfer_gib_per_s": device.gib_per_s,
            "load_gib_per_s": device.gib_per_s,
            "pause_s": 0.2,
        },
        "batch": {
            "groups_per_batch": config.queue.groups_per_batch,
            "samples_per_prompt": config.rollout.samples_per_prompt,
            "max_staleness": config.queue.max_staleness,
            "group_deadline_s": config.queue.group_deadline_s,
            "max_new_tokens": longest,
            "prompt_tokens": max(1, config.data.max_prompt_tokens // 4),
        },
        "lengths": {"kind": "lognormal", "median": max(1.0, longest / 3), "sigma": 0.8},
    }


def _weight_bytes(folder: Path) -> int:
    """Bytes of the weight files of a model folder; 0 when there are none here."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) if folder.is_dir() else 0
