"""A policy-only GRPO step of our learner against a bare PyTorch loop: useful tokens a second and peak memory.

SmolLM2-135M in bfloat16, 64 sequences of 40-60 prompt and 5-64 response tokens. The bare loop pads micro-batches of
rows as they come, runs the LM head on every position, and steps AdamW over float32 master weights, as ours does (at
this rate bfloat16 weights alone would not move); the best of a few micro-batch sizes counts. Ours is
``LearnerRank.train``, DeepSpeed included. A token is useful when it is not padding. Both in one run, in processes of
their own, with the same threads, dtype and attention.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

MODEL = Path("models/smollm2-135m-instruct")
SEQUENCES, GROUP = 64, 4
BARE_ROWS = (4, 8, 16)
CLIP = 0.2
LR = 1e-6


def make_sequences() -> list[dict[str, Any]]:
    """Prompt and response ids, old log-probs and scores of 16 groups of 4."""
    generator = np.random.default_rng(0)
    return [
        {
            "prompt": generator.integers(100, 40_000, int(generator.integers(40, 61))),
            "response": generator.integers(100, 40_000, int(generator.integers(5, 65))),
            "old": generator.normal(-8.0, 1.0, 64),
            "score": float(generator.normal()),
        }
        for _ in range(SEQUENCES)
    ]


def useful_tokens() -> int:
    return sum(len(row["prompt"]) + len(row["response"]) for row in make_sequences())


def bare_steps(rows_at_once: int, steps: int) -> list[float]:
    """Seconds of each step of a plain loop."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16, attn_implementation="eager").train()
    model.config.use_cache = False
    weights = list(model.parameters())
    masters = [weight.detach().float() for weight in weights]
    optimizer = torch.optim.AdamW(masters, lr=LR, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    rows = make_sequences()
    scores = torch.tensor([row["score"] for row in rows]).view(-1, GROUP)
    advantages = ((scores - scores.mean(1, keepdim=True)) / scores.std(1, correction=0, keepdim=True)).flatten()
    total = sum(len(row["response"]) for row in rows)
    seconds = []
    for _ in range(steps):
        started = time.perf_counter()
        for start in range(0, len(rows), rows_at_once):
            part = rows[start : start + rows_at_once]
            width = max(len(row["prompt"]) + len(row["response"]) for row in part)
            ids, real = torch.zeros(len(part), width, dtype=torch.long), torch.zeros(len(part), width, dtype=torch.long)
            answer, old = torch.zeros(len(part), width), torch.zeros(len(part), width)
            for index, row in enumerate(part):
                first, end = len(row["prompt"]), len(row["prompt"]) + len(row["response"])
                ids[index, :end] = torch.from_numpy(np.concatenate([row["prompt"], row["response"]]))
                real[index, :end] = 1
                answer[index, first:end] = 1
                old[index, first:end] = torch.from_numpy(row["old"][: end - first])
            logits = model(input_ids=ids, attention_mask=real).logits[:, :-1].float()
            logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
            ratio = (logprobs - old[:, 1:]).clamp(-20, 20).exp()
            a = advantages[start : start + rows_at_once, None]
            losses = -torch.minimum(a * ratio, a * ratio.clamp(1 - CLIP, 1 + CLIP))
            ((losses * answer[:, 1:]).sum() / total).backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        for master, weight in zip(masters, weights, strict=True):
            master.grad, weight.grad = weight.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            for master, weight in zip(masters, weights, strict=True):
                weight.copy_(master)
                master.grad = None
        seconds.append(time.perf_counter() - started)
    return seconds


def our_steps(micro_batch_tokens: int, steps: int) -> list[float]:
    """Seconds of each ``LearnerRank.train``."""
    import socket

    from learner.engine import init_distributed
    from learner.learner import LearnerRank
    from learner.spec import LearnerSpec
    from rlhf_cluster.config import AlgorithmConfig, LearnerConfig, ModelConfig, RewardConfig
    from rlhf_cluster.types import Rollout, Sampling, ScoredGroup, ScoredRollout, TrainBatch, VersionSpan

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    init_distributed(backend="gloo", rank=0, world_size=1, host="127.0.0.1", port=port, timeout_s=60)
    spec = LearnerSpec(
        model=ModelConfig(policy=str(MODEL), dtype="bfloat16", attention="eager"),
        algorithm=AlgorithmConfig(name="grpo", kl={"coef": 0.0}),
        learner=LearnerConfig(policy_lr=LR, warmup_fraction=0.0, micro_batch_tokens=micro_batch_tokens),
        reward=RewardConfig(components=({"name": "model", "kind": "model"},), normalize="none", clip=None),
        temperature=1.0,
        max_new_tokens=64,
        seed=0,
        steps=steps,
        max_staleness=0,
        max_skipped_steps=1,
        max_unscorable_fraction=0.0,
        device="cpu",
        snapshot_dir=Path("/dev/shm/rlhf-benchmark"),
    )
    learner = LearnerRank(spec, rank=0, world_size=1)
    rows = make_sequences()

    def batch(version: int) -> TrainBatch:
        groups = []
        for first in range(0, SEQUENCES, GROUP):
            members = []
            for index in range(first, first + GROUP):
                row = rows[index]
                n = len(row["response"])
                rollout = Rollout(
                    rollout_id=str(index),
                    attempt=0,
                    group_id=str(first),
                    prompt_token_ids=row["prompt"],
                    token_ids=row["response"],
                    behaviour_logprobs=row["old"][:n],
                    version_spans=(VersionSpan(version, 0, n),),
                    finish_reason="stop",
                    sampling=Sampling(1.0, 64, 0),
                )
                members.append(ScoredRollout(rollout, row["score"], {}, row["old"][:n]))
            groups.append(ScoredGroup(str(first), tuple(members)))
        return TrainBatch(version, tuple(groups))

    seconds = []
    for version in range(steps):
        ready = batch(version)
        started = time.perf_counter()
        result = learner.train(ready)
        seconds.append(time.perf_counter() - started)
        assert result.stepped
    learner.close()
    return seconds


def measure(kind: str, size: int, steps: int, threads: int) -> dict[str, float]:
    """Run one side in a process of its own: best seconds a step after the first, and peak resident memory in GiB."""
    command = [sys.executable, "-m", "benchmarks.learner", "--inside", kind, "--size", str(size), "--steps", str(steps)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=900)
    if done.returncode:
        raise SystemExit(f"{kind} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def inside(kind: str, size: int, steps: int) -> None:
    seconds = (bare_steps if kind == "bare" else our_steps)(size, steps)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(json.dumps({"seconds": min(seconds[1:]), "gib": peak}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inside", choices=["bare", "ours"])
    parser.add_argument("--size", type=int, default=0)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--micro-batch-tokens", type=int, default=512)
    options = parser.parse_args()
    if options.inside:
        inside(options.inside, options.size, options.steps)
        return
    from rlhf_cluster.demo.model import unpack

    unpack(MODEL)
    tokens = useful_tokens()
    print(f"{SEQUENCES} sequences, {tokens} tokens; {options.threads} threads; best step of {options.steps - 1}")
    bare = {}
    for rows in BARE_ROWS:
        bare[rows] = measure("bare", rows, options.steps, options.threads)
        found = bare[rows]
        print(f"bare loop, {rows:2d} rows: {tokens / found['seconds']:6.0f} tokens/s, peak {found['gib']:.2f} GiB")
    ours = measure("ours", options.micro_batch_tokens, options.steps, options.threads)
    print(f"our learner:        {tokens / ours['seconds']:6.0f} tokens/s, peak {ours['gib']:.2f} GiB")
    best = min(bare.values(), key=lambda found: found["seconds"])
    print(f"ratio of tokens/s, ours over the best bare loop: {best['seconds'] / ours['seconds']:.2f}")
    print(f"ratio of peak memory: {ours['gib'] / best['gib']:.2f}")


if __name__ == "__main__":
    main()
