"""Prompts from JSONL, rendered and measured; and the check that held-out prompts were not trained on."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rlhf_cluster.data.chat import ChatRenderer, as_messages, messages_of
from rlhf_cluster.data.jsonl import BadRow, DataError, RowError, read_rows, row_id
from rlhf_cluster.types import Prompt

TooLong = Literal["error", "drop", "truncate_left"]


@dataclass(frozen=True, slots=True)
class LoadedPrompts:
    """The prompts of one file in row order, and what became of its rows."""

    prompts: list[Prompt]
    dropped_too_long: int
    truncated: int
    n_rows: int


class _TooLongError(Exception):
    """A prompt over the limit; its length in tokens."""

    def __init__(self, n_tokens: int) -> None:
        self.n_tokens = n_tokens


def load_prompts(
    path: str | Path, *, field: str, renderer: ChatRenderer, max_prompt_tokens: int, too_long: TooLong
) -> LoadedPrompts:
    """Reads prompts; ``row[field]`` is the user's text or a list of chat messages that ends with the user's.

    Length is counted in tokens after the chat template, special tokens and generation prompt included. A longer
    prompt is an error, dropped, or cut: ``truncate_left`` takes text off the left of the last user message and leaves
    the template and the generation prompt whole. The id of a prompt is the row's ``id``, or its line number.

    Raises:
        DataError: when the file cannot be read, a row is bad (each named by line number), or no prompt is left.
    """
    prompts: list[Prompt] = []
    line_of_id: dict[str, int] = {}
    bad: list[BadRow] = []
    n_rows = n_too_long = n_truncated = 0
    for number, row in read_rows(path):
        n_rows += 1
        if isinstance(row, BadRow):
            bad.append(row)
            continue
        try:
            prompt, cut = _prompt(row, number, field, renderer, max_prompt_tokens, too_long == "truncate_left")
            if prompt.prompt_id in line_of_id:
                raise RowError(f"id {prompt.prompt_id!r} is already that of row {line_of_id[prompt.prompt_id]}")
        except RowError as error:
            bad.append(BadRow(number, str(error)))
            continue
        except _TooLongError as error:
            n_too_long += 1
            if too_long == "error":
                bad.append(BadRow(number, f"{error.n_tokens} tokens, limit {max_prompt_tokens}"))
            continue
        line_of_id[prompt.prompt_id] = number
        prompts.append(prompt)
        n_truncated += cut
    if bad:
        fix = "Correct these rows"
        if too_long == "error" and n_too_long:
            fix += ", raise data.max_prompt_tokens, or set data.too_long to drop or truncate_left"
        raise DataError(path, f"{len(bad)} of {n_rows} rows cannot be used", rows=bad, fix=f"{fix}.")
    if not prompts:
        why = f": {n_too_long} too long (limit {max_prompt_tokens})" if n_too_long else ""
        fix = "Raise data.max_prompt_tokens." if n_too_long else f"Add one JSON object a line with the field {field!r}."
        raise DataError(path, f"0 of {n_rows} rows left{why}", fix=fix)
    return LoadedPrompts(prompts, n_too_long, n_truncated, n_rows)


def _prompt(
    row: Mapping[str, Any], number: int, field: str, renderer: ChatRenderer, limit: int, truncate: bool
) -> tuple[Prompt, bool]:
    if field not in row:
        raise RowError(f"no field {field!r}")
    prompt_id = row_id(row, number)
    messages = as_messages(row[field], f"field {field!r}")
    ids = renderer.prompt_ids(messages)
    cut = len(ids) > limit
    if cut:
        if not truncate:
            raise _TooLongError(len(ids))
        messages, ids = _truncate_left(messages, renderer, limit)
    # `messages` is reserved for the conversation itself (types.Prompt).
    metadata = {name: value for name, value in row.items() if name not in (field, "id", "messages")}
    if not isinstance(row[field], str):
        metadata["messages"] = messages
    return Prompt(prompt_id, ids, messages[-1]["content"], metadata), cut


def _truncate_left(
    messages: list[dict[str, str]], renderer: ChatRenderer, limit: int
) -> tuple[list[dict[str, str]], tuple[int, ...]]:
    """The longest right part of the last message that fits, cut between words where possible.

    Raises:
        RowError: when the limit leaves no room for any of its text.
    """
    text = messages[-1]["content"]

    def render(start: int) -> tuple[list[dict[str, str]], tuple[int, ...]]:
        shorter = [*messages[:-1], {"role": "user", "content": text[start:]}]
        return shorter, renderer.prompt_ids(shorter)

    words = [match.start() for match in re.finditer(r"\S+", text)]
    for starts in (words[1:], list(range(words[-1] + 1, len(text.rstrip())))):
        low, high = 0, len(starts)
        while low < high:
            middle = (low + high) // 2
            if len(render(starts[middle])[1]) <= limit:
                high = middle
            else:
                low = middle + 1
        # Token counts may wobble by one between neighbouring cuts, so the bisected cut is checked, not assumed.
        for start in starts[low:]:
            shorter = render(start)
            if len(shorter[1]) <= limit:
                return shorter
    raise RowError(f"no text of the last message fits beside the template (limit {limit} tokens)")


class Overlap(NamedTuple):
    """A held-out prompt that is also a training prompt; ``exact`` is False when only the normalised texts agree."""

    heldout_id: str
    train_id: str
    exact: bool


def check_overlap(train: Sequence[Prompt], heldout: Sequence[Prompt]) -> list[Overlap]:
    """Held-out prompts that also stand in ``train``, as they are or normalised (case, whitespace and punctuation)."""
    exact: dict[str, str] = {}
    normalised: dict[str, str] = {}
    for prompt in train:
        exact.setdefault(_whole_text(prompt), prompt.prompt_id)
        normalised.setdefault(normalise(_whole_text(prompt)), prompt.prompt_id)
    overlaps = []
    for prompt in heldout:
        text = _whole_text(prompt)
        if text in exact:
            overlaps.append(Overlap(prompt.prompt_id, exact[text], True))
        elif normalise(text) in normalised:
            overlaps.append(Overlap(prompt.prompt_id, normalised[normalise(text)], False))
    return overlaps


def normalise(text: str) -> str:
    """Casefolded, with every run of whitespace and punctuation collapsed into one space; text of neither stays."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    return re.sub(r"[\W_]+", " ", folded).strip() or text


def _whole_text(prompt: Prompt) -> str:
    return "\n".join(message["content"] for message in messages_of(prompt))
