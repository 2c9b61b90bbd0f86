"""What a described cluster will do: the production controller and queue in virtual time, without faults.

    prediction = simulate(cluster_from_config(config), steps=100)
    prediction.steps_per_hour, prediction.idle["learner"], prediction.lag_tokens

The answer includes the start (the first batch finds an empty queue) and the end (nothing is generated that no step
needs), as a run of so many steps has them.
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from rlhf_cluster.controller import Controller, ControllerSettings
from rlhf_cluster.data.cursor import PromptCursor
from rlhf_cluster.experience_queue import ExperienceQueue
from rlhf_cluster.simulation.actors import (
    EngineSpeed,
    ModelledLearner,
    ModelledScorers,
    ModelledWorkers,
    ScorerStage,
)
from rlhf_cluster.simulation.cluster_model import ClusterModel, ScorerModel
from rlhf_cluster.simulation.quiet_logs import quiet_controller
from rlhf_cluster.simulation.quiet_recorder import QuietRecorder
from rlhf_cluster.simulation.virtual_time import VirtualClock, VirtualTimeLoop, run_virtual
from rlhf_cluster.types import Prompt, TrainBatch

_PROMPTS = 1024


@dataclass(frozen=True, slots=True)
class Prediction:
    """What to expect of ``steps`` learner steps. Shares are between 0 and 1, times in seconds."""

    max_staleness: int
    steps: int
    seconds: float
    steps_per_hour: float
    tokens_per_s: float
    """Generated tokens that were trained, a second."""
    generated_tokens_per_s: float
    idle: dict[str, float]
    """Share of the time that a stage (rollout, reward, reference, learner) had nothing to do, mean over its parts."""
    paused: float
    """Share of the time that the engines stood still for new weights, with work to do."""
    lag_tokens: dict[int, int]
    """Tokens trained, by learner version minus version of the token."""
    evicted_share: float
    """Share of the generated tokens that were thrown away because their group missed its deadline."""
    offered_length: float
    """Mean tokens of the answers that were asked for."""
    trained_length: float
    """Mean tokens of the answers that were trained."""

    @property
    def length_bias(self) -> float:
        """How much longer trained answers are than offered ones, as a share; below 0 long answers get lost."""
        return self.trained_length / self.offered_length - 1 if self.offered_length else math.nan

    @property
    def mean_lag(self) -> float:
        """Versions, over tokens."""
        tokens = sum(self.lag_tokens.values())
        return sum(lag * n for lag, n in self.lag_tokens.items()) / tokens if tokens else math.nan


@quiet_controller()
def simulate(cluster: ClusterModel, steps: int, *, seed: int = 0) -> Prediction:
    """Run ``steps`` learner steps on ``cluster``. The same arguments give the same prediction to the bit.

    Raises:
        RunFailed: the cluster cannot keep its own deadlines; the message says which.
        Deadlock: no run of this cluster can end.
    """
    loop = VirtualTimeLoop()
    clock = VirtualClock(loop)
    batch, weights = cluster.batch, cluster.weights
    workers = ModelledWorkers(
        loop,
        workers=cluster.rollout.workers,
        capacity=cluster.groups_per_worker,
        speed=EngineSpeed(cluster.rollout.tokens_per_s_alone, cluster.rollout.tokens_per_s),
        length=cluster.lengths.sample,
        prefill_tokens_per_token=cluster.rollout.prefill_tokens_per_token,
        transfer_s=weights.gib / weights.transfer_gib_per_s,
        pause_s=weights.pause_s + weights.gib / weights.load_gib_per_s,
    )
    scorers = {name: _stage(model) for name, model in _scorers(cluster).items()}
    learner = ModelledLearner(
        tokens_per_s=cluster.learner.tokens_per_s,
        fixed_s=cluster.learner.fixed_s,
        snapshot_s=weights.gib / weights.snapshot_gib_per_s,
    )
    lags: Counter[int] = Counter()

    def count_lags(step: int, trained: TrainBatch) -> None:
        for member in trained.rollouts:
            for span in member.rollout.version_spans:
                lags[trained.learner_version - span.version] += span.end - span.start

    prompt = tuple(range(batch.prompt_tokens))
    controller = Controller(
        ControllerSettings(
            seed=seed,
            steps=steps,
            groups_per_batch=batch.groups_per_batch,
            samples_per_prompt=batch.samples_per_prompt,
            max_new_tokens=batch.max_new_tokens,
            temperature=1.0,
            max_attempts=1000,
            max_unscorable_fraction=1.0,
        ),
        cursor=PromptCursor([Prompt(str(index), prompt, "") for index in range(_PROMPTS)], seed=seed),
        queue=ExperienceQueue(
            groups_per_batch=batch.groups_per_batch,
            max_staleness=batch.max_staleness,
            clock=clock,
            group_deadline_s=batch.group_deadline_s,
        ),
        generator=workers,
        scorer=ModelledScorers(loop, list(scorers.values())),
        learner=learner,
        sink=workers,
        clock=clock,
        recorder=QuietRecorder(clock),
        on_batch=count_lags,
    )
    with _fewer_collections():
        run_virtual(controller.run(), loop)
    seconds = loop.time()
    busy, paused = workers.busy_s()
    engine_seconds = seconds * cluster.rollout.workers
    idle = {"rollout": 1 - busy / engine_seconds}
    idle |= {name: 1 - stage.busy_s / (seconds * stage.replicas) for name, stage in scorers.items()}
    idle["learner"] = 1 - learner.busy_s / seconds
    tokens, answers = workers.offered_lengths
    return Prediction(
        max_staleness=batch.max_staleness,
        steps=steps,
        seconds=seconds,
        steps_per_hour=3600 * steps / seconds,
        tokens_per_s=learner.trained_tokens / seconds,
        generated_tokens_per_s=workers.generated_tokens / seconds,
        idle=idle,
        paused=paused / engine_seconds,
        lag_tokens=dict(sorted(lags.items())),
        evicted_share=workers.wasted_tokens / workers.generated_tokens,
        offered_length=tokens / answers,
        trained_length=learner.trained_tokens / learner.trained_rollouts,
    )


@contextlib.contextmanager
def _fewer_collections() -> Iterator[None]:
    """Next to nothing a simulation makes is cyclic; the collector would walk thousands of live groups over and over."""
    thresholds = gc.get_threshold()
    gc.set_threshold(200_000, 20, 20)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


def _scorers(cluster: ClusterModel) -> dict[str, ScorerModel]:
    scorers = {"reference": cluster.reference}
    return scorers if cluster.reward is None else {"reward": cluster.reward, **scorers}


def _stage(model: ScorerModel) -> ScorerStage:
    return ScorerStage(replicas=model.replicas, tokens_per_s=model.tokens_per_s, overhead_s=model.overhead_s)
