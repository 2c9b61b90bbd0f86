"""What does not fit, and the settings that make it fit; each change is planned again, so what it saves is computed.

A change is kept when it lowers what is over its limit; changes are tried in the order of what they cost a run, and the
list ends with the one that makes everything fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from rlhf_cluster.config import Config
from rlhf_cluster.planner.memory import GIB, Ledger, Shapes, plan_memory

# A change that saves less is not worth naming.
_LEAST_SAVING = 0.01


@dataclass(frozen=True, slots=True)
class Shortage:
    """``needed`` of ``limit`` bytes on ``what``: the host, or a GPU of one role."""

    what: str
    needed: float
    limit: float

    def __str__(self) -> str:
        return f"{self.what}: {self.needed / GIB:.1f} GiB of {self.limit / GIB:.1f} GiB"


@dataclass(frozen=True, slots=True)
class Change:
    """Overrides for `rlhf`, what they cost, and how many bytes less are missing with them."""

    overrides: tuple[str, ...]
    cost: str
    saved: float

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(override.partition("=")[0] for override in self.overrides)


@dataclass(frozen=True, slots=True)
class Remedy:
    """``changes`` in the order to make them; ``fits``: whether they are enough."""

    changes: tuple[Change, ...]
    fits: bool


def shortages(config: Config, ledger: Ledger, limit: float) -> list[Shortage]:
    """What is over ``limit`` bytes of the host (cpu) or of one GPU (cuda), and engines without room for a sequence."""
    found = []
    if config.cluster.device == "cpu":
        if ledger.host_bytes > limit:
            found.append(Shortage("host memory", ledger.host_bytes, limit))
    else:
        for process in ledger.processes:
            if process.device == "gpu" and process.total > limit:
                found.append(Shortage(f"GPU of a {process.role}", process.total, limit))
    if ledger.kv.sequences < 1:
        room = ledger.process("engine").parts["KV cache"]
        found.append(Shortage("KV cache for one of the longest sequences", ledger.kv.bytes_a_sequence, room))
    return found


def remedy(config: Config, shapes: Shapes, limit: float) -> Remedy:
    """Changes that make ``config`` fit ``limit``, as far as there are any."""
    ledger = plan_memory(config, shapes, gpu_bytes=limit)
    missing = missing_bytes(config, ledger, limit)
    changes: list[Change] = []
    while missing > 0:
        step = next(_helpful(config, shapes, limit, missing), None)
        if step is None:
            return Remedy(tuple(changes), False)
        change, config = step
        missing -= change.saved
        for earlier in [other for other in changes if other.keys == change.keys]:
            changes.remove(earlier)
            change = replace(change, saved=change.saved + earlier.saved)
        changes.append(change)
    return Remedy(tuple(changes), True)


def missing_bytes(config: Config, ledger: Ledger, limit: float) -> float:
    """How many bytes all shortages come to."""
    return sum(shortage.needed - shortage.limit for shortage in shortages(config, ledger, limit))


def _helpful(config: Config, shapes: Shapes, limit: float, missing: float) -> Iterator[tuple[Change, Config]]:
    for values, cost in _candidates(config):
        candidate = changed(config, values)
        if candidate is None:
            continue
        saved = missing - missing_bytes(candidate, plan_memory(candidate, shapes, gpu_bytes=limit), limit)
        if saved > _LEAST_SAVING * missing:
            yield Change(tuple(f"{key}={_shown(value)}" for key, value in values.items()), cost, saved), candidate


def _candidates(config: Config) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Changes of one setting, cheapest for the run first."""
    learner, engine, scorers = config.learner, config.rollout.engine, config.scorers
    longest = config.max_model_len
    if scorers.batch_tokens > 2 * longest:
        yield {"scorers.batch_tokens": max(longest, scorers.batch_tokens // 2)}, "scorers batch less"
    if learner.micro_batch_tokens > longest:
        yield {"learner.micro_batch_tokens": max(longest, learner.micro_batch_tokens // 2)}, "smaller micro-batches"
    if not learner.gradient_checkpointing:
        yield {"learner.gradient_checkpointing": True}, "a third more time in backward"
    if learner.ranks > 1 and learner.zero_stage < 3:
        yield {"learner.zero_stage": learner.zero_stage + 1}, "more communication between ranks"
    if config.model.dtype == "float32":
        yield {"model.dtype": "bfloat16"}, "bfloat16 rounding in every model"
    if config.cluster.device == "cpu":
        if engine.cpu_kv_cache_gib > 0.2:
            yield {"rollout.engine.cpu_kv_cache_gib": round(engine.cpu_kv_cache_gib / 2, 2)}, "fewer sequences at once"
        for key, count in (
            ("scorers.reward_replicas", scorers.reward_replicas),
            ("scorers.reference_replicas", scorers.reference_replicas),
            ("rollout.workers", config.rollout.workers),
            ("learner.ranks", learner.ranks),
        ):
            if count > 1:
                yield {key: count - 1}, "one process less"
    else:
        yield {"rollout.engine.tensor_parallel": engine.tensor_parallel * 2}, "twice the GPUs an engine"
        if engine.gpu_memory_utilization < 0.9:
            yield {"rollout.engine.gpu_memory_utilization": 0.9}, "less room for others on the engine's GPU"
        zero = {"learner.zero_stage": 3} if learner.zero_stage < 3 else {}
        yield {"learner.ranks": learner.ranks * 2, **zero}, "twice the GPUs for the learner"
    if config.algorithm.uses_critic and learner.critic_layers is None:
        yield {"learner.critic_layers": 4}, "only the critic's top layers are trained"
    if learner.lora is None:
        lora = {"learner.lora": {"rank": 16}}
        yield (
            lora,
            "low-rank adapters of the policy's linear layers are trained instead; raise learner.policy_lr tenfold",
        )


def changed(config: Config, values: Mapping[str, Any]) -> Config | None:
    """``config`` with dotted keys changed; None when it is refused."""
    content = config.model_dump()
    for key, value in values.items():
        section = content
        *path, name = key.split(".")
        for part in path:
            section = section[part]
        section[name] = value
    try:
        return Config.model_validate(content)
    except ValidationError:
        return None


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_shown(entry)}' for key, entry in value.items())}}}"
    return str(value).lower() if isinstance(value, bool) else str(value)
