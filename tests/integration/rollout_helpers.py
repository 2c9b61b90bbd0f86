"""Requests, snapshots and a transformers forward to hold a real rollout worker against."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actors.rollout_worker import RolloutWorker
from rlhf_cluster.config import EngineConfig, PublishConfig
from rlhf_cluster.protocols import RolloutRequest, WeightSnapshot
from rlhf_cluster.types import Prompt, Rollout, Sampling
from rlhf_cluster.weight_manifest import tensor_entry

PROMPT = tuple(range(3, 20))


def request(
    group_id: str, seeds: list[int], *, max_new_tokens: int = 40, temperature: float = 1.0, attempt: int = 1
) -> RolloutRequest:
    return RolloutRequest(
        group_id=group_id,
        attempt=attempt,
        prompt=Prompt("p", PROMPT, "text"),
        sampling=tuple(Sampling(temperature, max_new_tokens, seed) for seed in seeds),
    )


def transformers_logprobs(folder: Path, rollout: Rollout) -> NDArray[np.float32]:
    """(T,) log-probs of the sampled tokens by a plain forward of the weights in ``folder``, temperature applied."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([[*rollout.prompt_token_ids.tolist(), *rollout.token_ids.tolist()]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(rollout.prompt_token_ids) - 1 : -1] / rollout.sampling.temperature
    chosen = torch.log_softmax(logits, -1).gather(1, ids[0, len(rollout.prompt_token_ids) :, None])
    return chosen[:, 0].numpy()


def snapshot_of(
    folder: Path,
    path: Path,
    version: int,
    *,
    in_file: Callable[[dict[str, Any]], dict[str, Any]] = lambda tensors: tensors,
    in_manifest: Callable[[dict[str, Any]], dict[str, Any]] = lambda entries: entries,
) -> WeightSnapshot:
    """A snapshot of the weights in ``folder``; the two functions falsify the file or the manifest."""
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    entries = {
        name: tensor_entry(
            str(tensor.dtype).removeprefix("torch."), tensor.shape, tensor.view(torch.uint8).numpy().reshape(-1)
        )
        for name, tensor in tensors.items()
    }
    save_file(in_file(dict(tensors)), path)
    return WeightSnapshot(version, path, {"version": version, "tensors": in_manifest(entries)})


@contextmanager
def running_worker(model: Path, **engine: Any) -> Iterator[tuple[RolloutWorker, asyncio.Runner]]:
    """A float32 worker in this process (its engine in a process of its own) and the event loop it lives on."""
    environment = dict(os.environ)
    worker = RolloutWorker(
        index=1,
        model=str(model),
        dtype="float32",
        engine=EngineConfig(max_num_seqs=16, cpu_threads=1, **engine),
        max_model_len=600,
        seed=11,
        device="cpu",
        publish=PublishConfig(),
    )
    try:
        with asyncio.Runner() as runner:
            runner.run(worker.start())
            yield worker, runner
            runner.run(worker.close())
    finally:
        os.environ.clear()
        os.environ.update(environment)
