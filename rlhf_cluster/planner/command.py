"""``rlhf plan``: the memory of every process, what does not fit, and what the simulation recommends.

    rlhf plan configs/demo_smollm2.yaml --memory-gib 12
    rlhf plan configs/ppo_7b_cluster.yaml --memory-gib 80 --calibration runs/ppo/calibration.json

Exit codes: 0 everything fits; 1 something does not; 2 refused, because the config, a model folder or the calibration
cannot be used. Registered in ``cli.py`` with ``app.command()(plan)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from rlhf_cluster.config import Config
from rlhf_cluster.config_io import ConfigError, load_config
from rlhf_cluster.metrics.calibration import read_calibration
from rlhf_cluster.planner.advice import Remedy, Shortage, changed, missing_bytes, remedy, shortages
from rlhf_cluster.planner.memory import COLUMNS, GIB, Ledger, plan_memory, read_shapes
from rlhf_cluster.planner.recommendation import Choice, Division, Recommendation, ratio, recommend
from rlhf_cluster.simulation.cluster_model import cluster_from_config

ASSUMED_GPU_GIB = 80.0
_HEADINGS = {"process": "base", "gradients": "grads", "optimizer": "optim.", "activations": "activ.", "KV cache": "KV"}
_MEMINFO = Path("/proc/meminfo")
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def plan(
    config: Annotated[Path, typer.Argument(help="YAML config, e.g. configs/demo_smollm2.yaml.", metavar="CONFIG")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Overrides, e.g. learner.zero_stage=3 learner.ranks=4.", metavar="[KEY=VALUE]..."),
    ] = None,
    presets: Annotated[list[str] | None, typer.Option("--preset", help="Recipe laid over CONFIG.")] = None,
    memory_gib: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            help="GiB of the host (cpu; this machine's by default) or of one GPU (cuda; 80 by default).",
        ),
    ] = None,
    calibration: Annotated[
        Path | None, typer.Option(help="calibration.json of a run, or speeds and lengths as YAML.")
    ] = None,
) -> None:
    """Say before anything starts what memory CONFIG needs, what does not fit, and which settings would suit better."""
    try:
        fits = _plan(load_config(config, overrides or [], presets or []), memory_gib, calibration)
    except ConfigError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    if not fits:
        raise typer.Exit(1)


def _plan(config: Config, memory_gib: float | None, calibration: Path | None) -> bool:
    console = Console()
    overlay = read_calibration(calibration) if calibration else {}
    cluster = cluster_from_config(config, overlay, source=str(calibration or ""))
    shapes = read_shapes(config)
    limit_gib, where = _limit(config, memory_gib)
    limit = limit_gib * GIB
    ledger = plan_memory(config, shapes, gpu_bytes=limit)
    short = shortages(config, ledger, limit)
    console.print(memory_table(ledger))
    for line in (*_summary(config, ledger, limit_gib, where), *_verdict(short, remedy(config, shapes, limit))):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    missing = missing_bytes(config, ledger, limit)

    def fits_as_well(division: Division) -> bool:
        other = changed(config, {"rollout.workers": division.workers, "learner.ranks": division.ranks})
        return other is not None and missing_bytes(other, plan_memory(other, shapes, gpu_bytes=limit), limit) <= missing

    recommended = recommend(config, cluster, allowed=fits_as_well)
    console.print(recommendation_table(recommended))
    for line in _recommended(config, recommended):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    if not overlay:
        console.print(
            "Speeds and lengths are assumed from the device and the size of the policy; --calibration takes those that "
            "a run measured.",
            soft_wrap=True,
        )
    return not short


def memory_table(ledger: Ledger) -> Table:
    """GiB of each process by what it goes to."""
    table = Table(title="Memory of each process, GiB", title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("process", no_wrap=True)
    table.add_column("on")
    for column in (*COLUMNS, "total"):
        table.add_column(_HEADINGS.get(column, column), justify="right", no_wrap=True)
    for process in ledger.processes:
        parts = [process.parts.get(column, 0.0) for column in COLUMNS]
        role = process.role if process.count == 1 else f"{process.count} x {process.role}"
        table.add_row(role, process.device, *map(_gib, parts), _gib(process.total))
    return table


def recommendation_table(recommended: Recommendation) -> Table:
    """Every setting that was simulated."""
    table = Table(title="Simulated settings of the same devices", title_justify="left", box=None)
    for name in ("workers", "ranks", "max_staleness", "steps/hour", "rollout idle", "learner idle", "mean lag"):
        table.add_column(name, justify="right", no_wrap=True)
    # One setting is in both lists.
    others = [choice for choice in recommended.bounds if not any(choice is other for other in recommended.divisions)]
    for choice in (*recommended.divisions, *others):
        table.add_row(*_cells(choice), style="bold" if choice is recommended.best else None)
    return table


def _cells(choice: Choice) -> tuple[str, ...]:
    counts = (str(choice.division.workers), str(choice.division.ranks), str(choice.max_staleness))
    prediction = choice.prediction
    if prediction is None:
        return (*counts, "fails", "", "", "")
    idle = prediction.idle
    return (
        *counts,
        f"{prediction.steps_per_hour:,.1f}",
        f"{idle['rollout']:.0%}",
        f"{idle['learner']:.0%}",
        f"{prediction.mean_lag:.2f}",
    )


def _summary(config: Config, ledger: Ledger, limit_gib: float, where: str) -> list[str]:
    kv = ledger.kv
    lines = []
    if config.cluster.device == "cpu":
        lines.append(
            f"All processes together, shared libraries once: {ledger.host_bytes / GIB:.1f} GiB of {limit_gib:.1f} GiB "
            f"({where})."
        )
    else:
        lines.append(f"Each GPU has {limit_gib:.1f} GiB ({where}).")
    lines.append(
        f"KV cache of an engine: {kv.tokens:,.0f} tokens, {kv.sequences:,.1f} sequences of the longest length "
        f"({config.max_model_len} tokens); rollout.engine.max_num_seqs is {kv.wanted}."
    )
    if 1 <= kv.sequences < kv.wanted:
        lines.append(
            "Fewer of the longest sequences fit than may run at once: vLLM then preempts some and computes them again."
        )
    return lines


def _verdict(short: Sequence[Shortage], cure: Remedy) -> list[str]:
    if not short:
        return ["Everything fits."]
    lines = ["Does not fit:", *(f"  {shortage}" for shortage in short)]
    if cure.changes:
        lines.append("Change, in this order:" if cure.fits else "What helps, but is not enough:")
        for change in cure.changes:
            lines.append(f"  {' '.join(change.overrides)}  saves {change.saved / GIB:.2f} GiB; {change.cost}")
    if not cure.fits:
        lines.append("No change of these settings makes it fit: take more or larger devices, or smaller models.")
    return lines


def _recommended(config: Config, recommended: Recommendation) -> list[str]:
    best, current = recommended.best, recommended.current
    fed = recommended.ranks_fed_by_a_worker
    overrides = [
        f"{key}={value}"
        for key, value, now in (
            ("rollout.workers", best.division.workers, config.rollout.workers),
            ("learner.ranks", best.division.ranks, config.learner.ranks),
            ("queue.max_staleness", best.max_staleness, config.queue.max_staleness),
        )
        if value != now
    ]
    lines = [f"One rollout worker keeps {fed:.2f} learner ranks busy, one rank {1 / fed:.2f} workers."]
    if current.prediction is None:
        lines.append(f"As configured a run fails: {current.failure}")
    if best.prediction is None:
        return [
            *lines,
            "So does every other setting that was tried: raise queue.group_deadline_s, or train less a batch.",
        ]
    if not overrides:
        return [*lines, f"Keep {ratio(best.division)} workers to ranks and max_staleness {best.max_staleness}."]
    times = f", {best.speed / current.speed:.2f} times as fast" if current.speed else ""
    return [
        *lines,
        f"Recommended: {' '.join(overrides)} ({ratio(best.division)} workers to ranks, max_staleness "
        f"{best.max_staleness}){times}.",
    ]


def _limit(config: Config, memory_gib: float | None) -> tuple[float, str]:
    """(GiB, where the number comes from)."""
    if memory_gib is not None:
        return memory_gib, "--memory-gib"
    if config.cluster.device == "cuda":
        return ASSUMED_GPU_GIB, "assumed; --memory-gib says another size"
    try:
        total = next(line for line in _MEMINFO.read_text().splitlines() if line.startswith("MemTotal:"))
    except OSError:
        raise ConfigError("this system does not tell its memory; give --memory-gib") from None
    here = int(total.split()[1]) * 1024
    # A container may be allowed less than the machine has.
    limit = _CGROUP_LIMIT.read_text().strip() if _CGROUP_LIMIT.is_file() else "max"
    return (min(here, int(limit)) if limit.isdigit() else here) / GIB, "this machine"


def _gib(size: float) -> str:
    gib = size / GIB
    return "-" if size == 0 else f"{gib:.2f}" if gib < 9.995 else f"{gib:.1f}"
