"""What is checked before an engine is touched, and what happens to it after a failure; the engine is a stand-in."""

from __future__ import annotations

import contextlib
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from actors.engine_weights import EngineWeights
from actors.rollout_worker import RolloutWorker
from rlhf_cluster.config import EngineConfig, PublishConfig
from rlhf_cluster.protocols import WeightSnapshot
from rlhf_cluster.weight_manifest import WeightMismatch, tensor_entry
from tests.unit.builders import async_test

SHAPES = {"a": (2,), "b": (2,)}


class Engine:
    """Does everything it is asked for but what is in ``broken``; ``asked`` says what that was."""

    errored = False

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.broken: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        async def call(*arguments: Any, **options: Any) -> bool:
            what = arguments[0] if name == "collective_rpc" else f"{name} {options.get('mode', '')}".strip()
            self.asked.append(what)
            if what in self.broken:
                raise RuntimeError(f"{what} failed")
            return True

        return call


@pytest.fixture(autouse=True)
def requests_without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    base = types.ModuleType("vllm.distributed.weight_transfer.base")
    base.WeightTransferInitRequest = base.WeightTransferUpdateRequest = dict  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, base.__name__, base)


def worker(engine: Engine, dtype: str = "float32") -> RolloutWorker:
    """A worker that serves version 0 of a model with the tensors ``a`` and ``b`` of two elements."""
    made = RolloutWorker(0, "folder", dtype, EngineConfig(), 64, 0, "cpu", PublishConfig())
    made._engine, made._fenced = engine, None
    made._weights = EngineWeights(
        engine,
        name="rollout worker 0",
        index=0,
        weight_shapes=SHAPES,
        dtype=dtype,
        publish=PublishConfig(),
        tensor_parallel=1,
        max_model_len=64,
    )
    return made


def snapshot(folder: Path, version: int, **tensors: torch.Tensor) -> WeightSnapshot:
    path = folder / f"v{version}.safetensors"
    save_file(tensors, path)
    entries = {
        name: tensor_entry(str(tensor.dtype).removeprefix("torch."), tensor.shape, tensor.view(torch.uint8).numpy())
        for name, tensor in tensors.items()
    }
    return WeightSnapshot(version, path, {"version": version, "tensors": entries})


@pytest.mark.parametrize("version", [0, 1], ids=["held", "loaded"])
@async_test
async def test_a_snapshot_that_lacks_a_weight_never_reaches_the_engine(tmp_path: Path, version: int) -> None:
    engine = Engine()
    fenced = worker(engine)
    with pytest.raises(WeightMismatch, match=rf"rollout worker 0, version {version}: 1 names missing \['b'\]"):
        await fenced.update_weights(snapshot(tmp_path, version, a=torch.ones(2)))
    assert engine.asked == ["pause_generation abort"]
    assert fenced.fenced is not None


@pytest.mark.parametrize(
    ("wrong", "announced"),
    [(torch.ones(3), r"float32 \[3\]"), (torch.ones(0), r"float32 \[0\]"), (torch.ones(2).half(), r"float16 \[2\]")],
    ids=["shape", "empty", "dtype"],
)
@async_test
async def test_weights_of_another_layout_than_the_engines_are_refused_before_the_first_byte(
    tmp_path: Path, wrong: torch.Tensor, announced: str
) -> None:
    engine = Engine()
    expected = rf"version 1: b is announced as {announced}, the engine takes float32 \[2\]"
    with pytest.raises(WeightMismatch, match=expected):
        await worker(engine).update_weights(snapshot(tmp_path, 1, a=torch.ones(2), b=wrong))
    assert engine.asked == ["pause_generation abort"]


@async_test
async def test_the_expected_dtype_is_the_engines_whatever_the_folder_had(tmp_path: Path) -> None:
    half = torch.ones(2).bfloat16()
    serving = worker(Engine(), dtype="bfloat16")
    await serving.update_weights(snapshot(tmp_path, 1, a=half, b=half.clone()))
    assert (serving.version, serving.fenced) == (1, None)


@async_test
async def test_what_runs_is_aborted_also_when_a_failed_update_cannot_be_abandoned(tmp_path: Path) -> None:
    engine = Engine()
    engine.broken = {"update_weights", "abandon_weight_update"}
    with pytest.raises(RuntimeError, match="update_weights failed"):
        await worker(engine).update_weights(snapshot(tmp_path, 1, a=torch.ones(2), b=torch.ones(2)))
    assert engine.asked[-2:] == ["abandon_weight_update", "pause_generation abort"]


@async_test
async def test_weights_of_a_restored_learner_are_verified_out_of_turn_and_the_turn_starts_again(tmp_path: Path) -> None:
    engine = Engine()
    serving = worker(engine)
    verified = []
    for version in range(1, 14):
        update = snapshot(tmp_path, version, a=torch.ones(2), b=torch.ones(2))
        if version == 3:
            update = replace(update, manifest={**update.manifest, "verify": True})
        await serving.update_weights(update)
        if "verify_weights" in engine.asked:
            verified.append(version)
        engine.asked.clear()
    assert verified == [1, 3, 13], "the first, the restored learner's, and ten after that"


@async_test
async def test_the_update_after_a_failed_one_is_verified_out_of_turn(tmp_path: Path) -> None:
    engine = Engine()
    serving = worker(engine)
    verified = []
    for version in range(1, 5):
        engine.broken = {"update_weights"} if version == 3 else set()
        with contextlib.suppress(RuntimeError):
            await serving.update_weights(snapshot(tmp_path, version, a=torch.ones(2), b=torch.ones(2)))
        if "verify_weights" in engine.asked:
            verified.append(version)
        engine.asked.clear()
    assert (verified, serving.version) == ([1, 4], 4)
