"""Text as token blocks: which blocks a step takes, and files that cannot be used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_cluster.data.jsonl import DataError
from rlhf_cluster.data.text_blocks import TextBlocks, read_blocks


class Letters:
    """A tokenizer with one id a letter."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(letter) for letter in text]


def blocks_of(count: int, seed: int = 0) -> TextBlocks:
    return TextBlocks(np.arange(count, dtype=np.int32)[:, None], seed=seed)


def test_every_block_is_taken_once_a_pass_and_the_next_pass_has_another_order() -> None:
    blocks = blocks_of(9)
    taken = [int(block[0]) for step in range(6) for block in blocks.of_step(step, 3)]
    assert sorted(taken[:9]) == sorted(taken[9:]) == list(range(9))
    assert taken[:9] != taken[9:]
    assert taken[:9] != list(range(9))


def test_a_step_takes_the_same_blocks_whenever_it_is_asked_and_another_seed_others() -> None:
    first = [int(block[0]) for block in blocks_of(9).of_step(4, 4)]
    assert first == [int(block[0]) for block in blocks_of(9).of_step(4, 4)]
    assert any(first != [int(block[0]) for block in blocks_of(9, seed=seed).of_step(4, 4)] for seed in (1, 2))


def test_a_step_may_want_more_blocks_than_there_are() -> None:
    taken = [int(block[0]) for block in blocks_of(2).of_step(0, 5)]
    assert sorted(taken[:4]) == [0, 0, 1, 1]
    assert len(taken) == 5


def test_a_file_becomes_blocks_in_order_without_the_rest(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("abcdefgh")
    blocks = read_blocks(str(tmp_path / "text"), Letters(), 3)
    assert ["".join(map(chr, block)) for block in blocks.tolist()] == ["abc", "def"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"ab", "holds 2 tokens, less than one block of 3"),
        (b"a\xff", "is not UTF-8 at byte 1"),
        (None, "cannot be read"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_the_fix(tmp_path: Path, content: bytes | None, words: str) -> None:
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    tokenizer: Any = Letters()
    with pytest.raises(DataError, match=words) as refused:
        read_blocks(str(path), tokenizer, 3)
    assert "algorithm.ptx" in str(refused.value)
    assert str(path) in str(refused.value)
