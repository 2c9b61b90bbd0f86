"""Which model a folder holds: the same after a move, another after any training."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rlhf_cluster.model_fingerprint import fingerprint


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"vocab_size": 7}')
    (folder / "model.safetensors").write_bytes(bytes(300_000))
    return folder


def test_a_copy_elsewhere_is_the_same_model_whatever_lies_beside_it(model: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(model, tmp_path / "copy")
    (copy / "README.md").write_text("a copy")
    assert fingerprint(copy) == fingerprint(model)


@pytest.mark.parametrize("position", [0, 299_999])
def test_other_weights_are_another_model(model: Path, position: int) -> None:
    before = fingerprint(model)
    content = bytearray((model / "model.safetensors").read_bytes())
    content[position] = 1
    (model / "model.safetensors").write_bytes(content)
    assert fingerprint(model) != before


def test_another_config_or_size_is_another_model(model: Path) -> None:
    seen = {fingerprint(model)}
    (model / "config.json").write_text('{"vocab_size": 8}')
    seen.add(fingerprint(model))
    (model / "model.safetensors").write_bytes(bytes(300_001))
    seen.add(fingerprint(model))
    assert len(seen) == 3
