"""What a run measures of itself beside training: held-out evaluation, and whether engine and learner agree."""

from __future__ import annotations

import asyncio

from rlhf_cluster.config import Config
from rlhf_cluster.diagnosis import self_check
from rlhf_cluster.evaluation import Sampler, evaluate
from rlhf_cluster.fleet import Fleet
from rlhf_cluster.inputs import Inputs
from rlhf_cluster.metrics.console import ConsoleView
from rlhf_cluster.metrics.recorder import MetricsRecorder
from rlhf_cluster.protocols import Clock
from rlhf_cluster.run_folder import RunFolder

_SELF_CHECK_PROMPTS = 4
_SELF_CHECK_TOKENS = 24


class RunChecks:
    """Both sample on the serving engines while no update is in progress, and touch nothing of the training."""

    def __init__(
        self,
        config: Config,
        inputs: Inputs,
        folder: RunFolder,
        fleet: Fleet,
        clock: Clock,
        recorder: MetricsRecorder,
        view: ConsoleView,
    ) -> None:
        self._config = config
        self._inputs = inputs
        self._folder = folder
        self._fleet = fleet
        self._clock = clock
        self._recorder = recorder
        self._view = view

    async def evaluate(self, name: str) -> None:
        """Score the held-out prompts, if the config asks for it, and write ``name``'s record into the run folder."""
        if self._config.evaluation is None:
            return
        result = await evaluate(
            self._inputs.held_out,
            sampler=self._sampler(),
            scorer=self._fleet.scorers,
            samples_per_prompt=self._config.evaluation.samples_per_prompt,
        )
        self._recorder.evaluated(name, result.summary())
        self._folder.write_evaluation(name, result.record(self._inputs.decode))

    async def self_check(self) -> None:
        """Engine and learner must agree about a few fresh rollouts.

        Raises:
            SelfCheckFailed: they do not (see ``diagnosis.self_check``).
        """
        learner = self._fleet.learner
        sampler = self._sampler(_SELF_CHECK_TOKENS)
        label = f"self-check at version {learner.version}"
        prompts = self._inputs.train[:_SELF_CHECK_PROMPTS]
        groups = await asyncio.gather(*(sampler.sample(prompt, 1, label=label) for prompt in prompts))
        probe = [rollout for group in groups for rollout in group]
        logprobs = await learner.logprobs(probe)
        mean = self_check.check(
            probe,
            logprobs,
            version=learner.version,
            dtype=self._config.model.dtype,
            tolerance=self._config.guardrails.self_check_tolerance,
        )
        self._view.message(f"{label}: engine and learner differ by {mean:.4f} nats a token")

    def _sampler(self, max_new_tokens: int | None = None) -> Sampler:
        return Sampler(
            self._fleet.pool,
            self._clock,
            self._config.rollout,
            seed=self._config.run.seed,
            max_new_tokens=max_new_tokens,
        )
