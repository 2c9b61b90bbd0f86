"""`rlhf train` end to end: what it leaves behind and what Prometheus sees."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rlhf_cluster import checkpoint_set
from rlhf_cluster.metrics.series import parse_series_key
from tests.e2e.conftest import FinishedRun


@pytest.mark.timeout(500)
def test_no_token_was_trained_beyond_the_bound_and_attempts_close(finished_run: FinishedRun) -> None:
    rows = finished_run.rows()
    assert all(0 <= row["rlhf_batch_max_lag"] <= 1 for row in rows)
    last = rows[-1]
    ended = {
        parse_series_key(key)[1]["reason"]: value
        for key, value in last.items()
        if key.startswith("rlhf_attempts_total") and "dispatched" not in key
    }
    assert last['rlhf_attempts_total{state="dispatched",reason="none"}'] == sum(ended.values())
    # Only the interrupt cost attempts: those it found on the workers.
    assert {reason for reason, value in ended.items() if value} <= {"none", "aborted"}
    assert last['rlhf_tokens_total{stage="trained"}'] == sum(row["rlhf_batch_tokens"] for row in rows)


def test_training_was_asynchronous(finished_run: FinishedRun) -> None:
    overlapping = [row["rlhf_batch_overlapping_rollouts"] for row in finished_run.rows()]
    assert overlapping[0] == 0
    assert max(overlapping[1:]) > 0
    assert max(row["rlhf_batch_max_lag"] for row in finished_run.rows()) == 1


def _series(key: str) -> tuple[str, frozenset[tuple[str, str]]]:
    name, labels = parse_series_key(key)
    return name, frozenset(labels.items())


def test_prometheus_showed_per_version_staleness_and_kl_with_the_values_of_the_metrics_file(
    finished_run: FinishedRun,
) -> None:
    by_step = {row["step"]: row for row in finished_run.rows()}
    compared: set[str] = set()
    for scrape in finished_run.scrapes:
        samples = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(scrape)
            for sample in family.samples
        }
        step = samples.get(("rlhf_step", frozenset()))
        if step is None:
            continue
        row = {_series(key): value for key, value in by_step[int(step)].items() if key.startswith("rlhf_")}
        for (name, labels), value in samples.items():
            if name.startswith(("rlhf_version_", "rlhf_staleness_versions", "rlhf_kl_behaviour")):
                assert row[name, labels] == value, (name, labels)
                compared.add(name)
    assert {
        "rlhf_version_staleness_mean",
        "rlhf_version_staleness_max",
        "rlhf_version_kl_reference",
        "rlhf_kl_behaviour",
    } <= compared


def test_engine_and_learner_agree_at_start_and_under_trained_weights(finished_run: FinishedRun) -> None:
    for version in (0, 1):
        assert f"self-check at version {version}: engine and learner differ by 0.00" in finished_run.output
    assert all(row["rlhf_kl_behaviour_mean"] < 0.5 for row in finished_run.rows())


def test_held_out_prompts_are_evaluated_at_the_first_and_the_last_version(finished_run: FinishedRun) -> None:
    evaluations = [(row["name"], row["version"]) for row in finished_run.rows("evaluation")]
    assert evaluations == [("before", 0), ("after", finished_run.steps)]
    after = json.loads((finished_run.folder / "evaluation_after.json").read_text())
    assert after["version"] == finished_run.steps
    assert len(after["answers"]) == 40


def test_no_prompt_text_reaches_the_output(finished_run: FinishedRun) -> None:
    prompts = [
        json.loads(line)["prompt"] for line in Path("configs/data/everyday_prompts.jsonl").read_text().splitlines()
    ]
    assert not [prompt for prompt in prompts if prompt in finished_run.output]


def test_the_last_checkpoint_is_a_verified_set_with_models_that_load(finished_run: FinishedRun) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    checkpoint = checkpoint_set.newest_checkpoint(finished_run.folder / "checkpoints")
    assert checkpoint is not None
    assert checkpoint_set.step_of(checkpoint) == finished_run.steps
    checkpoint_set.verify(checkpoint)
    policy = AutoModelForCausalLM.from_pretrained(checkpoint / "learner" / "policy", dtype=torch.float32)
    initial = AutoModelForCausalLM.from_pretrained(finished_run.models / "policy", dtype=torch.float32)
    changed = [
        name
        for (name, new), old in zip(policy.named_parameters(), initial.parameters(), strict=True)
        if not torch.equal(new, old)
    ]
    assert len(changed) == len(list(policy.parameters())), "every weight of the policy was trained"
    critic = AutoModelForSequenceClassification.from_pretrained(checkpoint / "learner" / "critic")
    assert critic.config.num_labels == 1
