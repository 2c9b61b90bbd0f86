"""Plain text as token blocks of one length, for the language-model loss of PPO-ptx (Ouyang et al. 2022, eq. 2)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhf_cluster.data.jsonl import DataError
from rlhf_cluster.types import Ids


class TextBlocks:
    """Blocks in a seeded order, a new one each pass. Which blocks step n takes depends on n alone, so a resume needs
    no state of its own.

    Args:
        blocks: (N, block_tokens) token ids, N >= 1.
    """

    def __init__(self, blocks: Ids, *, seed: int) -> None:
        self._blocks = blocks
        self._seed = seed

    def __len__(self) -> int:
        return len(self._blocks)

    def of_step(self, step: int, count: int) -> list[Ids]:
        """The ``count`` blocks of optimizer step ``step`` (from 0), each (block_tokens,)."""
        positions = range(step * count, (step + 1) * count)
        orders: dict[int, NDArray[np.int64]] = {}
        taken = []
        for position in positions:
            number, place = divmod(position, len(self._blocks))
            if number not in orders:
                orders[number] = np.random.default_rng((self._seed, number)).permutation(len(self._blocks))
            taken.append(self._blocks[orders[number][place]])
        return taken


def read_blocks(path: str, tokenizer: Any, block_tokens: int) -> Ids:
    """(N, block_tokens) token ids of the text file in order; a rest shorter than a block is left out.

    Raises:
        DataError: the file cannot be read as UTF-8, or holds less than one block.
    """
    fix = "Name a UTF-8 text file in algorithm.ptx.file."
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(path, f"cannot be read: {error.strerror or error}", fix=fix) from None
    except UnicodeDecodeError as error:
        raise DataError(path, f"is not UTF-8 at byte {error.start}", fix=fix) from None
    ids = np.asarray(tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)
    count = len(ids) // block_tokens
    if not count:
        raise DataError(
            path,
            f"holds {len(ids)} tokens, less than one block of {block_tokens}",
            fix="Name a longer file in algorithm.ptx.file, or lower algorithm.ptx.block_tokens.",
        )
    return ids[: count * block_tokens].reshape(count, block_tokens)
