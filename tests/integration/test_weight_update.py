"""Weight updates of a real vLLM engine in flight: a tied model, prefix caching on, KV cache recomputed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.rollout_worker import RolloutWorker, WorkerFenced
from rlhf_cluster.types import Rollout
from tests.integration.rollout_helpers import request, running_worker, snapshot_of, transformers_logprobs
from tests.tiny_models import build_tiny_policy

pytest.importorskip("vllm")

NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    base = tmp_path_factory.mktemp("policies")
    return [build_tiny_policy(base / str(seed), tied=True, seed=seed) for seed in range(2)]


@pytest.fixture(scope="module")
def running(folders: list[Path]) -> Iterator[tuple[RolloutWorker, asyncio.Runner]]:
    with running_worker(folders[0], prefix_caching=True) as running:
        yield running


async def started(worker: RolloutWorker, *, samples: int, tokens: int) -> None:
    """Wait until ``samples`` requests have ``tokens`` tokens each."""
    async with asyncio.timeout(30):
        while True:
            states = worker._engine.output_processor.request_states.values()
            if sum(state.detokenizer.num_output_tokens() >= tokens for state in states) >= samples:
                return
            await asyncio.sleep(0.005)


def check_spans_against_weights(rollout: Rollout, weights: dict[int, Path]) -> None:
    for version, start, end in rollout.version_spans:
        expected = transformers_logprobs(weights[version], rollout)[start:end]
        np.testing.assert_allclose(rollout.behaviour_logprobs[start:end], expected, atol=0.02)


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


DAMAGE: dict[str, tuple[dict[str, Callable[..., Any]], str]] = {
    "missing_everywhere": ({"in_file": without_norm, "in_manifest": without_norm}, "1 names missing"),
    "renamed_everywhere": ({"in_file": renamed_norm, "in_manifest": renamed_norm}, "final_norm"),
    "missing_in_file": ({"in_file": without_norm}, "1 names missing"),
    "surplus_in_file": ({"in_file": lambda tensors: tensors | {"x": tensors[NORM].clone()}}, "1 unexpected"),
    "flipped_byte": ({"in_file": flipped_byte}, "checksum"),
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
    # Right names and checksums, wrong shape: the engine finds out only while it copies into the model.
    worker, runner = running
    served = worker.version
    good = folders[(served + 1) % 2]
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(good / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    wrong = dict(tensors) | {name: torch.zeros(64, 64)}
    save_file(wrong, tmp_path / "wrong.safetensors")
    (tmp_path / "as_model").mkdir()
    save_file(wrong, tmp_path / "as_model" / "model.safetensors")
    bad = snapshot_of(tmp_path / "as_model", tmp_path / "wrong.safetensors", served + 1)

    async def generate_into_a_failing_update() -> None:
        generation = asyncio.ensure_future(worker.generate(request("cut", list(range(12)), max_new_tokens=500)))
        await started(worker, samples=6, tokens=5)
        with pytest.raises(Exception, match="collective_rpc"):
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
