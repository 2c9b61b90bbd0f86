"""Samples -> token-balanced micro-batches per rank. Standard library and numpy only.

A packed micro-batch lays its samples end to end and costs the sum of their lengths, in tokens; one that is not packed
is padded to its longest row and costs rows * longest. All ranks run the same number of micro-batches per minibatch,
because every forward may hold a collective (ZeRO-3 gathers): a rank with less work ends with empty micro-batches, which
the learner runs as padding of zero weight.

Example, 2 ranks, budget 8 tokens, lengths [5, 4, 4, 3]: rank 0 takes samples 0 and 3 (8 tokens), rank 1 takes 1 and 2.
Packed, each rank has one micro-batch of 8 tokens. Padded, rank 0 cannot pad both of its rows to 5 within 8, so it has
two micro-batches; rank 1 has one of 2*4 and an empty one.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MicroBatch = tuple[int, ...]
"""Indices into ``lengths``, longest first; empty for a padding micro-batch."""


@dataclass(frozen=True, slots=True)
class MiniBatchPlan:
    """One optimizer step: ``ranks[r]`` are the micro-batches of rank r, equally many on every rank."""

    ranks: tuple[tuple[MicroBatch, ...], ...]

    @property
    def micro_batches(self) -> int:
        """Forward/backward passes each rank runs."""
        return len(self.ranks[0])

    @property
    def samples(self) -> tuple[int, ...]:
        """Every sample of this minibatch, ascending."""
        return tuple(sorted(index for rank in self.ranks for micro_batch in rank for index in micro_batch))


PADDING_SHARE = 0.05
"""Most of the slots of a minibatch's padded micro-batches, over all ranks, that hold no token."""

# Rows of one micro-batch are at least 1 - spread of its longest. The widest spread that keeps PADDING_SHARE makes the
# fewest micro-batches; the last one keeps it whatever the lengths are, since no row is padded by more.
_SPREADS = (1.0, 0.5, 0.4, 0.3, 0.25, 0.2, 0.16, 0.13, 0.1, 0.08, PADDING_SHARE)


def plan_minibatches(
    lengths: Sequence[int],
    *,
    ranks: int,
    minibatches: int,
    micro_batch_tokens: int,
    seed: int,
    epoch: int,
    packed: bool = False,
) -> tuple[MiniBatchPlan, ...]:
    """One pass over the batch in a shuffled order that depends on (seed, epoch) alone.

    Which samples make a minibatch, and which rank takes them, does not depend on ``packed`` or the budget. Ranks differ
    by at most one sample's tokens. Padded micro-batches waste at most ``PADDING_SHARE`` of a minibatch's slots.

    Args:
        lengths: prompt + response tokens of each sample, at least 1.
        minibatches: optimizer steps in this pass; their sample counts differ by at most one.
        micro_batch_tokens: most tokens of a micro-batch, padding included; a single sample above it gets one of its
            own.
        seed, epoch: non-negative. Give every learner step its own seed.
        packed: whether micro-batches are packed or padded.

    Raises:
        ValueError: naming the argument that does not fit.
    """
    if not 1 <= minibatches <= len(lengths):
        raise ValueError(
            f"learner.minibatches must lie between 1 and the {len(lengths)} samples of the batch, got {minibatches}"
        )
    _check(lengths, ranks, micro_batch_tokens)
    order = np.random.default_rng((seed, epoch)).permutation(len(lengths))
    return tuple(
        _plan(lengths, part.tolist(), ranks, micro_batch_tokens, packed) for part in np.array_split(order, minibatches)
    )


def forward_plan(
    lengths: Sequence[int],
    *,
    ranks: int,
    micro_batch_tokens: int,
    packed: bool = False,
    padding_share: float | None = None,
) -> MiniBatchPlan:
    """Every sample once, for passes without gradient. Arguments and errors as in ``plan_minibatches``.

    ``padding_share``: most padding of padded micro-batches (None: ``PADDING_SHARE``); 1 makes as few as the budget
    allows, for a few samples at a time, where one more forward costs more than padding.
    """
    _check(lengths, ranks, micro_batch_tokens)
    return _plan(lengths, list(range(len(lengths))), ranks, micro_batch_tokens, packed, padding_share)


def _check(lengths: Sequence[int], ranks: int, micro_batch_tokens: int) -> None:
    if ranks < 1:
        raise ValueError(f"learner.ranks must be at least 1, got {ranks}")
    if micro_batch_tokens < 1:
        raise ValueError(f"learner.micro_batch_tokens must be at least 1, got {micro_batch_tokens}")
    if any(length < 1 for length in lengths):
        raise ValueError(f"every sample needs at least 1 token, got lengths {list(lengths)}")


def _plan(
    lengths: Sequence[int],
    indices: list[int],
    ranks: int,
    micro_batch_tokens: int,
    packed: bool,
    padding_share: float | None = None,
) -> MiniBatchPlan:
    most = PADDING_SHARE if padding_share is None else padding_share
    # Longest first serves three ends: greedy assignment to the lightest rank balances best (LPT, Graham 1969), the
    # first micro-batch needs the most memory, so a budget that is too large fails at once, and rows of one
    # micro-batch are alike in length.
    by_length = sorted(indices, key=lambda index: -lengths[index])
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for index in by_length:
        load, rank = heapq.heappop(loads)
        shares[rank].append(index)
        heapq.heappush(loads, (load + lengths[index], rank))
    if packed:
        micro_batches = [_packed(lengths, share, micro_batch_tokens) for share in shares]
    else:
        tokens = sum(lengths[index] for index in indices)
        for spread in _SPREADS:
            micro_batches = [_padded(lengths, share, micro_batch_tokens, spread) for share in shares]
            slots = sum(len(rows) * lengths[rows[0]] for rank_ in micro_batches for rows in rank_)
            if slots - tokens <= most * slots:
                break
    count = max(len(mine) for mine in micro_batches)
    return MiniBatchPlan(tuple((*mine, *[()] * (count - len(mine))) for mine in micro_batches))


def _packed(lengths: Sequence[int], longest_first: list[int], micro_batch_tokens: int) -> list[MicroBatch]:
    """First-fit decreasing: each sample goes into the first micro-batch with room for it."""
    micro_batches: list[list[int]] = []
    room: list[int] = []
    for index in longest_first:
        for place, free in enumerate(room):
            if lengths[index] <= free:
                micro_batches[place].append(index)
                room[place] -= lengths[index]
                break
        else:
            micro_batches.append([index])
            room.append(micro_batch_tokens - lengths[index])
    return [tuple(micro_batch) for micro_batch in micro_batches]


def _padded(
    lengths: Sequence[int], longest_first: list[int], micro_batch_tokens: int, spread: float
) -> list[MicroBatch]:
    """Runs of neighbours within ``spread`` of their longest."""
    micro_batches: list[list[int]] = []
    for index in longest_first:
        rows = micro_batches[-1] if micro_batches else []
        fits = bool(rows) and (len(rows) + 1) * lengths[rows[0]] <= micro_batch_tokens
        if fits and lengths[index] >= (1 - spread) * lengths[rows[0]]:
            rows.append(index)
        else:
            micro_batches.append([index])
    return [tuple(micro_batch) for micro_batch in micro_batches]
