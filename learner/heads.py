"""Output layers of policy and critic: log-probs without a full logits matrix, values in float32.

Both are modules that own their weight, because ZeRO-3 brings a parameter in only for its own module's forward and
backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rlhf_cluster.algorithms.losses import entropy, token_logprobs

HEAD_ROWS = 1024
"""Rows of logits (rows x vocabulary) that live at once; with more, backward computes them again."""

# Softmax and entropy make float32 copies. 32 rows of them stay in a CPU's caches: 2 to 3 times as fast as 1024 rows.
_CPU_SOFTMAX_ROWS = 32


class LogprobHead(nn.Linear):
    """An LM head that turns hidden states into log-probs of given tokens. Shares the parameters of ``head``."""

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
            return _Logprobs.apply(hidden, self.weight, self.bias, token_ids, temperature, self.rows), None
        logprobs, entropies = [], []
        for rows, ids in zip(hidden.split(self.rows), token_ids.split(self.rows), strict=True):
            for logits, block_ids in _blocks(super().forward(rows), ids):
                logprobs.append(token_logprobs(logits, block_ids, temperature))
                if with_entropy:
                    everywhere = torch.ones_like(block_ids, dtype=torch.bool)
                    entropies.append(entropy(logits.float() / temperature, everywhere))
        return torch.cat(logprobs), torch.cat(entropies) if with_entropy else None


class _Logprobs(torch.autograd.Function):
    """``token_logprobs(linear(hidden))`` in chunks of rows; with more than one, backward computes the logits again.

    One node of the graph, not ``torch.utils.checkpoint`` a chunk: the weight gets its gradient once a backward, and
    ZeRO refuses a second one ("gradient computed twice").
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, token_ids: Tensor, temperature: float, rows: int
    ) -> Tensor:
        logprobs, logits = [], None
        for chunk, ids in zip(hidden.split(rows), token_ids.split(rows), strict=True):
            logits = nn.functional.linear(chunk, weight, bias)
            logprobs += [token_logprobs(block, block_ids, temperature) for block, block_ids in _blocks(logits, ids)]
        kept = logits if len(hidden) <= rows else None
        ctx.save_for_backward(hidden, weight, bias, token_ids, kept)
        ctx.temperature, ctx.rows = temperature, rows
        return torch.cat(logprobs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, token_ids, kept = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight)
        grad_bias = None if bias is None else torch.zeros_like(bias)
        for start in range(0, len(hidden), ctx.rows):
            part = slice(start, start + ctx.rows)
            logits = nn.functional.linear(hidden[part], weight, bias) if kept is None else kept
            grad_logits = _logit_gradient(logits, token_ids[part], grad[part], ctx.temperature)
            torch.mm(grad_logits, weight, out=grad_hidden[part])
            grad_weight.addmm_(grad_logits.T, hidden[part])
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
        return grad_hidden, grad_weight, grad_bias, None, None, None


def _logit_gradient(logits: Tensor, token_ids: Tensor, grad: Tensor, temperature: float) -> Tensor:
    """(rows, V) gradient of (rows,) ``token_logprobs`` weighted by ``grad``."""
    out = torch.empty_like(logits)
    start = 0
    for block, ids in _blocks(logits.detach(), token_ids):
        part = slice(start, start + len(block))
        with torch.enable_grad():
            leaf = block.requires_grad_()
            logprobs = token_logprobs(leaf, ids, temperature)
        (out[part],) = torch.autograd.grad(logprobs, leaf, grad[part])
        start += len(block)
    return out


def _blocks(logits: Tensor, token_ids: Tensor) -> list[tuple[Tensor, Tensor]]:
    rows = _CPU_SOFTMAX_ROWS if logits.device.type == "cpu" else HEAD_ROWS
    return list(zip(logits.split(rows), token_ids.split(rows), strict=True))


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
