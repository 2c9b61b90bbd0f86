"""What must hold after a drill, read from the files that the run left."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from rlhf_cluster import run_state
from rlhf_cluster.checkpoint_set import LEARNER, CheckpointDamaged, newest_checkpoint, verify
from rlhf_cluster.clock import SystemClock
from rlhf_cluster.experience_queue import ExperienceQueue
from tests.drills import learner_rank
from tests.drills.driver import GROUPS, MAX_STALENESS, PROMPTS
from tests.drills.plan import STEPS, Plan

_STEPS_COMPARED = 5
_STEPS_TO_RESTART = 8
_ROUNDING_NATS = 1e-5


def rows(run: Path) -> list[dict[str, Any]]:
    """Complete step rows so far; a line that is being written is left out."""
    path = run / "metrics.jsonl"
    if not path.is_file():
        return []
    complete = path.read_text().rpartition("\n")[0]
    return [row for row in map(json.loads, complete.splitlines()) if row["event"] == "step"]


def restart_kind(plan: Plan) -> str | None:
    """The label under which ``rlhf_restarts_total`` counts the victim; a driver counts nothing."""
    if plan.victim == "driver":
        return None
    return "learner" if plan.victim.startswith("learner") else plan.victim.rpartition("_")[0]


def check(run: Path, plan: Plan, *, killed_after: int | None) -> tuple[list[str], tuple[float, float]]:
    """(broken promises, mean score of the first and of the last steps).

    ``killed_after``: rows that were closed before the kill; None when it came too late.
    """
    failures: list[str] = []
    lines = rows(run)
    versions = [row["version"] for row in lines]
    if versions != sorted(set(versions)):
        failures.append(f"versions do not grow strictly: {versions}")
    if lines[-1]["step"] != STEPS:
        failures.append(f"the last row is that of step {lines[-1]['step']} of {STEPS}")
    if {row["step"] for row in lines} != set(range(1, STEPS + 1)):
        failures.append(f"some step has no row: {[row['step'] for row in lines]}")
    if (lag := max(row["rlhf_batch_max_lag"] for row in lines)) > MAX_STALENESS:
        failures.append(f"a token was trained at lag {lag}; the bound is {MAX_STALENESS}")
    failures += _wrong_weights(lines)
    kind = restart_kind(plan)
    # A part that dies in the last steps may not be back before the last row is closed.
    if kind is not None and killed_after is not None and killed_after <= STEPS - _STEPS_TO_RESTART:
        restarts = lines[-1][f'rlhf_restarts_total{{kind="{kind}"}}']
        if restarts < 1:
            failures.append(f"rlhf_restarts_total of {kind} is {restarts}")
    failures += _checkpoint(run)
    first, last = _score(lines[:_STEPS_COMPARED]), _score(lines[-_STEPS_COMPARED:])
    if last <= first + 0.1:
        failures.append(f"the score did not rise: {first:.3f} in the first steps, {last:.3f} in the last")
    return failures, (first, last)


def _wrong_weights(lines: list[dict[str, Any]]) -> list[str]:
    """Every trained token has the log-prob of the weights whose version it names."""
    worst = max(row["rlhf_learner_behaviour_error"] for row in lines)
    checked = sum(row["rlhf_learner_behaviour_checked"] for row in lines)
    failures = []
    if worst > _ROUNDING_NATS:
        failures.append(f"a worker's log-probs differ by {worst:.4f} nats from the weights of the version it named")
    if checked < GROUPS * len(lines):
        failures.append(f"only {checked:.0f} tokens could be compared with the weights of their version")
    return failures


def _checkpoint(run: Path) -> list[str]:
    newest = newest_checkpoint(run / "checkpoints")
    if newest is None:
        return ["there is no usable checkpoint"]
    failures = []
    if newest.name != f"step_{STEPS:08d}":
        failures.append(f"the newest checkpoint is {newest.name}")
    try:
        verify(newest)
    except CheckpointDamaged as error:
        failures.append(f"the newest checkpoint is damaged: {error}")
    lineage = json.loads((newest / LEARNER / learner_rank.STATE).read_text())["lineage"]
    failures += _exactly_once(lineage)
    saved = run_state.load_state(newest)
    queue = ExperienceQueue(
        groups_per_batch=GROUPS, max_staleness=MAX_STALENESS, clock=SystemClock(), group_deadline_s=60
    )
    queue.load_state_dict(saved["queue"])
    try:
        queue.ledger.check()
    except Exception as error:
        failures.append(f"the ledger does not close: {error}")
    if queue.outstanding:
        failures.append(f"{queue.outstanding} groups are still outstanding at the end")
    if saved["step"] != STEPS:
        failures.append(f"the newest checkpoint is that of step {saved['step']}")
    return failures


def _exactly_once(lineage: list[str]) -> list[str]:
    """The final weights were trained on every prompt exactly once an epoch."""
    epochs, rest = divmod(STEPS * GROUPS, PROMPTS)
    assert rest == 0
    expected = {f"{epoch}:p{number}" for epoch in range(epochs) for number in range(PROMPTS)}
    counts = Counter(lineage)
    failures = []
    if twice := sorted(group for group, count in counts.items() if count > 1):
        failures.append(f"trained more than once: {twice}")
    if missing := sorted(expected - counts.keys()):
        failures.append(f"never trained: {missing}")
    if surplus := sorted(counts.keys() - expected):
        failures.append(f"trained although of a later epoch: {surplus}")
    return failures


def _score(lines: list[dict[str, Any]]) -> float:
    return float(sum(row["rlhf_trained_score_mean"] for row in lines) / len(lines))
