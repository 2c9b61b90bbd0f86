"""Workers to ranks and max_staleness, chosen by simulating this cluster (`simulation.predict`).

The devices stay as many: what a learner rank gives up a rollout worker takes, and the other way round. A formula picks
the divisions worth a simulation, the simulation picks among them; then it tries bounds on staleness with the division
it picked and takes the smallest that is about as fast as the best. The learner's speed is taken to grow with its ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import fmean

from rlhf_cluster.config import Config
from rlhf_cluster.controller import RunFailed
from rlhf_cluster.simulation.cluster_model import ClusterModel
from rlhf_cluster.simulation.predict import Prediction, simulate

STALENESS = (0, 1, 2, 4)
# Two settings within this share of each other count as equally fast; the one with fewer stale tokens wins.
_ABOUT = 0.97
_DIVISIONS = 3
_MOST_STEPS, _LEAST_STEPS = 20, 6
_GROUPS = 6000
_SAMPLED_LENGTHS = 512


@dataclass(frozen=True, slots=True)
class Division:
    """So many rollout workers and learner ranks."""

    workers: int
    ranks: int


@dataclass(frozen=True, slots=True)
class Choice:
    """One simulated setting; ``prediction`` is None where a run would fail, and ``failure`` says why."""

    division: Division
    max_staleness: int
    prediction: Prediction | None
    failure: str = ""

    @property
    def speed(self) -> float:
        """Learner steps an hour."""
        return 0.0 if self.prediction is None else self.prediction.steps_per_hour


@dataclass(frozen=True, slots=True)
class Recommendation:
    current: Choice
    best: Choice
    """Its prediction is None when every setting fails."""
    divisions: tuple[Choice, ...]
    """At the configured bound."""
    bounds: tuple[Choice, ...]
    """With the best division, by max_staleness."""
    ranks_fed_by_a_worker: float
    """Learner ranks that one worker keeps busy, by the formula."""


def recommend(
    config: Config, cluster: ClusterModel, *, allowed: Callable[[Division], bool] = lambda _: True, seed: int = 0
) -> Recommendation:
    """What suits the devices of ``config``, of which ``cluster`` is the description, best.

    Args:
        allowed: whether a division other than the configured one may be chosen (its memory fits).
    """
    current = Division(config.rollout.workers, config.learner.ranks)
    steps = min(config.run.steps, max(_LEAST_STEPS, min(_MOST_STEPS, _GROUPS // cluster.batch.groups_per_batch)))

    def tried(division: Division, max_staleness: int) -> Choice:
        model = _described(cluster, current, division, max_staleness)
        try:
            return Choice(division, max_staleness, simulate(model, steps, seed=seed))
        except RunFailed as error:
            return Choice(division, max_staleness, None, str(error))

    bound = cluster.batch.max_staleness
    possible = [division for division in divisions(config) if division == current or allowed(division)]
    likely = sorted(possible, key=lambda other: step_seconds(_described(cluster, current, other, bound)))
    chosen = dict.fromkeys([current, *likely[:_DIVISIONS]])
    by_division = [tried(division, bound) for division in chosen]
    # The first is the division as it stands: another must be faster to replace it.
    division = max(by_division, key=lambda choice: choice.speed).division
    if by_division[0].speed >= _ABOUT * max(choice.speed for choice in by_division):
        division = current
    known = {choice.division: choice for choice in by_division}
    by_bound = [known[division] if k == bound else tried(division, k) for k in sorted({*STALENESS, bound})]
    fastest = max(choice.speed for choice in by_bound)
    best = next(choice for choice in by_bound if choice.speed >= _ABOUT * fastest)
    generate, _, train = stage_seconds(_described(cluster, current, Division(1, 1), bound))
    return Recommendation(by_division[0], best, tuple(by_division), tuple(by_bound), train / generate)


def divisions(config: Config) -> Iterator[Division]:
    """Every way to divide the devices of workers and ranks: GPUs, or threads on a CPU."""
    on_gpu = config.cluster.device == "cuda"
    a_worker = config.rollout.engine.tensor_parallel if on_gpu else config.rollout.engine.cpu_threads
    a_rank = 1 if on_gpu else config.learner.cpu_threads
    total = config.rollout.workers * a_worker + config.learner.ranks * a_rank
    for workers in range(1, (total - a_rank) // a_worker + 1):
        rest = total - workers * a_worker
        if rest % a_rank == 0:
            yield Division(workers, rest // a_rank)


def step_seconds(cluster: ClusterModel) -> float:
    """Seconds of one learner step: those of the slowest stage, or of all in turn when nothing overlaps."""
    stages = stage_seconds(cluster)
    return sum(stages) if cluster.batch.max_staleness == 0 else max(stages)


def stage_seconds(cluster: ClusterModel) -> tuple[float, float, float]:
    """Seconds that generating, scoring and training one batch take, each stage with nothing in its way."""
    batch, rollout, weights = cluster.batch, cluster.rollout, cluster.weights
    answers = batch.groups_per_batch * batch.samples_per_prompt
    length = fmean(cluster.lengths.sample(index, batch.max_new_tokens) for index in range(_SAMPLED_LENGTHS))
    outstanding = answers * (batch.max_staleness + 1)
    at_once = max(1.0, min(rollout.sequences, outstanding / rollout.workers))
    speed = rollout.tokens_per_s * at_once / (at_once + rollout.tokens_per_s / rollout.tokens_per_s_alone - 1)
    work = answers * (length + batch.prompt_tokens / rollout.prefill_tokens_per_token)
    generate = work / (speed * rollout.workers) + weights.pause_s + weights.gib / weights.load_gib_per_s
    tokens = answers * (length + batch.prompt_tokens)
    scorers = [cluster.reference] if cluster.reward is None else [cluster.reference, cluster.reward]
    score = max(
        (tokens / scorer.tokens_per_s + batch.groups_per_batch * scorer.overhead_s) / scorer.replicas
        for scorer in scorers
    )
    train = cluster.learner.fixed_s + tokens / cluster.learner.tokens_per_s + weights.gib / weights.snapshot_gib_per_s
    return generate, score, train


def _described(cluster: ClusterModel, current: Division, division: Division, max_staleness: int) -> ClusterModel:
    """``cluster`` with other counts; engines fewer or more, the learner faster or slower."""
    speed = cluster.learner.tokens_per_s * division.ranks / current.ranks
    return cluster.model_copy(
        update={
            "rollout": cluster.rollout.model_copy(update={"workers": division.workers}),
            "learner": cluster.learner.model_copy(update={"tokens_per_s": speed}),
            "batch": cluster.batch.model_copy(update={"max_staleness": max_staleness}),
        }
    )


def ratio(division: Division) -> str:
    """As people write it: 3:2, not 6:4."""
    shared = math.gcd(division.workers, division.ranks)
    return f"{division.workers // shared}:{division.ranks // shared}"
