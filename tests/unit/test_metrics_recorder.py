"""What the recorder makes of the events of a run, by hand-worked numbers."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest

from rlhf_cluster.metrics.recorder import MetricsRecorder
from rlhf_cluster.protocols import PublishReport
from rlhf_cluster.types import Ratio, ScoredGroup, ScoredRollout, TrainBatch, UpdateResult
from tests.unit.builders import admit_many, async_test, make_group, make_queue, put_all
from tests.unit.metrics_run import HandClock, KeepingSink, group, record_step, recorder, rollout


@dataclass(frozen=True)
class Worker:
    index: int
    up: bool
    version: int


def test_the_lag_of_every_token_is_counted_at_consumption() -> None:
    metrics = recorder()
    # Learner at 5: lags 2, 2, 1 and 0, 0.
    batch = TrainBatch(5, (group([3, 3, 4]), group([5, 5], group_id="h")))
    metrics.batch_consumed(batch, waited_s=0.0, overlapping_rollouts=1)
    row = metrics.close_step(5, 1)
    assert [row[f'rlhf_staleness_versions_bucket{{le="{le}"}}'] for le in ("0.0", "1.0", "2.0", "+Inf")] == [2, 3, 5, 5]
    assert row["rlhf_staleness_versions_sum"] == 5 and row["rlhf_staleness_versions_count"] == 5
    assert row["rlhf_batch_max_lag"] == 2 and row["rlhf_batch_mean_lag"] == 1.0
    assert row["rlhf_batch_overlapping_rollouts"] == 1 and row["rlhf_overlapping_rollout_fraction"] == 0.5


def test_staleness_and_kl_of_a_version_run_over_all_batches_that_consumed_its_tokens() -> None:
    metrics = recorder()
    # Version 0: first batch lag 0 with log-ratios 0.2, 0.4; second batch lag 1 with 0.6. Version 1: lag 0, -0.1.
    record_step(metrics, 0, [0, 0], [0.2, 0.4])
    row = record_step(metrics, 1, [0, 1], [0.6, -0.1])
    assert row['rlhf_version_staleness_mean{policy_version="0"}'] == pytest.approx(1 / 3)
    assert row['rlhf_version_staleness_max{policy_version="0"}'] == 1
    assert row['rlhf_version_staleness_max{policy_version="1"}'] == 0
    assert row['rlhf_version_kl_reference{policy_version="0",estimator="k1"}'] == pytest.approx(0.4, abs=1e-6)
    # k3 = exp(-d) - 1 + d: 0.018731, 0.070320, 0.148812; for d = -0.1 it is 0.005171.
    k3 = 'rlhf_version_kl_reference{{policy_version="{}",estimator="k3"}}'
    assert row[k3.format(0)] == pytest.approx((0.018731 + 0.070320 + 0.148812) / 3, abs=1e-5)
    assert row[k3.format(1)] == pytest.approx(0.005171, abs=1e-5)
    assert row['rlhf_version_kl_reference{policy_version="1",estimator="k1"}'] == pytest.approx(-0.1, abs=1e-6)


def test_a_token_without_a_finite_log_ratio_counts_for_staleness_but_not_for_kl() -> None:
    metrics = recorder()
    row = record_step(metrics, 1, [0, 0], [math.nan, 0.5])
    assert row['rlhf_version_kl_reference{policy_version="0",estimator="k1"}'] == pytest.approx(0.5)
    assert row["rlhf_staleness_versions_count"] == 2


def test_only_the_newest_eight_versions_keep_their_series() -> None:
    metrics = recorder()
    for version in range(20):
        row = record_step(metrics, version, [version])
    kept = sorted(int(key.split('"')[1]) for key in row if key.startswith("rlhf_version_staleness_mean"))
    assert kept == list(range(12, 20))


def test_a_clip_fraction_over_micro_batches_is_clipped_tokens_over_tokens() -> None:
    # M02: (clipped, tokens) = (0, 4) three times and (2, 2): 2/14, while the mean of the fractions is 0.25.
    metrics = recorder()
    for clipped, tokens in ((0, 4), (0, 4), (0, 4), (2, 2)):
        metrics.step_done(UpdateResult(1, True, {"clip_fraction": Ratio(clipped, tokens)}), seconds=1.0)
    assert metrics.close_step(1, 1)["rlhf_clip_fraction"] == pytest.approx(0.142857, abs=1e-6)


def test_a_mean_over_nothing_is_left_out_of_the_row() -> None:
    metrics = recorder()
    metrics.step_done(UpdateResult(1, True, {"clip_fraction": Ratio(0, 0), "entropy": Ratio(6, 3)}), seconds=1.0)
    row = metrics.close_step(1, 1)
    assert "rlhf_clip_fraction" not in row and row["rlhf_entropy"] == 2.0
    assert "rlhf_entropy" not in metrics.close_step(2, 2), "a step does not repeat the values of the one before"


def test_token_rates_are_over_the_last_step_only() -> None:
    # M06: 100 tokens a second for three steps is 100, 100, 100, where cumulative tokens over one interval give 300.
    clock = HandClock()
    metrics = recorder(clock=clock)
    clock.seconds = 40.0  # start-up is in no rate
    rates = []
    for step in range(1, 4):
        clock.seconds += 1.0
        metrics.rollouts_generated(0, [rollout([step] * 100)], 1.0)
        row = metrics.close_step(step, step)
        rates.append(row['rlhf_tokens_per_second{stage="generated"}'])
    assert rates == [100.0, 100.0, 100.0]
    assert row['rlhf_tokens_total{stage="generated"}'] == 300
    assert row["rlhf_elapsed_seconds"] == 43.0
    assert row["rlhf_time_left_seconds"] == 7.0, "7 of 10 steps left at 1 s"


def test_unscorable_rollouts_are_in_no_mean_and_are_counted_beside_it() -> None:
    # M06: 4 scores of 1, 2 of 0, 2 without a score: 4/6 and 2, not 4/8.
    metrics = recorder()
    members = tuple(
        ScoredRollout(rollout([0]), score, {"model": score}, np.zeros(1))
        for score in (1, 1, 1, 1, 0, 0, np.nan, np.nan)
    )
    metrics.group_scored(ScoredGroup("g", members), 0.1)
    metrics.unscorable(2, "score")
    row = metrics.close_step(0, 1)
    assert row["rlhf_score_mean"] == pytest.approx(4 / 6)
    assert row['rlhf_score_component_mean{component="model"}'] == pytest.approx(4 / 6)
    assert row["rlhf_scored_rollouts_total"] == 6
    assert row['rlhf_unscorable_total{reason="score"}'] == 2
    assert row["rlhf_unscorable_fraction"] == pytest.approx(0.25)


def test_an_unknown_unscorable_reason_opens_no_new_series() -> None:
    metrics = recorder()
    metrics.unscorable(1, "reward model said: prompt 17 is odd")
    row = metrics.close_step(0, 1)
    assert row['rlhf_unscorable_total{reason="other"}'] == 1
    assert not any("prompt 17" in key for key in row)


def test_learner_metrics_get_their_documented_names_and_unknown_ones_are_kept() -> None:
    metrics = recorder(max_staleness=2)
    learner = {
        "nll": Ratio(20.0, 10),
        "kl_reference_k3": Ratio(0.5, 10),
        "kl_behaviour": Ratio(0.1, 10),
        "kl_behaviour_lag0": Ratio(0.02, 2),
        "kl_behaviour_lag2": Ratio(0.08, 4),
        "grad_norm_policy": Ratio(3.0, 2),
        "grad_norm_critic": Ratio(8.0, 2),
        "lr_policy": Ratio(2e-6, 2),
        "optimizer_steps_policy": Ratio(4, 1),
        "optimizer_steps_skipped_critic": Ratio(1, 1),
        "Odd-Name": Ratio(7, 1),
    }
    metrics.step_done(UpdateResult(1, True, learner), seconds=1.0)
    metrics.step_done(UpdateResult(2, True, {"optimizer_steps_policy": Ratio(4, 1)}), seconds=1.0)
    row = metrics.close_step(2, 1)
    assert row["rlhf_perplexity"] == pytest.approx(math.exp(2.0))
    assert row['rlhf_kl_reference{estimator="k3"}'] == pytest.approx(0.05)
    assert row["rlhf_kl_behaviour_mean"] == pytest.approx(0.01)
    assert row['rlhf_kl_behaviour{lag="0"}'] == pytest.approx(0.01)
    assert row['rlhf_kl_behaviour{lag="2"}'] == pytest.approx(0.02)
    assert row['rlhf_grad_norm{model="policy"}'] == 1.5 and row['rlhf_grad_norm{model="critic"}'] == 4.0
    assert row['rlhf_learning_rate{model="policy"}'] == pytest.approx(1e-6)
    assert row['rlhf_optimizer_steps_total{model="policy"}'] == 8
    assert row['rlhf_optimizer_steps_skipped_total{model="critic"}'] == 1
    assert row["rlhf_learner_odd_name"] == 7


def test_a_skipped_step_trains_no_tokens() -> None:
    metrics = recorder()
    batch = TrainBatch(0, (group([0, 0, 0]),))
    for stepped in (False, True):
        metrics.batch_consumed(batch, waited_s=0.0, overlapping_rollouts=0)
        metrics.step_done(UpdateResult(int(stepped), stepped, {}), seconds=1.0)
        row = metrics.close_step(int(stepped), 1)
    assert row['rlhf_tokens_total{stage="trained"}'] == 3
    assert row["rlhf_steps_total"] == 1 and row["rlhf_steps_skipped_total"] == 1


def test_a_batch_whose_step_was_skipped_does_not_hide_its_lag_behind_the_next_one() -> None:
    metrics = recorder()
    for token_version, stepped in ((0, False), (2, True)):
        batch = TrainBatch(2, (group([token_version]),))
        metrics.batch_consumed(batch, waited_s=0.0, overlapping_rollouts=0)
        metrics.step_done(UpdateResult(2 + stepped, stepped, {}), seconds=1.0)
    assert metrics.close_step(3, 1)["rlhf_batch_max_lag"] == 2


@async_test
async def test_attempt_counters_close_over_groups_and_tokens() -> None:
    metrics = recorder()
    queue = make_queue(groups_per_batch=2, max_staleness=1)
    attempts = admit_many(queue, "abcd", 0)
    put_all(queue, attempts[:2])  # two rollouts of two tokens each
    await queue.next_batch()
    queue.advance(1)
    queue.put(make_group(attempts[0]))
    queue.retire("c", 0, "failed")
    metrics.queue_state(queue)
    row = metrics.close_step(1, 1)
    assert row['rlhf_attempts_total{state="dispatched",reason="none"}'] == 4
    assert row['rlhf_attempts_total{state="trained",reason="none"}'] == 2
    assert row['rlhf_attempts_total{state="retired",reason="failed"}'] == 1
    assert row['rlhf_attempts_total{state="retired",reason="duplicate"}'] == 1
    assert row['rlhf_attempt_tokens_total{state="trained",reason="none"}'] == 8
    assert row["rlhf_outstanding_groups"] == 1 and row["rlhf_queue_groups"] == 0


def test_worker_gauges_are_live_and_go_with_their_slot() -> None:
    sink = KeepingSink()
    metrics = recorder(sink)
    metrics.workers([Worker(0, True, 3), Worker(1, False, 2)])
    assert sink.lives[-1]['rlhf_worker_up{worker="1"}'] == 0
    assert sink.lives[-1]['rlhf_worker_policy_version{worker="0"}'] == 3
    metrics.workers([Worker(0, True, 4)])
    assert not any('worker="1"' in key for key in sink.lives[-1])
    assert metrics.close_step(4, 1)['rlhf_worker_policy_version{worker="0"}'] == 4


def test_publications_restarts_and_failed_workers_are_counted() -> None:
    metrics = recorder()
    metrics.weights_published(PublishReport(1, (0,), {1: "checksum"}, paused_s=0.2, total_s=0.9))
    metrics.restarted("rollout_worker")
    row = metrics.close_step(1, 1)
    assert row["rlhf_publications_total"] == 1 and row["rlhf_publish_failures_total"] == 1
    assert row["rlhf_publish_seconds"] == 0.9 and row["rlhf_publish_paused_seconds"] == 0.2
    assert row['rlhf_stage_seconds_bucket{stage="publish",le="1.0"}'] == 1
    assert row['rlhf_stage_seconds_bucket{stage="publish",le="0.3"}'] == 0
    assert row['rlhf_restarts_total{kind="rollout_worker"}'] == 1


def test_trouble_with_actors_and_a_standstill_are_metrics_and_no_progress() -> None:
    metrics = recorder()
    before = metrics.events
    for event in ("down", "fenced", "fenced", "up", "restart"):
        metrics.supervision_event("rollout_worker", event)
    metrics.no_progress(45.0)
    assert metrics.events == before
    row = metrics.close_step(1, 1)
    events = {key: value for key, value in row.items() if key.startswith("rlhf_supervision_events_total") and value}
    assert events == {
        'rlhf_supervision_events_total{kind="rollout_worker",event="down"}': 1,
        'rlhf_supervision_events_total{kind="rollout_worker",event="fenced"}': 2,
    }
    assert row["rlhf_no_progress_seconds"] == 45.0


def test_a_resumed_run_goes_on_counting_where_the_saved_one_stopped() -> None:
    clock = HandClock()
    whole, first = recorder(clock=clock), recorder(clock=clock)
    for metrics in (whole, first):
        record_step(metrics, 0, [0, 0], [0.2, 0.4])
    clock.seconds = 10.0
    resumed = recorder(clock=clock)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    clock.seconds = 12.0
    expected, row = (record_step(metrics, 1, [0, 1], [0.6, -0.1]) for metrics in (whole, resumed))
    over_the_run = [key for key in expected if "_total" in key or "_version_" in key or "_bucket" in key]
    assert len(over_the_run) > 50
    assert {key: row[key] for key in over_the_run} == {key: expected[key] for key in over_the_run}
    assert row['rlhf_stage_seconds_sum{stage="train"}'] == 4.0
    assert row["rlhf_elapsed_seconds"] == 12.0


def test_a_smaller_staleness_bound_after_a_resume_keeps_the_old_counts() -> None:
    first = recorder(max_staleness=2)
    record_step(first, 2, [0, 2])
    resumed = recorder(max_staleness=1)
    resumed.load_state_dict(first.state_dict())
    row = resumed.close_step(3, 3)
    assert row['rlhf_staleness_versions_bucket{le="1.0"}'] == 1
    assert row['rlhf_staleness_versions_bucket{le="+Inf"}'] == 2
    assert row["rlhf_staleness_versions_sum"] == 2


def test_the_number_of_series_does_not_grow_with_prompts_versions_or_restarts() -> None:
    # M03: 10,000 prompts over 200 versions and 50 restarts.
    metrics = recorder()
    sizes = []
    for version in range(200):
        for prompt in range(50):
            metrics.group_scored(group([version], group_id=f"prompt-{version}-{prompt}"), 0.1)
        if version < 50:
            metrics.restarted("rollout_worker")
        metrics.workers([Worker(slot, True, version) for slot in range(4)])
        sizes.append(len(record_step(metrics, version, [version])))
    assert sizes[-1] == sizes[20] <= 500


def test_every_sink_is_closed_even_when_one_fails() -> None:
    class Failing(KeepingSink):
        def close(self) -> None:
            raise OSError("disk full")

    last = KeepingSink()
    with pytest.raises(OSError, match="disk full"):
        recorder(Failing(), last).close()
    assert last.closed == 1


def test_recorder_and_sinks_load_neither_torch_nor_ray() -> None:
    code = (
        "import sys, rlhf_cluster.metrics.recorder, rlhf_cluster.metrics.prometheus, rlhf_cluster.metrics.jsonl, "
        "rlhf_cluster.metrics.tensorboard, rlhf_cluster.metrics.console; "
        "print([m for m in ('torch', 'ray', 'vllm', 'transformers', 'tensorboard') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize(("mismatch", "warned"), [(0.09, False), (0.11, True)])
def test_an_engine_that_disagrees_with_the_learner_raises_an_alarm(
    mismatch: float, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """N20; tokens of older versions differ by staleness and raise none."""
    watching = MetricsRecorder(max_staleness=1, total_steps=1, clock=HandClock(), sinks=(), mismatch_alarm=0.1)
    metrics = {"kl_behaviour_lag0": Ratio(mismatch * 10, 10), "kl_behaviour_lag1": Ratio(5.0, 10)}
    watching.step_done(UpdateResult(7, True, metrics), seconds=1.0)
    assert ("version 7: engine and learner differ" in caplog.text) == warned
