"""``max_staleness: 0`` through controller, queue, Ray learner and published weights is plain synchronous PPO."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import ray
import torch
from safetensors.torch import load_file

from learner.learner_group import LearnerGroup
from rlhf_cluster.clock import SystemClock
from rlhf_cluster.controller import Controller, ControllerSettings
from rlhf_cluster.data.cursor import PromptCursor
from rlhf_cluster.experience_queue import ExperienceQueue
from rlhf_cluster.metrics.recorder import MetricsRecorder
from rlhf_cluster.types import Prompt, TrainBatch
from tests.deterministic_engine import DeterministicScorer, DeterministicWorker
from tests.distributed.learner_ranks import make_spec
from tests.reference_ppo import Settings, train
from tests.tiny_models import build_tiny_policy, build_tiny_reward_model

SETTINGS = Settings(
    seed=3,
    steps=5,
    groups=4,
    samples=2,
    max_new_tokens=10,
    temperature=0.9,
    minibatches=2,
    epochs=2,
    policy_lr=1e-4,
    critic_lr=1e-4,
    kl_coef=0.1,
    gamma=0.99,
    lam=0.95,
)
PROMPTS = [Prompt(str(index), tuple(range(3 + index, 9 + 2 * index)), "text") for index in range(7)]


@pytest.fixture(scope="module")
def ray_here() -> Iterator[None]:
    ray.init(address="local", num_cpus=4, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    yield
    ray.shutdown()


def test_the_whole_system_at_staleness_zero_equals_a_plain_synchronous_loop(ray_here: None, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    build_tiny_policy(tmp_path / "policy")
    build_tiny_reward_model(tmp_path / "reward")
    spec = make_spec(
        tmp_path,
        tmp_path / "snapshots",
        algorithm={"gamma": SETTINGS.gamma, "lam": SETTINGS.lam, "kl": {"coef": SETTINGS.kl_coef}},
        minibatches=SETTINGS.minibatches,
        epochs=SETTINGS.epochs,
        micro_batch_tokens=64,
        policy_lr=SETTINGS.policy_lr,
        critic_lr=SETTINGS.critic_lr,
        timeout_s=60,
    )
    spec = replace(spec, steps=SETTINGS.steps, seed=SETTINGS.seed, max_staleness=0)
    batches: list[list[tuple[int, ...]]] = []

    def keep(step: int, batch: TrainBatch) -> None:
        batches.append([tuple(member.rollout.token_ids.tolist()) for member in batch.rollouts])

    async def system() -> None:
        clock = SystemClock()
        learner = LearnerGroup(spec, actor_options=[{"num_cpus": 1}], start_timeout_s=120)
        worker = DeterministicWorker(tmp_path / "policy", slots=3)
        try:
            await learner.start()
            controller = Controller(
                ControllerSettings(
                    seed=SETTINGS.seed,
                    steps=SETTINGS.steps,
                    groups_per_batch=SETTINGS.groups,
                    samples_per_prompt=SETTINGS.samples,
                    max_new_tokens=SETTINGS.max_new_tokens,
                    temperature=SETTINGS.temperature,
                    max_attempts=3,
                    max_unscorable_fraction=0.0,
                ),
                cursor=PromptCursor(PROMPTS, seed=SETTINGS.seed),
                queue=ExperienceQueue(
                    groups_per_batch=SETTINGS.groups, max_staleness=0, clock=clock, group_deadline_s=60
                ),
                generator=worker,
                scorer=DeterministicScorer(tmp_path / "policy"),
                learner=learner,
                sink=worker,
                clock=clock,
                recorder=MetricsRecorder(max_staleness=0, total_steps=SETTINGS.steps, clock=clock, sinks=[]),
                on_batch=keep,
            )
            await controller.run()
            await learner.save(tmp_path / "end")
        finally:
            await learner.close()

    asyncio.run(system())
    policy, critic, expected_batches = train(tmp_path, PROMPTS, SETTINGS)
    assert batches == expected_batches
    starts = {"policy": tmp_path / "policy", "critic": tmp_path / "reward"}
    for name, model in (("policy", policy), ("critic", critic)):
        trained = load_file(tmp_path / "end" / name / "model.safetensors")
        start = load_file(starts[name] / "model.safetensors")
        weights = dict(model.named_parameters())
        for key, weight in trained.items():
            torch.testing.assert_close(weight, weights[key].detach(), atol=1e-5, rtol=0, msg=f"{name} {key}")
            assert (weight - start[key]).abs().max() > 1e-4, f"{name} {key} has not moved"
