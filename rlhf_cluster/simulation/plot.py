"""A sweep as a picture: one line a combination of the slower axes, the first axis along x."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from rlhf_cluster.simulation.predict import Prediction
from rlhf_cluster.simulation.sweep import Point

_PANELS: tuple[tuple[str, Callable[[Prediction], float]], ...] = (
    ("learner steps an hour", lambda prediction: prediction.steps_per_hour),
    ("mean lag (versions)", lambda prediction: prediction.mean_lag),
    ("workers idle (share)", lambda prediction: prediction.idle["rollout"]),
    ("learner idle (share)", lambda prediction: prediction.idle["learner"]),
)


def check_can_plot() -> None:
    """Raises ModuleNotFoundError when matplotlib is not installed: before a long sweep, not after it."""
    import matplotlib  # noqa: F401


def write_plot(points: Sequence[Point], path: Path) -> None:
    """Draw ``points`` into ``path`` (its suffix says the format).

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: there is nothing to draw.
    """
    if not points or not points[0].settings:
        raise ValueError("a plot needs --sweep: there is one prediction and no axis")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    axis, *others = points[0].settings
    lines: dict[str, list[Point]] = defaultdict(list)
    for point in points:
        lines[", ".join(f"{key}={point.settings[key]}" for key in others)].append(point)
    figure = Figure(figsize=(9, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    for place, (title, value) in zip(figure.subplots(2, 2).flat, _PANELS, strict=True):
        for label, line in lines.items():
            x, labels = _positions([point.settings[axis] for point in line])
            place.plot(x, [value(point.prediction) for point in line], marker="o", label=label or None)
            if labels:
                place.set_xticks(x, labels)
        place.set(title=title, xlabel=axis)
        place.set_ylim(bottom=0)
        place.grid(alpha=0.3)
        if others:
            place.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def _positions(values: Sequence[str]) -> tuple[list[float], list[str]]:
    """Numbers where they are numbers, else places in a row with the values as labels."""
    try:
        return [float(value) for value in values], []
    except ValueError:
        return [float(place) for place in range(len(values))], list(values)
