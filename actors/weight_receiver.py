"""The engine side of weight publication: vLLM's ``shared_memory`` weight transfer backend, for engine processes.

vLLM imports this module in every engine process because ``engine_arguments`` names ``WeightReceiverExtension`` as the
worker extension; importing it registers the backend. The learner writes one safetensors file a node (in /dev/shm on
CPU); the worker checks its bytes while the engine still generates; each engine process maps it and loads it through
``model.load_weights``, and from time to time holds everything it computes with against it (``held_weights``).

An update does all its work in ``update_weights`` and leaves ``start``/``finish`` without effects, because vLLM can
begin a new update after a failed ``update_weights`` but not after a failed ``finish_weight_update``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from actors.held_weights import differing_parameters
from actors.snapshot_file import map_snapshot
from rlhf_cluster.weight_manifest import WeightMismatch, check_names

logger = logging.getLogger(__name__)

BACKEND = "shared_memory"


@dataclass
class SnapshotInitInfo(WeightTransferInitInfo):
    """``names``: the checkpoint names every update must bring, no more and no fewer."""

    names: list[str]


@dataclass
class SnapshotUpdateInfo(WeightTransferUpdateInfo):
    """``path``: the safetensors file on this node. ``tensors``: its manifest, see ``rlhf_cluster.weight_manifest``."""

    path: str
    tensors: dict[str, dict[str, Any]]


class SnapshotReceiver(WeightTransferEngine[SnapshotInitInfo, SnapshotUpdateInfo]):
    """Loads one verified snapshot file into the running model.

    Nothing is written to the model before every name, shape and dtype of the file has been checked, and its bytes have
    been by the worker: an update that is refused leaves the old weights serving-ready. Only an error inside the load
    itself leaves the model undefined, and the worker is fenced in both cases.
    """

    init_info_cls = SnapshotInitInfo
    update_info_cls = SnapshotUpdateInfo
    supports_draft_weight_update = False

    _names: list[str] | None = None

    def init_transfer_engine(self, init_info: SnapshotInitInfo) -> None:
        self._names = list(init_info.names)

    def start_weight_update(self) -> None:
        pass

    def finish_weight_update(self) -> None:
        pass

    def shutdown(self) -> None:
        pass

    def receive_weights(self, update_info: SnapshotUpdateInfo) -> None:
        """Load the file and cure what a reload leaves stale.

        Raises:
            WeightMismatch: the file differs from its manifest, or its names from the model's.
        """
        if self._names is None:
            raise RuntimeError("an update arrived before init_weight_transfer_engine told the expected weight names")
        check_names(self._names, update_info.tensors, what=f"weight update {update_info.path}")
        tensors = map_snapshot(update_info.path, update_info.tensors)

        parameters = {name for name, _ in self.model.named_parameters()}
        initialize_layerwise_reload(self.model)
        try:
            loaded = self.model.load_weights(iter(tensors.items()))
        except BaseException:
            # It takes the layers off the meta device, so that a later update can start afresh.
            try:
                finalize_layerwise_reload(self.model, self.model_config)
            except Exception:
                logger.exception("the layers could not be put back after a load that failed")
            raise
        finalize_layerwise_reload(self.model, self.model_config)
        repack_tied_head(self.model)
        if loaded is not None and (unloaded := parameters - loaded - tied_head_names(self.model)):
            raise WeightMismatch(f"weight update left {len(unloaded)} parameters unloaded: {sorted(unloaded)[:5]}")


def _heads_and_embeddings(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    return ((name, module) for name, module in model.named_modules() if isinstance(module, VocabParallelEmbedding))


def repack_tied_head(model: torch.nn.Module) -> None:
    """Give a tied output head a fresh packed copy of the weight it shares with the input embedding (CPU only).

    vLLM packs the head for oneDNN once after loading; a reload replaces the embedding's weight in place and never
    packs the head again, because no tensor named after the head was loaded. The head would go on computing logits
    with the old weights, which no checksum of parameters can see.
    """
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    modules = dict(_heads_and_embeddings(model))
    embedded = {m.weight.data_ptr() for m in modules.values() if not isinstance(m, ParallelLMHead)}
    for module in modules.values():
        tied = isinstance(module, ParallelLMHead) and module.weight.data_ptr() in embedded
        if tied and hasattr(module, "cpu_linear"):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


def tied_head_names(model: torch.nn.Module) -> set[str]:
    """Names of head weights that share storage with an embedding: no tensor of their own is ever sent for them."""
    seen: dict[int, str] = {}
    names: set[str] = set()
    for name, module in _heads_and_embeddings(model):
        weight_name, pointer = f"{name}.weight", module.weight.data_ptr()
        if pointer in seen:
            names.add(weight_name)
        seen.setdefault(pointer, weight_name)
    return names


class WeightReceiverExtension:
    """Mixed into vLLM's worker class; its methods are called through ``collective_rpc``."""

    def verify_weights(self, path: str, tensors: dict[str, dict[str, Any]]) -> None:
        """Compare everything that this process computes with to the snapshot, to the bit; changes nothing.

        Raises:
            WeightMismatch: naming the parameters that differ in any copy, packed and tied ones included.
        """
        worker: Any = self
        with set_current_vllm_config(worker.vllm_config):
            wrong = differing_parameters(worker.weight_transfer_engine.model, map_snapshot(path, tensors))
        if wrong:
            raise WeightMismatch(f"{len(wrong)} parameters held differ from snapshot {path}: {wrong[:5]}")

    def abandon_weight_update(self) -> None:
        """Close an update that failed under any backend, so that the next one starts from a clean state.

        The weights are undefined afterwards: the caller fences the worker until a complete update succeeds.
        """
        worker: Any = self
        engine = worker.weight_transfer_engine
        finalize_layerwise_reload(engine.model, engine.model_config)
        engine.reset_weight_update_target()
        worker._weight_update_active = False


def _register(registry: Mapping[str, Any]) -> None:
    if BACKEND not in registry:
        WeightTransferEngineFactory.register_engine(BACKEND, SnapshotReceiver)


_register(WeightTransferEngineFactory._registry)
