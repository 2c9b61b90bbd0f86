"""Preference pairs in JSONL: one prompt, a chosen and a rejected answer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf_cluster.data.chat import as_messages
from rlhf_cluster.data.jsonl import BadRow, DataError, RowError, read_rows, row_id

_OWN_FIELDS = ("id", "prompt", "chosen", "rejected", "chosen_complete", "rejected_complete")


@dataclass(frozen=True, slots=True)
class PreferencePair:
    """Two answers to one prompt, the first preferred.

    ``*_complete`` is False for an answer that the length limit ended: it is rendered without its end-of-turn token.
    ``metadata`` holds the other fields of the row.
    """

    pair_id: str
    messages: tuple[Mapping[str, str], ...] = field(repr=False)
    chosen: str = field(repr=False)
    rejected: str = field(repr=False)
    chosen_complete: bool = True
    rejected_complete: bool = True
    metadata: Mapping[str, Any] = field(default_factory=dict, repr=False)


def load_preferences(path: str | Path) -> list[PreferencePair]:
    """Reads rows ``{prompt, chosen, rejected, [id, chosen_complete, rejected_complete, ...]}``.

    ``prompt`` is the user's text or a list of chat messages; answers are strings; completeness defaults to true.

    Raises:
        DataError: when the file cannot be read or is empty, or a row is bad (each named by line number).
    """
    pairs: dict[str, PreferencePair] = {}
    bad: list[BadRow] = []
    n_rows = 0
    for number, row in read_rows(path):
        n_rows += 1
        if isinstance(row, BadRow):
            bad.append(row)
            continue
        try:
            pair = _pair(row, number)
            if pair.pair_id in pairs:
                raise RowError(f"id {pair.pair_id!r} is already that of another row")
        except RowError as error:
            bad.append(BadRow(number, str(error)))
            continue
        pairs[pair.pair_id] = pair
    if bad:
        raise DataError(path, f"{len(bad)} of {n_rows} rows cannot be used", rows=bad, fix="Correct these rows.")
    if not pairs:
        raise DataError(path, "0 rows", fix="Add one JSON object a line with prompt, chosen and rejected.")
    return list(pairs.values())


def save_preferences(path: str | Path, pairs: Iterable[PreferencePair]) -> None:
    """Writes pairs so that ``load_preferences`` reads them back equal."""
    with Path(path).open("w", encoding="utf-8") as file:
        for pair in pairs:
            row = {
                **pair.metadata,
                "id": pair.pair_id,
                "prompt": [dict(message) for message in pair.messages],
                "chosen": pair.chosen,
                "rejected": pair.rejected,
                "chosen_complete": pair.chosen_complete,
                "rejected_complete": pair.rejected_complete,
            }
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def _pair(row: Mapping[str, Any], number: int) -> PreferencePair:
    missing = [name for name in ("prompt", "chosen", "rejected") if name not in row]
    if missing:
        raise RowError(f"no field {', '.join(map(repr, missing))}")
    for name in ("chosen", "rejected"):
        if not isinstance(row[name], str):
            raise RowError(f"field {name!r} is a JSON {type(row[name]).__name__}, not a string")
    complete = [row.get(name, True) for name in ("chosen_complete", "rejected_complete")]
    if not all(isinstance(value, bool) for value in complete):
        raise RowError("chosen_complete and rejected_complete must be true or false")
    if (row["chosen"], complete[0]) == (row["rejected"], complete[1]):
        raise RowError("chosen and rejected are the same answer")
    return PreferencePair(
        pair_id=row_id(row, number),
        messages=tuple(as_messages(row["prompt"], "field 'prompt'")),
        chosen=row["chosen"],
        rejected=row["rejected"],
        chosen_complete=complete[0],
        rejected_complete=complete[1],
        metadata={name: value for name, value in row.items() if name not in _OWN_FIELDS},
    )
