"""calibration.json: a run whose speeds are known is measured, and the prediction made of the file meets that run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_cluster.config import Config
from rlhf_cluster.config_io import ConfigError, load_config
from rlhf_cluster.metrics.calibrating_recorder import CalibratingRecorder
from rlhf_cluster.metrics.calibration import FILE_NAME, Calibration, read_calibration
from rlhf_cluster.protocols import PublishReport
from rlhf_cluster.simulation.cluster_model import ClusterModel, cluster_from_config
from rlhf_cluster.simulation.predict import Prediction, simulate
from rlhf_cluster.types import (
    Ratio,
    Rollout,
    Sampling,
    ScoredGroup,
    ScoredRollout,
    TrainBatch,
    UpdateResult,
    VersionSpan,
)
from tests.tiny_models import build_tiny_policy
from tests.unit.builders import ManualClock

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30

SPEEDS: dict[str, Any] = {
    "rollout": {"tokens_per_s": 400.0, "tokens_per_s_alone": 40.0},
    "reference": {"tokens_per_s": 5000.0},
    "reward": {"tokens_per_s": 5000.0},
    "learner": {"tokens_per_s": 900.0, "fixed_s": 2.0},
    "weights": {
        "gib": 0.5,
        "snapshot_gib_per_s": 1.0,
        "transfer_gib_per_s": 0.5,
        "load_gib_per_s": 0.25,
        "pause_s": 0.0,
    },
    "batch": {"prompt_tokens": 40},
    "lengths": {"kind": "lognormal", "median": 60.0, "sigma": 0.7},
}


def config(*overrides: str) -> Config:
    """Batches small enough, and answers long enough, that batches differ in size."""
    changes = ("rollout.workers=2", "rollout.engine.max_num_seqs=16", "queue.groups_per_batch=4")
    return load_config(ROOT / "configs" / "demo_smollm2.yaml", [*changes, "rollout.max_new_tokens=256", *overrides])


def measured_run(monkeypatch: pytest.MonkeyPatch, path: Path, cluster: ClusterModel, steps: int) -> Prediction:
    """A run of the production control loop in virtual time, with the recorder of a real run."""
    recorders = []

    def recorder(clock: Any) -> CalibratingRecorder:
        made = CalibratingRecorder(
            path,
            weight_bytes=GIB // 2,
            reward_replicas=1,
            reference_replicas=1,
            max_staleness=cluster.batch.max_staleness,
            total_steps=steps,
            clock=clock,
            sinks=(),
        )
        recorders.append(made)
        return made

    monkeypatch.setattr("rlhf_cluster.simulation.predict.QuietRecorder", recorder)
    prediction = simulate(cluster, steps)
    monkeypatch.undo()
    recorders[0].close()
    return prediction


def recorder_of(path: Path) -> CalibratingRecorder:
    """The recorder of a run without a reward model, on a clock that stands still."""
    return CalibratingRecorder(
        path,
        weight_bytes=GIB,
        reward_replicas=0,
        reference_replicas=1,
        max_staleness=1,
        total_steps=1,
        clock=ManualClock(100.0),
        sinks=(),
    )


@pytest.fixture
def truth() -> ClusterModel:
    return cluster_from_config(config(), SPEEDS)


def test_the_speeds_of_a_run_come_back_out_of_its_calibration(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, truth: ClusterModel
) -> None:
    run = measured_run(monkeypatch, tmp_path / FILE_NAME, truth, 20)
    found = Calibration.model_validate_json((tmp_path / FILE_NAME).read_text())
    assert found.rollout.tokens_per_s == pytest.approx(400, rel=0.1)
    assert found.rollout.tokens_per_s_alone == pytest.approx(40, rel=0.1)
    assert found.learner.tokens_per_s == pytest.approx(900, rel=0.05)
    assert found.learner.fixed_s == pytest.approx(2.0, abs=0.3)
    assert found.reference.tokens_per_s == pytest.approx(5000, rel=0.1)
    assert found.weights.gib == 0.5
    assert found.weights.snapshot_gib_per_s == pytest.approx(1.0, rel=0.05)
    assert found.weights.transfer_gib_per_s == pytest.approx(0.5, rel=0.05)
    assert found.weights.load_gib_per_s == pytest.approx(0.25, rel=0.05)
    assert found.batch.prompt_tokens == 40
    assert found.measured.steps == 20
    assert found.measured.steps_per_hour == pytest.approx(run.steps_per_hour, rel=0.03)
    assert found.measured.answers.mean == pytest.approx(run.offered_length, rel=0.01)
    assert sum(found.measured.answers.counts) == found.measured.answers.count == 20 * 8


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_the_prediction_made_of_a_calibration_meets_the_run_it_was_measured_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, max_staleness: int
) -> None:
    described = config(f"queue.max_staleness={max_staleness}")
    run = measured_run(monkeypatch, tmp_path / FILE_NAME, cluster_from_config(described, SPEEDS), 16)
    cluster = cluster_from_config(described, read_calibration(tmp_path / FILE_NAME))
    predicted = simulate(cluster, 16)
    assert predicted.steps_per_hour == pytest.approx(run.steps_per_hour, rel=0.04)
    assert predicted.idle["learner"] == pytest.approx(run.idle["learner"], abs=0.06)


def test_pre_training_of_the_critic_is_shown_but_is_no_part_of_a_step_to_come(tmp_path: Path) -> None:
    recorder = recorder_of(tmp_path / FILE_NAME)
    members = [
        ScoredRollout(
            Rollout(f"g/0/{k}", 0, "g", np.zeros(10), np.zeros(40), np.zeros(40), (VersionSpan(0, 0, 40),), "stop",
                    Sampling(1.0, 64, k)), 0.0, {}, np.zeros(40),
        )
        for k in range(2)
    ]  # fmt: skip
    group = ScoredGroup("g", tuple(members))
    recorder.rollouts_generated(0, [member.rollout for member in members], 4.0)
    recorder.group_scored(group, 0.5)
    recorder.batch_consumed(TrainBatch(0, (group,)), waited_s=0.0, overlapping_rollouts=0)
    stages = {"critic_pretrain_seconds": Ratio(6.0, 1.0), "train_seconds": Ratio(10.0, 1.0)}
    recorder.step_done(UpdateResult(1, True, stages), seconds=10.0)
    recorder.weights_published(PublishReport(1, (0,), {}, 0.25, 0.5))
    recorder.close_step(1, 1)
    found = recorder.calibration()
    assert found is not None
    # 2 x (10 + 40) tokens in the 4 s that are left of 10.
    assert (found.learner.tokens_per_s, found.learner.fixed_s) == (pytest.approx(25.0), 0.0)
    assert found.measured.train_stages == {"critic_pretrain": 6.0}
    assert found.measured.train_seconds == 4.0
    # The run has no reward model, so a prediction must not be given one.
    assert "reward" not in found.overlay()


def test_a_run_that_closed_no_step_writes_no_file(tmp_path: Path) -> None:
    recorder = recorder_of(tmp_path / FILE_NAME)
    recorder.close()
    assert recorder.calibration() is None
    assert list(tmp_path.iterdir()) == []


def test_the_recorder_of_a_run_counts_the_weights_it_publishes(tmp_path: Path) -> None:
    policy = build_tiny_policy(tmp_path / "policy")
    recorder = CalibratingRecorder.for_run(
        config(f"model.policy={policy}"), tmp_path / FILE_NAME, clock=ManualClock(100.0), sinks=()
    )
    # 259 x 64 embeddings (tied), 2 layers of 4 x 64 x 64 + 3 x 64 x 128 + 2 x 64, a norm of 64; bfloat16.
    assert recorder._weight_bytes == 2 * (16576 + 2 * (16384 + 24576 + 128) + 64)


def test_a_file_written_by_hand_needs_no_measurements_and_a_calibration_must_be_whole(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, truth: ClusterModel
) -> None:
    by_hand = tmp_path / "cluster.yaml"
    by_hand.write_text("learner: {tokens_per_s: 5}\n")
    assert read_calibration(by_hand) == {"learner": {"tokens_per_s": 5}}
    measured_run(monkeypatch, tmp_path / FILE_NAME, truth, 6)
    content = json.loads((tmp_path / FILE_NAME).read_text())
    assert "measured" not in read_calibration(tmp_path / FILE_NAME)
    content["learner"]["speed"] = 1
    (tmp_path / FILE_NAME).write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"learner\.speed"):
        read_calibration(tmp_path / FILE_NAME)
