"""YAML as configs are written in it, and the error that refuses one. Loads nothing but PyYAML."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml


class ConfigError(ValueError):
    """The configuration cannot be used. The message is written for the user."""


class _Loader(yaml.SafeLoader):
    """YAML 1.2 floats (PyYAML reads ``1e-6`` as text) and no silently overwritten duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} appears twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)[eE][-+]?[0-9]+$"),
    list("-+0123456789."),
)


def parse_yaml(text: str, source: str) -> Any:
    """The value that ``text`` stands for; ``source`` names it in the ConfigError."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: not valid YAML: {error}") from None


def read_text(path: Path, what: str) -> str:
    """The text of ``path``; ``what`` ("config file") names it in the ConfigError."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(f"{path}: cannot read the {what}: {reason}") from None


def read_sections(text: str, source: str) -> dict[str, Any]:
    """The sections of a config or preset file."""
    raw = parse_yaml(text, source)
    if not isinstance(raw, dict):
        raise ConfigError(f"{source}: the file must hold sections (run:, model:, ...), not {type(raw).__name__}")
    return raw
