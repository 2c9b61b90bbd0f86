"""Reads JSONL row by row; every bad row is named by its line number, and none of its text is quoted."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROWS_SHOWN = 5


class BadRow(NamedTuple):
    """A row that cannot be used: its 1-based line number and why."""

    line: int
    reason: str


class RowError(ValueError):
    """The reason one row cannot be used; collected into a ``DataError``."""


class DataError(ValueError):
    """A data file that cannot be used. Names the file, the rows and the fix.

    >>> print(DataError("prompts.jsonl", "1 bad row", rows=[BadRow(3, "no field 'prompt'")], fix="Add it."))
    prompts.jsonl: 1 bad row: row 3: no field 'prompt'. Add it.
    """

    def __init__(self, path: str | Path, problem: str, *, rows: Sequence[BadRow] = (), fix: str) -> None:
        self.path = str(path)
        self.rows = tuple(rows)
        shown = "; ".join(f"row {row.line}: {row.reason}" for row in self.rows[:ROWS_SHOWN])
        if len(self.rows) > ROWS_SHOWN:
            shown += f"; and {len(self.rows) - ROWS_SHOWN} more"
        super().__init__(f"{path}: {problem}{': ' + shown if shown else ''}. {fix}")


def read_rows(path: str | Path) -> Iterator[tuple[int, Mapping[str, Any] | BadRow]]:
    """Yields ``(line number, object)``, or ``(line number, BadRow)`` where a line holds no JSON object.

    Blank lines at the end are ignored; one between rows is a bad row, since it may be a row that got lost.

    Raises:
        DataError: when the file cannot be read.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise DataError(path, f"cannot be read ({error.strerror})", fix="Name a readable JSONL file.") from None
    # Only "\n" ends a row: str.splitlines would also cut at U+2028, which JSON strings may hold as it is.
    lines = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    while lines and not lines[-1].strip():
        lines.pop()
    for number, line in enumerate(lines, start=1):
        yield number, _parse(number, line)


def _parse(number: int, line: bytes) -> Mapping[str, Any] | BadRow:
    if not line.strip():
        return BadRow(number, "a blank line")
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        return BadRow(number, "not UTF-8")
    except json.JSONDecodeError as error:
        return BadRow(number, f"not valid JSON ({error.msg}, column {error.colno})")
    except (ValueError, RecursionError) as error:
        return BadRow(number, f"JSON that cannot be read ({type(error).__name__}: {error})")
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return BadRow(number, "half of a surrogate pair (\\ud800 to \\udfff), which is no character")
    return row if isinstance(row, dict) else BadRow(number, f"a JSON {type(row).__name__}, not an object")


def row_id(row: Mapping[str, Any], number: int) -> str:
    """The row's own ``id`` (string or integer), or its zero-padded line number.

    Raises:
        RowError: when ``id`` is neither.
    """
    own = row.get("id")
    if own is None:
        return f"{number:06d}"
    if isinstance(own, bool) or not isinstance(own, str | int) or own == "":
        raise RowError("`id` must be a non-empty string or an integer")
    return str(own)
