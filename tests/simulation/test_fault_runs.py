"""The search for bad schedules over seeds, and how a failing seed is reported."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rlhf_cluster.simulation.faults import FAULTS
from rlhf_cluster.simulation.report import SimulationReport, explain
from rlhf_cluster.simulation.search import first_failure, minimise, run_seed
from rlhf_cluster.simulation.soak import main as soak
from tests.simulation.queue_mutants import MUTANTS, NoAttemptCheck

ROOT = Path(__file__).resolve().parents[2]
SEEDS = 2000


def search(seeds: range) -> tuple[SimulationReport | None, Counter[str], float]:
    """The first failure, the faults that struck, and the CPU seconds."""
    struck: Counter[str] = Counter()
    started = time.process_time()
    return first_failure(seeds, struck), struck, time.process_time() - started


def test_every_invariant_holds_on_2000_seeded_fault_runs() -> None:
    struck: Counter[str] = Counter()
    cpu_s = 0.0
    with ProcessPoolExecutor(2) as pool:
        for failure, faults, seconds in pool.map(search, [range(n, n + 100) for n in range(0, SEEDS, 100)]):
            if failure is not None:
                pool.shutdown(cancel_futures=True)
                pytest.fail(explain(minimise(failure)))
            struck.update(faults)
            cpu_s += seconds
    assert cpu_s < 90
    rare = {kind: struck[kind] for kind in FAULTS if struck[kind] < 20}
    assert not rare, "a fault that hardly strikes proves nothing"


# The invariants that may notice that a rule is missing; anything else would be an accident of the simulation.
NOTICED_BY = {
    "admission": {"outstanding", "feasible"},
    "due ordering": {"batch"},
    "waiting": {"feasible"},
    "attempt check": {"attempts"},
    "capacity freeing": {"deadlock", "error"},
    "monotonic check": {"versions"},
}


@pytest.mark.parametrize("rule", MUTANTS)
def test_without_any_one_rule_a_counter_example_is_found(rule: str, record_property: Any) -> None:
    failure = first_failure(range(SEEDS), queue_class=MUTANTS[rule])
    assert failure is not None, f"without {rule}: no counter-example in {SEEDS} seeds"
    print(f"without {rule}: counter-example after {failure.seed + 1} seeds: {failure.violation}")
    record_property("seeds", failure.seed + 1)
    assert failure.rule in NOTICED_BY[rule]
    assert run_seed(failure.seed).ok, "the same seed passes with the rule in place"


def test_a_seed_gives_the_same_run_to_the_bit_also_in_another_process() -> None:
    seeds = (0, 7, 11)
    here = [run_seed(seed).digest for seed in seeds]
    assert here == [run_seed(seed).digest for seed in seeds]
    assert len(set(here)) == len(seeds)
    program = f"from rlhf_cluster.simulation.search import run_seed\nfor s in {seeds}: print(run_seed(s).digest)"
    there = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={"PYTHONHASHSEED": "99"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert there.stdout.split() == here


def test_a_failing_run_is_made_smaller_and_names_its_replay() -> None:
    failure = first_failure(range(SEEDS), queue_class=NoAttemptCheck)
    assert failure is not None
    smallest = minimise(failure, queue_class=NoAttemptCheck)
    assert smallest.rule == failure.rule
    assert not set(smallest.faults) & set(smallest.without)
    assert "late_score" in smallest.faults or "repeated_put" in smallest.faults or "late_reply" in smallest.faults
    assert len(smallest.faults) <= 2
    text = explain(smallest)
    assert f"rlhf simulate --seed {failure.seed} --trace --without " in text
    assert text.splitlines()[-1] == smallest.trace[-1]
    assert "VIOLATION attempts" in smallest.trace[-1]
    again = run_seed(smallest.seed, without=smallest.without, queue_class=NoAttemptCheck)
    assert again.trace == smallest.trace


def test_soak_reports_how_many_seeds_passed(capsys: pytest.CaptureFixture[str]) -> None:
    assert soak(["12", "--first", "30", "--jobs", "1"]) == 0
    assert "12 seeds from 30, no invariant broken" in capsys.readouterr().out


def test_soak_fails_with_the_seed_that_broke_an_invariant(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Worker processes are forked after this, so they see the mutant too.
    monkeypatch.setattr("rlhf_cluster.simulation.fault_run.ExperienceQueue.can_admit", MUTANTS["admission"].can_admit)
    assert soak(["5", "--jobs", "1"]) == 1
    assert "rlhf simulate --seed 1 --trace" in capsys.readouterr().out
