"""All CPU and GPU arithmetic: what each role of a configuration asks of Ray, and whether a cluster has it.

An actor's ``num_gpus`` is booked on one node, so an engine's tensor-parallel GPUs are always together; roles take
whole GPUs and share none. On CPU a role books the threads it computes with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_cluster.config import Config


@dataclass(frozen=True, slots=True)
class Wanted:
    """``count`` actors of one role, each with ``cpus`` logical CPUs and ``gpus`` whole GPUs."""

    role: str
    count: int
    cpus: int
    gpus: int
    setting: str
    """The setting that lowers ``count``."""


def wanted(config: Config) -> tuple[Wanted, ...]:
    """Every actor of a run, by role. The reward scorer also runs for function rewards, then without a GPU."""
    engine, scorers, learner = config.rollout.engine, config.scorers, config.learner
    on_gpu = config.cluster.device == "cuda"

    def role(name: str, count: int, *, threads: int, gpus: int, setting: str) -> Wanted:
        return Wanted(name, count, cpus=1 if on_gpu else threads, gpus=gpus if on_gpu else 0, setting=setting)

    return (
        role(
            "rollout workers",
            config.rollout.workers,
            threads=engine.cpu_threads,
            gpus=engine.tensor_parallel,
            setting="rollout.workers or rollout.engine.tensor_parallel",
        ),
        role(
            "reward scorers",
            scorers.reward_replicas,
            threads=scorers.cpu_threads,
            gpus=1,
            setting="scorers.reward_replicas",
        ),
        role(
            "reference scorers",
            scorers.reference_replicas,
            threads=scorers.cpu_threads,
            gpus=1,
            setting="scorers.reference_replicas",
        ),
        role("learner ranks", learner.ranks, threads=learner.cpu_threads, gpus=1, setting="learner.ranks"),
    )


def total(roles: Sequence[Wanted]) -> dict[str, int]:
    """Ray resources of all roles together.

    >>> total([Wanted("a", 2, cpus=1, gpus=4, setting="x"), Wanted("b", 1, cpus=2, gpus=0, setting="y")])
    {'CPU': 4, 'GPU': 8}
    """
    return {"CPU": sum(r.count * r.cpus for r in roles), "GPU": sum(r.count * r.gpus for r in roles)}


def check_fits(roles: Sequence[Wanted], available: Mapping[str, float]) -> None:
    """``available`` are a cluster's total resources, as ``ray.cluster_resources()`` gives them.

    Raises:
        ValueError: what is short, who wants how much of it, and the settings that lower it.
    """
    for resource, attribute, unit in (("GPU", "gpus", "GPUs"), ("CPU", "cpus", "logical CPUs")):
        needed, present = total(roles)[resource], available.get(resource, 0)
        if needed <= present:
            continue
        takers = [role for role in roles if getattr(role, attribute)]
        shares = ", ".join(f"{role.role} {role.count} x {getattr(role, attribute)}" for role in takers)
        fix = "; or set cluster.device: cpu" if resource == "GPU" and not present else ""
        raise ValueError(
            f"the configuration wants {needed} {unit} ({shares}) but the Ray cluster has {present:g}. "
            f"Lower {', '.join(role.setting for role in takers)}, or add nodes{fix}"
        )


def _options(config: Config, role_name: str) -> dict[str, Any]:
    role = next(role for role in wanted(config) if role.role == role_name)
    return {"num_cpus": role.cpus, "num_gpus": role.gpus}


def rollout_options(config: Config) -> dict[str, Any]:
    """Ray options of one rollout worker; its environment is set by the worker, before it imports vLLM."""
    return _options(config, "rollout workers")


def scorer_options(config: Config) -> dict[str, Any]:
    """Ray options of one scorer, reward or reference."""
    return _options(config, "reference scorers") | _environment(config, config.scorers.cpu_threads)


def learner_options(config: Config) -> dict[str, Any]:
    """Ray options of one learner rank."""
    return _options(config, "learner ranks") | _environment(config, config.learner.cpu_threads)


def _environment(config: Config, threads: int) -> dict[str, Any]:
    """Environment of a torch process: what must be set before it starts. Holds no secrets."""
    variables = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if config.cluster.device == "cpu":
        # Roles share cores: an OpenMP thread that spins at a barrier takes one from the others.
        variables |= {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
        # Threads that each keep a heap of their own hold on to what batches of other shapes once needed.
        variables |= {"MALLOC_ARENA_MAX": "2"}
    return {"runtime_env": {"env_vars": variables}}
