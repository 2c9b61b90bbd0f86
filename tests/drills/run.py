"""Many drills: ``python -m tests.drills.run 500 [--first-seed N] [--jobs N]``. Exit code 1 when one failed."""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.drills.drill import Report, forks, run
from tests.drills.plan import Plan, draw

JOBS = 2
_CPUS_A_DRILL = 8


@contextlib.contextmanager
def cluster(jobs: int) -> Iterator[str]:
    """A Ray cluster for ``jobs`` drills at once; gives its address."""
    import ray

    ray.init(
        "local", num_cpus=jobs * _CPUS_A_DRILL, include_dashboard=False, log_to_driver=False, configure_logging=False
    )
    try:
        yield ray.get_runtime_context().gcs_address
    finally:
        ray.shutdown()


def run_all(
    plans: Sequence[Plan], folder: Path, *, jobs: int = JOBS, on_report: Callable[[Report], None] = lambda report: None
) -> dict[int, Report]:
    """Seed -> report of every plan; the folders of those that failed are kept under ``folder``."""
    # The longest ones first, so that none of them runs alone at the end.
    ordered = sorted(plans, key=lambda plan: plan.victim != "driver")
    forks()
    with cluster(jobs) as address, ThreadPoolExecutor(jobs) as pool:

        def one(plan: Plan) -> Report:
            report = run(plan, folder / f"seed_{plan.seed}", address=address)
            on_report(report)
            return report

        return {report.plan.seed: report for report in pool.map(one, ordered)}


def recovery(reports: Sequence[Report]) -> list[str]:
    """Median and longest seconds from the kill until the part served again, a line a part."""
    lines = []
    for part in ("rollout_worker", "reward_scorer", "reference_scorer", "learner_rank", "driver"):
        of_part = [report for report in reports if report.plan.victim.startswith(part)]
        for name, values in (
            ("noticed", [report.noticed_s for report in of_part]),
            ("recovered", [report.recovered_s for report in of_part]),
            ("gone", [report.gone_s for report in of_part]),
        ):
            known = [value for value in values if value is not None]
            if known:
                lines.append(
                    f"{part.replace('_', ' '):17} {name:10} median {statistics.median(known):6.2f} s, longest "
                    f"{max(known):6.2f} s of {len(known)}"
                )
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int, help="how many seeds")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=JOBS, help="drills at once")
    parser.add_argument("--folder", type=Path, help="where folders of failed drills stay; default: a new one")
    given = parser.parse_args(arguments)
    folder = given.folder or Path(tempfile.mkdtemp(prefix="rlhf-drills-"))
    started, done = time.monotonic(), 0

    def tell(report: Report) -> None:
        nonlocal done
        done += 1
        print(f"[{done}/{given.count}, {time.monotonic() - started:.0f} s] {report}", flush=True)

    plans = [draw(seed) for seed in range(given.first_seed, given.first_seed + given.count)]
    reports = run_all(plans, folder, jobs=given.jobs, on_report=tell)
    print("\n".join(recovery(list(reports.values()))))
    failed = sorted(seed for seed, report in reports.items() if report.failures)
    print(f"{len(failed)} of {len(reports)} drills failed{': seeds ' + str(failed) if failed else ''}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
