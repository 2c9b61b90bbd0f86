"""``rlhf simulate`` as a user meets it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from rlhf_cluster.simulation.command import simulate
from rlhf_cluster.simulation.fault_run import ExperienceQueue

ROOT = Path(__file__).resolve().parents[2]
DEMO = str(ROOT / "configs" / "demo_smollm2.yaml")


@pytest.fixture
def app() -> typer.Typer:
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(simulate)
    return app


def run(app: typer.Typer, *arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "150"})
    return result.exit_code, result.output


def test_a_prediction_stands_beside_the_synchronous_one(app: typer.Typer) -> None:
    code, text = run(app, DEMO, "--steps", "6")
    assert code == 0
    for expected in ("6 learner steps", "max_staleness 1", "synchronous", "steps/hour", "learner idle", "length bias"):
        assert expected in text
    assert "asynchronous is 1." in text
    assert "assumed from the device" in text


def test_a_measured_cluster_is_used_without_a_warning(app: typer.Typer, tmp_path: Path) -> None:
    """A learner of 1 token a second sets the pace: 32 answers of 10 tokens and their prompts of 32."""
    file = tmp_path / "calibration.json"
    file.write_text('{"learner": {"tokens_per_s": 1.0}, "lengths": {"kind": "constant", "tokens": 10}}')
    code, text = run(app, DEMO, "--steps", "4", "--cluster", str(file))
    assert code == 0
    assert "assumed" not in text
    rate = float(text.split("steps/hour")[1].split("│")[1])
    assert rate == pytest.approx(3600 / (32 * 42), rel=0.1)


def test_a_sweep_prints_one_row_a_combination(app: typer.Typer) -> None:
    code, text = run(
        app, DEMO, "--steps", "3", "--sweep", "rollout.workers=1,2,3", "--sweep", "queue.max_staleness=0,1"
    )
    assert code == 0
    assert len([line for line in text.splitlines() if line.startswith("│")]) == 6


def test_a_sweep_writes_its_plot(app: typer.Typer, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "plot.png"
    axes = ("--sweep", "rollout.workers=1,2", "--sweep", "queue.max_staleness=0,1")
    code, text = run(app, DEMO, "--steps", "3", *axes, "--out", str(out))
    assert code == 0, text
    assert out.read_bytes().startswith(b"\x89PNG")
    assert out.stat().st_size > 10_000


def test_without_matplotlib_a_plot_is_refused_with_the_cure(
    app: typer.Typer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("rlhf_cluster.simulation.command.sweep", lambda *given, **more: pytest.fail("simulated first"))
    axes = ("--sweep", "rollout.workers=1")
    code, text = run(app, DEMO, "--steps", "1", *axes, "--out", str(tmp_path / "plot.png"))
    assert code == 2
    assert "--out needs the package matplotlib" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a CONFIG to predict, or --seed N"),
        ([DEMO, "rollout.wokers=2"], "rollout.wokers"),
        ([DEMO, "simulate.learner.tokens=2"], "learner.tokens"),
        ([DEMO, "--sweep", "rollout.workers"], "write key=a,b,c"),
        ([DEMO, "--out", "p.png"], "add --sweep"),
        (["--seed", "1", "--without", "rain"], "rain: not among the fault kinds"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_runs(app: typer.Typer, arguments: list[str], message: str) -> None:
    code, text = run(app, *arguments)
    assert code == 2
    assert message in text


def test_a_seed_is_replayed_with_every_event(app: typer.Typer) -> None:
    code, text = run(app, "--seed", "5", "--trace")
    assert code == 0
    assert "life 1 begins" in text
    assert "seed 5: every invariant held" in text
    assert run(app, "--seed", "5", "--trace")[1] == text


def test_a_seed_that_breaks_an_invariant_exits_1_and_says_which(
    app: typer.Typer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ExperienceQueue, "can_admit", lambda self, version: 0 <= version <= self.learner_version)
    code, text = run(app, "--seed", "1")
    assert code == 1
    assert "seed 1: outstanding: 7 groups are outstanding, the bound is 6" in text
    assert "replay: rlhf simulate --seed 1 --trace" in text
