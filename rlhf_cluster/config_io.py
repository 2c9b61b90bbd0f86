"""Composes a base file, presets and dotted overrides into a ``Config``, and writes the resolved one back.

Every refusal is a ``ConfigError`` that names file, preset or override, key, rule and value, and the nearest valid key
for an unknown one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from rlhf_cluster.config import Config
from rlhf_cluster.config_keys import all_keys, say_unknown
from rlhf_cluster.config_yaml import ConfigError, parse_yaml, read_sections, read_text
from rlhf_cluster.presets import Preset, Reference, leaves, load_preset

__all__ = [
    "Composition",
    "ConfigError",
    "Layer",
    "all_keys",
    "changed_settings",
    "compose_config",
    "dump_config",
    "load_config",
]

KeyPath = tuple[Any, ...]


@dataclass(frozen=True)
class Layer:
    """A file, preset or override, and what it changed in the ones before it: `key: value (was other)` a line."""

    source: str
    changes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Composition:
    """A config, and the layers it was composed of, in the order they were laid on."""

    config: Config
    layers: tuple[Layer, ...]


def load_config(path: Path, overrides: Sequence[str] = (), presets: Sequence[str] = ()) -> Config:
    """The config at ``path`` under ``presets`` and ``section.key=value`` overrides; see ``compose_config``."""
    return compose_config(path, overrides, presets).config


def compose_config(path: Path, overrides: Sequence[str] = (), presets: Sequence[str] = ()) -> Composition:
    """The base file, then ``presets`` in order, then ``overrides`` in order.

    A preset first takes out the keys of its ``drop``. Its ``algorithm`` section replaces the one so far, since it says
    wholly what the algorithm is; its other sections are merged key by key.

    Raises:
        ConfigError: unreadable file, unknown preset, malformed override, unknown key, value out of range, impossible
            combination.
    """
    layers = _Layers()
    layers.merge(read_sections(read_text(path, "config file"), str(path)), str(path))
    said = [Layer(str(path))]
    for name in presets:
        preset, before = load_preset(name), layers.values()
        layers.lay_on(preset)
        chain = " on ".join(file.name for file in reversed(preset.files))
        said.append(Layer(f"preset {chain}", _changes(before, layers.values())))
    for override in overrides:
        before = layers.values()
        layers.override(override)
        said.append(Layer(f"override {override}", _changes(before, layers.values())))
    return Composition(layers.config(), tuple(said))


def dump_config(config: Config) -> str:
    """The resolved config as YAML; ``load_config`` reads it back to an equal one."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, width=120)


def changed_settings(written: Path, config: Config) -> list[str]:
    """How ``config`` differs from one that ``dump_config`` wrote, as ``key: old -> new``; of a file that is no config,
    that alone."""
    try:
        content = yaml.safe_load(written.read_text(encoding="utf-8"))
        if not isinstance(content, Mapping):
            raise ValueError("it is no config")
        old = dict(_flat(content))
    except FileNotFoundError:
        return []
    except (OSError, ValueError, yaml.YAMLError) as error:
        return [f"{written} cannot be read: {error}"]
    new = dict(_flat(config.model_dump(mode="json")))
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    return [f"{key}: {_plain(old.get(key))} -> {_plain(new.get(key))}" for key in keys]


def _plain(value: Any) -> str:
    # Somebody's hand may have made a date of it.
    return json.dumps(value, default=str)


def _flat(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _flat(inner, f"{key}.{name}" if key else str(name))
    else:
        yield key, value


@dataclass(frozen=True)
class _Leaf:
    value: Any
    source: str


class _Layers:
    """Values by path, each with the file, preset or override that it came from last."""

    def __init__(self) -> None:
        self._leaves: dict[KeyPath, _Leaf] = {}
        self._sources: list[str] = []

    def merge(self, values: Mapping[Any, Any], source: str) -> None:
        """Key by key: what ``values`` does not name stays."""
        self._sources.append(source)
        for path, value in leaves(values):
            if path and (value != {} or not self._under(path)):
                self._set(path, value, source)

    def lay_on(self, preset: Preset) -> None:
        for key in preset.drop:
            self._remove(tuple(key.split(".")))
        if any("algorithm" in file.sections for file in preset.files):
            self._remove(("algorithm",))
        for file in preset.files:
            self.merge(file.sections, file.source)

    def override(self, text: str) -> None:
        source = f"override {text!r}"
        key, separator, value = text.partition("=")
        if not separator or not key.strip():
            raise ConfigError(f"{source}: write section.key=value")
        path = tuple(key.strip().split("."))
        for depth in range(1, len(path)):
            parent = self._leaves.get(path[:depth])
            if parent is not None and parent.value not in (None, {}):
                raise ConfigError(f"{source}: {'.'.join(path[:depth])} holds no keys")
        self._sources.append(source)
        parsed = parse_yaml(value, source)
        self._remove(path)
        for rest, item in leaves(parsed):
            self._set((*path, *rest), item, source)

    def values(self) -> dict[KeyPath, Any]:
        return {path: leaf.value for path, leaf in self._leaves.items()}

    def config(self) -> Config:
        """Everything so far, validated.

        Raises:
            ConfigError: what pydantic refuses, a line each, naming where the value came from.
        """
        try:
            return Config.model_validate(self._nested())
        except ValidationError as error:
            items = error.errors(include_url=False, include_context=False)
            raise ConfigError("\n".join(f"{self._blame(item)}: {_explain(item)}" for item in items)) from None

    def _nested(self) -> dict[Any, Any]:
        root: dict[Any, Any] = {}
        for path, leaf in self._leaves.items():
            node = root
            for part in path[:-1]:
                node = node.setdefault(part, {})
            node[path[-1]] = self._resolved(path, leaf)
        return root

    def _resolved(self, path: KeyPath, leaf: _Leaf) -> Any:
        if not isinstance(leaf.value, Reference):
            return leaf.value
        key = leaf.value.key
        target = self._leaves.get(tuple(key.split(".")))
        if target is None or target.value is None or isinstance(target.value, Reference):
            raise ConfigError(f"{leaf.source}: {_dotted(path)} is ${{{key}}}, but {key} holds no value; set {key}")
        return target.value

    def _set(self, path: KeyPath, value: Any, source: str) -> None:
        self._remove(path)
        for depth in range(1, len(path)):
            self._leaves.pop(path[:depth], None)
        self._leaves[path] = _Leaf(value, source)

    def _remove(self, path: KeyPath) -> None:
        for inner in self._under(path):
            del self._leaves[inner]

    def _under(self, path: KeyPath) -> list[KeyPath]:
        return [inner for inner in self._leaves if inner[: len(path)] == path]

    def _blame(self, item: Any) -> str:
        """The sources of the values that an error is about, in the order they were laid on."""
        location, message = tuple(item["loc"]), str(item["msg"])
        if item["type"] == "missing":
            return self._sources[0]
        about = [path for path in self._leaves if path == location[: len(path)] or path[: len(location)] == location]
        # A rule over several keys names those it is about: dotted ones across sections, bare ones within a section.
        words = set(re.findall(r"[a-z_0-9]+(?:\.[a-z_0-9]+)*", message))
        named = [path for path in about if words & {_dotted(path), _dotted(path[len(location) :])}]
        sources = {self._leaves[path].source for path in named or about}
        return " + ".join(source for source in dict.fromkeys(self._sources) if source in sources) or self._sources[0]


def _changes(before: Mapping[KeyPath, Any], after: Mapping[KeyPath, Any]) -> tuple[str, ...]:
    lines = [f"{_dotted(path)}: the default (was {_shown(before[path])})" for path in before if path not in after]
    for path, value in after.items():
        if path not in before:
            lines.append(f"{_dotted(path)}: {_shown(value)}")
        elif before[path] != value:
            lines.append(f"{_dotted(path)}: {_shown(value)} (was {_shown(before[path])})")
    return tuple(lines)


def _shown(value: Any) -> str:
    return f"${{{value.key}}}" if isinstance(value, Reference) else json.dumps(value, default=str)


def _explain(item: Any) -> str:
    location = list(item["loc"])
    name = _dotted(location) or "config"
    if item["type"] == "extra_forbidden":
        return say_unknown(location)
    if item["type"] == "missing":
        return f"{name}: required and missing; add it to the file or as an override {name}=..."
    message = str(item["msg"]).removeprefix("Value error, ")
    shown = "" if isinstance(item.get("input"), dict | BaseModel) else f" (got {item.get('input')!r})"
    return f"{name}: {message}{shown}"


def _dotted(path: Sequence[Any]) -> str:
    return ".".join(map(str, path))
