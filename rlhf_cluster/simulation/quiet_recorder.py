"""A recorder that records nothing: simulations count for themselves, and rows nobody reads cost most of the time."""

from __future__ import annotations

from typing import Any

from rlhf_cluster.metrics.recorder import MetricsRecorder
from rlhf_cluster.protocols import Clock


class QuietRecorder(MetricsRecorder):
    """Takes every event of the control loop; its state is empty."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(max_staleness=0, total_steps=0, clock=clock, sinks=())

    def rollouts_generated(self, *event: Any) -> None: ...

    def group_scored(self, *event: Any) -> None: ...

    def unscorable(self, *event: Any) -> None: ...

    def batch_consumed(self, *event: Any, **numbers: Any) -> None: ...

    def step_done(self, *event: Any, **numbers: Any) -> None: ...

    def weights_published(self, *event: Any) -> None: ...

    def workers(self, *event: Any) -> None: ...

    def queue_state(self, *event: Any) -> None: ...

    def close_step(self, *event: Any) -> dict[str, float]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {}
