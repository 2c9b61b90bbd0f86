"""X03: a checkpoint is data. What it holds runs no code, whoever wrote it."""

from __future__ import annotations

import ast
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from learner.checkpoint import WeightsOnlyCheckpointEngine, load_json, save_json
from rlhf_cluster import run_state
from tests.unit.checkpoint_builders import save_set


class MakesMarker:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("zip_format", [True, False])
def test_a_pickle_in_the_optimizer_state_is_refused_and_not_run(tmp_path: Path, zip_format: bool) -> None:
    marker, path = tmp_path / "marker", tmp_path / "rank0.pt"
    torch.save({"moments": MakesMarker(marker)}, path, _use_new_zipfile_serialization=zip_format)
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        WeightsOnlyCheckpointEngine().load(str(path))
    assert not marker.exists()
    pickle.loads(pickle.dumps(MakesMarker(marker)))
    assert marker.exists(), "the pickle is one that works when somebody loads it"


def test_a_pickle_in_place_of_a_json_file_is_refused_and_not_run(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    folder = save_set(tmp_path / "checkpoints", 1)
    for name in ("run_state.json", "learner/learner.json"):
        (folder / name).write_bytes(pickle.dumps(MakesMarker(marker)))
    with pytest.raises(ValueError):
        run_state.load_state(folder)
    with pytest.raises(ValueError):
        load_json(folder / "learner/learner.json")
    assert not marker.exists()


def test_tensors_come_back_as_they_were(tmp_path: Path) -> None:
    engine, state = WeightsOnlyCheckpointEngine(), {"step": 3, "exp_avg": torch.linspace(0, 1, 7)}
    engine.save(state, str(tmp_path / "state.pt"))
    assert engine.error is None
    loaded = engine.load(str(tmp_path / "state.pt"))
    assert loaded["step"] == 3
    assert torch.equal(loaded["exp_avg"], state["exp_avg"])


def test_json_state_is_complete_or_absent(tmp_path: Path) -> None:
    path = tmp_path / "learner.json"
    save_json(path, {"lr": 0.1})
    with pytest.raises(TypeError):
        save_json(path, {"lr": object()})
    assert load_json(path) == {"lr": 0.1}


UNPICKLERS = {"pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal", "jsonpickle"}
ROOT = Path(__file__).resolve().parents[2]


def unpickling(source: str) -> Iterator[str]:
    """What in ``source`` can load a pickle: a module that does nothing else, or a loader that may."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] in UNPICKLERS)
        if isinstance(node, ast.ImportFrom):
            module = node.module or ""
            loads = module == "torch" and any(alias.name in ("load", "jit") for alias in node.names)
            if module.split(".")[-1] in UNPICKLERS or loads:
                yield f"from {module}"
        if isinstance(node, ast.Call):
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            if given.get("allow_pickle", "False") != "False":
                yield ast.unparse(node)
            if ast.unparse(node.func) == "torch.load" and given.get("weights_only") != "True":
                yield ast.unparse(node)


@pytest.mark.parametrize("package", ["rlhf_cluster", "actors", "learner", "benchmarks", "deploy"])
def test_no_module_can_load_a_pickle(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files or package == "deploy"
    found = {str(path.relative_to(ROOT)): list(unpickling(path.read_text())) for path in files}
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import os, cloudpickle as c",
        "from ray.cloudpickle import loads",
        "from torch import load",
        "import torch; torch.load(path)",
        "import torch; torch.load(path, weights_only=flag)",
        "import numpy as np; np.load(path, allow_pickle=True)",
    ],
)
def test_a_loader_of_pickles_is_found_however_it_is_named(source: str) -> None:
    assert list(unpickling(source))


def test_what_loads_tensors_and_arrays_only_is_allowed() -> None:
    assert not list(unpickling("torch.load(path, weights_only=True); np.load(path); np.load(path, allow_pickle=False)"))
