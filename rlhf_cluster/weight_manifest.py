"""What the learner promises about a weight snapshot and an engine checks before it serves it.

A snapshot is one safetensors file; its manifest is ``{"version": int, "tensors": {name: {"dtype", "shape", "crc32"}}}``
with dtypes spelt as torch spells them ("bfloat16"), ``"probe"`` (``diagnosis.logprob_probe``), and ``"verify": true``
when engines must verify what they then hold whether or not that is due. The manifest of a broadcast has no checksums:
its bytes never lie in host memory. No torch here: learner and actors share this file and
nothing else.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


class WeightMismatch(RuntimeError):
    """Names, shapes, dtypes or bytes of an update differ from what was promised; nothing may be served from it."""


def crc32(raw: NDArray[np.uint8]) -> int:
    """CRC-32 of a tensor's bytes, given as a flat uint8 view."""
    return zlib.crc32(np.ascontiguousarray(raw).data)


def tensor_entry(dtype: str, shape: Sequence[int], raw: NDArray[np.uint8]) -> dict[str, Any]:
    """Manifest entry of one tensor."""
    return {"dtype": dtype, "shape": list(shape), "crc32": crc32(raw)}


def check_names(expected: Iterable[str], found: Iterable[str], *, what: str) -> None:
    """Raise WeightMismatch listing up to five missing and unexpected names."""
    wanted, got = set(expected), set(found)
    if wanted == got:
        return
    missing, surplus = sorted(wanted - got), sorted(got - wanted)
    raise WeightMismatch(f"{what}: {len(missing)} names missing {missing[:5]}, {len(surplus)} unexpected {surplus[:5]}")


def check_layout(name: str, entry: Mapping[str, Any], dtype: str, shape: Sequence[int]) -> None:
    """Raise WeightMismatch when dtype or shape differ from the manifest entry."""
    if entry["dtype"] != dtype or list(entry["shape"]) != list(shape):
        raise WeightMismatch(f"{name}: got {dtype} {list(shape)}, manifest says {entry['dtype']} {entry['shape']}")


def check_tensor(name: str, entry: Mapping[str, Any], dtype: str, shape: Sequence[int], raw: NDArray[np.uint8]) -> None:
    """Raise WeightMismatch when a received tensor differs from its manifest entry."""
    check_layout(name, entry, dtype, shape)
    if crc32(raw) != entry["crc32"]:
        raise WeightMismatch(f"{name}: bytes differ from the checksum the learner sent")
