"""Presets: recipes in configs/presets/NAME.yaml that are laid over a base config with ``--preset NAME``.

A preset holds sections of the config and, beside them:

- ``parent: NAME``: what it starts from; its own keys are merged over the parent's.
- ``drop: [learner.critic_lr, ...]``: keys of the base that mean nothing with it and are taken out first.
- ``key: ${section.key}`` as a whole value: what that key is in the composed config, for values that no preset can know
  (``critic: ${model.policy}``).

Its comment header says what it is, where it comes from and what to compare it with.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_cluster.config_keys import all_keys, say_unknown, unknown_keys
from rlhf_cluster.config_yaml import ConfigError, read_sections, read_text

_REFERENCE = re.compile(r"^\$\{([^{}]*)\}$")


@dataclass(frozen=True)
class Reference:
    """Stands for the value of another key until everything is composed."""

    key: str


@dataclass(frozen=True)
class PresetFile:
    """One file. ``name``: as it was asked for; ``about``: the first line of its header."""

    path: Path
    name: str
    about: str
    parent: str | None
    drop: tuple[str, ...]
    sections: Mapping[str, Any]

    @property
    def source(self) -> str:
        """What errors call it."""
        return f"preset {self.name}"


@dataclass(frozen=True)
class Preset:
    """A preset with its parents: ``files`` in the order they are merged, the named one last."""

    name: str
    files: tuple[PresetFile, ...]

    @property
    def drop(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(key for file in self.files for key in file.drop))


def presets_folder() -> Path:
    """configs/presets of this checkout, or of the current folder where the package is installed apart from it."""
    checkout = Path(__file__).resolve().parent.parent / "configs" / "presets"
    return checkout if checkout.is_dir() else Path("configs/presets")


def preset_names() -> list[str]:
    """Names of the shipped presets, sorted."""
    return sorted(path.stem for path in presets_folder().glob("*.yaml"))


def is_path(name: str) -> bool:
    """Whether ``name`` is a file of the user's rather than a shipped preset."""
    return name.endswith((".yaml", ".yml"))


def load_preset(name: str) -> Preset:
    """The preset ``name``: a shipped one, or a path ending in .yaml; a parent's path is relative to its child's file.

    Raises:
        ConfigError: unknown name, unreadable file, unknown key (also in ``drop`` and ``${...}``), parents in a circle.
    """
    files: list[PresetFile] = []
    wanted: str | None = name
    folder = Path()
    while wanted is not None:
        file = _read(_find(wanted, folder), wanted)
        if file.path in [child.path for child in files]:
            raise ConfigError(f"{files[-1].source}: parent: {wanted} has this preset among its own parents")
        files.append(file)
        wanted, folder = file.parent, file.path.parent
    return Preset(name, tuple(reversed(files)))


def _find(name: str, folder: Path) -> Path:
    if is_path(name):
        return (folder / name).resolve()
    names = preset_names()
    if name not in names:
        close = difflib.get_close_matches(name.replace("-", "_"), names, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]}? " if close else ""
        shipped = ", ".join(names) or f"none found in {presets_folder()}"
        raise ConfigError(f"preset {name!r} is unknown; {hint}shipped: {shipped}; or give a path ending in .yaml")
    return presets_folder() / f"{name}.yaml"


def _read(path: Path, name: str) -> PresetFile:
    source = f"preset {name}"
    text = read_text(path, f"file of {source}")
    sections = read_sections(text, source)
    parent, drop = sections.pop("parent", None), sections.pop("drop", [])
    if parent is not None and not isinstance(parent, str):
        raise ConfigError(f"{source}: parent: must be the name of a preset, got {parent!r}")
    if not isinstance(drop, list) or not all(isinstance(key, str) for key in drop):
        raise ConfigError(f"{source}: drop: must be a list of section.key, got {drop!r}")
    sections = _with_references(sections)
    references = {value.key for _, value in leaves(sections) if isinstance(value, Reference)}
    known = set(all_keys())
    wrong = [("drop: ", key.split(".")) for key in drop if key not in known]
    wrong += [("${...}: ", key.split(".")) for key in sorted(references - known)]
    wrong += [("", list(location)) for location in unknown_keys(sections)]
    if wrong:
        raise ConfigError("\n".join(f"{source}: {where}{say_unknown(location)}" for where, location in wrong))
    return PresetFile(path, name, _about(text), parent, tuple(drop), sections)


def leaves(values: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """(path, value) of everything in nested mappings that is not a mapping with entries; lists are values."""
    if isinstance(values, Mapping) and values:
        for key, value in values.items():
            yield from leaves(value, (*path, key))
    else:
        yield path, values


def _with_references(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_references(item) for key, item in value.items()}
    found = _REFERENCE.match(value) if isinstance(value, str) else None
    return value if found is None else Reference(found[1])


def _about(text: str) -> str:
    first = text.lstrip().split("\n", 1)[0]
    return first.lstrip("# ") if first.startswith("#") else ""
