"""`rlhf plan` against the resident memory of every real process of a run: engine, scorers, learner rank, driver aside.

The batch is the longest that the config allows, since that is what the ledger is for.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from rlhf_cluster.config import Config
from rlhf_cluster.config_io import load_config
from rlhf_cluster.inputs import read_inputs
from rlhf_cluster.launch import Fleet, ray_session
from rlhf_cluster.planner.memory import MIB, plan_memory, read_shapes
from rlhf_cluster.protocols import RolloutRequest
from rlhf_cluster.types import Prompt, Rollout, Sampling, ScoredGroup, TrainBatch, VersionSpan
from tests.drills.processes import engines, titled
from tests.tiny_models import build_tiny_policy, build_tiny_reward_model

pytest.importorskip("vllm")

TITLES = {
    "rollout worker": "ray::RolloutWorker",
    "reward scorer": "ray::RewardScorerActor",
    "reference scorer": "ray::ReferenceScorerActor",
    "learner rank": "ray::RankActor",
}
GROUPS, ANSWERS = 4, 2


def peak_memory() -> dict[str, float]:
    """MiB that each role's largest process of ours had resident at its peak (VmHWM)."""
    roles = {role: titled(os.getpid(), title) for role, title in TITLES.items()}
    roles["engine"] = engines(os.getpid())
    return {role: max(map(peak, processes)) for role, processes in roles.items() if processes}


def peak(process: psutil.Process) -> float:
    status = Path(f"/proc/{process.pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")) / 1024


def longest(config: Config, prompt: Prompt, group: int) -> list[Rollout]:
    generator = np.random.default_rng(group)
    tokens = config.rollout.max_new_tokens
    return [
        Rollout(
            f"{group}/0/{member}",
            0,
            str(group),
            generator.integers(40, 250, config.data.max_prompt_tokens).astype(np.int32),
            generator.integers(40, 250, tokens).astype(np.int32),
            generator.normal(-5, 0.5, tokens).astype(np.float32),
            (VersionSpan(0, 0, tokens),),
            "length",
            Sampling(1.0, tokens, member),
        )
        for member in range(ANSWERS)
    ]


async def one_step(config: Config, prompt: Prompt) -> dict[str, float]:
    fleet = Fleet(config)
    try:
        await fleet.ready("rollout workers", "scorers", "learner")
        worker = fleet.pool.choose()
        sampling = tuple(Sampling(1.0, config.rollout.max_new_tokens, seed) for seed in range(16))
        await fleet.pool.generate(worker, RolloutRequest("sampled", 0, prompt, sampling))
        scored = await asyncio.gather(
            *(fleet.scorers.score(prompt, longest(config, prompt, group)) for group in range(2 * GROUPS))
        )
        groups = tuple(
            ScoredGroup(str(group), tuple(replace(member, score=float(index)) for index, member in enumerate(members)))
            for group, members in enumerate(scored[:GROUPS])
        )
        result = await fleet.learner.train(TrainBatch(0, groups))
        assert result.stepped
        await fleet.sink.publish(await fleet.learner.snapshot())
        return peak_memory()
    finally:
        await fleet.close()


@pytest.mark.timeout(240)
def test_the_ledger_meets_the_resident_memory_of_every_process_within_a_fifth(tmp_path: Path) -> None:
    build_tiny_policy(tmp_path / "policy")
    build_tiny_reward_model(tmp_path / "reward")
    config = load_config(
        Path("configs/tiny_test.yaml"),
        [
            f"model.policy={tmp_path / 'policy'}",
            f"model.reward={tmp_path / 'reward'}",
            "learner.ranks=1",
            "rollout.engine.cpu_kv_cache_gib=0.5",
        ],
    )
    prompt = read_inputs(config).train[0]
    with ray_session(config):
        measured = asyncio.run(one_step(config, prompt))
    ledger = plan_memory(config, read_shapes(config))
    planned = {role: ledger.process(role).total / MIB for role in (*TITLES, "engine")}
    assert measured.keys() == planned.keys()
    wrong = {
        role: f"planned {planned[role]:.0f} MiB, measured {measured[role]:.0f} MiB"
        for role in planned
        if not 0.8 <= planned[role] / measured[role] <= 1.2
    }
    assert not wrong, wrong
