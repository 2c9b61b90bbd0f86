"""Small worlds for the fault simulation, with times that a test can reckon with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rlhf_cluster.simulation.fault_run import FaultRun
from rlhf_cluster.simulation.faults import ScriptedFaults, World
from rlhf_cluster.simulation.lengths import Constant

CALM = World(
    steps=4,
    groups_per_batch=2,
    max_staleness=1,
    samples_per_prompt=2,
    prompts=8,
    workers=1,
    capacity=4,
    speed_alone=4.0,
    speed_peak=16.0,
    lengths=Constant(tokens=4),
    max_new_tokens=8,
    scorer_replicas=1,
    scorer_s=0.1,
    learner_s=1.0,
    snapshot_s=0.0,
    transfer_s=0.1,
    pause_s=0.1,
    restart_s=1.0,
    group_deadline_s=20.0,
    rollout_timeout_s=10.0,
    scorer_timeout_s=5.0,
    publish_timeout_s=5.0,
    checkpoint_every=1,
    checkpoint_s=0.0,
)
"""Answers of 4 tokens, a second each when alone; a step takes a second; nothing fails."""


def scripted(
    *faults: tuple[object, ...], moment: float = 0.5, crash_at_event: int | None = None, **world: Any
) -> FaultRun:
    """A run of the calm world, changed by ``world``, with exactly ``faults``; not started."""
    return FaultRun(
        0,
        world=replace(CALM, **world),
        faults=ScriptedFaults(faults, moment=moment),
        crash_at_event=crash_at_event,
    )
