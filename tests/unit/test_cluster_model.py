"""The description of a cluster: defaults from a config, files over them, refusals that name the key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_cluster.config_io import ConfigError, load_config
from rlhf_cluster.metrics.calibration import read_calibration
from rlhf_cluster.simulation.cluster_model import cluster_from_config
from rlhf_cluster.simulation.sweep import describe, parse_sweep

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = ROOT / "configs" / "ppo_7b_cluster.yaml"


def config(*overrides: str) -> Any:
    return load_config(CLUSTER, overrides)


def test_counts_and_limits_are_those_of_the_config() -> None:
    model = cluster_from_config(config("rollout.workers=5", "rollout.samples_per_prompt=4"))
    assert (model.rollout.workers, model.rollout.sequences) == (5, 512)
    assert model.groups_per_worker == 128
    assert model.reward is not None
    assert (model.reward.replicas, model.reference.replicas) == (2, 2)
    assert model.batch.model_dump() == {
        "groups_per_batch": 512,
        "samples_per_prompt": 4,
        "max_staleness": 2,
        "group_deadline_s": 1800.0,
        "max_new_tokens": 1024,
        "prompt_tokens": 256,
    }
    assert model.synchronous().batch.max_staleness == 0


def test_assumed_speeds_scale_with_the_devices_and_the_weights() -> None:
    base = cluster_from_config(config())
    wide = cluster_from_config(config("rollout.engine.tensor_parallel=4", "learner.ranks=32"))
    assert wide.rollout.tokens_per_s == pytest.approx(2 * base.rollout.tokens_per_s)
    assert wide.learner.tokens_per_s == pytest.approx(2 * base.learner.tokens_per_s)
    # 7B parameters in bfloat16: 14e9 bytes.
    assert base.weights.gib == pytest.approx(14e9 / 2**30)
    # 16 ranks of 3.5e14 FLOP/s; policy and critic cost 6 + 2 FLOP a parameter and token each.
    assert base.learner.tokens_per_s == pytest.approx(16 * 3.5e14 / (7e9 * 2 * 8))


def test_the_size_of_the_weights_is_read_from_the_policy_folder_when_it_is_here(tmp_path: Path) -> None:
    for part in (1, 2):
        (tmp_path / f"model-0000{part}.safetensors").write_bytes(b"\0" * 3000)
    model = cluster_from_config(config(f"model.policy={tmp_path}"))
    assert model.weights.gib == 6000 / 2**30


def test_a_calibration_file_replaces_what_it_names_and_nothing_else(tmp_path: Path) -> None:
    calibration = tmp_path / "calibration.json"
    calibration.write_text(
        json.dumps({"learner": {"tokens_per_s": 321.0}, "lengths": {"kind": "empirical", "tokens": [5, 9]}})
    )
    base, model = cluster_from_config(config()), cluster_from_config(config(), read_calibration(calibration))
    assert model.learner.tokens_per_s == 321.0
    assert model.learner.fixed_s == base.learner.fixed_s
    assert model.lengths.kind == "empirical"
    assert (model.rollout, model.weights, model.batch) == (base.rollout, base.weights, base.batch)


@pytest.mark.parametrize(
    ("overlay", "message"),
    [
        ({"learner": {"tokens_per_sec": 3}}, r"c\.yaml: learner\.tokens_per_sec"),
        ({"leaner": {"tokens_per_s": 3}}, r"c\.yaml: leaner"),
        ({"weights": {"gib": 0}}, r"c\.yaml: weights\.gib: .*greater than 0"),
        ({"rollout": {"tokens_per_s": 1.0}}, r"rollout: .*it cannot be less"),
        ({"rollout": {"sequences": 1}, "batch": {"samples_per_prompt": 2}}, "a group would not fit an engine"),
        ({"lengths": {"kind": "constant"}}, r"c\.yaml: lengths\.constant\.tokens: Field required"),
    ],
)
def test_a_wrong_description_is_refused_by_key(overlay: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cluster_from_config(config(), overlay, source="c.yaml")


def test_a_file_without_sections_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the cluster file"):
        read_calibration(tmp_path / "none.yaml")
    (tmp_path / "list.yaml").write_text("[1, 2]")
    with pytest.raises(ConfigError, match="the file must hold sections"):
        read_calibration(tmp_path / "list.yaml")


def test_overrides_with_the_prefix_go_to_the_cluster_and_beat_the_file() -> None:
    overrides = ["rollout.workers=3", "simulate.learner.tokens_per_s=5e3", "simulate.learner.fixed_s=2"]
    resolved, model = describe(
        lambda own: load_config(CLUSTER, own), overrides, {"learner": {"tokens_per_s": 1.0, "fixed_s": 9.0}}, "c.yaml"
    )
    assert resolved.rollout.workers == model.rollout.workers == 3
    assert (model.learner.tokens_per_s, model.learner.fixed_s) == (5000.0, 2.0)


def test_a_sweep_is_a_key_with_values() -> None:
    assert parse_sweep("rollout.workers=2, 4,8") == ("rollout.workers", ["2", "4", "8"])
    for text in ("rollout.workers", "=1,2", "rollout.workers="):
        with pytest.raises(ConfigError, match="write key=a,b,c"):
            parse_sweep(text)
