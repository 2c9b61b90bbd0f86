"""Function rewards: pure functions of a prompt and an answer, built in or named ``module:name`` in the config."""

from __future__ import annotations

import importlib
import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rlhf_cluster.config import RewardComponent
from rlhf_cluster.types import FinishReason, Prompt


class RewardFunction(Protocol):
    """What ``function: module:name`` must point to. NaN says: this answer cannot be judged."""

    def __call__(self, prompt: Prompt, answer: str, finish_reason: FinishReason, /) -> float: ...


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer as function rewards see it. ``token_ids`` are those the policy sampled, EOS included."""

    text: str = field(repr=False)
    token_ids: Sequence[int] = field(repr=False)
    finish_reason: FinishReason
    max_new_tokens: int


ComponentFunction = Callable[[Prompt, Answer], float]


def length(n_tokens: int, max_new_tokens: int) -> float:
    """Share of the allowed tokens that the answer used, in [0, 1]."""
    return n_tokens / max_new_tokens


def repetition(token_ids: Sequence[int], n: int = 3) -> float:
    """Share of the answer's n-grams of tokens that stood in it before, in [0, 1); 0 for fewer than n tokens.

    >>> repetition([7, 7, 7, 7, 7])     # three 3-grams, two of them repeated
    0.6666666666666666
    """
    grams = Counter(tuple(token_ids[i : i + n]) for i in range(len(token_ids) - n + 1))
    return 1.0 - len(grams) / grams.total() if grams else 0.0


def load_function(reference: str) -> RewardFunction:
    """The function that ``module:name`` names.

    Raises:
        ValueError: the module cannot be imported, has no such name, or the name cannot be called with
            (prompt, answer, finish_reason).
    """
    module_name, _, name = reference.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(
            f"reward function {reference!r}: cannot import {module_name!r} ({error}); "
            "install it or put its folder on PYTHONPATH"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        what = "has no" if function is None else "has something that is not a function at"
        raise ValueError(f"reward function {reference!r}: module {module_name!r} {what} {name!r}")
    try:
        inspect.signature(function).bind(None, "", "stop")
    except TypeError as error:
        raise ValueError(
            f"reward function {reference!r} must take (prompt, answer, finish_reason), but {error}"
        ) from error
    return function  # type: ignore[no-any-return]


def component_function(component: RewardComponent) -> ComponentFunction:
    """The function behind a component of any kind but ``model``.

    Raises:
        ValueError: as ``load_function``, or a component of kind: model.
    """
    if component.kind == "length":
        return lambda prompt, answer: length(len(answer.token_ids), answer.max_new_tokens)
    if component.kind == "repetition":
        return lambda prompt, answer: repetition(answer.token_ids)
    if component.function is None:
        raise ValueError(f"component {component.name!r} of kind: {component.kind} is not a function reward")
    function = load_function(component.function)
    return lambda prompt, answer: float(function(prompt, answer.text, answer.finish_reason))
