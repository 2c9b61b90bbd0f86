"""Preference pairs: reading, writing, and bad rows named by number."""

from __future__ import annotations

import json

import pytest

from rlhf_cluster.data.jsonl import DataError
from rlhf_cluster.data.preferences import PreferencePair, load_preferences, save_preferences


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_row_becomes_a_pair_and_keeps_its_other_fields(tmp_path):
    path = write(
        tmp_path / "pairs.jsonl",
        {"prompt": "hi", "chosen": "hello", "rejected": "go", "rejected_complete": False, "margin": 0.5},
    )
    assert load_preferences(path) == [
        PreferencePair("000001", ({"role": "user", "content": "hi"},), "hello", "go", True, False, {"margin": 0.5})
    ]


def test_saved_pairs_load_equal(tmp_path):
    turns = ({"role": "system", "content": "Be kind."}, {"role": "user", "content": "größe?\u2028"})
    pairs = [
        PreferencePair("a", turns, "ja\n", "", False, True, {"source": "x"}),
        PreferencePair("b", turns[1:], "same", "same", True, False),
    ]
    save_preferences(tmp_path / "pairs.jsonl", pairs)
    assert load_preferences(tmp_path / "pairs.jsonl") == pairs


def test_bad_rows_are_named_by_line_number(tmp_path):
    good = {"prompt": "hi", "chosen": "a", "rejected": "b"}
    path = write(
        tmp_path / "pairs.jsonl",
        {"prompt": "hi", "chosen": "a"},
        {**good, "rejected": None},
        {**good, "rejected": "a"},
        {**good, "prompt": ""},
        {**good, "chosen_complete": "yes"},
        good,
    )
    with pytest.raises(DataError) as caught:
        load_preferences(path)
    assert {row.line: row.reason for row in caught.value.rows} == {
        1: "no field 'rejected'",
        2: "field 'rejected' is a JSON NoneType, not a string",
        3: "chosen and rejected are the same answer",
        4: "field 'prompt' is empty",
        5: "chosen_complete and rejected_complete must be true or false",
    }


def test_doubled_ids_and_empty_files_are_refused(tmp_path):
    row = {"id": "a", "prompt": "hi", "chosen": "a", "rejected": "b"}
    with pytest.raises(DataError, match="row 2: id 'a' is already"):
        load_preferences(write(tmp_path / "doubled.jsonl", row, row))
    with pytest.raises(DataError, match=r"empty\.jsonl: 0 rows"):
        load_preferences(write(tmp_path / "empty.jsonl"))


def test_texts_stay_out_of_the_repr():
    pair = PreferencePair("a", ({"role": "user", "content": "PII-MARKER"},), "PII-MARKER 1", "PII-MARKER 2")
    assert "PII-MARKER" not in repr(pair)
