"""One real vLLM engine on a tiny untied model whose own sampling defaults are far from neutral."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from actors.rollout_worker import RolloutWorker
from learner.lora import is_adapter
from learner.models import PolicyModel, collate, load_policy
from learner.weight_publisher import WeightPublisher
from rlhf_cluster.config import LearnerConfig, LoraConfig, ModelConfig
from rlhf_cluster.protocols import WeightSnapshot
from rlhf_cluster.types import Rollout
from tests.integration.rollout_helpers import (
    LONG_PROMPT,
    PROMPT,
    WholeEngine,
    check_spans_against_weights,
    logprobs_over_older_cache,
    negated,
    plain_logprobs,
    request,
    running_worker,
    snapshot_of,
    started,
    transformers_logprobs,
)
from tests.tiny_models import build_tiny_policy

pytest.importorskip("vllm")

# An id that only generation_config.json names as an end of answer.
SECOND_END = 50


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = build_tiny_policy(tmp_path_factory.mktemp("policy"), tied=False, seed=0)
    file = folder / "generation_config.json"
    own = {"do_sample": True, "repetition_penalty": 1.1, "top_p": 0.8, "top_k": 20, "temperature": 0.7}
    file.write_text(json.dumps(json.loads(file.read_text()) | own | {"eos_token_id": [2, SECOND_END]}))
    return folder


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[tuple[RolloutWorker, asyncio.Runner]]:
    with running_worker(folder) as running:
        yield running


def test_rollouts_carry_ids_order_lengths_and_version_of_their_request(running) -> None:
    worker, runner = running
    asked = request("g7", [1, 2, 3], max_new_tokens=12, attempt=4)
    rollouts = runner.run(worker.generate(asked))

    assert [rollout.rollout_id for rollout in rollouts] == ["g7/4/0", "g7/4/1", "g7/4/2"]
    assert [rollout.sampling for rollout in rollouts] == list(asked.sampling)
    for rollout in rollouts:
        assert (rollout.group_id, rollout.attempt) == ("g7", 4)
        assert rollout.prompt_token_ids.tolist() == list(PROMPT)
        assert 1 <= rollout.n_tokens <= 12
        assert rollout.version_spans == ((0, 0, rollout.n_tokens),)


def test_answers_end_at_every_end_id_with_the_id_included_or_at_the_limit(running) -> None:
    worker, runner = running
    rollouts = runner.run(worker.generate(request("ends", list(range(64)), max_new_tokens=300)))

    ended = [rollout for rollout in rollouts if rollout.finish_reason == "stop"]
    assert {int(rollout.token_ids[-1]) for rollout in ended} == {2, SECOND_END}
    for rollout in rollouts:
        inner = rollout.token_ids[:-1] if rollout.finish_reason == "stop" else rollout.token_ids
        assert not np.isin(inner, [2, SECOND_END]).any()
        assert rollout.finish_reason == "stop" or (rollout.truncated and rollout.n_tokens == 300)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_behaviour_logprobs_are_the_models_own_at_the_temperature(running, folder: Path, temperature: float) -> None:
    # Any top_p, top_k or penalty taken from the model's generation config would renormalise these.
    worker, runner = running
    rollouts = runner.run(worker.generate(request("lp", [5, 6], max_new_tokens=60, temperature=temperature)))

    for rollout in rollouts:
        np.testing.assert_allclose(rollout.behaviour_logprobs, transformers_logprobs(folder, rollout), atol=0.02)


def test_same_seed_repeats_and_other_seeds_differ(running) -> None:
    worker, runner = running
    first = runner.run(worker.generate(request("a", [1, 2, 3, 1])))
    again = runner.run(worker.generate(request("b", [3, 1])))

    answers = [tuple(rollout.token_ids.tolist()) for rollout in first]
    assert len(set(answers[:3])) == 3
    assert answers[3] == answers[0]
    assert [tuple(rollout.token_ids.tolist()) for rollout in again] == [answers[2], answers[0]]


def test_a_request_longer_than_the_engine_holds_is_refused_by_name(running) -> None:
    worker, runner = running
    with pytest.raises(ValueError, match=r"rollout worker 1: group long may reach 617 tokens, the engine holds 600"):
        runner.run(worker.generate(request("long", [1], max_new_tokens=600)))


def test_an_untied_model_serves_updated_weights(running, tmp_path: Path) -> None:
    worker, runner = running
    other = build_tiny_policy(tmp_path / "other", tied=False, seed=9)
    timing = runner.run(worker.update_weights(snapshot_of(other, tmp_path / "v1.safetensors", 1)))
    (rollout,) = runner.run(worker.generate(request("new", [4])))

    assert rollout.version_spans == ((1, 0, rollout.n_tokens),)
    assert 0 < timing.paused_s <= timing.total_s
    # Its head has a packed copy and a parameter of its own; the first update of a worker compares both.
    assert timing.verified
    np.testing.assert_allclose(rollout.behaviour_logprobs, transformers_logprobs(other, rollout), atol=0.02)


async def across_the_update(
    worker: RolloutWorker, old: WeightSnapshot, new: WeightSnapshot, *, prompt: Sequence[int]
) -> list[Rollout]:
    """One answer to ``LONG_PROMPT`` that began after the update, then those to ``prompt`` that it met running.

    ``LONG_PROMPT`` was answered under the old weights before, so a cache that stayed would be found.
    """
    await worker.update_weights(old)
    await worker.generate(request("before", [1], max_new_tokens=2, prompt=LONG_PROMPT))
    asked = request("running", list(range(8)), max_new_tokens=200, prompt=prompt)
    running_on = asyncio.ensure_future(worker.generate(asked))
    await started(worker, samples=4, tokens=5)
    await worker.update_weights(new)
    after = await worker.generate(request("after", [1], max_new_tokens=3, prompt=LONG_PROMPT))
    return [*after, *await running_on]


@pytest.mark.parametrize("kv_cache", ["recompute", "keep"])
def test_without_prefix_caching_a_negated_head_is_what_new_and_running_requests_get(
    running, folder: Path, tmp_path: Path, kv_cache: str
) -> None:
    # The head alone changes, so a kept KV cache is right for what runs, too: both settings give the same log-probs.
    worker, runner = running
    version = worker.version + 1
    other = negated(folder, tmp_path / "negated", "lm_head.weight")
    old, new = (
        snapshot_of(weights, tmp_path / f"{number}.safetensors", version + number)
        for number, weights in enumerate((folder, other))
    )

    configured = worker._weights.publish
    worker._weights.publish = configured.model_copy(update={"kv_cache": kv_cache})
    try:
        after, *running_on = runner.run(across_the_update(worker, old, new, prompt=LONG_PROMPT))
    finally:
        worker._weights.publish = configured
    expected = plain_logprobs(other, LONG_PROMPT, after.token_ids.tolist())
    np.testing.assert_allclose(after.behaviour_logprobs, expected, atol=0.01)
    spanning = [rollout for rollout in running_on if len(rollout.version_spans) == 2]
    assert spanning
    for rollout in spanning:
        check_spans_against_weights(rollout, {version: folder, version + 1: other})


def test_an_engine_gets_weights_and_adapters_in_one_sum_and_what_they_started_from_stays(
    running, folder: Path, tmp_path: Path
) -> None:
    worker, runner = running
    config = ModelConfig(policy=str(folder), dtype="float32", attention="eager")
    policy = load_policy(str(folder), config, LearnerConfig(lora=LoraConfig(rank=4)), temperature=1.0)
    publisher = WeightPublisher(WholeEngine(policy), tmp_path / "snapshots", rank=0)
    configured = worker._weights.publish
    worker._weights.publish = configured.model_copy(update={"verify_every": 1})
    try:
        for version in range(worker.version + 1, worker.version + 4):
            move_adapters(policy, seed=version)
            # Its manifest holds the learner's answers to the probe, computed with the adapters beside the weights.
            timing = runner.run(worker.update_weights(publisher.write(version)))
            assert timing.verified and timing.probe_nats is not None
            (rollout,) = runner.run(worker.generate(request(f"adapted{version}", [version])))
            inputs = collate([(rollout.prompt_token_ids, rollout.token_ids)], torch.device("cpu"))
            with torch.no_grad():
                learners = policy(inputs).logprobs[0].numpy()
            np.testing.assert_allclose(rollout.behaviour_logprobs, learners, atol=0.01)
            assert np.abs(learners - transformers_logprobs(folder, rollout)).max() > 0.1
    finally:
        worker._weights.publish = configured
        publisher.close()
    for name, weight in load_file(folder / "model.safetensors").items():
        assert torch.equal(policy.model.get_parameter(name), weight), name


def move_adapters(policy: PolicyModel, *, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in policy.named_parameters():
            if is_adapter(name):
                weight.add_(torch.randn(weight.shape, generator=generator) * 0.05)


def test_running_answers_go_on_over_the_keys_and_values_they_have_and_new_ones_get_their_own(
    running, folder: Path, tmp_path: Path
) -> None:
    worker, runner = running
    assert worker._weights.publish.kv_cache == "keep"
    version = worker.version + 1
    other = negated(folder, tmp_path / "negated", "model.layers.0.self_attn.v_proj.weight")
    old, new = (
        snapshot_of(weights, tmp_path / f"{number}.safetensors", version + number)
        for number, weights in enumerate((folder, other))
    )

    fresh, *running_on = runner.run(across_the_update(worker, old, new, prompt=PROMPT))
    expected = plain_logprobs(other, LONG_PROMPT, fresh.token_ids.tolist())
    np.testing.assert_allclose(fresh.behaviour_logprobs, expected, atol=0.02)
    spanning = [rollout for rollout in running_on if len(rollout.version_spans) == 2]
    assert spanning
    for rollout in spanning:
        ids, start = rollout.token_ids.tolist(), rollout.version_spans[1].start
        after = rollout.behaviour_logprobs[start:]
        expected = logprobs_over_older_cache(folder, other, list(PROMPT) + ids[: start - 1], ids[start - 1 :])
        np.testing.assert_allclose(after, expected, atol=0.02)
        # The new weights alone would have given others, or this test could not tell.
        assert np.abs(after - plain_logprobs(other, PROMPT, ids)[start:]).max() > 0.1
