"""A snapshot file is data: what differs from its manifest is refused, and what is no safetensors file runs nothing."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from actors.snapshot_file import check_snapshot, map_snapshot
from rlhf_cluster.weight_manifest import WeightMismatch, tensor_entry

TENSORS = {"a": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3), "b": torch.ones(4)}


def entries() -> dict[str, dict[str, Any]]:
    return {
        name: tensor_entry(
            str(tensor.dtype).removeprefix("torch."), tensor.shape, tensor.view(torch.uint8).numpy().reshape(-1)
        )
        for name, tensor in TENSORS.items()
    }


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "v1.safetensors")
    return tmp_path / "v1.safetensors"


def test_what_was_written_is_mapped_and_passes(path: Path) -> None:
    check_snapshot(path, entries())
    mapped = map_snapshot(path, entries())
    assert sorted(mapped) == ["a", "b"]
    assert all(torch.equal(mapped[name], TENSORS[name]) for name in TENSORS)


@pytest.mark.parametrize("byte", range(-28, 0))
def test_every_single_flipped_byte_is_found(path: Path, byte: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[byte] ^= 1  # the last 28 bytes are the tensors: 6 * 2 of a, 4 * 4 of b
    path.write_bytes(raw)
    with pytest.raises(WeightMismatch, match="bytes differ from the checksum the learner sent"):
        check_snapshot(path, entries())


def test_other_shapes_and_names_are_refused_before_a_byte_is_read(path: Path) -> None:
    turned = entries() | {"a": {**entries()["a"], "shape": [3, 2]}}
    with pytest.raises(WeightMismatch, match=r"a: got bfloat16 \[2, 3\], manifest says bfloat16 \[3, 2\]"):
        map_snapshot(path, turned)
    other_dtype = entries() | {"a": {**entries()["a"], "dtype": "float16"}}
    with pytest.raises(WeightMismatch, match=r"a: got bfloat16 \[2, 3\], manifest says float16 \[2, 3\]"):
        map_snapshot(path, other_dtype)
    with pytest.raises(WeightMismatch, match=r"0 names missing \[\], 1 unexpected \['b'\]"):
        map_snapshot(path, {"a": entries()["a"]})
    with pytest.raises(WeightMismatch, match=r"1 names missing \['c'\], 0 unexpected \[\]"):
        map_snapshot(path, entries() | {"c": entries()["b"]})


class MakesMarker:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


def test_a_pickle_in_place_of_a_snapshot_is_refused_and_not_run(tmp_path: Path) -> None:
    marker, path = tmp_path / "marker", tmp_path / "v1.safetensors"
    for write in (
        lambda: path.write_bytes(pickle.dumps(MakesMarker(marker))),
        lambda: torch.save(MakesMarker(marker), path),
    ):
        write()
        with pytest.raises(SafetensorError):
            check_snapshot(path, entries())
    assert not marker.exists()
    pickle.loads(pickle.dumps(MakesMarker(marker)))
    assert marker.exists(), "the pickle is one that works when somebody loads it"
