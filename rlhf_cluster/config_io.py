"""Reads YAML plus dotted overrides into a ``Config``, and writes the resolved one back.

Every refusal is a ``ConfigError`` that names file, key, rule and value, and the nearest valid key for an unknown one.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from rlhf_cluster.config import Config

# What other systems call a key of ours; only used to suggest.
_OTHER_NAMES = {
    "learning_rate": "learner.policy_lr",
    "lr": "learner.policy_lr",
    "actor_learning_rate": "learner.policy_lr",
    "critic_learning_rate": "learner.critic_lr",
    "batch_size": "queue.groups_per_batch",
    "num_epochs": "learner.epochs",
    "init_kl_coef": "algorithm.kl.coef",
    "tensor_parallel_size": "rollout.engine.tensor_parallel",
}


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


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """The config at ``path`` with ``section.key=value`` overrides applied, validated.

    Raises:
        ConfigError: unreadable file, malformed override, unknown key, value out of range, impossible combination.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the config file: {error.strerror or error}") from None
    raw = _parse(text, str(path))
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: the file must hold sections (run:, model:, ...), not {type(raw).__name__}")
    for override in overrides:
        _apply_override(raw, override, str(path))
    return parse_config(raw, source=str(path))


def parse_config(raw: dict[str, Any], *, source: str) -> Config:
    """A validated config from plain values; ``source`` names where they come from in errors."""
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        lines = [_explain(item) for item in error.errors(include_url=False, include_context=False)]
        raise ConfigError("\n".join(f"{source}: {line}" for line in lines)) from None


def dump_config(config: Config) -> str:
    """The resolved config as YAML; ``load_config`` reads it back to an equal one."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, width=120)


def _parse(text: str, source: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: not valid YAML: {error}") from None


def _apply_override(raw: dict[str, Any], override: str, source: str) -> None:
    key, separator, value = override.partition("=")
    if not separator or not key.strip():
        raise ConfigError(f"override {override!r}: write section.key=value")
    *parents, leaf = key.strip().split(".")
    node: Any = raw
    for depth, part in enumerate(parents):
        child = node.get(part)
        if child is None:
            child = node[part] = {}
        if not isinstance(child, dict):
            raise ConfigError(f"{source}: override {override!r}: {'.'.join(parents[: depth + 1])} holds no keys")
        node = child
    node[leaf] = _parse(value, f"override {override!r}")


def _explain(item: Any) -> str:
    location = [part for part in item["loc"]]
    name = ".".join(str(part) for part in location) or "config"
    if item["type"] == "extra_forbidden":
        return f"{name}: unknown key; {_nearest(location)}"
    if item["type"] == "missing":
        return f"{name}: required and missing; add it to the file or as an override {name}=..."
    message = str(item["msg"]).removeprefix("Value error, ")
    shown = "" if isinstance(item.get("input"), dict | BaseModel) else f" (got {item.get('input')!r})"
    return f"{name}: {message}{shown}"


def _nearest(location: list[Any]) -> str:
    """The most similar valid key in the same section, else anywhere."""
    section: type[BaseModel] | None = Config
    for part in location[:-1]:
        section = _section_type(section, part) if section is not None else section
    wrong = str(location[-1])
    everywhere = _OTHER_NAMES | {key.rsplit(".", 1)[-1]: key for key in all_keys() if "." in key}
    if wrong in everywhere:
        return f"did you mean {everywhere[wrong]}?"
    siblings = list(section.model_fields) if section is not None else []
    prefix = ".".join(str(part) for part in location[:-1])
    close = difflib.get_close_matches(wrong.replace("-", "_"), siblings, n=1, cutoff=0.6)
    if close:
        return f"did you mean {prefix + '.' if prefix else ''}{close[0]}?"
    elsewhere = difflib.get_close_matches(wrong.replace("-", "_"), list(everywhere), n=1, cutoff=0.7)
    if elsewhere:
        return f"did you mean {everywhere[elsewhere[0]]}?"
    return f"valid keys here: {', '.join(siblings)}"


def all_keys(section: type[BaseModel] = Config, prefix: str = "") -> list[str]:
    """Dotted names of every field of every section, in order."""
    keys: list[str] = []
    for name, info in section.model_fields.items():
        nested = _models_in(info.annotation)
        keys.append(prefix + name)
        for model in nested:
            keys += all_keys(model, f"{prefix}{name}.")
    return keys


def _section_type(section: type[BaseModel], part: Any) -> type[BaseModel] | None:
    if isinstance(part, int):
        return section
    info = section.model_fields.get(part)
    models = _models_in(info.annotation) if info is not None else []
    return models[0] if models else None


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models_in(argument)]
