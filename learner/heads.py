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
"""Rows of training logits (rows x vocabulary) that live at once; longer inputs are cut and recomputed in backward."""

# Without gradients nothing is kept, and rows that fit a CPU's caches are faster.
_INFERENCE_ROWS = 128


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
        if not torch.is_grad_enabled():
            return self._without_gradient(hidden, token_ids, temperature, with_entropy)
        if len(hidden) > self.rows:
            return _ChunkedLogprobs.apply(hidden, self.weight, self.bias, token_ids, temperature, self.rows), None
        return token_logprobs(super().forward(hidden), token_ids, temperature), None

    def _without_gradient(
        self, hidden: Tensor, token_ids: Tensor, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        logprobs, entropies = [], []
        for rows, ids in zip(hidden.split(_INFERENCE_ROWS), token_ids.split(_INFERENCE_ROWS), strict=True):
            logits = super().forward(rows)
            logprobs.append(token_logprobs(logits, ids, temperature))
            if with_entropy:
                entropies.append(entropy(logits.float() / temperature, torch.ones_like(ids, dtype=torch.bool)))
        return torch.cat(logprobs), torch.cat(entropies) if with_entropy else None


class _ChunkedLogprobs(torch.autograd.Function):
    """``token_logprobs(linear(hidden))`` in chunks of rows, whose logits are computed again in backward.

    One node of the graph, not ``torch.utils.checkpoint`` a chunk: the weight gets its gradient once a backward, and
    ZeRO refuses a second one ("gradient computed twice").
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, token_ids: Tensor, temperature: float, rows: int
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias, token_ids)
        ctx.temperature, ctx.rows = temperature, rows
        chunks = zip(hidden.split(rows), token_ids.split(rows), strict=True)
        return torch.cat(
            [token_logprobs(nn.functional.linear(chunk, weight, bias), ids, temperature) for chunk, ids in chunks]
        )

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, token_ids = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight)
        grad_bias = None if bias is None else torch.zeros_like(bias)
        for start in range(0, len(hidden), ctx.rows):
            part = slice(start, start + ctx.rows)
            logits = nn.functional.linear(hidden[part], weight, bias).requires_grad_()
            with torch.enable_grad():
                logprobs = token_logprobs(logits, token_ids[part], ctx.temperature)
            (grad_logits,) = torch.autograd.grad(logprobs, logits, grad[part])
            torch.mm(grad_logits, weight, out=grad_hidden[part])
            grad_weight.addmm_(grad_logits.T, hidden[part])
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
