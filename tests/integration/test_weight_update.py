"""Weight updates of a real vLLM engine in flight: a tied model, prefix caching on, KV cache recomputed.

The engine can be damaged from outside (``SabotagedReceiver``): it then computes with other weights than it was sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.rollout_worker import RolloutWorker, WorkerFenced
from rlhf_cluster.config import PublishConfig
from rlhf_cluster.diagnosis.logprob_probe import ProbeFailed
from rlhf_cluster.types import Rollout
from tests.integration.rollout_helpers import (
    LONG_PROMPT,
    check_spans_against_weights,
    negated,
    plain_logprobs,
    probe_of,
    request,
    running_worker,
    snapshot_of,
    started,
)
from tests.tiny_models import build_tiny_policy

pytest.importorskip("vllm")

NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    base = tmp_path_factory.mktemp("policies")
    return [build_tiny_policy(base / str(seed), tied=True, seed=seed) for seed in range(2)]


@pytest.fixture(scope="module")
def running(folders: list[Path]) -> Iterator[tuple[RolloutWorker, asyncio.Runner]]:
    with running_worker(
        folders[0],
        prefix_caching=True,
        publish=PublishConfig(verify_every=3, kv_cache="recompute"),
        extension="tests.integration.sabotaged_receiver.SabotagedReceiver",
    ) as running:
        yield running


def test_running_answers_go_on_under_the_new_weights(running, folders: list[Path], tmp_path: Path) -> None:
    worker, runner = running

    async def generate_across_an_update() -> list[Rollout]:
        generation = asyncio.ensure_future(worker.generate(request("span", list(range(12)), max_new_tokens=500)))
        await started(worker, samples=6, tokens=10)
        await worker.update_weights(snapshot_of(folders[1], tmp_path / "v1.safetensors", 1))
        return await generation

    rollouts = runner.run(generate_across_an_update())

    spanning = [rollout for rollout in rollouts if len(rollout.version_spans) == 2]
    assert len(spanning) >= 3
    for rollout in spanning:
        assert [span.version for span in rollout.version_spans] == [0, 1]
        assert rollout.version_spans[0].end >= 1
        check_spans_against_weights(rollout, {0: folders[0], 1: folders[1]})
    # The same prompt again: neither a stale packed head nor a prefix cached under version 0 may answer it.
    (after,) = runner.run(worker.generate(request("after", [3])))
    assert after.version_spans == ((1, 0, after.n_tokens),)
    check_spans_against_weights(after, {1: folders[1]})


def without_norm(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name != NORM}


def renamed_norm(values: dict[str, Any]) -> dict[str, Any]:
    return {name.replace(NORM, "model.final_norm.weight"): value for name, value in values.items()}


def flipped_byte(tensors: dict[str, Any]) -> dict[str, Any]:
    import torch

    damaged = tensors[NORM].clone()
    damaged.view(torch.uint8)[0] ^= 1
    return tensors | {NORM: damaged}


def half_precision(tensors: dict[str, Any]) -> dict[str, Any]:
    return tensors | {NORM: tensors[NORM].bfloat16()}


def turned_entry(entries: dict[str, Any]) -> dict[str, Any]:
    return entries | {NORM: {**entries[NORM], "shape": [1, *entries[NORM]["shape"]]}}


DAMAGE: dict[str, tuple[dict[str, Callable[..., Any]], str]] = {
    "missing_everywhere": ({"in_file": without_norm, "in_manifest": without_norm}, "1 names missing"),
    "renamed_everywhere": ({"in_file": renamed_norm, "in_manifest": renamed_norm}, "final_norm"),
    "missing_in_file": ({"in_file": without_norm}, "1 names missing"),
    "surplus_in_file": ({"in_file": lambda tensors: tensors | {"x": tensors[NORM].clone()}}, "1 unexpected"),
    "flipped_byte": ({"in_file": flipped_byte}, "checksum"),
    "other_shape": ({"in_manifest": turned_entry}, r"announced as float32 \[1, 64\], the engine takes float32 \[64\]"),
    "other_dtype": ({"in_file": half_precision}, "bfloat16"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_update_fences_the_worker_until_a_complete_one(
    running, folders: list[Path], tmp_path: Path, damage: str
) -> None:
    worker, runner = running
    served = worker.version
    falsified, reason = DAMAGE[damage]
    bad = snapshot_of(folders[0], tmp_path / "bad.safetensors", served + 1, **falsified)

    with pytest.raises(Exception, match=reason):
        runner.run(worker.update_weights(bad))
    assert worker.version == served
    with pytest.raises(WorkerFenced, match=f"rollout worker 1 does not generate: .*version {served + 1} failed"):
        runner.run(worker.generate(request("refused", [1])))

    good = folders[(served + 1) % 2]
    runner.run(worker.update_weights(snapshot_of(good, tmp_path / "good.safetensors", served + 1)))
    (healed,) = runner.run(worker.generate(request("healed", [1])))
    assert healed.version_spans == ((served + 1, 0, healed.n_tokens),)
    check_spans_against_weights(healed, {served + 1: good})


def test_a_load_that_breaks_half_way_is_healed_by_the_next_update(running, folders: list[Path], tmp_path: Path) -> None:
    worker, runner = running
    served = worker.version
    good = folders[(served + 1) % 2]
    bad = snapshot_of(good, tmp_path / "bad.safetensors", served + 1)
    call_engine(running, "break_next_load", 10)

    async def generate_into_a_failing_update() -> None:
        generation = asyncio.ensure_future(worker.generate(request("cut", list(range(12)), max_new_tokens=500)))
        await started(worker, samples=6, tokens=5)
        with pytest.raises(Exception, match="the load broke half way"):
            await worker.update_weights(bad)
        with pytest.raises(WorkerFenced):
            await generation

    runner.run(generate_into_a_failing_update())
    assert worker.version == served and worker.fenced is not None

    runner.run(worker.update_weights(snapshot_of(good, tmp_path / "good.safetensors", served + 1)))
    (healed,) = runner.run(worker.generate(request("whole", [1])))
    check_spans_against_weights(healed, {served + 1: good})


def test_an_older_version_is_refused_without_fencing(running, folders: list[Path], tmp_path: Path) -> None:
    worker, runner = running
    served = worker.version
    old = snapshot_of(folders[0], tmp_path / "old.safetensors", served - 1)

    with pytest.raises(ValueError, match=f"serves version {served}; got an update to {served - 1}"):
        runner.run(worker.update_weights(old))
    assert worker.fenced is None and worker.version == served


VOCABULARY = 259


def publish_good(running, folders: list[Path], tmp_path: Path) -> tuple[int, Path]:
    """Publish the other weights as the next version, with the learner's probe; returns both."""
    worker, runner = running
    version = worker.version + 1
    good = folders[version % 2]
    snapshot = snapshot_of(good, tmp_path / f"v{version}.safetensors", version, probe=probe_of(good, VOCABULARY))
    runner.run(worker.update_weights(snapshot))
    return version, good


def call_engine(running, method: str, *args: Any) -> None:
    worker, runner = running
    runner.run(worker._engine.collective_rpc(method, args=args))


def test_every_third_update_and_the_first_after_a_fence_verify_what_the_engine_holds(
    running, folders: list[Path], tmp_path: Path
) -> None:
    worker, runner = running
    worker._weights._since_verified = None
    probe = {index: probe_of(folder, VOCABULARY) for index, folder in enumerate(folders)}
    verified = []
    for _ in range(5):
        version = worker.version + 1
        snapshot = snapshot_of(
            folders[version % 2], tmp_path / f"v{version}.safetensors", version, probe=probe[version % 2]
        )
        timing = runner.run(worker.update_weights(snapshot))
        verified.append(timing.verified)
        assert (timing.probe_nats is not None) == timing.verified
        assert timing.probe_nats is None or timing.probe_nats < 0.005
    assert verified == [True, False, False, True, False]
    # The version that is served already is verified again and not loaded.
    again = runner.run(worker.update_weights(snapshot))
    assert again.verified and again.probe_nats is not None

    with pytest.raises(Exception, match="1 names missing"):
        runner.run(worker.update_weights(snapshot_of(folders[0], tmp_path / "bad", 99, in_manifest=without_norm)))
    version, good = worker.version + 1, folders[(worker.version + 1) % 2]
    healed = runner.run(worker.update_weights(snapshot_of(good, tmp_path / "healed.safetensors", version)))
    assert healed.verified


# Layer, and the shape of what it has packed: fused projections, and the head that is tied to the embedding.
PACKED = {
    "lm_head": (320, 64),
    "model.layers.0.self_attn.qkv_proj": (192, 64),
    "model.layers.1.mlp.gate_up_proj": (256, 64),
}


@pytest.mark.parametrize("layer", PACKED)
def test_a_packed_copy_that_differs_behind_right_parameters_is_named_and_fences(
    running, folders: list[Path], tmp_path: Path, layer: str
) -> None:
    worker, runner = running
    version, good = publish_good(running, folders, tmp_path)
    same = snapshot_of(good, tmp_path / "same.safetensors", version)
    call_engine(running, "spoil_packed_copy", layer, *PACKED[layer])

    with pytest.raises(Exception, match=rf"1 parameters held differ from snapshot .*'{layer}.weight'"):
        runner.run(worker.update_weights(same))
    with pytest.raises(WorkerFenced):
        runner.run(worker.generate(request("refused", [1])))
    publish_good(running, folders, tmp_path)
    assert worker.fenced is None


def test_a_parameter_with_one_element_flipped_in_the_engine_is_named(
    running, folders: list[Path], tmp_path: Path
) -> None:
    worker, runner = running
    version, good = publish_good(running, folders, tmp_path)
    call_engine(running, "flip_one_element", "model.norm")
    with pytest.raises(Exception, match=r"1 parameters held differ from snapshot .*'model.norm.weight'"):
        runner.run(worker.update_weights(snapshot_of(good, tmp_path / "same.safetensors", version)))
    publish_good(running, folders, tmp_path)


def test_the_probe_alone_finds_a_tied_head_that_stayed_behind_and_no_answer_leaves_before_its_verdict(
    running, folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, runner = running
    publish_good(running, folders, tmp_path)

    async def nothing(update: dict[str, Any]) -> None: ...

    monkeypatch.setattr(worker._weights, "_compare", nothing)
    call_engine(running, "repack_tied_heads", False)
    version = worker.version + 1
    good = folders[version % 2]
    snapshot = snapshot_of(good, tmp_path / "next.safetensors", version, probe=probe_of(good, VOCABULARY))
    worker._weights._since_verified = None
    judge = worker._weights._probe

    async def slow_judge(snapshot: Any) -> float | None:
        # Long enough for the answers below to end under the weights that are on trial.
        while worker._engine.output_processor.request_states:
            await asyncio.sleep(0.005)
        return await judge(snapshot)

    monkeypatch.setattr(worker._weights, "_probe", slow_judge)

    async def update_while_answers_end() -> None:
        generation = asyncio.ensure_future(worker.generate(request("trial", list(range(6)), max_new_tokens=60)))
        await started(worker, samples=1, tokens=2)
        with pytest.raises(ProbeFailed, match=rf"rollout worker 1 and the learner differ by .* of version {version}"):
            await worker.update_weights(snapshot)
        with pytest.raises(WorkerFenced):
            await generation

    runner.run(update_while_answers_end())
    monkeypatch.undo()
    call_engine(running, "repack_tied_heads", True)
    publish_good(running, folders, tmp_path)
    assert worker.fenced is None


@pytest.mark.parametrize("in_flight", [False, True], ids=["idle", "in_flight"])
def test_no_prefix_cached_under_older_weights_answers_a_new_request(
    running, folders: list[Path], tmp_path: Path, in_flight: bool
) -> None:
    worker, runner = running
    version, good = publish_good(running, folders, tmp_path)
    # The head is tied to the embedding.
    other = negated(good, tmp_path / "negated", "model.embed_tokens.weight")

    async def cached_tokens() -> int:
        from vllm import SamplingParams, TokensPrompt

        params = SamplingParams(max_tokens=1, detokenize=False)
        async for output in worker._engine.generate(TokensPrompt(prompt_token_ids=LONG_PROMPT), params, "cached"):
            cached = output.num_cached_tokens
        return int(cached)

    async def across_the_update() -> list[Rollout]:
        await worker.generate(request("before", [1], max_new_tokens=2, prompt=LONG_PROMPT))
        assert await cached_tokens() == 128
        running_on = []
        if in_flight:
            asked = request("running", list(range(8)), max_new_tokens=200, prompt=LONG_PROMPT)
            running_on.append(asyncio.ensure_future(worker.generate(asked)))
            await started(worker, samples=4, tokens=5)
        await worker.update_weights(snapshot_of(other, tmp_path / "negated.safetensors", version + 1))
        after = await worker.generate(request("after", [1], max_new_tokens=3, prompt=LONG_PROMPT))
        return [*after, *(rollout for group in await asyncio.gather(*running_on) for rollout in group)]

    after, *running_on = runner.run(across_the_update())
    assert after.min_version == version + 1
    expected = plain_logprobs(other, LONG_PROMPT, after.token_ids.tolist())
    np.testing.assert_allclose(after.behaviour_logprobs, expected, atol=0.01)
    # Recomputed: what ran on did so as if its beginning had been read by the new weights.
    spanning = [rollout for rollout in running_on if len(rollout.version_spans) == 2]
    assert bool(spanning) == in_flight
    for rollout in spanning:
        check_spans_against_weights(rollout, {version: good, version + 1: other})
