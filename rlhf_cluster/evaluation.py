"""Held-out evaluation: the same prompts, seeds and sampling before and after training, on the serving engines.

It runs only while no update is in progress, so every sample carries the labelled version and nothing else; it touches
no training cursor, queue or generator state.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlhf_cluster.protocols import Clock, Generator, RolloutRequest, Scorer
from rlhf_cluster.seeds import derive_seed
from rlhf_cluster.types import Prompt, Ratio, Sampling, ScoredRollout

_POLL_S = 0.05


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

    def prompt_scores(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """(n_prompts,) mean score of each prompt's answers."""
        return np.array([_mean([answer.score for answer in group]) for group in self.samples])


async def evaluate(
    prompts: Sequence[Prompt],
    *,
    generator: Generator,
    scorer: Scorer,
    clock: Clock,
    seed: int,
    samples_per_prompt: int,
    temperature: float,
    max_new_tokens: int,
    label: str = "evaluation",
) -> Evaluation:
    """Sample and score ``samples_per_prompt`` answers a prompt. The same ``seed`` samples with the same seeds again."""

    async def one(prompt: Prompt) -> list[ScoredRollout]:
        sampling = tuple(
            Sampling(temperature, max_new_tokens, derive_seed(seed, label, prompt.prompt_id, index))
            for index in range(samples_per_prompt)
        )
        request = RolloutRequest(f"{label}:{prompt.prompt_id}", 0, prompt, sampling)
        async with turn:
            while (worker := generator.choose()) is None:
                await clock.sleep(_POLL_S)
            generation = asyncio.ensure_future(generator.generate(worker, request))
            await asyncio.sleep(0)
        return await scorer.score(prompt, await generation)

    turn = asyncio.Lock()  # one dispatch at a time, so that the router counts each before the next choice
    samples = await asyncio.gather(*(one(prompt) for prompt in prompts))
    versions = {span.version for group in samples for answer in group for span in answer.rollout.version_spans}
    if len(versions) != 1:
        raise RuntimeError(f"evaluation saw policy versions {sorted(versions)}; weights changed while it ran")
    return Evaluation(versions.pop(), tuple(prompts), tuple(tuple(group) for group in samples))


def _mean(values: Sequence[float]) -> float:
    """Mean of the finite values, NaN when there is none."""
    finite = [value for value in values if np.isfinite(value)]
    return Ratio(sum(finite), len(finite)).value
