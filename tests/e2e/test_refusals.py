"""Bad input: one readable message that names the fix, exit code 2, before anything heavy starts."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlhf_cluster import cli
from tests.driver_process import Driver
from tests.e2e.conftest import tiny_overrides


def refused(tiny_models: Path, tmp_path: Path, *more: str) -> str:
    arguments = ("train", "configs/tiny_test.yaml", *tiny_overrides(tiny_models, tmp_path), *more)
    driver = Driver(tmp_path / "output.txt", command_line, arguments)
    assert driver.end(60) == 2, driver.output
    assert "Traceback" not in driver.output
    return driver.output


def command_line(report: Callable[[Any], None], arguments: Sequence[str]) -> int:
    sys.argv = ["rlhf", *arguments]
    cli.main()
    return 0


def test_an_unknown_key_names_the_nearest_valid_one(tiny_models: Path, tmp_path: Path) -> None:
    output = refused(tiny_models, tmp_path, "learner.learning_rte=1e-6")
    assert "learner.learning_rte: unknown key; did you mean learner.policy_lr?" in output


def test_a_missing_model_folder_is_named_with_its_key(tiny_models: Path, tmp_path: Path) -> None:
    output = refused(tiny_models, tmp_path, "model.reward=models/nowhere")
    assert "model.reward: no folder models/nowhere; give the path" in output


def test_an_empty_prompt_file_is_refused(tiny_models: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    output = refused(tiny_models, tmp_path, f"data.prompts={tmp_path / 'empty.jsonl'}")
    assert "empty.jsonl" in output
    assert "0 of 0 rows left" in output


def test_a_row_without_the_prompt_field_is_named_by_number(tiny_models: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "Say hello."}, {"question": "Say hello again."}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    output = refused(tiny_models, tmp_path, f"data.prompts={tmp_path / 'rows.jsonl'}")
    assert "row 2" in output
    assert "no field 'prompt'" in output


def test_a_prompt_over_the_limit_is_named_with_its_length_and_the_fix(tiny_models: Path, tmp_path: Path) -> None:
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": "word " * 200}) + "\n")
    output = refused(tiny_models, tmp_path, f"data.prompts={tmp_path / 'long.jsonl'}")
    assert "limit 256" in output
    assert "data.too_long" in output


@pytest.mark.timeout(120)
def test_more_gpus_than_there_are_is_refused_with_wanted_and_available(tiny_models: Path, tmp_path: Path) -> None:
    output = refused(tiny_models, tmp_path, "cluster.device=cuda", "rollout.engine.tensor_parallel=9")
    assert "GPUs" in output
    assert "rollout.engine.tensor_parallel" in output


def test_resume_required_on_an_empty_folder_is_refused(tiny_models: Path, tmp_path: Path) -> None:
    output = refused(tiny_models, tmp_path, "--resume", "required")
    assert "holds no complete checkpoint" in output
