"""Fault runs in which every checkpoint lets the queue forget what lies below its frontier."""

from __future__ import annotations

import json

from rlhf_cluster.simulation.fault_run import FaultRun

SEEDS = range(120)


class ForgettingRun(FaultRun):
    """As a driver does that keeps one set: when a checkpoint is durable, what it counts as consumed is over."""

    forgotten = 0

    async def _after_step(self, step: int) -> None:
        before = self._saved
        await super()._after_step(step)
        if self._saved is not before:
            self.forget()

    def forget(self) -> None:
        assert self._saved is not None and self.queue is not None
        frontier, cursor = json.loads(self._saved.state)["cursor"]["frontier"], self.cursor
        self.forgotten += self.queue.forget(lambda group_id: cursor.passed(group_id, frontier))


def test_forgetting_changes_no_event_of_any_run_with_faults() -> None:
    forgotten = failovers = 0
    for seed in SEEDS:
        run = ForgettingRun(seed)
        report = run.run()
        assert report.ok, report.violation
        assert report.digest == FaultRun(seed).run().digest
        forgotten += run.forgotten
        failovers += report.lives > 1 and run.forgotten > 0
    assert forgotten > 500
    assert failovers > 10, "runs that went back to a checkpoint after forgetting"


class TooEager(ForgettingRun):
    """Forgets what is consumed now, although the run may go back to a checkpoint that does not know it."""

    async def _after_step(self, step: int) -> None:
        await super()._after_step(step)
        assert self.queue is not None
        frontier, cursor = self.cursor.frontier, self.cursor
        self.queue.forget(lambda group_id: cursor.passed(group_id, frontier))


def test_forgetting_what_a_checkpoint_may_issue_again_is_found_out() -> None:
    violations = (TooEager(seed).run().violation for seed in SEEDS)
    found = next(violation for violation in violations if violation is not None)
    assert "is over: forget() dropped its attempts" in found
