"""Output layers of policy and critic: log-probs without a full logits matrix, values in float32.

Both are modules that own their weight, because ZeRO-3 brings a parameter in only for its own module's forward and
backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

HEAD_ROWS = 1024
"""Rows of logits (rows x vocabulary, in the model's dtype) that live at once; backward computes them again."""

# Float32 copies are made of this many rows at a time. What is done to a row of 50,000 or 150,000 logits is bound by
# memory, and blocks that stay near the caches were 6 times as fast on CPU as whole chunks.
_BLOCK_ROWS = 128
_LEAST_LOGIT = -1e4


class LogprobHead(nn.Linear):
    """An LM head that turns hidden states into log-probs of given tokens. Shares the parameters of ``head``.

    The same numbers as ``algorithms.losses.token_logprobs`` of the logits, which a test compares.
    """

    def __init__(self, head: nn.Module, rows: int = HEAD_ROWS) -> None:
        super().__init__(1, 1, bias=False, device="meta")
        if not isinstance(head, nn.Linear):
            raise ValueError(f"model.policy has an LM head of type {type(head).__name__}; it must be linear")
        self.in_features, self.out_features = head.in_features, head.out_features
        self.weight, self.bias = head.weight, head.bias
        self.rows = rows

    def forward(
        self, hidden: Tensor, token_ids: Tensor, *, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """(N, H) hidden states and (N,) tokens -> (N,) log-probs and, without gradients, (N,) entropies; nats."""
        if torch.is_grad_enabled():
            return _LinearLogprobs.apply(hidden, self.weight, self.bias, token_ids, temperature, self.rows), None
        selected, entropies = _selected(hidden, self.weight, self.bias, token_ids, temperature, self.rows, with_entropy)
        return selected.logprobs, entropies


@dataclass(frozen=True, slots=True)
class _Selected:
    """(N,) log-probs, and what backward needs to find every probability again: (N, 1) largest logit and log-sum."""

    logprobs: Tensor
    top: Tensor
    log_sum: Tensor


def _selected(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    token_ids: Tensor,
    temperature: float,
    rows: int,
    with_entropy: bool,
) -> tuple[_Selected, Tensor | None]:
    logprobs = hidden.new_empty(len(hidden), dtype=torch.float32)
    top, log_sum = logprobs.new_empty(len(hidden), 1), logprobs.new_empty(len(hidden), 1)
    entropies = torch.empty_like(logprobs) if with_entropy else None
    for block, logits in _blocks(hidden, weight, bias, rows):
        scaled = logits.float() / temperature
        # The largest logit goes first: float32 near 30,000 has no digits left for a difference of log 2.
        torch.amax(scaled, -1, keepdim=True, out=top[block])
        scaled.sub_(top[block])
        chosen = scaled.gather(-1, token_ids[block, None].long())
        if entropies is None:
            log_sum[block] = scaled.exp_().sum(-1, keepdim=True).log_()
        else:
            weights = scaled.exp()
            total = weights.sum(-1, keepdim=True)
            log_sum[block] = total.log()
            # A logit of -inf has probability 0 and adds 0; without the clamp it would be 0 * inf.
            mean = weights.mul_(scaled.clamp_(min=_LEAST_LOGIT)).sum(-1, keepdim=True) / total
            entropies[block] = (log_sum[block] - mean).squeeze(-1)
        logprobs[block] = (chosen - log_sum[block]).squeeze(-1)
    return _Selected(logprobs, top, log_sum), entropies


def _blocks(hidden: Tensor, weight: Tensor, bias: Tensor | None, rows: int) -> Iterator[tuple[slice, Tensor]]:
    """(rows of ``hidden``, their logits) block by block; logits of ``rows`` rows are multiplied out at once."""
    for start in range(0, len(hidden), rows):
        chunk = nn.functional.linear(hidden[start : start + rows], weight, bias)
        for first in range(0, len(chunk), _BLOCK_ROWS):
            logits = chunk[first : first + _BLOCK_ROWS]
            yield slice(start + first, start + first + len(logits)), logits


class _LinearLogprobs(torch.autograd.Function):
    """``token_logprobs(linear(hidden))`` whose logits are computed again in backward.

    One node of the graph, not ``torch.utils.checkpoint`` a chunk: the weight gets its gradient once a backward, and
    ZeRO refuses a second one ("gradient computed twice").
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, token_ids: Tensor, temperature: float, rows: int
    ) -> Tensor:
        selected, _ = _selected(hidden, weight, bias, token_ids, temperature, rows, with_entropy=False)
        ctx.save_for_backward(hidden, weight, bias, token_ids, selected.top, selected.log_sum)
        ctx.temperature, ctx.rows = temperature, rows
        return selected.logprobs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, token_ids, top, log_sum = ctx.saved_tensors
        scale = (grad / ctx.temperature)[:, None]
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight)
        grad_bias = None if bias is None else torch.zeros_like(bias)
        for start in range(0, len(hidden), ctx.rows):
            chunk = slice(start, min(start + ctx.rows, len(hidden)))
            # d log p(token) / d logits = onehot(token) - p, written over the logits it is made from.
            grad_logits = nn.functional.linear(hidden[chunk], weight, bias)
            for first in range(chunk.start, chunk.stop, _BLOCK_ROWS):
                block = slice(first, min(first + _BLOCK_ROWS, chunk.stop))
                mine = grad_logits[block.start - chunk.start : block.stop - chunk.start]
                probs = (mine.float() / ctx.temperature).sub_(top[block]).sub_(log_sum[block]).exp_()
                probs.mul_(-scale[block]).scatter_add_(-1, token_ids[block, None].long(), scale[block])
                mine.copy_(probs)
            torch.mm(grad_logits, weight, out=grad_hidden[chunk])
            grad_weight.addmm_(grad_logits.T, hidden[chunk])
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
        return grad_hidden, grad_weight, grad_bias, None, None, None


class Float32Head(nn.Linear):
    """A linear layer that computes in float32 whatever its parameters are: bfloat16 rounds values to 3 digits."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__(1, 1, bias=False, device="meta")
        self.in_features, self.out_features = head.in_features, head.out_features
        self.weight, self.bias = head.weight, head.bias

    def forward(self, hidden: Tensor) -> Tensor:
        """(N, H) -> (N, labels) float32."""
        bias = None if self.bias is None else self.bias.float()
        return nn.functional.linear(hidden.float(), self.weight.float(), bias)
