"""What an engine computes with: a snapshot is loaded under running requests, and what is then held is verified.

    WeightSnapshot -> check bytes | pause -> load (-> compare every copy) -> resume | (probe log-probs)

In every ``publish.verify_every``-th update, the first of an engine, the one after a failure and that of a restored
learner, all copies that the engine computes with are compared to the snapshot, and its log-probs of fixed ids to the
learner's. Versions and fences are the worker's. vLLM is imported inside methods only.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from actors.engine_arguments import nccl_init_info, nccl_update_info
from actors.fetched_snapshots import FetchedSnapshots
from rlhf_cluster.config import PublishConfig
from rlhf_cluster.diagnosis import logprob_probe
from rlhf_cluster.protocols import WeightSnapshot
from rlhf_cluster.types import Floats
from rlhf_cluster.weight_manifest import WeightMismatch, check_names

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class UpdateTiming:
    """Seconds generation stood still, and seconds from call to verified version."""

    paused_s: float
    total_s: float
    verified: bool = False
    """Whether it was held against the learner beyond the bytes that came: every copy to the bit, or after a broadcast,
    which leaves nothing to compare with, by the log-prob probe alone."""
    probe_nats: float | None = None
    """Mean |engine - learner| of the log-prob probe, nats a token; None when not due or not in the snapshot."""


class EngineWeights:
    """The weights of one running engine. Calls must not overlap.

    Args:
        engine: vLLM's ``AsyncLLM``, serving its initial weights.
        name, index: of the worker, for error texts and its place in a transfer group.
        weight_shapes: what every snapshot must bring, by name.
        dtype: of the engine, which every weight must have; the folder that it started from may have had another.
        max_model_len: tokens of a probe sequence beyond it are left out.
    """

    def __init__(
        self,
        engine: Any,
        *,
        name: str,
        index: int,
        weight_shapes: Mapping[str, Sequence[int]],
        dtype: str,
        publish: PublishConfig,
        tensor_parallel: int,
        max_model_len: int,
    ) -> None:
        self.publish = publish
        self.settled = asyncio.Event()
        """Clear from an update that is being verified to the verdict, which the worker sets."""
        self.settled.set()
        self._engine = engine
        self._name = name
        self._index = index
        self._weight_shapes = weight_shapes
        self._dtype = dtype
        self._probe_tolerance = logprob_probe.tolerance_nats(dtype, publish.probe_tolerance_nats)
        self._tensor_parallel = tensor_parallel
        self._max_model_len = max_model_len
        self._joined: dict[str, Any] | None = None
        """Init info of the transfer group, or of the receiver, that the engine is in."""
        self._fetched = FetchedSnapshots()
        self._since_verified: int | None = None
        """Updates since the last verified one; None: the next is to be verified whatever its number."""
        self._open = False
        """Whether the engine is between start and finish of an update."""
        self._probes = 0

    async def load(self, snapshot: WeightSnapshot) -> UpdateTiming:
        """Replace the weights under whatever runs; verify them when that is due.

        Raises:
            WeightMismatch, ProbeFailed, or what the engine raised: ``abandon`` is to follow.
        """
        begun = time.monotonic()
        asked = snapshot.manifest.get("verify", False) or self._since_verified is None
        due = asked or (self._since_verified or 0) + 1 >= self.publish.verify_every
        update = await self._prepare_transfer(snapshot)
        paused_at = time.monotonic()
        await self._apply(update, snapshot.version)
        compared = due and await self._compare(update)
        if due:
            self.settled.clear()
        await self._engine.resume_generation()
        resumed_at = time.monotonic()
        nats = await self._probe(snapshot) if due else None
        verified = compared or nats is not None
        self._since_verified = 0 if verified else (self._since_verified or 0) + 1
        return UpdateTiming(resumed_at - paused_at, time.monotonic() - begun, verified=verified, probe_nats=nats)

    async def verify_held(self, snapshot: WeightSnapshot) -> UpdateTiming:
        """Hold what is loaded already against ``snapshot``, without loading it again. Raises as ``load`` does."""
        begun = time.monotonic()
        self.settled.clear()
        update = await self._prepare_transfer(snapshot)
        stood_at = time.monotonic()
        # The engine process does one thing at a time: it generates nothing while it compares.
        await self._compare(update)
        stood_s = time.monotonic() - stood_at
        nats = await self._probe(snapshot)
        self._since_verified = 0
        return UpdateTiming(stood_s, time.monotonic() - begun, verified=True, probe_nats=nats)

    async def _prepare_transfer(self, snapshot: WeightSnapshot) -> dict[str, Any]:
        """Everything that can be done while generation runs, the bytes' checksums too; returns the backend's info."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        self._check_manifest(snapshot)
        if self.publish.backend == "nccl":
            tensor_parallel = self._tensor_parallel
            init_info = nccl_init_info(snapshot.transport, slot=self._index, tensor_parallel=tensor_parallel)
            update = nccl_update_info(snapshot.manifest)
        else:
            init_info = {"names": list(self._weight_shapes)}
            entries = {name: dict(entry) for name, entry in snapshot.manifest["tensors"].items()}
            path = await asyncio.to_thread(self._fetched_and_checked, snapshot, entries)
            update = {"path": str(path), "tensors": entries}
        if init_info != self._joined:
            if self._joined is not None:
                self._joined = None
                await self._engine.shutdown_weight_transfer_engine()
            await self._engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info=init_info))
            self._joined = init_info
        return update

    def _check_manifest(self, snapshot: WeightSnapshot) -> None:
        """Raises WeightMismatch when the snapshot announces other names, dtypes or shapes than the engine's."""
        what, tensors = f"{self._name}, version {snapshot.version}", snapshot.manifest["tensors"]
        check_names(self._weight_shapes, tensors, what=what)
        for name, shape in self._weight_shapes.items():
            entry = tensors[name]
            if (entry["dtype"], list(entry["shape"])) != (self._dtype, list(shape)):
                raise WeightMismatch(
                    f"{what}: {name} is announced as {entry['dtype']} {entry['shape']}, the engine takes {self._dtype} "
                    f"{list(shape)}"
                )

    def _fetched_and_checked(self, snapshot: WeightSnapshot, entries: dict[str, dict[str, Any]]) -> Path:
        """Path of the snapshot on this node, every byte of it held against the learner's checksums.

        Raises:
            WeightMismatch: it differs. FileNotFoundError: it is gone.
        """
        from actors.snapshot_file import check_snapshot

        path = self._fetched.path(snapshot)
        check_snapshot(path, entries)
        return path

    async def _apply(self, update: dict[str, Any], version: int) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        recompute = self.publish.kv_cache == "recompute"
        await self._engine.pause_generation(mode="keep", clear_cache=recompute)
        self._open = True
        await self._engine.start_weight_update()
        await self._engine.update_weights(WeightTransferUpdateRequest(update_info=update))
        await self._engine.finish_weight_update(weight_version=str(version))
        self._open = False
        if recompute and not await self._engine.reset_prefix_cache():
            raise RuntimeError(f"{self._name}: the engine could not drop its KV cache of older weights")

    async def _compare(self, update: dict[str, Any]) -> bool:
        """False after a broadcast: it left nothing to compare with. Raises WeightMismatch (as the engine wraps it) when
        anything held differs."""
        if "path" not in update:
            return False
        await self._engine.collective_rpc("verify_weights", args=(update["path"], update["tensors"]))
        return True

    async def _probe(self, snapshot: WeightSnapshot) -> float | None:
        entry = snapshot.manifest.get("probe")
        if entry is None:
            return None
        scored = await asyncio.gather(
            *(
                self._prompt_logprobs(ids[: self._max_model_len - 1], number, snapshot.version)
                for number, ids in enumerate(entry["sequences"])
            )
        )
        nats = logprob_probe.check(
            entry, scored, worker=self._name, version=snapshot.version, tolerance=self._probe_tolerance
        )
        logger.info("%s holds version %d: %.4f nats a token from the learner", self._name, snapshot.version, nats)
        return nats

    async def _prompt_logprobs(self, ids: Sequence[int], number: int, version: int) -> Floats:
        """Log-probs of all ids but the first at temperature 1, nats, before every other request that waits."""
        from vllm import SamplingParams, TokensPrompt

        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        self._probes += 1
        final = None
        async for output in self._engine.generate(
            TokensPrompt(prompt_token_ids=list(ids)), params, f"probe {version}/{number}/{self._probes}", priority=-1
        ):
            final = output
        if final is None or final.prompt_logprobs is None:
            raise RuntimeError(f"{self._name}: the engine returned no log-probs for the probe")
        scored = zip(ids[1:], final.prompt_logprobs[1:], strict=True)
        return np.array([entry[token].logprob for token, entry in scored], dtype=np.float32)

    async def abandon(self) -> None:
        """After a failure: end the open update and abort what runs; the engine stays paused until the next ``load``."""
        self._since_verified = None
        try:
            if self._open:
                self._open = False
                await self._engine.collective_rpc("abandon_weight_update")
        finally:
            # Otherwise what runs would wait in an engine that stands still.
            await self._engine.pause_generation(mode="abort", clear_cache=True)

    def close(self) -> None:
        """Remove the snapshots fetched to this node."""
        self._fetched.close()
