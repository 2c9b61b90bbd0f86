"""What became of one seed of the fault simulation, and how a person reads it."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlhf_cluster.simulation.faults import World


@dataclass(frozen=True, slots=True)
class SimulationReport:
    """What became of one seed. ``violation`` is None when every invariant held."""

    seed: int
    violation: str | None
    rule: str | None
    """The invariant that was broken."""
    steps: int
    lives: int
    seconds: float
    """Virtual seconds."""
    events: int
    """Events of the queue, each followed by a check of every invariant."""
    faults: dict[str, int]
    lag_tokens: dict[int, int]
    digest: str
    world: World
    without: tuple[str, ...]
    trace: tuple[str, ...] = field(repr=False)

    @property
    def ok(self) -> bool:
        return self.violation is None

    def replay(self) -> str:
        """The command that runs this seed again and prints every event."""
        without = f" --without {','.join(self.without)}" if self.without else ""
        return f"rlhf simulate --seed {self.seed} --trace{without}"


def explain(report: SimulationReport, last: int = 40) -> str:
    """What a person needs to see of a failing run: the replay command, the world, and the trace that matters."""
    shown = report.trace[-last:]
    hidden = len(report.trace) - len(shown)
    head = [
        f"seed {report.seed}: {report.violation}",
        f"replay: {report.replay()}",
        f"world: {report.world}",
        f"faults: {report.faults}",
    ]
    return "\n".join([*head, *([f"... {hidden} earlier events"] if hidden else []), *shown])
