"""Ctrl-C ends a run cleanly with its state saved, and `--resume` goes on from the saved step and version."""

from __future__ import annotations

import pytest

from tests.e2e.conftest import FinishedRun


@pytest.mark.timeout(500)
def test_an_interrupted_run_saves_its_last_step_exits_130_and_leaves_no_process(finished_run: FinishedRun) -> None:
    interrupted = finished_run.interrupted
    assert interrupted.exit_code == 130, finished_run.output
    assert interrupted.left_behind == []
    # One line a step, and the evaluation before the first.
    assert interrupted.rows == interrupted.step + 1 >= 4


def test_a_resumed_run_goes_on_from_the_saved_step_and_version(finished_run: FinishedRun) -> None:
    assert finished_run.exit_code == 0, finished_run.output
    steps = finished_run.steps
    assert f"resuming from step_{finished_run.interrupted.step:08d}" in finished_run.output
    assert [(row["step"], row["version"]) for row in finished_run.rows()] == [(n, n) for n in range(1, steps + 1)]
    last = finished_run.rows()[-1]
    assert last['rlhf_attempts_total{state="trained",reason="none"}'] == 4 * steps
    assert last['rlhf_optimizer_steps_total{model="policy"}'] == 2 * steps
    assert last['rlhf_worker_policy_version{worker="0"}'] >= steps - 1
