"""The learner's side of ``publish.backend: nccl``: vLLM's trainer engine, opened in learner rank 0's process.

    driver -- NcclBroadcast (picklable, opaque to the learner) --> rank 0: connect() once a group, then send a version
    rank 0 ======== NCCL group: engine GPUs are ranks 1.. in slot order ========> vLLM's NCCLWeightTransferEngine

A group is formed for the workers that are alive and never changes: when one dies or comes back the next group meets at
a new port with another world size, and the old one is left (``rlhf_cluster.broadcast_sink``).

``launch`` hands a ``NcclBroadcast`` to the learner, which knows it as ``protocols.WeightBroadcast`` only. torch and
vllm are imported inside ``connect``: importing this module on the driver costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_cluster.config import Config

# Both sides hold this many buffers of this size, plus one tensor each; vLLM's default of 1 GiB would come out of what
# the engine's KV cache left free.
_BUFFER_BYTES = 256 * 2**20
_BUFFERS = 2


@dataclass(frozen=True, slots=True)
class NcclBroadcast:
    """Implements ``protocols.WeightBroadcast`` for ``workers`` engines of ``tensor_parallel`` GPUs each."""

    workers: int
    tensor_parallel: int

    @classmethod
    def from_config(cls, config: Config) -> NcclBroadcast | None:
        """None when the configuration publishes another way."""
        if config.publish.backend != "nccl":
            return None
        return cls(config.rollout.workers, config.rollout.engine.tensor_parallel)

    def transport(self, host: str, port: int, members: Sequence[int] | None = None) -> dict[str, Any]:
        """``"nccl"``: the fields that vLLM's init infos of both sides share, so that they cannot disagree.
        ``"members"``: the worker slots of the group in rank order. Rank 0 is the sender, then come every member's GPUs.

        Raises:
            ValueError: a group without a worker.
        """
        slots = sorted(range(self.workers) if members is None else members)
        if not slots:
            raise ValueError("a transfer group needs at least one rollout worker")
        return {
            "members": slots,
            "nccl": {
                "master_address": host,
                "master_port": port,
                "world_size": 1 + len(slots) * self.tensor_parallel,
                "packed": True,
                "packed_buffer_size_bytes": _BUFFER_BYTES,
                "packed_num_buffers": _BUFFERS,
            },
        }

    def connect(self, transport: Mapping[str, Any], manifest: Mapping[str, Any]) -> _Channel:
        """Meet the engines on the current CUDA device; blocks until all have come (vLLM gives up after 300 s)."""
        import torch
        from vllm.distributed.weight_transfer import ParamMeta, WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        source = _Weights(
            [
                ParamMeta(name, getattr(torch, entry["dtype"]), tuple(entry["shape"]))
                for name, entry in manifest["tensors"].items()
            ],
            finish_stream=lambda: torch.cuda.current_stream().synchronize(),
        )
        engine = WeightTransferTrainerFactory.trainer_init(
            NCCLTrainerInitInfo(**transport["nccl"], rank=0), client=_DriverCallsTheWorkers(), source=source
        )
        # The optimizer wrote the weights on another stream than the packer's.
        return _Channel(engine, source, before_sending=torch.cuda.synchronize)


class _Channel:
    """Implements ``protocols.WeightChannel`` over vLLM's trainer engine."""

    def __init__(self, engine: Any, source: _Weights, before_sending: Callable[[], None]) -> None:
        self._engine, self._source, self._before_sending = engine, source, before_sending

    def __call__(self, weights: Iterator[tuple[str, Any]]) -> None:
        """Broadcast one version; returns when its bytes have left.

        Raises:
            ValueError: a weight is not the next one of the manifest.
        """
        self._source.weights = weights
        self._before_sending()
        self._engine.send_weights()

    def close(self) -> None:
        self._engine.shutdown()


class _Weights:
    """vLLM's ``WeightSource`` by shape: the declared weights, and one pass over those of the version being sent.

    Iteration yields copies: the packer keeps a buffer's tensors until it is full, the learner's live until the next one
    is asked for. The packer alternates between streams of its own, and what ZeRO-3 gathered on one is read on the
    other; ``finish_stream`` waits for the current one, so each copy is complete before it is handed over.
    """

    def __init__(self, declared: list[Any], finish_stream: Callable[[], None]) -> None:
        self._declared = declared
        self._finish_stream = finish_stream
        self.weights: Iterator[tuple[str, Any]] = iter(())

    def metadata(self) -> list[Any]:
        return self._declared

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        for name, weight in self.weights:
            copy = weight.clone()
            self._finish_stream()
            yield name, copy


class _DriverCallsTheWorkers:
    """vLLM's ``VLLMWeightSyncClient`` with nothing left to do: the pool calls the workers, each with a deadline."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: Any) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...
