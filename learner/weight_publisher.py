"""Policy weights out of the learner: gathered from ZeRO in buckets, written as a checked snapshot or broadcast.

Gathering is collective: under ZeRO-3 all ranks walk through the same buckets together, and one bucket (or one tensor,
if that is larger) is the extra memory.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import deepspeed
import numpy as np
import torch
from torch import Tensor, nn

from learner.engine import TrainEngine
from learner.lora import AdaptedLinear, adapted_layers, is_adapter
from learner.models import collate
from rlhf_cluster.diagnosis import logprob_probe
from rlhf_cluster.protocols import WeightBroadcast, WeightChannel, WeightSnapshot
from rlhf_cluster.weight_manifest import tensor_entry

BUCKET_BYTES = 256 * 2**20
KEPT_SNAPSHOTS = 2
"""The newest, and the one before it that a worker may still be reading."""

_SAFETENSORS_DTYPES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.float16: "F16"}


def weight_metadata(engine: TrainEngine) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Dtype and full shape of every weight, by its Hugging Face name, in the order of ``iterate_weights``.

    Tied weights appear once, under their first name, as ``save_pretrained`` writes them. Not collective.
    """
    return {each.name: (each.weight.dtype, _full_shape(each.weight)) for each in _weights(engine)}


def iterate_weights(engine: TrainEngine, *, bucket_bytes: int = BUCKET_BYTES) -> Iterator[tuple[str, Tensor]]:
    """(name, full tensor) of every weight on every rank, what adapters add included. A tensor is valid until the next
    one is asked for.

    Collective: all ranks must exhaust it.

    Raises:
        RuntimeError: between two micro-batches, when gathering would disturb the gradients of ZeRO-3.
    """
    for bucket in _gathered(engine, bucket_bytes):
        for each in bucket:
            yield each.name, each.value()


def take_part(engine: TrainEngine) -> None:
    """What a rank does that wants no weights while another one iterates over all of them. Collective."""
    for _ in _gathered(engine, BUCKET_BYTES):
        pass


class WeightPublisher:
    """Writes snapshots ``v{version}.safetensors`` into ``folder`` and removes old ones. Files appear complete or not at
    all."""

    def __init__(self, engine: TrainEngine, folder: Path, *, rank: int) -> None:
        self._engine = engine
        self._folder = folder
        self._rank = rank
        self._written: list[Path] = []
        if rank == 0:
            # What a learner group that died left here: workers may still read the whole ones.
            for partial in folder.glob("v*.partial"):
                partial.unlink()
            self._written = sorted(folder.glob("v*.safetensors"), key=lambda path: path.stat().st_mtime_ns)

    def write(self, version: int) -> WeightSnapshot | None:
        """Write the current weights as ``version``: rank 0 returns the snapshot, the others None. Collective.

        The manifest carries checksums and the learner's answers to the log-prob probe.

        Raises:
            RuntimeError: between two micro-batches of a step.
        """
        _refuse_mid_accumulation(self._engine)
        probe = probe_entry(self._engine)
        if self._rank != 0:
            take_part(self._engine)
            return None
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self.path(version)
        partial = path.with_suffix(".partial")
        try:
            with partial.open("wb") as file:
                entries = self._stream(file)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
        self._keep(path)
        return WeightSnapshot(version, path, {"version": version, "tensors": entries, "probe": probe})

    def path(self, version: int) -> Path:
        return self._folder / f"v{version}.safetensors"

    def close(self) -> None:
        """Remove every snapshot still there, and the folder when nobody else put anything into it."""
        for path in self._written:
            path.unlink(missing_ok=True)
        self._written.clear()
        with contextlib.suppress(OSError):
            self._folder.rmdir()

    def _stream(self, file: BinaryIO) -> dict[str, Any]:
        """The safetensors layout: header length (8 bytes, little-endian), JSON header, then the tensors' bytes."""
        header: dict[str, Any] = {}
        offset = 0
        for name, (dtype, shape) in weight_metadata(self._engine).items():
            end = offset + dtype.itemsize * torch.Size(shape).numel()
            header[name] = {"dtype": _SAFETENSORS_DTYPES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
            offset = end
        encoded = json.dumps(header, separators=(",", ":")).encode()
        encoded += b" " * (-len(encoded) % 8)
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        entries = {}
        for name, weight in iterate_weights(self._engine):
            raw = weight.to("cpu").contiguous().flatten().view(torch.uint8).numpy()
            file.write(raw.data)
            entries[name] = tensor_entry(_dtype_name(weight.dtype), tuple(weight.shape), raw)
        return entries

    def _keep(self, newest: Path) -> None:
        self._written = [*(path for path in self._written if path != newest), newest]
        while len(self._written) > KEPT_SNAPSHOTS:
            self._written.pop(0).unlink(missing_ok=True)


class WeightBroadcaster:
    """Sends the live weights from rank 0 to the engines instead of writing them; connects once a transfer group."""

    def __init__(self, engine: TrainEngine, *, rank: int) -> None:
        self._engine = engine
        self._rank = rank
        self._channel: WeightChannel | None = None
        self._group: Mapping[str, Any] = {}

    def manifest(self, version: int) -> dict[str, Any]:
        """Names, dtypes and shapes in the order of ``send``, without checksums. Not collective."""
        tensors = {
            name: {"dtype": _dtype_name(dtype), "shape": list(shape)}
            for name, (dtype, shape) in weight_metadata(self._engine).items()
        }
        return {"version": version, "tensors": tensors}

    def announcement(self, version: int) -> dict[str, Any]:
        """``manifest``, and the log-prob probe where one rank can answer it alone (not with sharded weights)."""
        probe = {} if self._engine.zero_stage == 3 else {"probe": probe_entry(self._engine)}
        return {**self.manifest(version), **probe}

    def send(self, version: int, broadcast: WeightBroadcast, transport: Mapping[str, Any]) -> None:
        """Rank 0 sends every weight while the other ranks take part in the gathering. Collective."""
        if self._rank != 0:
            take_part(self._engine)
            return
        if self._channel is None or transport != self._group:
            if self._channel is not None:
                channel, self._channel = self._channel, None
                channel.close()
            self._channel = broadcast.connect(transport, self.manifest(version))
            self._group = transport
        self._channel(iterate_weights(self._engine))


def probe_entry(engine: TrainEngine) -> dict[str, Any]:
    """``manifest["probe"]`` under the current weights (``diagnosis.logprob_probe``). Collective."""
    probed = logprob_probe.sequences(hugging_face_model(engine).config.get_text_config().vocab_size)
    rows = [(np.array(ids[:1], np.int32), np.array(ids[1:], np.int32)) for ids in probed]
    inputs = collate(rows, next(engine.module.parameters()).device, packed=engine.module.packed)
    with torch.no_grad():
        logprobs = engine(inputs, temperature=1.0).logprobs
    return logprob_probe.manifest_entry(probed, [row.float().cpu().numpy() for row in logprobs])


def hugging_face_model(engine: TrainEngine) -> Any:
    """The Hugging Face model inside the engine's forward wrapper."""
    return engine.module.model


def _refuse_mid_accumulation(engine: TrainEngine) -> None:
    if engine.accumulating:
        raise RuntimeError(
            f"the {engine.name} weights were asked for in the middle of gradient accumulation; ask after the step"
        )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class _Weight(NamedTuple):
    """A parameter by its Hugging Face name, and the layer it belongs to when that has an adapter."""

    name: str
    weight: nn.Parameter
    adapted: AdaptedLinear | None

    @property
    def parts(self) -> list[nn.Parameter]:
        """What has to be whole before ``value``."""
        adapted = self.adapted
        return [self.weight] if adapted is None else [self.weight, adapted.lora_a, adapted.lora_b]

    def value(self) -> Tensor:
        return self.weight.detach() if self.adapted is None else self.adapted.merged()


def _weights(engine: TrainEngine) -> list[_Weight]:
    model = hugging_face_model(engine)
    adapted = adapted_layers(model)
    return [
        _Weight(name, weight, adapted.get(name)) for name, weight in model.named_parameters() if not is_adapter(name)
    ]


def _full_shape(weight: nn.Parameter) -> tuple[int, ...]:
    # ZeRO-3 leaves an empty tensor behind; its own attribute has the shape.
    return tuple(getattr(weight, "ds_shape", weight.shape))


def _gathered(engine: TrainEngine, bucket_bytes: int) -> Iterator[list[_Weight]]:
    """Buckets of weights, each whole until the next one is asked for."""
    _refuse_mid_accumulation(engine)
    for bucket in _buckets(engine, bucket_bytes):
        # Under stages 0 to 2 every rank holds whole weights and this does nothing.
        parts = [part for each in bucket for part in each.parts]
        with deepspeed.zero.GatheredParameters(parts, enabled=engine.zero_stage == 3):
            yield bucket


def _buckets(engine: TrainEngine, bucket_bytes: int) -> Iterator[list[_Weight]]:
    bucket: list[_Weight] = []
    filled = 0
    for each in _weights(engine):
        size = sum(torch.Size(_full_shape(part)).numel() * part.dtype.itemsize for part in each.parts)
        if bucket and filled + size > bucket_bytes:
            yield bucket
            bucket, filled = [], 0
        bucket.append(each)
        filled += size
    if bucket:
        yield bucket
