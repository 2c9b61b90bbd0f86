"""Block-diagonal causal attention: samples lie behind one another in one row, and none sees its neighbours.

There is no L x L mask. Samples of like length are gathered into one batch and padded to the longest of them, for the
attention alone, which is a small part of a transformer's work; everything else runs on real tokens.

Transformers calls an attention function by the name in ``config._attn_implementation``; this module registers
``packed_eager`` and ``packed_sdpa`` (``AttentionInterface``), with a mask function that builds no mask. The segments
travel as a keyword argument of the model's forward, which transformers hands on to every layer, also when a
checkpointed layer runs again in backward. Without segments rows are padded on the right: causal attention alone keeps
real tokens from seeing padding, which comes after them.

Shapes: L tokens of the packed row, S samples of a group, W tokens of the longest of them, K key/value heads with G
query heads each, D features of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

PACKED = {"eager": "packed_eager", "sdpa": "packed_sdpa"}
"""``model.attention`` -> the implementation that also reads packed rows. Flash attention has its own varlen path."""

# A group ends where padding to its longest sample would waste more than about a third of a sample's scores.
_LEAST_FILL = 0.8
# What transformers hands to an attention function without meaning another result.
_HARMLESS = frozenset({"position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states"})


@dataclass(frozen=True, slots=True)
class SegmentGroup:
    """Samples that attention runs as one batch, each padded to ``longest`` tokens."""

    samples: int
    longest: int


@dataclass(frozen=True, slots=True)
class _HeadIndices:
    """How rows of D features move between the packed row and the groups, where a group is (K, S, G, W) rows.

    Every token has one slot; padding slots read their sample's last token and are written nowhere.
    """

    query: Tensor
    """Slots <- (K * G, L)."""
    query_back: Tensor
    """(K * G, L) <- slots."""
    key: Tensor
    """Slots <- (K, L)."""
    key_back: Tensor
    """(K, L) <- slots."""
    output: Tensor
    """(L, K * G) <- slots."""
    output_back: Tensor
    """Slots <- (L, K * G)."""
    padding: Tensor
    """Query slots without a token."""


@dataclass(frozen=True, slots=True)
class Segments:
    """Where the samples of a packed row lie."""

    lengths: tuple[int, ...]
    """Tokens of each sample, in the order of the row."""
    groups: tuple[SegmentGroup, ...]
    bounds: Tensor
    """(samples + 1,) int32, cumulative lengths, on the device of the row."""
    _order: tuple[int, ...]
    _indices: dict[tuple[int, int], _HeadIndices] = field(default_factory=dict)

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> Segments:
        """``lengths``: tokens of each sample, at least 1, in any order; neighbours need not be alike."""
        order = sorted(range(len(lengths)), key=lambda sample: -lengths[sample])
        groups: list[SegmentGroup] = []
        for sample in order:
            if groups and lengths[sample] >= _LEAST_FILL * groups[-1].longest:
                groups[-1] = SegmentGroup(groups[-1].samples + 1, groups[-1].longest)
            else:
                groups.append(SegmentGroup(1, int(lengths[sample])))
        bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        return cls(
            tuple(int(length) for length in lengths), tuple(groups), torch.from_numpy(bounds).to(device), tuple(order)
        )

    def model_arguments(self, attention: str) -> dict[str, Any]:
        """Keyword arguments of a model's forward for the attention implementation in its config."""
        if attention in PACKED.values():
            return {"segments": self}
        longest = max(self.lengths)
        return {
            "cu_seq_lens_q": self.bounds,
            "cu_seq_lens_k": self.bounds,
            "max_length_q": longest,
            "max_length_k": longest,
        }

    def indices(self, key_heads: int, queries: int) -> _HeadIndices:
        """For K key heads with G queries each; the same for all layers, so computed once."""
        if (key_heads, queries) not in self._indices:
            self._indices[key_heads, queries] = self._head_indices(key_heads, queries)
        return self._indices[key_heads, queries]

    def _head_indices(self, key_heads: int, queries: int) -> _HeadIndices:
        starts = np.concatenate([[0], np.cumsum(self.lengths)])
        length = int(starts[-1])
        tokens: list[NDArray[np.int64]] = []  # (S, W) of each group: the token that a slot reads
        real: list[NDArray[np.bool_]] = []
        first = 0
        for group in self.groups:
            samples = np.array(self._order[first : first + group.samples])
            first += group.samples
            sizes, steps = np.array(self.lengths)[samples, None], np.arange(group.longest)
            tokens.append(starts[samples, None] + np.minimum(steps, sizes - 1))
            real.append(steps < sizes)

        def slots(heads: int, head_major: bool, per_key: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
            """Row that each slot reads, in slot order, and whether it is a token's own."""
            rows, own = [], []
            for token, mine in zip(tokens, real, strict=True):
                shape = (key_heads, len(token), per_key, token.shape[1])
                head = np.arange(heads).reshape(key_heads, 1, per_key, 1)
                token, mine = token[None, :, None, :], mine[None, :, None, :]
                row = head * length + token if head_major else token * heads + head
                rows.append(np.broadcast_to(row, shape).ravel())
                own.append(np.broadcast_to(mine, shape).ravel())
            return np.concatenate(rows), np.concatenate(own)

        def back(rows: NDArray[np.int64], own: NDArray[np.bool_]) -> NDArray[np.int64]:
            inverse = np.empty(int(own.sum()), dtype=np.int64)
            inverse[rows[own]] = np.flatnonzero(own)
            return inverse

        query, own = slots(key_heads * queries, True, queries)
        key, key_own = slots(key_heads, True, 1)
        output, _ = slots(key_heads * queries, False, queries)
        arrays = (
            query,
            back(query, own),
            key,
            back(key, key_own),
            back(output, own),
            output,
            np.flatnonzero(~own),
        )
        return _HeadIndices(*(torch.from_numpy(array).to(self.bounds.device) for array in arrays))


class _Move(torch.autograd.Function):
    """Rows into slots or back. Both ways are gathers: the sum that autograd would scatter has one term."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, index_back: Tensor, empty: Tensor | None) -> Tensor:
        ctx.save_for_backward(index_back, empty)
        return rows.index_select(0, index)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        index_back, empty = ctx.saved_tensors
        moved = grad.index_select(0, index_back)
        if empty is not None and len(empty):
            moved.index_fill_(0, empty, 0)
        return moved, None, None, None


class _CausalAttention(torch.autograd.Function):
    """softmax(scale Q K' + mask) V of every group. What backward needs are Q, K, V and the probabilities."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        shapes: tuple[tuple[int, int, int], ...],
        scale: float,
        window: int | None,
    ) -> Tensor:
        out = torch.empty((len(query), value.shape[-1]), dtype=query.dtype, device=query.device)
        all_probs = []
        for (batch, queries, longest), mine, other in _batches(shapes):
            q = query[mine].view(batch, queries * longest, -1)
            k, v = (x[other].view(batch, longest, -1) for x in (key, value))
            scores = torch.bmm(q, k.transpose(1, 2)).view(batch, queries, longest, longest)
            mask = _causal_mask(longest, window, q.dtype, q.device)
            torch.add(mask, scores, alpha=scale, out=scores)
            # Float32 inside whatever the dtype is, as transformers' eager attention does it.
            probs = torch.softmax(scores, -1).view(batch, queries * longest, longest)
            torch.bmm(probs, v, out=out[mine].view(batch, queries * longest, -1))
            all_probs.append(probs)
        ctx.save_for_backward(query, key, value, *all_probs)
        ctx.shapes, ctx.scale = shapes, scale
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *all_probs = ctx.saved_tensors
        grad = grad.contiguous()
        grad_query, grad_key, grad_value = (torch.empty_like(x) for x in (query, key, value))
        for ((batch, queries, longest), mine, other), probs in zip(_batches(ctx.shapes), all_probs, strict=True):
            q, g, dq = (x[mine].view(batch, queries * longest, -1) for x in (query, grad, grad_query))
            k, v, dk, dv = (x[other].view(batch, longest, -1) for x in (key, value, grad_key, grad_value))
            torch.bmm(probs.transpose(1, 2), g, out=dv)
            grad_probs = torch.bmm(g, v.transpose(1, 2))
            grad_scores = torch._softmax_backward_data(grad_probs, probs, -1, probs.dtype)
            torch.bmm(grad_scores, k, out=dq)
            torch.bmm(grad_scores.transpose(1, 2), q, out=dk)
        return grad_query.mul_(ctx.scale), grad_key.mul_(ctx.scale), grad_value, None, None, None


def _batches(
    shapes: tuple[tuple[int, int, int], ...],
) -> list[tuple[tuple[int, int, int], slice, slice]]:
    """Each (batch, queries, longest) with its rows among the query slots and among the key slots."""
    out, query, key = [], 0, 0
    for batch, queries, longest in shapes:
        rows, others = batch * queries * longest, batch * longest
        out.append(((batch, queries, longest), slice(query, query + rows), slice(key, key + others)))
        query, key = query + rows, key + others
    return out


def _causal_mask(longest: int, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(longest, longest): 0 where a query (row) sees a key (column), else -inf."""
    return _square_mask(-(-longest // 128) * 128, window, dtype, device)[:longest, :longest]


@lru_cache(maxsize=8)
def _square_mask(size: int, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    seen = torch.ones((size, size), dtype=torch.bool, device=device).tril_()
    if window is not None:
        seen.triu_(1 - window)
    return torch.zeros((size, size), dtype=dtype, device=device).masked_fill_(~seen, float("-inf"))


def _sdpa_groups(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shapes: tuple[tuple[int, int, int], ...],
    scale: float,
    window: int | None,
) -> Tensor:
    out = []
    for (batch, queries, longest), mine, other in _batches(shapes):
        q = query[mine].view(batch, queries, longest, -1)
        k, v = (x[other].view(batch, 1, longest, -1) for x in (key, value))
        local = window is not None and window < longest
        attended = scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=_causal_mask(longest, window, q.dtype, q.device) if local else None,
            is_causal=not local,
            scale=scale,
            enable_gqa=queries > 1,
        )
        out.append(attended.reshape(batch * queries * longest, -1))
    return torch.cat(out)


def _attend(
    math: Any,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    segments: Segments | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention function: (B, K * G, L, D) queries, (B, K, L, D) keys and values -> (B, L, K * G, D).

    Raises:
        ValueError: something is asked for that this function would leave out.
    """
    asked = {name for name, value in others.items() if value is not None and name not in _HARMLESS}
    if dropout:
        asked.add("dropout")
    if is_causal is False or not getattr(module, "is_causal", True):
        asked.add("attention to later tokens")
    local = None if attention_mask is None else int(attention_mask)
    if local != sliding_window:
        asked.add("local attention by its mask")
    if asked:
        raise ValueError(f"{type(module).__name__} asks for {', '.join(sorted(asked))}")
    rows, heads, length, _ = query.shape
    key_heads = key.shape[1]
    queries = heads // key_heads
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    flat = [x.reshape(-1, x.shape[-1]) for x in (query, key, value)]
    if segments is None:
        out = math(*flat, ((rows * key_heads, queries, length),), scale, sliding_window)
        return out.view(rows, heads, length, -1).transpose(1, 2).contiguous(), None
    if rows != 1 or length != sum(segments.lengths):
        raise ValueError(f"segments of {sum(segments.lengths)} tokens do not fit {rows} rows of {length}")
    index = segments.indices(key_heads, queries)
    shapes = tuple((key_heads * group.samples, queries, group.longest) for group in segments.groups)
    out = math(
        _Move.apply(flat[0], index.query, index.query_back, None),
        _Move.apply(flat[1], index.key, index.key_back, None),
        _Move.apply(flat[2], index.key, index.key_back, None),
        shapes,
        scale,
        sliding_window,
    )
    # Padding slots get a gradient of 0 as queries, so they add nothing to those of the keys they see.
    return _Move.apply(out, index.output, index.output_back, index.padding).view(1, length, heads, -1), None


def packed_eager(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """Explicit softmax. See ``_attend``."""
    return _attend(_CausalAttention.apply, module, *args, **kwargs)


def packed_sdpa(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """PyTorch's fused attention. See ``_attend``."""
    return _attend(_sdpa_groups, module, *args, **kwargs)


def _no_mask(*args: Any, local_size: int | None = None, use_vmap: bool = False, **kwargs: Any) -> Tensor | None:
    """Transformers' mask function: no mask, but the window of layers that attend locally, as a tensor of one number.

    Raises:
        ValueError: the model overlays a mask of its own.
    """
    if use_vmap:
        raise ValueError("the model overlays an attention mask of its own")
    return None if local_size is None else torch.tensor(local_size)


AttentionInterface.register(PACKED["eager"], packed_eager)
AttentionInterface.register(PACKED["sdpa"], packed_sdpa)
for _name in PACKED.values():
    AttentionMaskInterface.register(_name, _no_mask)
