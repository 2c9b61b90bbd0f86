"""A snapshot file on this node: mapped into memory, and held against its manifest.

The tensors share the file's pages, which in /dev/shm are the learner's own: nothing is copied and nothing unpickled
(safetensors is a JSON header and raw bytes).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from rlhf_cluster.weight_manifest import check_layout, check_names, check_tensor


def map_snapshot(path: Path | str, entries: Mapping[str, Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """Every tensor of the snapshot by name, read-only.

    Raises:
        WeightMismatch: names, dtypes or shapes differ from ``entries``.
    """
    tensors: dict[str, torch.Tensor] = {}
    with safe_open(str(path), framework="pt", device="cpu") as file:
        check_names(entries, file.keys(), what=f"snapshot {path} against its manifest")
        for name in file.keys():  # noqa: SIM118 - a safetensors file is no dict
            tensor = file.get_tensor(name)
            check_layout(name, entries[name], _dtype_name(tensor), tensor.shape)
            tensors[name] = tensor
    return tensors


def check_snapshot(path: Path | str, entries: Mapping[str, Mapping[str, Any]]) -> None:
    """Read every byte once and compare with the learner's checksums. Releases the GIL while it reads.

    Raises:
        WeightMismatch: names, dtypes, shapes or bytes differ from ``entries``.
    """
    for name, tensor in map_snapshot(path, entries).items():
        raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
        check_tensor(name, entries[name], _dtype_name(tensor), tensor.shape, raw)


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
