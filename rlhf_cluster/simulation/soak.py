"""Many seeds of the fault simulation: ``python -m rlhf_cluster.simulation.soak 200000 [--first N] [--jobs N]``.

Stops at the first seed that breaks an invariant, makes the run smaller and prints how to replay it. Exit code 0: none
of the seeds did; 1: one did.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

from rlhf_cluster.simulation.report import SimulationReport, explain
from rlhf_cluster.simulation.search import first_failure, minimise

_SEEDS_A_TASK = 200


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m rlhf_cluster.simulation.soak", description=__doc__)
    parser.add_argument("seeds", type=int, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one a core)")
    given = parser.parse_args(arguments)
    started, done, struck = time.monotonic(), 0, Counter[str]()
    with ProcessPoolExecutor(given.jobs) as pool:
        for seeds, faults, failure in pool.map(_task, _tasks(given.first, given.seeds)):
            done += len(seeds)
            struck.update(faults)
            if failure is not None:
                pool.shutdown(cancel_futures=True)
                print(explain(minimise(failure)))
                return 1
            if done % (50 * _SEEDS_A_TASK) == 0:
                print(f"{done:,} seeds, {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    print(f"{done:,} seeds from {given.first}, no invariant broken; faults: {dict(struck.most_common())}")
    return 0


def _tasks(first: int, seeds: int) -> Iterator[range]:
    end = first + seeds
    return (range(start, min(start + _SEEDS_A_TASK, end)) for start in range(first, end, _SEEDS_A_TASK))


def _task(seeds: range) -> tuple[range, Counter[str], SimulationReport | None]:
    faults: Counter[str] = Counter()
    return seeds, faults, first_failure(seeds, faults=faults)


if __name__ == "__main__":
    sys.exit(main())
