"""A generator and scorer that depend on nothing but weights and seeds, for runs that must be repeatable to the bit.

One plain model in this process, sampled token by token: `sample` and `score` are shared by the system under test and by
the plain loop it is compared with.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlhf_cluster.protocols import PublishReport, RolloutRequest, WeightSnapshot, WorkerSlot, WorkerStatus
from rlhf_cluster.types import Prompt, Rollout, Sampling, ScoredRollout, VersionSpan

EOS = 2


def load_policy(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@torch.no_grad()
def sample(model: Any, prompt: Sequence[int], sampling: Sampling) -> tuple[list[int], list[float]]:
    """Token ids (EOS included) and their log-probs at the sampling temperature."""
    generator = torch.Generator().manual_seed(sampling.seed)
    ids, logprobs = list(prompt), []
    while len(logprobs) < sampling.max_new_tokens and (not logprobs or ids[-1] != EOS):
        logp = torch.log_softmax(model(torch.tensor([ids])).logits[0, -1] / sampling.temperature, -1)
        token = int(torch.multinomial(logp.exp(), 1, generator=generator))
        ids.append(token)
        logprobs.append(float(logp[token]))
    return ids[len(prompt) :], logprobs


@torch.no_grad()
def token_logprobs(model: Any, prompt: Sequence[int], answer: Sequence[int], temperature: float) -> list[float]:
    """Log-probs of an answer under ``model``, one row at a time."""
    logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1] / temperature
    return torch.log_softmax(logits, -1)[torch.arange(len(answer)), torch.tensor(answer)].tolist()


def score(answer: Sequence[int]) -> float:
    """The share of even token ids."""
    return sum(token % 2 == 0 for token in answer) / len(answer)


class DeterministicWorker:
    """Generator and WeightSink in one: a single worker that holds the newest published weights.

    ``slots`` groups are taken at once. Answers depend on weights and seeds alone, whatever the order of requests.
    """

    def __init__(self, folder: Path, *, slots: int) -> None:
        self._model = load_policy(folder)
        self._slots = slots
        self._busy = 0
        self._version = 0

    def choose(self) -> WorkerSlot | None:
        return WorkerSlot(0, self._version) if self._busy < self._slots else None

    def status(self) -> list[WorkerStatus]:
        return [WorkerStatus(0, True, self._version, self._busy)]

    async def generate(self, worker: WorkerSlot, request: RolloutRequest) -> list[Rollout]:
        self._busy += 1
        try:
            return [self._rollout(request, index) for index in range(len(request.sampling))]
        finally:
            self._busy -= 1

    def _rollout(self, request: RolloutRequest, index: int) -> Rollout:
        sampling = request.sampling[index]
        tokens, logprobs = sample(self._model, request.prompt.token_ids, sampling)
        return Rollout(
            rollout_id=f"{request.group_id}/{request.attempt}/{index}",
            attempt=request.attempt,
            group_id=request.group_id,
            prompt_token_ids=np.array(request.prompt.token_ids),
            token_ids=np.array(tokens),
            behaviour_logprobs=np.array(logprobs),
            version_spans=(VersionSpan(self._version, 0, len(tokens)),),
            finish_reason="stop" if tokens[-1] == EOS else "length",
            sampling=sampling,
        )

    async def publish(self, snapshot: WeightSnapshot) -> PublishReport:
        from safetensors.torch import load_file

        missing, unexpected = self._model.load_state_dict(load_file(snapshot.path), strict=False)
        if unexpected or set(missing) - {"lm_head.weight"}:
            raise ValueError(f"the snapshot lacks {missing} and has {unexpected} too many")
        self._version = snapshot.version
        return PublishReport(snapshot.version, (0,), {}, 0.0, 0.0)


class DeterministicScorer:
    """`score` and the log-probs of a frozen model."""

    def __init__(self, folder: Path) -> None:
        self._reference = load_policy(folder)

    async def score(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[ScoredRollout]:
        return [self._scored(rollout) for rollout in rollouts]

    def _scored(self, rollout: Rollout) -> ScoredRollout:
        tokens = rollout.token_ids.tolist()
        reference = token_logprobs(
            self._reference, rollout.prompt_token_ids.tolist(), tokens, rollout.sampling.temperature
        )
        return ScoredRollout(rollout, score(tokens), {"even": score(tokens)}, np.array(reference))
