"""The driver process of a drill: what ``rlhf train`` does, with the small actors of this folder."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from safetensors.numpy import save_file

from actors.rollout_pool import RolloutPool
from actors.scorer_pool import ScorerPool
from actors.scorer_replicas import Retries
from learner.learner_group import LearnerGroup
from learner.spec import LearnerSpec
from rlhf_cluster.config import Config
from rlhf_cluster.config_io import load_config
from rlhf_cluster.ending import guard, run_async
from rlhf_cluster.inputs import Inputs
from rlhf_cluster.launch import Fleet, ray_session, snapshot_folder
from rlhf_cluster.metrics.console import ConsoleView
from rlhf_cluster.run_folder import RunFolder
from rlhf_cluster.supervision import Event, SupervisionSettings
from rlhf_cluster.training_run import TrainingRun
from rlhf_cluster.types import Prompt
from tests.drills.inference_actors import DrillReferenceScorer, DrillRewardScorer, DrillRolloutWorker
from tests.drills.learner_rank import DrillRankActor
from tests.drills.plan import SAVE_EVERY, STEPS
from tests.drills.policy import initial_weights
from tests.drills.processes import register

GROUPS, SAMPLES, TOKENS, MAX_STALENESS = 4, 4, 6, 1
_RUN = "drill"
PROMPTS = 24
"""A quarter of what is trained, so that a run is four whole epochs."""


@dataclass(frozen=True, slots=True)
class Order:
    """One start of a driver. ``address``: the Ray cluster to join; None: it starts Ray itself."""

    folder: Path
    seed: int
    address: str | None
    log: str
    overrides: tuple[str, ...] = ()

    @property
    def run_folder(self) -> Path:
        return self.folder / _RUN


def configuration(order: Order) -> Config:
    overrides = [
        f"model.policy={order.folder}",
        f"model.reward={order.folder}",
        f"run.dir={order.folder}",
        f"run.name={_RUN}",
        f"run.seed={order.seed}",
        f"run.steps={STEPS}",
        f"rollout.samples_per_prompt={SAMPLES}",
        f"rollout.max_new_tokens={TOKENS}",
        "rollout.workers=2",
        "rollout.timeout_s=20",
        f"queue.groups_per_batch={GROUPS}",
        f"queue.max_staleness={MAX_STALENESS}",
        "queue.group_deadline_s=40",
        f"checkpoint.every_steps={SAVE_EVERY}",
        "learner.timeout_s=30",
        "learner.stall_timeout_s=20",
        "guardrails.no_progress_s=60",
        "scorers.timeout_s=20",
        "supervision.heartbeat_s=0.5",
        # A busy machine is no dead actor.
        "supervision.heartbeat_misses=20",
        "supervision.backoff_s=0.1",
        "cluster.start_timeout_s=60",
        "metrics.prometheus=null",
        *order.overrides,
    ]
    if order.address is not None:
        overrides.append(f"cluster.address={order.address}")
    return load_config(Path("configs/tiny_test.yaml"), overrides)


class DrillFleet(Fleet):
    """The production pools and the production learner group around small actors."""

    def __init__(self, config: Config, order: Order, on_event: Callable[[Event], None]) -> None:
        supervision = SupervisionSettings(**config.supervision.model_dump())
        self.pool = self.sink = RolloutPool(
            config, supervision=supervision, on_event=on_event, worker_class=DrillRolloutWorker
        )
        self.scorers = ScorerPool(
            config.model,
            config.reward,
            config.scorers,
            actor_options={"num_cpus": 1},
            supervision=supervision,
            retries=Retries(config.scorers.attempts, 0.1, config.scorers.max_in_flight),
            on_event=on_event,
            reward_actor=DrillRewardScorer,
            reference_actor=DrillReferenceScorer,
        )
        self.learner = LearnerGroup(
            LearnerSpec.from_config(config, snapshot_folder(config)),
            actor_options=[{"num_cpus": 1}] * config.learner.ranks,
            start_timeout_s=config.cluster.start_timeout_s,
            rank_class=DrillRankActor,
        )
        self._parts = {"rollout workers": self.pool, "scorers": self.scorers, "learner": self.learner}
        timeout_s = config.cluster.start_timeout_s
        self._starting = {
            "rollout workers": asyncio.create_task(self.pool.start(timeout_s)),
            "scorers": asyncio.create_task(self.scorers.start(timeout_s)),
            "learner": asyncio.create_task(self.learner.start()),
        }


class Told:
    """Everything that the driver learns of deaths, with the time, for the harness: ``events.jsonl``."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, kind: str, role: str, reason: str) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"at": time.time(), "kind": kind, "role": role, "reason": reason}) + "\n")


class DrillView(ConsoleView):
    """The console, and the loss of a learner as an event."""

    def __init__(self, told: Told) -> None:
        super().__init__()
        self._told = told

    def message(self, text: str) -> None:
        super().message(text)
        if text.startswith("the learner is lost"):
            self._told.write("down", "learner", text)


def train(order: Order) -> None:
    config = configuration(order)
    # The run measures the size of the policy that it was given.
    save_file(initial_weights(), order.folder / "model.safetensors")
    told = Told(order.folder / "events.jsonl")
    view = DrillView(told)
    prompts = [Prompt(f"p{number}", (number, 50, 51), f"prompt {number}") for number in range(PROMPTS)]
    folder = RunFolder.open(config, resume="auto")
    run = TrainingRun(config, Inputs(prompts, [], None), folder, view)
    run.read_checkpoint()
    folder.begin(config)

    def start(on_event: Callable[[Event], None]) -> Fleet:
        def tell(event: Event) -> None:
            told.write(event.kind, f"{event.role}_{event.slot}", event.reason)
            on_event(event)

        return DrillFleet(config, order, tell)

    with ray_session(config):
        run_async(lambda signals: run.run(signals, start))


def main(order: Order) -> None:
    """The body of the process: never returns."""
    log = os.open(order.folder / order.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True)
    register(order.folder, "driver")
    code = guard(lambda: train(order))
    sys.stdout.flush()
    sys.exit(code)
