"""A rollout worker: one vLLM engine that turns prompts into rollouts and takes weight updates in flight.

    RolloutRequest -> AsyncLLM (one engine request a sample, own seed) -> list[Rollout]
    WeightSnapshot -> engine_weights: loaded, verified -> version, or fence

``RolloutWorker`` is a plain class; the router makes it an async Ray actor, so that many requests are in flight at once
(continuous batching). vLLM is imported inside ``start`` only: importing this module on the driver costs nothing.

A worker serves exactly one version at a time. An update that fails anywhere *fences* it: what runs is aborted, further
requests are refused with the reason, and only a complete, verified update opens it again. No answer leaves between an
update that is verified and its verdict.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from actors.engine_arguments import (
    checkpoint_weight_shapes,
    engine_arguments,
    engine_environment,
    neutral_sampling,
    stop_token_ids,
)
from actors.engine_weights import EngineWeights, UpdateTiming
from actors.health import Health, Pulse
from rlhf_cluster.config import EngineConfig, PublishConfig
from rlhf_cluster.protocols import RolloutRequest, WeightSnapshot
from rlhf_cluster.types import FINISH_REASONS, FinishReason, Rollout, Sampling, VersionSpan

logger = logging.getLogger(__name__)

INITIAL_VERSION = 0


class WorkerFenced(RuntimeError):
    """The worker holds no complete verified version and refuses to generate."""


class EngineDied(RuntimeError):
    """The engine's process is gone; the worker is of no more use."""


def version_spans(reported: Sequence[Any] | None, n_tokens: int, start_version: int) -> tuple[VersionSpan, ...]:
    """Spans as the engine labelled its steps; one empty span at ``start_version`` when no token was sampled.

    ``reported`` are vLLM's ``WeightVersionSpan(version, start, end)``.
    """
    if n_tokens == 0:
        return (VersionSpan(start_version, 0, 0),)
    return tuple(VersionSpan(int(span.version), span.start, span.end) for span in reported or ())


class RolloutWorker(Health):
    """One engine and the version it serves. Create, ``await start()``, then generate and update concurrently.

    Args:
        index: stable slot number, also in error texts ("rollout worker 1").
        model: Hugging Face folder of the initial policy (version 0).
        max_model_len: longest prompt plus answer, tokens.
        seed: engine seed; every sample brings its own besides.
        device: "cpu" or "cuda".
    """

    def __init__(
        self,
        index: int,
        model: str,
        dtype: str,
        engine: EngineConfig,
        max_model_len: int,
        seed: int,
        device: str,
        publish: PublishConfig,
        trust_remote_code: bool = False,
    ) -> None:
        self.name = f"rollout worker {index}"
        self._index = index
        self._folder = Path(model)
        self._engine_config = engine
        self._publish = publish
        self._device = device
        self._dtype = dtype
        self._arguments = engine_arguments(
            model=model,
            dtype=dtype,
            engine=engine,
            max_model_len=max_model_len,
            seed=seed,
            device=device,
            publish=publish,
            trust_remote_code=trust_remote_code,
        )
        self._max_model_len = max_model_len
        self._engine: Any = None
        self._version = INITIAL_VERSION
        self._fenced: str | None = "it has not started"
        self._stop_ids: list[int] = []
        self._weights: EngineWeights | None = None
        self._updating = asyncio.Lock()

    async def start(self) -> dict[str, Any]:
        """Bring the engine up on the initial policy, as version 0; returns the sampling that every request gets.

        Raises:
            ValueError: no safetensors in the model folder. RuntimeError: the engine refused a setting.
        """
        os.environ.update(engine_environment(self._engine_config, self._device))
        weight_shapes = checkpoint_weight_shapes(self._folder)
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        if self._device == "cpu":
            _register_model_in_process(self._folder)
        self._engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**self._arguments))
        mode = self._engine.model_config.logprobs_mode
        if mode != "processed_logprobs":
            raise RuntimeError(f"{self.name}: engine reports {mode}; training needs processed_logprobs")
        self._stop_ids = stop_token_ids(self._folder, getattr(self._engine.get_tokenizer(), "eos_token_id", None))
        await self._engine.update_weight_version(str(INITIAL_VERSION))
        self._weights = EngineWeights(
            self._engine,
            name=self.name,
            index=self._index,
            weight_shapes=weight_shapes,
            dtype=self._dtype,
            publish=self._publish,
            tensor_parallel=self._engine_config.tensor_parallel,
            max_model_len=self._max_model_len,
        )
        self._fenced = None
        return neutral_sampling(self._stop_ids)

    @property
    def version(self) -> int:
        """The newest version applied and verified here."""
        return self._version

    @property
    def fenced(self) -> str | None:
        """Why generation is refused, None when it is not."""
        return self._fenced

    async def ping(self) -> Pulse:
        """Answers a heartbeat; an engine that died without a request running is found here.

        Raises:
            EngineDied: the engine's process is gone.
        """
        if self._engine is not None and self._engine.errored:
            raise EngineDied(f"{self.name}: the engine process died")
        return await super().ping()

    async def generate(self, request: RolloutRequest) -> list[Rollout]:
        """One Rollout per entry of ``request.sampling``, in that order.

        Raises:
            WorkerFenced: the worker is fenced, or became so while this ran. ValueError: prompt and answer together
            exceed the engine's length.
        """
        self._check_open()
        longest = len(request.prompt.token_ids) + max(sampling.max_new_tokens for sampling in request.sampling)
        if longest > self._max_model_len:
            raise ValueError(
                f"{self.name}: group {request.group_id} may reach {longest} tokens, the engine holds "
                f"{self._max_model_len}; raise data.max_prompt_tokens or lower rollout.max_new_tokens"
            )
        samples = [
            asyncio.ensure_future(self._sample(request, number, sampling))
            for number, sampling in enumerate(request.sampling)
        ]
        try:
            return await asyncio.gather(*samples)
        finally:
            # A group is whole: when one sample fails, or the caller gives up, the engine stops working on the rest.
            for sample in samples:
                sample.cancel()

    async def _sample(self, request: RolloutRequest, number: int, sampling: Sampling) -> Rollout:
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=sampling.temperature,
            max_tokens=sampling.max_new_tokens,
            seed=sampling.seed,
            # 0: the sampled token's log-prob and no others.
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            **neutral_sampling(self._stop_ids),
        )
        start_version = self._version
        rollout_id = f"{request.group_id}/{request.attempt}/{number}"
        prompt = TokensPrompt(prompt_token_ids=list(request.prompt.token_ids))
        final = None
        try:
            async for output in self._engine.generate(prompt, params, rollout_id):
                final = output
        except Exception as error:
            if self._engine.errored:
                raise EngineDied(f"{self.name}: the engine process died: {error}") from error
            raise
        # Tokens of weights that are still on trial are not handed out.
        if self._weights is not None:
            await self._weights.settled.wait()
        self._check_open()
        if final is None or not final.finished:
            raise RuntimeError(f"{self.name}: the engine ended {rollout_id} without a result")
        answer = final.outputs[0]
        if answer.finish_reason not in FINISH_REASONS:
            raise RuntimeError(f"{self.name}: the engine ended {rollout_id} with {answer.finish_reason!r}")
        reason: FinishReason = answer.finish_reason
        token_ids = np.asarray(answer.token_ids, dtype=np.int32)
        return Rollout(
            rollout_id=rollout_id,
            attempt=request.attempt,
            group_id=request.group_id,
            prompt_token_ids=np.asarray(request.prompt.token_ids, dtype=np.int32),
            token_ids=token_ids,
            behaviour_logprobs=_sampled_logprobs(answer.logprobs, token_ids),
            version_spans=version_spans(answer.weight_versions, len(token_ids), start_version),
            finish_reason=reason,
            sampling=sampling,
        )

    async def update_weights(self, snapshot: WeightSnapshot) -> UpdateTiming:
        """Apply and verify ``snapshot``; running requests go on under the new weights.

        A version that is served already is verified and not loaded again. Updates wait for one another. An update once
        begun runs to its end even when the caller stops waiting.

        Raises:
            WeightMismatch, ProbeFailed, or what the engine raised: the worker is fenced then.
            EngineDied: the engine's process is gone.
            ValueError: the version is older than the one served.
        """
        return await asyncio.shield(asyncio.ensure_future(self._update(snapshot)))

    async def _update(self, snapshot: WeightSnapshot) -> UpdateTiming:
        async with self._updating:
            if snapshot.version < self._version:
                raise ValueError(f"{self.name} serves version {self._version}; got an update to {snapshot.version}")
            weights = self._weights
            if weights is None:
                raise RuntimeError(f"{self.name} takes no weights: {self._fenced}")
            try:
                # Whoever sends by broadcast waits for every receiver, whatever that holds.
                held = snapshot.version == self._version and self._fenced is None
                if held and weights.publish.backend != "nccl":
                    timing = await weights.verify_held(snapshot)
                else:
                    timing = await weights.load(snapshot)
            except BaseException as error:
                await self._fence(f"the update to version {snapshot.version} failed: {error}", weights)
                if self._engine is not None and self._engine.errored:
                    raise EngineDied(f"{self.name}: the engine process died: {error}") from error
                raise
            finally:
                weights.settled.set()
            if self._weights is not weights:
                raise RuntimeError(f"{self.name} was closed during the update to version {snapshot.version}")
            self._version = snapshot.version
            self._fenced = None
            return timing

    async def _fence(self, reason: str, weights: EngineWeights) -> None:
        self._fenced = reason
        logger.error("%s is fenced: %s", self.name, reason)
        try:
            # The aborted requests end their generate calls with WorkerFenced.
            await weights.abandon()
        except Exception:
            logger.exception("%s: the engine did not stop cleanly after a failed update", self.name)

    def _check_open(self) -> None:
        if self._fenced is not None:
            raise WorkerFenced(f"{self.name} does not generate: {self._fenced}")

    async def close(self) -> None:
        """Stop the engine process."""
        self._fenced = "it was closed"
        if self._weights is not None:
            self._weights.close()
            self._weights = None
        if self._engine is not None:
            engine, self._engine = self._engine, None
            engine.shutdown()


def _sampled_logprobs(flat: Any, token_ids: np.ndarray) -> np.ndarray:
    """(T,) log-probs of the sampled tokens, nats; the engine lists the sampled token first at each position."""
    starts = np.asarray(flat.start_indices if flat is not None else [], dtype=np.int64)
    if len(starts) != len(token_ids):
        raise RuntimeError(f"the engine returned {len(starts)} log-probs for {len(token_ids)} tokens")
    if not len(starts):
        return np.empty(0, dtype=np.float32)
    if not np.array_equal(np.asarray(flat.token_ids)[starts], token_ids):
        raise RuntimeError("the engine's log-probs belong to other tokens than it sampled")
    return np.asarray(flat.logprobs, dtype=np.float32)[starts]


def _register_model_in_process(folder: Path) -> None:
    """Import the model class here, so that vLLM does not start a process (and import itself again) to look at it."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.registry import _LazyRegisteredModel

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for architecture in config.get("architectures") or ():
        known = ModelRegistry.models.get(architecture)
        if isinstance(known, _LazyRegisteredModel):
            ModelRegistry.register_model(architecture, known.load_model_cls())
