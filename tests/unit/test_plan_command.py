"""`rlhf plan`: what it prints, its exit codes, and that it loads nothing heavy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from rlhf_cluster.planner.command import plan
from tests.unit.test_plan_memory import LLAMA_8B, SMOLLM2, folder

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "ray", "vllm", "transformers", "deepspeed")


@pytest.fixture
def models(tmp_path: Path) -> list[str]:
    policy = folder(tmp_path / "smollm2", SMOLLM2)
    return [f"model.policy={policy}", f"model.reward={policy}"]


def run(*arguments: str) -> tuple[int, str]:
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(plan)
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.output


def test_a_plan_that_fits_ends_with_0_and_says_what_it_assumes(models: list[str]) -> None:
    code, output = run("configs/demo_smollm2.yaml", *models, "--memory-gib", "16")
    assert code == 0
    assert "Everything fits." in output
    assert "of 16.0 GiB (--memory-gib)" in output
    assert "Speeds and lengths are assumed" in output
    # 0.4 GiB of 23,040 bytes a token; 192 tokens a sequence.
    assert "18,641 tokens, 97.1 sequences" in output
    assert "Keep 1:1 workers to ranks" in output


def test_a_plan_that_does_not_fit_ends_with_1_and_says_what_to_change(tmp_path: Path) -> None:
    llama = folder(tmp_path / "llama", LLAMA_8B)
    code, output = run(
        "configs/ppo_7b_single_node.yaml", f"model.policy={llama}", f"model.reward={llama}", "--memory-gib", "60"
    )
    assert code == 1
    assert "GPU of a learner rank: 77.2 GiB of 60.0 GiB" in output
    assert "Change, in this order:" in output
    assert "learner.ranks=8" in output


def test_a_model_that_is_not_here_is_refused_with_2(tmp_path: Path) -> None:
    code, output = run("configs/ppo_7b_cluster.yaml")
    assert code == 2
    assert "model.policy: /shared/models/policy-7b-sft has no config.json here" in output


def test_a_broken_calibration_is_refused_with_2_by_its_key(models: list[str], tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    file.write_text(json.dumps({"measured": {}, "learner": {"tokens_per_s": -1, "fixed_s": 0}}))
    code, output = run("configs/demo_smollm2.yaml", *models, "--calibration", str(file))
    assert code == 2
    assert "learner.tokens_per_s" in output


def test_measured_speeds_replace_the_assumed_ones(models: list[str], tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    # A step of 32 x (20 + 30) tokens takes 1,600 s, generating them a few seconds.
    file.write_text(
        "learner: {tokens_per_s: 1}\nbatch: {prompt_tokens: 30}\nlengths: {kind: constant, tokens: 20}\n"
        "rollout: {tokens_per_s: 1000, tokens_per_s_alone: 1000}\n"
    )
    code, output = run(
        "configs/demo_smollm2.yaml", *models, "--memory-gib", "16", "--calibration", str(file), "queue.max_staleness=2"
    )
    assert code == 0
    assert "Speeds and lengths are assumed" not in output
    # Asynchronous training hides next to nothing, so synchronous training is as fast and never stale.
    assert "Recommended: queue.max_staleness=0" in output


def test_a_cluster_that_cannot_keep_its_deadlines_gets_no_recommendation(models: list[str], tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("rollout: {tokens_per_s: 1, tokens_per_s_alone: 1}\nlengths: {kind: constant, tokens: 50}\n")
    deadlines = ("rollout.timeout_s=1", "queue.group_deadline_s=5", "queue.groups_per_batch=1")
    minibatch = ("learner.minibatches=1", "rollout.engine.max_num_seqs=2")
    code, output = run(
        "configs/demo_smollm2.yaml", *models, *deadlines, *minibatch, "--memory-gib", "16", "--calibration", str(file)
    )
    assert code == 0
    assert "As configured a run fails:" in output
    assert "So does every other setting" in output
    assert "Recommended" not in output


def test_planning_loads_no_heavy_library() -> None:
    modules = [f"rlhf_cluster.planner.{path.stem}" for path in (ROOT / "rlhf_cluster" / "planner").glob("[!_]*.py")]
    modules += [f"rlhf_cluster.metrics.{name}" for name in ("calibration", "calibrating_recorder", "speed_fits")]
    assert len(modules) == 10
    probe = f"import sys, {', '.join(modules)}; print(*sorted(set({HEAVY!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr
