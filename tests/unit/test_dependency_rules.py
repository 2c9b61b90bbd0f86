"""The dependency rules of the architecture, read from the source of every module.

core = rlhf_cluster without launch.py; actors and learner are the shells around hardware. Imports inside functions
count like imports at the top.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("rlhf_cluster", "actors", "learner")
HEAVY = ("torch", "ray", "vllm", "transformers", "deepspeed")

# Who may import what; a trailing slash names a folder.
ALLOWED = {
    "ray": ("rlhf_cluster/launch.py", "actors/", "learner/learner_group.py"),
    "vllm": (
        "actors/rollout_worker.py",
        "actors/engine_weights.py",
        "actors/held_weights.py",
        "actors/weight_receiver.py",
        "actors/weight_sender.py",
    ),
    "deepspeed": ("learner/engine.py", "learner/weight_publisher.py", "learner/checkpoint.py"),
    "actors": ("rlhf_cluster/launch.py", "actors/"),
    "learner": ("rlhf_cluster/launch.py", "learner/"),
    # Programs start runs (cli, and the demo that drives whole runs); nothing below them does.
    "rlhf_cluster.launch": ("rlhf_cluster/cli.py", "rlhf_cluster/demo/"),
    "rlhf_cluster.cli": ("rlhf_cluster/__main__.py",),
    "pickle": (),
    "cloudpickle": (),
}

# Import without any heavy library being loaded.
LIGHT = ("config", "types", "protocols", "controller", "experience_queue", "run_state", "simulation", "planner")


def sources(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def imported_names(source: str, module: str) -> Iterator[str]:
    """Dotted name of everything that ``source`` imports anywhere; ``module`` is its own dotted name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = ".".join(module.split(".")[: -node.level]) if node.level else ""
            base = ".".join(part for part in (package, node.module) if part)
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and _called(node) in ("import_module", "__import__") and node.args:
            first = node.args[0]
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield first.value


def _called(node: ast.Call) -> str:
    function = node.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def violations(path: str, source: str) -> list[str]:
    """Rules that the module at ``path`` (relative to the root) breaks, as readable lines."""
    module = path.removesuffix(".py").replace("/", ".")
    found = []
    for name in imported_names(source, module):
        for target, allowed in ALLOWED.items():
            reaches = name == target or name.startswith(f"{target}.")
            if reaches and not path.startswith(allowed):
                found.append(f"{path} imports {name}; only {', '.join(allowed) or 'nobody'} may")
    return found


@pytest.mark.parametrize("path", sources(*PACKAGES), ids=lambda path: str(path.relative_to(ROOT)))
def test_each_module_imports_only_what_its_layer_may(path: Path) -> None:
    assert violations(path.relative_to(ROOT).as_posix(), path.read_text()) == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("rlhf_cluster/controller.py", "def run():\n    import ray.util\n"),
        ("rlhf_cluster/metrics/registry.py", "from actors.pool import Pool\n"),
        ("rlhf_cluster/run_state.py", "from . import launch\n"),
        ("rlhf_cluster/metrics/registry.py", "from ..launch import train\n"),
        ("actors/pool.py", "from learner.models import Policy\n"),
        ("actors/reward_scorer.py", "from vllm import LLM\n"),
        ("learner/learner.py", "import actors.frozen_model as frozen\n"),
        ("learner/learner.py", "import importlib\nimportlib.import_module('deepspeed')\n"),
        ("learner/checkpoint.py", "import pickle\n"),
    ],
)
def test_a_forbidden_import_is_found_wherever_it_hides(path: str, source: str) -> None:
    assert len(violations(path, source)) == 1


def test_names_that_only_begin_alike_are_allowed() -> None:
    source = "import learners_guide, raytracer\nfrom rlhf_cluster import clipping\n"
    assert violations("rlhf_cluster/config.py", source) == []


def test_the_control_core_loads_no_heavy_library() -> None:
    present = [
        name
        for name in LIGHT
        if (ROOT / "rlhf_cluster" / f"{name}.py").exists() or (ROOT / "rlhf_cluster" / name / "__init__.py").exists()
    ]
    assert {"config", "types", "protocols", "controller", "experience_queue"} <= set(present)
    names = [f"rlhf_cluster.{name}" for name in present]
    names += [
        f"rlhf_cluster.simulation.{path.stem}"
        for path in sources("rlhf_cluster/simulation")
        if path.stem not in ("__init__", "__main__")
    ]
    for name in names:
        probe = f"import {name}, sys; print(*sorted(set({HEAVY!r}) & set(sys.modules)))"
        done = subprocess.run(
            [sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, f"import {name} failed:\n{done.stderr}"
        assert done.stdout.split() == [], f"{name} loads {done.stdout.split()}"


def test_algorithms_are_pure_torch() -> None:
    """The numerics depend on torch, on each other and on the records, on nothing else of this project."""
    for path in sources("rlhf_cluster/algorithms"):
        module = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
        for name in imported_names(path.read_text(), module):
            ours = name.split(".")[0] in PACKAGES
            assert not ours or name.startswith(("rlhf_cluster.algorithms", "rlhf_cluster.types")), f"{path} {name}"
            assert name.split(".")[0] not in {"transformers", "numpy"}, f"{path.name} imports {name}"


@pytest.mark.parametrize(
    ("pattern", "rule"),
    [
        (r"trust_remote_code\s*=\s*True", "remote code runs only when model.trust_remote_code says so"),
        (r"['\"]trust_remote_code['\"]\s*:\s*True", "remote code runs only when model.trust_remote_code says so"),
        (r"weights_only\s*=\s*False", "torch.load reads tensors only, never pickled objects"),
        (r"0\.0\.0\.0", "servers bind to loopback unless the config names an address"),
        (r"shell\s*=\s*True", "commands are argument lists, never shell text"),
    ],
)
def test_unsafe_settings_stand_nowhere_in_the_code(pattern: str, rule: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in sources(*PACKAGES, "benchmarks")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(pattern, line)
    ]
    assert found == [], rule


def test_every_torch_load_reads_weights_only() -> None:
    for path in sources(*PACKAGES, "tests", "benchmarks"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                assert given.get("weights_only") == "True", f"{path.relative_to(ROOT)}:{node.lineno}"
