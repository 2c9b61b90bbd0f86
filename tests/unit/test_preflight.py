"""What is refused before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhf_cluster.checkpoint_layout import checkpoint_layout
from rlhf_cluster.config import Config
from rlhf_cluster.config_io import load_config
from rlhf_cluster.diagnosis.preflight import PreflightError, check_learner_layout, check_model_folders, check_run_folder
from rlhf_cluster.run_folder import RunFolder


def model_folder(path: Path, **config: int) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({"vocab_size": 10, "max_position_embeddings": 512, **config}))
    (path / "model.safetensors").write_bytes(b"")
    return path


def config_for(tmp_path: Path, *overrides: str) -> Config:
    models = [f"model.policy={tmp_path / 'policy'}", f"model.reward={tmp_path / 'reward'}", f"run.dir={tmp_path}"]
    return load_config(Path("configs/tiny_test.yaml"), [*models, *overrides])


def test_good_folders_pass(tmp_path: Path) -> None:
    model_folder(tmp_path / "policy")
    model_folder(tmp_path / "reward")
    check_model_folders(config_for(tmp_path))


def test_a_missing_model_folder_is_named_with_its_key(tmp_path: Path) -> None:
    model_folder(tmp_path / "policy")
    with pytest.raises(PreflightError, match=r"model\.reward: no folder .*reward; give the path"):
        check_model_folders(config_for(tmp_path))


@pytest.mark.parametrize("name", ["lr=[1]", "policy*", "policy?"])
def test_a_policy_in_a_folder_that_vllm_takes_for_a_pattern_is_refused(tmp_path: Path, name: str) -> None:
    model_folder(tmp_path / "reward")
    with pytest.raises(PreflightError, match=r"model\.policy: vLLM takes .* for a pattern"):
        check_model_folders(config_for(tmp_path, f"model.policy={model_folder(tmp_path / name)}"))


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_folder_without_config_or_weights_is_refused(tmp_path: Path, missing: str) -> None:
    model_folder(tmp_path / "reward")
    (model_folder(tmp_path / "policy") / missing).unlink()
    with pytest.raises(PreflightError, match=r"model\.policy: .*(config\.json|safetensors)"):
        check_model_folders(config_for(tmp_path))


def test_a_reference_with_another_vocabulary_is_refused(tmp_path: Path) -> None:
    for name in ("policy", "reward"):
        model_folder(tmp_path / name)
    other = model_folder(tmp_path / "other", vocab_size=11)
    with pytest.raises(PreflightError, match=r"model\.reference has a vocabulary of 11 and model\.policy of 10"):
        check_model_folders(config_for(tmp_path, f"model.reference={other}"))


def test_sequences_longer_than_the_policy_reads_are_refused(tmp_path: Path) -> None:
    for name in ("policy", "reward"):
        model_folder(tmp_path / name, max_position_embeddings=100)
    with pytest.raises(PreflightError, match=r"is 280 tokens, but model\.policy .* reads 100"):
        check_model_folders(config_for(tmp_path))


def test_resume_and_the_run_folder_must_go_together(tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match=r"--resume required.*no complete checkpoint"):
        check_run_folder(tmp_path, resume="required", has_checkpoint=False)
    with pytest.raises(PreflightError, match=r"--resume never.*already holds a checkpoint"):
        check_run_folder(tmp_path, resume="never", has_checkpoint=True)
    check_run_folder(tmp_path, resume="auto", has_checkpoint=False)
    check_run_folder(tmp_path, resume="required", has_checkpoint=True)


def test_a_fresh_run_moves_older_metrics_aside_and_writes_the_resolved_config(tmp_path: Path) -> None:
    config = config_for(tmp_path)
    folder = RunFolder.open(config, resume="auto")
    folder.begin(config)
    assert load_config(folder.path / "config.yaml") == config
    folder.metrics.write_text("old\n")
    RunFolder.open(config, resume="auto").begin(config)
    assert not folder.metrics.exists()
    assert folder.metrics.with_name("metrics.jsonl.1").read_text() == "old\n"


def test_evaluations_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    folder = RunFolder.open(config_for(tmp_path), resume="auto")
    path = folder.write_evaluation("before", {"answers": []})
    assert path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("planned", "overrides", "warned"),
    [
        (30, ["learner.policy_decay=cosine"], "run.steps is 300, the checkpoint was saved under 30"),
        (30, ["learner.critic_decay=linear"], "the decay (learner.critic_decay) is spread anew"),
        (30, [], None),
        (300, ["learner.policy_decay=cosine"], None),
        (None, ["learner.policy_decay=cosine"], None),
    ],
)
def test_other_run_steps_are_warned_of_when_a_learning_rate_decays_over_them(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    planned: int | None,
    overrides: list[str],
    warned: str | None,
) -> None:
    config = config_for(tmp_path, "run.steps=300", *overrides)
    state = {
        "layout": checkpoint_layout(config.model, config.algorithm, config.learner),
        "update": {} if planned is None else {"planned_steps": planned},
    }
    (tmp_path / "learner.json").write_text(json.dumps(state))
    check_learner_layout(tmp_path, config)
    assert warned in caplog.text if warned else caplog.text == ""


def test_a_checkpoint_of_another_layout_is_refused_by_key_before_anything_starts(tmp_path: Path) -> None:
    layout = {"learner.ranks": 2, "learner.zero_stage": 1, "model.dtype": "float32"}
    (tmp_path / "learner.json").write_text(json.dumps({"layout": layout}))
    check_learner_layout(tmp_path, config_for(tmp_path))
    with pytest.raises(PreflightError, match=r"learner\.ranks is 1 but the checkpoint was saved with 2"):
        check_learner_layout(tmp_path, config_for(tmp_path, "learner.ranks=1"))
    with pytest.raises(PreflightError, match=r"learner\.lora is \{'rank': 8.*checkpoint was saved with None"):
        check_learner_layout(tmp_path, config_for(tmp_path, "learner.lora.rank=8"))
