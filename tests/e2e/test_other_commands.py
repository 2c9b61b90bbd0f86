"""`rlhf eval`, `rlhf reward-model` and `--dry-run` as a user calls them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.conftest import rlhf, tiny_overrides


def test_dry_run_prints_the_resolved_config_and_starts_nothing(tmp_path: Path) -> None:
    result = rlhf("train", "configs/tiny_test.yaml", f"run.dir={tmp_path}", "learner.policy_lr=3e-6", "--dry-run")
    assert result.returncode == 0
    assert "policy_lr: 3.0e-06" in result.stdout
    assert "outstanding groups bound" in result.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(200)
def test_eval_scores_a_policy_folder_on_the_held_out_prompts(tiny_models: Path, tmp_path: Path) -> None:
    overrides = tiny_overrides(tiny_models, tmp_path)
    result = rlhf("eval", "configs/tiny_test.yaml", *overrides, "--policy", str(tiny_models / "policy"))
    assert result.returncode == 0, result.stdout + result.stderr
    line = next(line for line in result.stdout.splitlines() if line.startswith("evaluation "))
    values = dict(pair.rsplit(" ", 1) for pair in line.split(": ", 1)[1].split(", "))
    assert abs(float(values["kl_reference_k1"])) < 1e-3, "the policy is its own reference"
    assert float(values["response_length"]) > 0


@pytest.mark.timeout(120)
def test_a_reward_model_is_fitted_from_a_file_of_pairs(tiny_models: Path, tmp_path: Path) -> None:
    pairs = [
        {"id": f"{i}-{k}", "prompt": f"Question {i}?", "chosen": f"good {k}", "rejected": f"bad {k}!"}
        for i in range(12)
        for k in range(2)
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    arguments = [str(tiny_models / "policy"), str(tmp_path / "pairs.jsonl"), str(tmp_path / "reward")]
    result = rlhf("reward-model", *arguments, "--dtype", "float32", "--attention", "eager")
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads((tmp_path / "reward" / "pair_accuracy.json").read_text())
    assert report["held_out_accuracy"] > 0.9, "the last byte alone tells good from bad"

    (tmp_path / "pairs.jsonl").write_text(json.dumps({"prompt": "x", "chosen": "y"}) + "\n")
    refused = rlhf("reward-model", *arguments)
    assert refused.returncode == 2
    assert "no field 'rejected'" in refused.stdout
