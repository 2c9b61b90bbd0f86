"""Requests, snapshots and a transformers forward to hold a real rollout worker against."""

from __future__ import annotations

import asyncio
import functools
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actors.rollout_worker import RolloutWorker
from rlhf_cluster.config import EngineConfig, PublishConfig
from rlhf_cluster.diagnosis import logprob_probe
from rlhf_cluster.protocols import RolloutRequest, WeightSnapshot
from rlhf_cluster.types import Prompt, Rollout, Sampling
from rlhf_cluster.weight_manifest import tensor_entry

PROMPT = tuple(range(3, 20))
# Longer than a block of the engine's KV cache (128 tokens on CPU), or nothing would be cached at all.
LONG_PROMPT = tuple(3 + (7 * index) % 250 for index in range(200))


def request(
    group_id: str,
    seeds: list[int],
    *,
    max_new_tokens: int = 40,
    temperature: float = 1.0,
    attempt: int = 1,
    prompt: Sequence[int] = PROMPT,
) -> RolloutRequest:
    return RolloutRequest(
        group_id=group_id,
        attempt=attempt,
        prompt=Prompt("p", tuple(prompt), "text"),
        sampling=tuple(Sampling(temperature, max_new_tokens, seed) for seed in seeds),
    )


def transformers_logprobs(folder: Path, rollout: Rollout) -> NDArray[np.float32]:
    """(T,) log-probs of the sampled tokens by a plain forward of the weights in ``folder``, temperature applied."""
    prompt, answer = rollout.prompt_token_ids.tolist(), rollout.token_ids.tolist()
    return plain_logprobs(folder, prompt, answer, rollout.sampling.temperature)


@functools.lru_cache(maxsize=8)
def _plain_model(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def plain_logprobs(
    folder: Path, prompt: Sequence[int], answer: Sequence[int], temperature: float = 1.0
) -> NDArray[np.float32]:
    """(T,) log-probs of ``answer`` by a plain float32 forward of the weights in ``folder``, which stay as they are."""
    import torch

    model = _plain_model(folder)
    ids = torch.tensor([[*prompt, *answer]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1] / temperature
    chosen = torch.log_softmax(logits, -1).gather(1, ids[0, len(prompt) :, None])
    return chosen[:, 0].numpy()


def logprobs_over_older_cache(old: Path, new: Path, before: Sequence[int], after: Sequence[int]) -> NDArray[np.float32]:
    """Log-probs of ``after[1:]`` by the weights ``new`` over the keys and values that ``old`` gave for ``before``."""
    import torch

    with torch.no_grad():
        cache = _plain_model(old)(torch.tensor([before]), use_cache=True).past_key_values
        logits = _plain_model(new)(torch.tensor([after]), past_key_values=cache, use_cache=True).logits[0, :-1]
    chosen = torch.log_softmax(logits, -1).gather(1, torch.tensor(after)[1:, None])
    return chosen[:, 0].numpy()


def check_spans_against_weights(rollout: Rollout, weights: dict[int, Path]) -> None:
    """Each span of log-probs must be that of the weights of its version over all tokens before it."""
    for version, start, end in rollout.version_spans:
        expected = transformers_logprobs(weights[version], rollout)[start:end]
        np.testing.assert_allclose(rollout.behaviour_logprobs[start:end], expected, atol=0.02)


async def started(worker: RolloutWorker, *, samples: int, tokens: int) -> None:
    """Wait until ``samples`` requests have ``tokens`` tokens each."""
    async with asyncio.timeout(30):
        while True:
            states = worker._engine.output_processor.request_states.values()
            if sum(state.detokenizer.num_output_tokens() >= tokens for state in states) >= samples:
                return
            await asyncio.sleep(0.005)


def negated(folder: Path, target: Path, name: str) -> Path:
    """The model in ``folder`` with weight ``name`` negated."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, target)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {name: -tensors[name]}, target / "model.safetensors", metadata={"format": "pt"})
    return target


def probe_of(folder: Path, vocab_size: int) -> dict[str, Any]:
    """What a learner that holds the weights in ``folder`` answers to the log-prob probe."""
    probed = logprob_probe.sequences(vocab_size)
    return logprob_probe.manifest_entry(probed, [plain_logprobs(folder, ids[:1], ids[1:]) for ids in probed])


class WholeEngine:
    """What a publisher needs of a train engine, over a policy that no ZeRO has cut."""

    name, zero_stage, accumulating = "policy", 0, False

    def __init__(self, policy: Any) -> None:
        self.module = policy

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.module(*args, **options)


def snapshot_of(
    folder: Path,
    path: Path,
    version: int,
    *,
    in_file: Callable[[dict[str, Any]], dict[str, Any]] = lambda tensors: tensors,
    in_manifest: Callable[[dict[str, Any]], dict[str, Any]] = lambda entries: entries,
    probe: dict[str, Any] | None = None,
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
    manifest = {"version": version, "tensors": in_manifest(entries)}
    return WeightSnapshot(version, path, manifest if probe is None else {**manifest, "probe": probe})


@contextmanager
def running_worker(
    model: Path, *, publish: PublishConfig | None = None, extension: str | None = None, **engine: Any
) -> Iterator[tuple[RolloutWorker, asyncio.Runner]]:
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
        publish=publish or PublishConfig(),
    )
    if extension is not None:
        worker._arguments["worker_extension_cls"] = extension
    try:
        with asyncio.Runner() as runner:
            runner.run(worker.start())
            yield worker, runner
            runner.run(worker.close())
    finally:
        os.environ.clear()
        os.environ.update(environment)
