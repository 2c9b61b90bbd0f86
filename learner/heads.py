"""Output layers of policy and critic: log-probs, entropy and full KL without a full logits matrix; values in float32.

Both are modules that own their weight, because ZeRO-3 brings a parameter in only for its own module's forward and
backward.

Shapes: N response tokens, H hidden size, V vocabulary. z are a row's logits over the temperature t, p = softmax(z), q
the reference's, a and b the log-probs log p and log q:

    log-prob    a[token]            d/dz = onehot(token) - p
    entropy     -sum p a            d/dz = -p (a + entropy)
    KL(p || q)   sum p (a - b)      d/dz = p (a - b - KL)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

HEAD_ROWS = 1024
"""Rows of logits (rows x vocabulary, in the model's dtype) that live at once, and as many of the reference's."""

# Float32 copies are made of a few rows at a time. What is done to a row of 50,000 or 150,000 logits is bound by memory:
# on a CPU such a block is to stay in the caches, on a GPU it is to be worth a kernel launch.
_BLOCK_ELEMENTS = {"cpu": 2**20, "cuda": 2**24}
_LEAST_LOGIT = -1e4


class ReferenceRows(NamedTuple):
    """What the reference model's logits of N response tokens are made of. No gradient reaches them."""

    hidden: Tensor
    """(N, H_ref), in the order of ``inputs.response_mask``."""
    weight: Tensor
    """(V, H_ref) of its LM head."""
    bias: Tensor | None


class HeadOutputs(NamedTuple):
    """Float32 (float64 for a float64 model), nats, at the temperature asked for."""

    logprobs: Tensor
    """(N,)"""
    entropy: Tensor | None
    """(N,), None where not asked for."""
    kl: Tensor | None
    """(N,) KL(policy || reference) over the whole vocabulary, None without a reference."""


class LogprobHead(nn.Linear):
    """An LM head that turns hidden states into log-probs of given tokens. Shares the parameters of ``head``.

    The same numbers as ``algorithms.losses.token_logprobs`` and ``entropy`` of the logits, which a test compares.
    """

    def __init__(self, head: nn.Module, rows: int = HEAD_ROWS) -> None:
        super().__init__(1, 1, bias=False, device="meta")
        if not isinstance(head, nn.Linear):
            raise ValueError(f"model.policy has an LM head of type {type(head).__name__}; it must be linear")
        self.in_features, self.out_features = head.in_features, head.out_features
        self.weight, self.bias = head.weight, head.bias
        self.rows = rows

    def forward(  # type: ignore[override]
        self,
        hidden: Tensor,
        token_ids: Tensor,
        *,
        temperature: float,
        with_entropy: bool = False,
        entropy_gradient: bool = False,
        reference: ReferenceRows | None = None,
    ) -> HeadOutputs:
        """(N, H) hidden states and (N,) tokens -> what was asked for, all differentiable but the entropy.

        ``entropy_gradient`` makes the entropy differentiable too; without it, it costs one pass over the exponentials
        that the log-probs need anyway.

        Raises:
            ValueError: a reference of another vocabulary.
        """
        if reference is not None and len(reference.weight) != len(self.weight):
            raise ValueError(
                f"model.reference has {len(reference.weight)} output tokens, model.policy {len(self.weight)}: a KL "
                "over the whole vocabulary needs the same one"
            )
        request = _Request(
            temperature, self.rows, with_entropy or entropy_gradient, entropy_gradient, torch.is_grad_enabled()
        )
        return HeadOutputs(*_TokenStatistics.apply(hidden, self.weight, self.bias, token_ids, reference, request))


@dataclass(frozen=True, slots=True)
class _Request:
    temperature: float
    rows: int
    entropy: bool
    entropy_gradient: bool
    gradients: bool


class _Logits(NamedTuple):
    """Logits of one chunk of rows, the reference's beside them."""

    policy: Tensor
    reference: Tensor | None


class _TokenStatistics(torch.autograd.Function):
    """Linear layer, temperature, and the three numbers of each token, without keeping logits beyond ``rows`` rows.

    One node of the graph, not ``torch.utils.checkpoint`` a chunk and not one node a number: the weight gets its
    gradient once a backward, and ZeRO refuses a second one ("gradient computed twice").
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        token_ids: Tensor,
        reference: ReferenceRows | None,
        request: _Request,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        logprobs = hidden.new_empty(len(hidden), dtype=torch.promote_types(hidden.dtype, torch.float32))
        log_sum = torch.empty_like(logprobs)[:, None]
        entropy = torch.empty_like(logprobs) if request.entropy else None
        kl = None if reference is None else torch.empty_like(logprobs)
        logits = None
        for chunk in _slices(len(hidden), request.rows):
            logits = _chunk_logits(hidden, weight, bias, reference, chunk)
            for block in _blocks(chunk, weight):
                row = slice(chunk.start + block.start, chunk.start + block.stop)
                z = _scaled(logits.policy[block], request.temperature)
                chosen = z.gather(-1, token_ids[row, None].long())
                if entropy is None and kl is None:
                    log_sum[row] = z.exp_().sum(-1, keepdim=True).log_()
                else:
                    # A logit of -inf has probability 0 and adds 0; without the clamp it would be 0 * inf.
                    weights = z.clamp_(min=_LEAST_LOGIT).exp()
                    total = weights.sum(-1, keepdim=True)
                    log_sum[row] = total.log()
                    if entropy is not None:
                        entropy[row] = (log_sum[row] - torch.linalg.vecdot(weights, z)[:, None] / total).squeeze(-1)
                    if kl is not None and logits.reference is not None:
                        z_ref = _scaled(logits.reference[block], request.temperature)
                        log_q = z_ref.sub_(_log_sum(z_ref.clamp_(min=_LEAST_LOGIT)))
                        kl[row] = torch.linalg.vecdot(weights, z.sub_(log_sum[row]).sub_(log_q)) / total[:, 0]
                logprobs[row] = (chosen - log_sum[row]).squeeze(-1)
        ctx.save_for_backward(hidden, weight, bias, token_ids, log_sum, entropy, kl)
        ctx.reference, ctx.request = reference, request
        # Logits that fit one chunk wait for backward, which would start by computing just these again.
        ctx.logits = logits if request.gradients and len(hidden) <= request.rows else None
        ctx.set_materialize_grads(False)
        if entropy is not None and not request.entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy, kl

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, grad_kl: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, token_ids, log_sum, entropy, kl = ctx.saved_tensors
        reference, request, kept = ctx.reference, ctx.request, ctx.logits
        ctx.logits = None
        grads = _Gradients.of(grad_logprobs, entropy, grad_entropy, kl, grad_kl)
        live = None if grads is None else grads.live()
        grad_hidden = torch.zeros_like(hidden)
        # A frozen head (under adapters, say) is spared the product that is a third of its work.
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias) if ctx.needs_input_grad[2] else None
        if grads is None or (live is not None and not len(live)):
            return grad_hidden, grad_weight, grad_bias, None, None, None
        if live is not None:
            # Rows that the loss leaves out take no part: a NaN among them would survive a multiplication by zero.
            hidden, token_ids, log_sum, grads = hidden[live], token_ids[live], log_sum[live], grads.rows(live)
            reference = None if reference is None else reference._replace(hidden=reference.hidden[live])
        mine = grad_hidden if live is None else torch.empty_like(hidden)
        for chunk in _slices(len(hidden), request.rows):
            logits = kept or _chunk_logits(hidden, weight, bias, reference if grads.kl is not None else None, chunk)
            for block in _blocks(chunk, weight):
                row = slice(chunk.start + block.start, chunk.start + block.stop)
                # Kept logits are of all rows. What is written lies at or before what is read, so nothing is lost.
                read = block if live is None or kept is None else live[block]
                logits.policy[block] = _logit_gradients(
                    logits.policy[read],
                    None if logits.reference is None else logits.reference[read],
                    log_sum[row],
                    token_ids[row, None].long(),
                    grads.rows(row),
                    request.temperature,
                )
            grad_logits = logits.policy[: chunk.stop - chunk.start]
            torch.mm(grad_logits, weight, out=mine[chunk])
            if grad_weight is not None:
                grad_weight.addmm_(grad_logits.T, hidden[chunk])
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
        if live is not None:
            grad_hidden[live] = mine
        return grad_hidden, grad_weight, grad_bias, None, None, None


@dataclass(frozen=True, slots=True)
class _Gradients:
    """(N, 1) upstream gradients, None for what the loss does not use.

    ``offset`` is what stands in each row's bracket beside the multiples of log p and log q: with the formulas of the
    module, d/dz = p (offset + log p (kl - entropy) - log q kl) + onehot(token) logprobs.
    """

    offset: Tensor
    logprobs: Tensor | None
    entropy: Tensor | None
    kl: Tensor | None

    @classmethod
    def of(
        cls,
        logprobs: Tensor | None,
        entropy: Tensor | None,
        grad_entropy: Tensor | None,
        kl: Tensor | None,
        grad_kl: Tensor | None,
    ) -> _Gradients | None:
        terms = []
        if logprobs is not None:
            terms.append(-logprobs)
        if grad_entropy is not None:
            terms.append(-grad_entropy * entropy)
        if grad_kl is not None:
            terms.append(-grad_kl * kl)
        if not terms:
            return None
        columns = [None if grad is None else grad[:, None] for grad in (logprobs, grad_entropy, grad_kl)]
        return cls(torch.stack(terms).sum(0)[:, None], *columns)

    def rows(self, index: slice | Tensor) -> _Gradients:
        columns = (self.offset, self.logprobs, self.entropy, self.kl)
        return _Gradients(*(None if column is None else column[index] for column in columns))  # type: ignore[arg-type]

    def live(self) -> Tensor | None:
        """Indices of the rows with any gradient that is not 0; None when that is every row."""
        some = torch.stack([grad != 0 for grad in (self.logprobs, self.entropy, self.kl) if grad is not None])
        used = some.any(0).squeeze(-1)
        return None if bool(used.all()) else used.nonzero().squeeze(-1)


def _logit_gradients(
    logits: Tensor,
    reference_logits: Tensor | None,
    log_sum: Tensor,
    token_ids: Tensor,
    grads: _Gradients,
    temperature: float,
) -> Tensor:
    """(rows, V) d loss / d logits, before the temperature, of one block."""
    log_p = _scaled(logits, temperature).sub_(log_sum)
    if grads.entropy is None and grads.kl is None:
        out = log_p.exp_().mul_(grads.offset)
    else:
        probs = log_p.exp()
        log_p.clamp_(min=_LEAST_LOGIT)
        factor: Tensor = -grads.entropy if grads.entropy is not None else torch.zeros_like(grads.offset)
        if grads.kl is not None:
            factor = factor + grads.kl
        out = log_p.mul_(factor).add_(grads.offset)
        if grads.kl is not None and reference_logits is not None:
            z_ref = _scaled(reference_logits, temperature).clamp_(min=_LEAST_LOGIT)
            out.sub_(z_ref.sub_(_log_sum(z_ref)).mul_(grads.kl))
        out.mul_(probs)
    if grads.logprobs is not None:
        out.scatter_add_(-1, token_ids, grads.logprobs)
    return out if temperature == 1 else out.div_(temperature)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """A float32 copy of (rows, V) logits, largest 0 a row, over the temperature.

    The largest goes first: float32 near 30,000 has no digits left for a difference of log 2.
    """
    top = logits.amax(-1, keepdim=True)
    wide = torch.promote_types(logits.dtype, torch.float32)
    scaled = logits.to(wide, copy=True).sub_(top)
    return scaled if temperature == 1 else scaled.div_(temperature)


def _log_sum(scaled: Tensor) -> Tensor:
    """(rows, 1) log of the sum of exponentials of logits whose largest is 0. The policy's is made by the same
    operations, so that equal models have a KL of exactly 0."""
    return scaled.exp().sum(-1, keepdim=True).log_()


def _chunk_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, reference: ReferenceRows | None, chunk: slice
) -> _Logits:
    policy = nn.functional.linear(hidden[chunk], weight, bias)
    if reference is None:
        return _Logits(policy, None)
    return _Logits(policy, nn.functional.linear(reference.hidden[chunk], reference.weight, reference.bias))


def _slices(count: int, size: int) -> Iterator[slice]:
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


def _blocks(chunk: slice, weight: Tensor) -> Iterator[slice]:
    """Parts of a chunk, counted from its start."""
    elements = _BLOCK_ELEMENTS.get(weight.device.type, _BLOCK_ELEMENTS["cuda"])
    return _slices(chunk.stop - chunk.start, max(1, elements // len(weight)))


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
