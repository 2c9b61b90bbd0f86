"""The search for bad schedules: seeds until one breaks an invariant, and that run made smaller.

failure = first_failure(range(2000))
if failure is not None:
    print(explain(minimise(failure)))
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from rlhf_cluster.simulation.fault_run import FaultRun
from rlhf_cluster.simulation.faults import Faults
from rlhf_cluster.simulation.report import SimulationReport


def run_seed(seed: int, **options: Any) -> SimulationReport:
    """Run one seed to its end.

    Args:
        world: a ``World`` instead of the one the seed draws.
        faults: instead of those the seed draws.
        without: fault kinds that are switched off.
        queue_class: the queue under test.
        crash_at_event: the driver dies at this event of the queue (once).
    """
    return FaultRun(seed, **options).run()


def minimise(report: SimulationReport, **options: Any) -> SimulationReport:
    """The same seed with as few kinds of fault as still break the same invariant."""
    smallest, without = report, set(report.without)
    for kind in Faults(report.seed, without=without).rates:
        smaller = run_seed(report.seed, without=without | {kind}, **options)
        if smaller.rule == report.rule:
            smallest = smaller
            without.add(kind)
    return smallest


def first_failure(seeds: range, faults: Counter[str] | None = None, **options: Any) -> SimulationReport | None:
    """The report of the first seed that breaks an invariant; ``faults`` adds up what struck until then.

    ``options`` are those of ``run_seed``.
    """
    for seed in seeds:
        report = run_seed(seed, **options)
        if faults is not None:
            faults.update(report.faults)
        if not report.ok:
            return report
    return None
