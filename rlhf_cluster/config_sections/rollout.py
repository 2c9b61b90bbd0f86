"""Sampling: engines, the queue they fill, and how new weights reach them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rlhf_cluster.config_sections.base import NonNegativeInt, Positive, PositiveInt, Section


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
        "to the bit, and the log-prob probe) to the next. The first of a worker, the one after a failed update and "
        "that of a restored learner are verified in any case; the bytes of a snapshot are checked every time.",
    )
    probe_tolerance_nats: Positive | None = Field(
        None,
        description="Mean |engine - learner| over the log-prob probe above which a worker is fenced, nats a token; "
        "null: 0.01 in float32, 0.25 in bfloat16.",
    )
