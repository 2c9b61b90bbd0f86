"""``rlhf simulate``: predict a cluster, or replay a seed of the fault simulation.

    rlhf simulate configs/ppo_7b_cluster.yaml
    rlhf simulate CONFIG --cluster calibration.json --sweep rollout.workers=2,4,8 --sweep queue.max_staleness=0,1
    rlhf simulate --seed 1234 --trace

Registered in ``cli.py`` with ``app.command()(simulate)``.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from rlhf_cluster.config import Config
from rlhf_cluster.config_io import ConfigError, load_config
from rlhf_cluster.controller import RunFailed
from rlhf_cluster.metrics.calibration import read_calibration
from rlhf_cluster.simulation.cluster_model import ClusterModel
from rlhf_cluster.simulation.faults import FAULTS
from rlhf_cluster.simulation.plot import check_can_plot, write_plot
from rlhf_cluster.simulation.predict import Prediction
from rlhf_cluster.simulation.predict import simulate as predict
from rlhf_cluster.simulation.report import explain
from rlhf_cluster.simulation.search import run_seed
from rlhf_cluster.simulation.sweep import Point, describe, parse_sweep, sweep

_DEFAULT_STEPS = 50
# What fits a terminal; the plot and a single prediction show the rest.
_SWEEP_COLUMNS = ("steps/hour", "trained tokens/s", "rollout idle", "learner idle", "mean lag", "evicted tokens")


def simulate(
    config: Annotated[
        Path | None, typer.Argument(help="YAML config of the run to predict.", metavar="[CONFIG]")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="Overrides of the config, or with the prefix simulate. of the cluster description.",
            metavar="[KEY=VALUE]...",
        ),
    ] = None,
    presets: Annotated[list[str] | None, typer.Option("--preset", help="Recipe laid over CONFIG.")] = None,
    cluster: Annotated[
        Path | None,
        typer.Option(help="Speeds and lengths of the cluster (YAML), or the calibration.json of a run."),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Learner steps; run.steps, at most 50, by default.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of the prediction, or of the fault run.")] = None,
    sweeps: Annotated[
        list[str] | None, typer.Option("--sweep", help="key=a,b,c; may be given again.", metavar="KEY=A,B,C")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the plot of the sweep here (PNG).")] = None,
    trace: Annotated[bool, typer.Option("--trace", help="Without CONFIG: print every event of the fault run.")] = False,
    without: Annotated[str, typer.Option(help="Without CONFIG: fault kinds to switch off, separated by commas.")] = "",
) -> None:
    """Predict a run on a described cluster; without CONFIG, replay a seed of the fault simulation."""
    try:
        if config is None:
            _fault_run(seed, trace=trace, without=without)
        else:
            _predict(config, overrides or [], presets or [], cluster, steps, seed or 0, sweeps or [], out)
    except (ConfigError, ValueError) as error:
        _refuse(str(error))
    except ModuleNotFoundError as error:
        _refuse(f"--out needs the package {error.name}; install it, or leave --out out")


def _fault_run(seed: int | None, *, trace: bool, without: str) -> None:
    if seed is None:
        raise ConfigError("give a CONFIG to predict, or --seed N to replay a seed of the fault simulation")
    kinds = [kind for kind in without.split(",") if kind]
    unknown = sorted(set(kinds) - set(FAULTS))
    if unknown:
        raise ConfigError(f"--without {','.join(unknown)}: not among the fault kinds {', '.join(FAULTS)}")
    report = run_seed(seed, without=kinds)
    if report.violation is not None:
        typer.echo(explain(report, last=len(report.trace) if trace else 40))
        raise typer.Exit(1)
    if trace:
        typer.echo("\n".join(report.trace))
    faults = ", ".join(f"{kind} {count}" for kind, count in report.faults.items()) or "none"
    typer.echo(
        f"seed {seed}: every invariant held over {report.events} events, {report.steps} steps, {report.lives} lives "
        f"and {report.seconds:.1f} virtual seconds; faults: {faults}; digest {report.digest[:16]}"
    )


def _predict(
    path: Path,
    overrides: Sequence[str],
    presets: Sequence[str],
    cluster_file: Path | None,
    steps: int | None,
    seed: int,
    sweeps: Sequence[str],
    out: Path | None,
) -> None:
    axes = [parse_sweep(text) for text in sweeps]
    if out is not None and not axes:
        raise ConfigError("--out draws a sweep; add --sweep key=a,b,c")
    if out is not None:
        check_can_plot()
    overlay = read_calibration(cluster_file) if cluster_file else {}

    def load(own: Sequence[str]) -> Config:
        return load_config(path, own, presets)

    def described(more: Sequence[str]) -> tuple[Config, ClusterModel]:
        return describe(load, [*overrides, *more], overlay, str(cluster_file or ""))

    config, cluster = described(())
    steps = steps or min(config.run.steps, _DEFAULT_STEPS)
    console = Console()
    started = time.perf_counter()
    try:
        if axes:
            points = sweep(described, axes, steps=steps, seed=seed)
            console.print(sweep_table(points))
            if out is not None:
                write_plot(points, out)
                console.print(f"plot: {out}")
        else:
            console.print(
                comparison_table(predict(cluster, steps, seed=seed), predict_synchronous(cluster, steps, seed))
            )
    except RunFailed as error:
        typer.echo(f"error: this cluster cannot finish a run: {error}", err=True)
        raise typer.Exit(1) from None
    if not overlay:
        console.print(
            "Speeds and lengths are assumed from the device and the size of the policy; --cluster takes measured ones."
        )
    console.print(f"{steps} steps simulated in {time.perf_counter() - started:.1f} s")


def predict_synchronous(cluster: ClusterModel, steps: int, seed: int) -> Prediction | None:
    """The same run with max_staleness 0; None when it is synchronous already."""
    return predict(cluster.synchronous(), steps, seed=seed) if cluster.batch.max_staleness else None


def comparison_table(prediction: Prediction, synchronous: Prediction | None) -> Table:
    """The prediction beside that of synchronous training."""
    table = Table(title=f"{prediction.steps} learner steps", title_justify="left")
    table.add_column("")
    table.add_column(f"max_staleness {prediction.max_staleness}", justify="right")
    columns = [_rows(prediction)]
    if synchronous is not None:
        table.add_column("synchronous", justify="right")
        columns.append(_rows(synchronous))
    for name in columns[0]:
        table.add_row(name, *(column[name] for column in columns))
    if synchronous is not None:
        table.caption = f"asynchronous is {prediction.steps_per_hour / synchronous.steps_per_hour:.2f} times as fast"
        table.caption_justify = "left"
    return table


def sweep_table(points: Sequence[Point]) -> Table:
    """One row a point of the sweep."""
    table = Table(title=f"{points[0].prediction.steps} learner steps", title_justify="left")
    for key in points[0].settings:
        table.add_column(key.rpartition(".")[2], justify="right")
    for name in _SWEEP_COLUMNS:
        table.add_column(name, justify="right")
    for point in points:
        row = _rows(point.prediction)
        table.add_row(*point.settings.values(), *(row[name] for name in _SWEEP_COLUMNS))
    return table


def _rows(prediction: Prediction) -> dict[str, str]:
    tokens = sum(prediction.lag_tokens.values())
    lags = " ".join(f"{lag}:{count / tokens:.0%}" for lag, count in prediction.lag_tokens.items())
    return {
        "steps/hour": f"{prediction.steps_per_hour:,.1f}",
        "trained tokens/s": f"{prediction.tokens_per_s:,.0f}",
        "generated tokens/s": f"{prediction.generated_tokens_per_s:,.0f}",
        **{f"{stage} idle": f"{share:.0%}" for stage, share in prediction.idle.items()},
        "engines paused": f"{prediction.paused:.1%}",
        "lag (tokens)": lags,
        "mean lag": f"{prediction.mean_lag:.2f}",
        "evicted tokens": f"{prediction.evicted_share:.1%}",
        "length bias": f"{prediction.length_bias:+.1%}",
    }


def _refuse(message: str) -> NoReturn:
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(2)
