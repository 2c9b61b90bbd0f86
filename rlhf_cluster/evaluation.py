"""Held-out evaluation: the same prompts, seeds and sampling before and after training, on the serving engines.

It runs only while no update is in progress, so every sample carries the labelled version and nothing else; it touches
no training cursor, queue or generator state.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlhf_cluster.config import RolloutConfig
from rlhf_cluster.protocols import Clock, Generator, RolloutRequest, Scorer, WorkerFailed, WorkerSlot
from rlhf_cluster.seeds import derive_seed
from rlhf_cluster.types import Prompt, Ratio, Rollout, Sampling, ScoredRollout

_POLL_S = 0.05
# Answers depend on seeds and weights alone, so asking again costs time and changes nothing.
_ATTEMPTS = 3

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Scored answers of one version: ``samples[i][k]`` is answer k to prompt i."""

    version: int
    prompts: tuple[Prompt, ...]
    samples: tuple[tuple[ScoredRollout, ...], ...]

    def summary(self) -> dict[str, float]:
        """Means over answers (score, components, length, share that ended by itself) and over tokens (KL, nats)."""
        answers = [answer for group in self.samples for answer in group]
        tokens = sum(answer.rollout.n_tokens for answer in answers)
        log_ratios = [
            answer.rollout.behaviour_logprobs.astype(np.float64) - answer.ref_logprobs.astype(np.float64)
            for answer in answers
        ]
        components = sorted({name for answer in answers for name in answer.score_components})
        values = {
            "score": _mean([answer.score for answer in answers]),
            "score_std_over_prompts": float(np.std(self.prompt_scores())),
            "response_length": Ratio(tokens, len(answers)).value,
            "complete_fraction": _mean([float(answer.rollout.finish_reason == "stop") for answer in answers]),
            "kl_reference_k1": Ratio(float(sum(ratio.sum() for ratio in log_ratios)), tokens).value,
            "kl_reference_k3": Ratio(float(sum((np.expm1(-r) + r).sum() for r in log_ratios)), tokens).value,
            "unscorable": float(sum(not answer.finite for answer in answers)),
        }
        return values | {
            f"component_{name}": _mean([answer.score_components[name] for answer in answers]) for name in components
        }

    def record(self, decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
        """The summary with every answer in clear, JSON-able; ``decode`` turns token ids into text."""
        return {
            "version": self.version,
            "summary": self.summary(),
            "answers": [
                {
                    "prompt_id": prompt.prompt_id,
                    "prompt": prompt.text,
                    "answer": decode(answer.rollout.token_ids.tolist()),
                    "seed": answer.rollout.sampling.seed,
                    "temperature": answer.rollout.sampling.temperature,
                    "finish_reason": answer.rollout.finish_reason,
                    "score": answer.score,
                    "components": dict(answer.score_components),
                }
                for prompt, group in zip(self.prompts, self.samples, strict=True)
                for answer in group
            ],
        }

    def prompt_scores(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """(n_prompts,) mean score of each prompt's answers."""
        return np.array([_mean([answer.score for answer in group]) for group in self.samples])


class Sampler:
    """Samples answers outside training, with seeds that depend on (seed, label, prompt, answer) and nothing else.

    Args:
        rollout: temperature and length as in training; its deadline also bounds the wait for a free worker.
        seed: the run's seed.
        max_new_tokens: a shorter limit than that of ``rollout``, or None.
    """

    def __init__(
        self,
        generator: Generator,
        clock: Clock,
        rollout: RolloutConfig,
        *,
        seed: int,
        max_new_tokens: int | None = None,
    ) -> None:
        self._generator = generator
        self._clock = clock
        self._seed = seed
        self._temperature = rollout.temperature
        self._max_new_tokens = min(rollout.max_new_tokens, max_new_tokens or rollout.max_new_tokens)
        self._timeout_s = rollout.timeout_s
        self._turn = asyncio.Lock()

    async def sample(self, prompt: Prompt, n: int, *, label: str) -> list[Rollout]:
        """``n`` answers to ``prompt`` from the least busy worker; waits while every worker is full or restarts.

        Raises:
            WorkerFailed, TimeoutError: three workers failed over it, or none came free.
        """
        sampling = tuple(
            Sampling(self._temperature, self._max_new_tokens, derive_seed(self._seed, label, prompt.prompt_id, index))
            for index in range(n)
        )
        request = RolloutRequest(f"{label}:{prompt.prompt_id}", 0, prompt, sampling)
        for left in reversed(range(_ATTEMPTS)):
            async with self._turn:  # one dispatch at a time, so that the router counts each before the next choice
                worker = await self._free_worker()
                generation = asyncio.ensure_future(self._generator.generate(worker, request))
                await asyncio.sleep(0)
            try:
                return await generation
            except (WorkerFailed, TimeoutError) as error:
                if not left:
                    raise
                log.warning("%s is asked again: rollout worker %d: %s", request.group_id, worker.index, error)
        raise AssertionError("the last attempt returned or raised")

    async def _free_worker(self) -> WorkerSlot:
        deadline = self._clock.now() + self._timeout_s
        while (worker := self._generator.choose()) is None:
            if self._clock.now() > deadline:
                states = ", ".join(
                    f"worker {status.index} {'busy' if status.up else 'down or fenced'}"
                    for status in self._generator.status()
                )
                raise TimeoutError(f"no rollout worker came free within {self._timeout_s:g} s ({states})")
            await self._clock.sleep(_POLL_S)
        return worker


async def evaluate(
    prompts: Sequence[Prompt], *, sampler: Sampler, scorer: Scorer, samples_per_prompt: int
) -> Evaluation:
    """Sample and score ``samples_per_prompt`` answers a prompt; the same seeds every time it is called.

    Raises:
        RuntimeError: the weights changed while it ran.
    """

    async def one(prompt: Prompt) -> list[ScoredRollout]:
        return await scorer.score(prompt, await sampler.sample(prompt, samples_per_prompt, label="evaluation"))

    samples = await asyncio.gather(*(one(prompt) for prompt in prompts))
    versions = {span.version for group in samples for answer in group for span in answer.rollout.version_spans}
    if len(versions) != 1:
        raise RuntimeError(f"evaluation saw policy versions {sorted(versions)}; weights changed while it ran")
    return Evaluation(versions.pop(), tuple(prompts), tuple(tuple(group) for group in samples))


def _mean(values: Sequence[float]) -> float:
    """Mean of the finite values, NaN when there is none."""
    finite = [value for value in values if np.isfinite(value)]
    return Ratio(sum(finite), len(finite)).value
