"""The command line: ``rlhf ...`` and ``python -m rlhf_cluster ...``.

Exit codes: 0 done; 2 bad config or data, before Ray starts; 1 failure while running, naming the first cause; 130/143
stopped by SIGINT/SIGTERM with the state saved.
"""

from __future__ import annotations

import logging
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from rlhf_cluster.config_io import Composition, ConfigError, compose_config, dump_config
from rlhf_cluster.config_summary import config_warnings, derived_table
from rlhf_cluster.ending import guard
from rlhf_cluster.planner.command import plan
from rlhf_cluster.presets import load_preset, preset_names, presets_folder
from rlhf_cluster.simulation.command import simulate

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Align language models with an actor/learner RLHF system on Ray.",
)

ConfigArgument = Annotated[Path, typer.Argument(help="YAML config, e.g. configs/demo_smollm2.yaml.", metavar="CONFIG")]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(help="Overrides, e.g. learner.policy_lr=1e-6 run.steps=10.", metavar="[KEY=VALUE]..."),
]
PresetsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--preset",
        help="Recipe laid over CONFIG before the overrides; may be given again. `rlhf presets` lists them.",
        metavar="NAME",
    ),
]


class Resume(StrEnum):
    auto = "auto"
    required = "required"
    never = "never"


@app.command()
def train(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    presets: PresetsOption = None,
    resume: Annotated[
        Resume,
        typer.Option(help="auto: continue when the run folder has a checkpoint; required: refuse to start fresh."),
    ] = Resume.auto,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print how the config is composed and what it comes to; exit.")
    ] = False,
) -> None:
    """Train a policy asynchronously by PPO, GRPO, RLOO and the like."""
    composed = _load(config, overrides, presets)
    resolved = composed.config
    for warning in config_warnings(resolved):
        typer.echo(f"warning: {warning}", err=True)
    if dry_run:
        _print_dry_run(composed)
        return
    from rlhf_cluster import launch

    _exit(guard(lambda: launch.train(resolved, resume=resume.value)))


@app.command("reward-model")
def reward_model(
    base: Annotated[Path, typer.Argument(help="Hugging Face folder of the model whose features the head reads.")],
    pairs: Annotated[Path, typer.Argument(help="JSONL of preference pairs: prompt, chosen, rejected.")],
    out: Annotated[Path, typer.Argument(help="Folder to write the reward model to.")],
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    attention: Annotated[str, typer.Option(help="eager, sdpa or flash_attention_2.")] = "sdpa",
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 2,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the folds of the held-out accuracy.")] = 0,
) -> None:
    """Fit a scalar reward head on frozen features of BASE to preference pairs."""
    from rlhf_cluster import launch

    _exit(
        guard(
            lambda: launch.fit_reward_model(
                base, pairs, out, dtype=dtype, attention=attention, threads=threads, seed=seed
            )
        )
    )


@app.command("eval")
def evaluate(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    presets: PresetsOption = None,
    policy: Annotated[Path | None, typer.Option(help="Model folder to evaluate instead of model.policy.")] = None,
) -> None:
    """Evaluate a policy on the held-out prompts of CONFIG."""
    resolved = _load(config, overrides, presets).config
    from rlhf_cluster import launch

    _exit(guard(lambda: launch.evaluate_folder(resolved, policy)))


@app.command()
def submit(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    presets: PresetsOption = None,
    address: Annotated[str, typer.Option(help="Address of the cluster's job server.")] = "http://127.0.0.1:8265",
    follow: Annotated[bool, typer.Option(help="Stay and print the job's log.")] = True,
) -> None:
    """Check CONFIG here, then run it on a cluster with `ray job submit`."""
    _load(config, overrides, presets)
    from rlhf_cluster import submit as submission

    _exit(
        guard(
            lambda: submission.submit_job(config, overrides or [], presets or [], address=address, follow=follow),
        )
    )


@app.command("presets")
def list_presets() -> None:
    """List the recipes that --preset takes."""
    names = preset_names()
    if not names:
        typer.echo(f"error: no presets in {presets_folder()}; run inside a checkout", err=True)
        raise typer.Exit(2)
    width = max(map(len, names))
    for name in names:
        typer.echo(f"{name:<{width}}  {load_preset(name).files[-1].about}")


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the models and the run.")] = Path("runs/demo"),
    overrides: Annotated[list[str] | None, typer.Argument(help="Overrides of configs/demo_smollm2.yaml.")] = None,
) -> None:
    """Align SmolLM2-135M-Instruct on this machine: pairs, reward model, PPO, held-out evaluation."""
    from rlhf_cluster.demo import main as demo_main

    _exit(guard(lambda: demo_main.run(out, overrides or [])))


@app.command()
def scale(
    run: Annotated[Path, typer.Argument(help="Run folder of a run in progress, e.g. runs/demo/ppo.")],
    target: Annotated[str, typer.Argument(metavar="workers=N", help="How many rollout workers it shall have.")],
    timeout: Annotated[float, typer.Option(min=1, help="Seconds to wait for the answer.")] = 900.0,
) -> None:
    """Change the number of rollout workers of a run in progress."""
    key, _, count = target.partition("=")
    if key != "workers" or not count.isdecimal() or int(count) < 1:
        typer.echo(f"error: {target!r}: write workers=N with N of at least 1", err=True)
        raise typer.Exit(2)
    from rlhf_cluster.control import ControlRefused, ask

    try:
        typer.echo(ask(run, "scale", {"workers": int(count)}, timeout_s=timeout))
    except (ControlRefused, TimeoutError) as refused:
        typer.echo(f"error: {refused}", err=True)
        raise typer.Exit(1) from None


app.command()(simulate)
app.command()(plan)


def main() -> None:
    """Entry point of the console script."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    app()


def _load(path: Path, overrides: list[str] | None, presets: list[str] | None) -> Composition:
    try:
        return compose_config(path, overrides or [], presets or [])
    except ConfigError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None


def _print_dry_run(composed: Composition) -> None:
    config = composed.config
    for layer in composed.layers:
        typer.echo(f"# {layer.source}")
        for change in layer.changes:
            typer.echo(f"#   {change}")
    typer.echo(dump_config(config))
    table = Table(title="What this comes to", title_justify="left")
    table.add_column("quantity")
    table.add_column("value", justify="right")
    for name, value in derived_table(config).items():
        table.add_row(name.replace("_", " "), f"{value:,}")
    Console().print(table)


def _exit(code: int) -> NoReturn:
    raise typer.Exit(code)
