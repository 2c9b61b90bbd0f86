"""The names of the config: every dotted key, which of them a file got wrong, and the nearest valid one."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel

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


def all_keys(section: type[BaseModel] = Config, prefix: str = "") -> list[str]:
    """Dotted names of every field of every section, in order."""
    keys: list[str] = []
    for name, info in section.model_fields.items():
        keys.append(prefix + name)
        for model in _models_in(info.annotation):
            keys += all_keys(model, f"{prefix}{name}.")
    return keys


def unknown_keys(values: Any, section: type[BaseModel] = Config) -> Iterator[tuple[Any, ...]]:
    """Locations of keys in plain ``values`` that ``section`` does not have; values themselves are not looked at."""
    if isinstance(values, Sequence) and not isinstance(values, str):
        for index, item in enumerate(values):
            yield from ((index, *rest) for rest in unknown_keys(item, section))
    elif isinstance(values, Mapping):
        for key, value in values.items():
            info = section.model_fields.get(key)
            if info is None:
                yield (key,)
                continue
            for model in _models_in(info.annotation):
                yield from ((key, *rest) for rest in unknown_keys(value, model))


def say_unknown(location: Sequence[Any]) -> str:
    """`section.key: unknown key; did you mean ...?`"""
    return f"{'.'.join(map(str, location))}: unknown key; {_nearest(location)}"


def _nearest(location: Sequence[Any]) -> str:
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
