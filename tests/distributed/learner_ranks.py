"""Real learner ranks under gloo for tests: spawn them with a deadline, and batches they can train on."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as mp

from learner.spec import LearnerSpec
from rlhf_cluster.config import AlgorithmConfig, LearnerConfig, ModelConfig, RewardConfig
from rlhf_cluster.types import FinishReason, Rollout, Sampling, ScoredGroup, ScoredRollout, TrainBatch, VersionSpan

VOCAB = 259  # of tests.tiny_models


def spawn_ranks(scenario: Callable[[int, Path], Any], world_size: int, folder: Path, deadline_s: float) -> list[Any]:
    """Run ``scenario(rank, folder)`` in ``world_size`` processes that share a gloo group; what each returned."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.start_processes(
        _rank, args=(scenario, world_size, str(folder), port), nprocs=world_size, join=False, start_method="spawn"
    )
    deadline = time.monotonic() + deadline_s
    try:
        while not context.join(timeout=1):
            assert time.monotonic() < deadline, f"{world_size} learner ranks did not finish within {deadline_s:g} s"
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
    return [torch.load(folder / f"result{rank}.pt", weights_only=True) for rank in range(world_size)]


def _rank(rank: int, scenario: Callable[[int, Path], Any], world_size: int, folder: str, port: int) -> None:
    from learner import engine

    torch.set_num_threads(1)
    # As a large model has them: several parameter groups under ZeRO-1 and 2.
    engine._GROUP_ELEMENTS = 1
    engine.init_distributed(backend="gloo", rank=rank, world_size=world_size, host="127.0.0.1", port=port, timeout_s=60)
    torch.save(scenario(rank, Path(folder)), Path(folder) / f"result{rank}.pt")


def make_spec(
    models: Path,
    snapshots: Path,
    *,
    dtype: Any = "float32",
    algorithm: dict[str, Any] | None = None,
    reward: dict[str, Any] | None = None,
    max_skipped_steps: int = 5,
    **learner: Any,
) -> LearnerSpec:
    """A learner of the tiny policy and reward model under ``models``; ``learner`` are fields of that section."""
    return LearnerSpec(
        model=ModelConfig(policy=str(models / "policy"), critic=str(models / "reward"), dtype=dtype, attention="eager"),
        algorithm=AlgorithmConfig(**(algorithm or {})),
        learner=LearnerConfig(**{"policy_lr": 1e-4, "critic_lr": 1e-4, "warmup_fraction": 0.0, **learner}),
        reward=RewardConfig(components=({"name": "model", "kind": "model"},), **(reward or {})),
        temperature=0.9,
        max_new_tokens=12,
        seed=3,
        steps=10,
        max_staleness=1,
        max_skipped_steps=max_skipped_steps,
        max_unscorable_fraction=0.1,
        device="cpu",
        snapshot_dir=snapshots,
    )


def make_batch(
    version: int,
    *,
    rollouts: int = 8,
    empty: int = 0,
    reference_gap: float = 0.1,
    lengths: Sequence[int] | None = None,
) -> TrainBatch:
    """Groups of two rollouts with 1 to 12 random tokens, half of them truncated, tokens of versions v-1 and v.

    The reference's log-probs are ``reference_gap`` nats below the behaviour's. ``lengths`` are those of the answers,
    instead of random ones; prompts have one token then.
    """
    generator = np.random.default_rng(version)
    members = []
    for index in range(rollouts):
        n_tokens = 0 if index < empty else int(generator.integers(1, 13))
        if lengths is not None:
            n_tokens = lengths[index]
        oldest = max(0, version - 1)
        half = n_tokens // 2
        spans = (VersionSpan(oldest, 0, half), VersionSpan(version, half, n_tokens))
        finish: FinishReason = "length" if index % 2 else "stop"
        logprobs = generator.normal(-5.0, 0.5, n_tokens).astype(np.float32)
        n_prompt = int(generator.integers(1, 6)) if lengths is None else 1
        rollout = Rollout(
            rollout_id=f"v{version}/{index}",
            attempt=0,
            group_id=f"g{index // 2}",
            prompt_token_ids=generator.integers(3, VOCAB, n_prompt),
            token_ids=generator.integers(3, VOCAB, n_tokens),
            behaviour_logprobs=logprobs,
            version_spans=spans,
            finish_reason=finish,
            sampling=Sampling(temperature=0.9, max_new_tokens=12, seed=index),
        )
        score = float(generator.normal())
        members.append(ScoredRollout(rollout, score, {"model": score}, logprobs - np.float32(reference_gap)))
    groups = [ScoredGroup(f"g{first // 2}", tuple(members[first : first + 2])) for first in range(0, rollouts, 2)]
    return TrainBatch(version, tuple(groups))
