"""Bytes of passes through a decoder of the usual kind: two RMS norms, grouped-query attention, a gated MLP a layer.

N slots (tokens, padding included) go through together, L of them in the longest sample. H hidden size, A query heads, K
key/value heads, D features of a head, I MLP width, V vocabulary, e bytes of a number.

What a layer keeps of a slot for its backward pass, in the order of the forward pass:

    two norms       input and scaled input      e = 2: 4H (the input in float32) + 2H;  e = 4: 4H + 4H;  twice
    linear inputs   q, k, v share one; gate, up another                                 2 e H
    attention       queries, keys, values; probabilities (eager) or output and row sums  e (A + 2K) D + e A L
    output          input of the output projection                                      e A D
    MLP             gate, its SiLU, up, their product                                   4 e I
"""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_cluster.planner.model_shapes import ModelShape

MIB = 2**20
# As learner.heads and actors.reference_scorer have them; a test compares.
HEAD_ROWS = 1024
SCORER_LOGIT_ROWS = 512
_FLOAT32 = 4


@dataclass(frozen=True, slots=True)
class Pass:
    """``slots`` go through at once, ``longest`` tokens in the longest sample; ``eager`` attention keeps its scores."""

    slots: int
    longest: int
    element: int
    eager: bool


def kept_by_a_layer(model: ModelShape, run: Pass) -> float:
    """Bytes that one layer keeps of a pass for its backward one."""
    e, hidden, heads = run.element, model.hidden, model.heads
    norms = 2 * (_FLOAT32 * hidden + e * hidden)
    inputs = 2 * e * hidden
    key_values = 2 * model.key_value_heads * model.head_dim
    attention = e * (heads * model.head_dim + key_values)
    attention += e * heads * run.longest if run.eager else e * heads * model.head_dim + _FLOAT32 * heads
    output = e * heads * model.head_dim
    return run.slots * (norms + inputs + attention + output + 4 * e * model.intermediate)


def backward_of_a_layer(model: ModelShape, run: Pass) -> float:
    """Bytes at work in one layer's backward pass: gradients of the MLP's three wide tensors and of the scores."""
    scores = 2 * model.heads * run.longest if run.eager else 2 * model.heads * model.head_dim
    return run.slots * run.element * (3 * model.intermediate + scores)


def training_pass(model: ModelShape, run: Pass, *, checkpointing: bool, trained_layers: int) -> float:
    """Bytes of activations at the peak of a forward and backward pass; ``trained_layers`` keep theirs."""
    layer = kept_by_a_layer(model, run)
    if not checkpointing:
        return trained_layers * layer + backward_of_a_layer(model, run)
    inputs = trained_layers * run.slots * model.hidden * run.element
    return inputs + layer + backward_of_a_layer(model, run)


def training_head(model: ModelShape, responses: int, element: int, *, reference: bool) -> float:
    """Bytes of the LM head: one chunk of logits (two with a reference beside it) and the gradient of its weight."""
    chunk = min(HEAD_ROWS, responses) * model.vocabulary * element
    return chunk * (2 if reference else 1) + model.vocabulary * model.hidden * element


def forward_pass(model: ModelShape, run: Pass) -> float:
    """Bytes at work in a pass without gradient: one layer's, since nothing is kept."""
    e = run.element
    hidden = model.hidden * (3 * e + 2 * _FLOAT32)
    width = model.heads * model.head_dim
    # Transformers repeats keys and values for every query head; its eager softmax is in float32.
    attention = 4 * width * e + (model.heads * run.longest * (2 * e + _FLOAT32) if run.eager else 0)
    return run.slots * (hidden + max(attention, 3 * model.intermediate * e))


def scoring_head(model: ModelShape, responses: int, element: int) -> float:
    """Bytes of the reference's logits: the model's own, and three float32 copies on the way to log-probs."""
    return min(SCORER_LOGIT_ROWS, responses) * model.vocabulary * (element + 3 * _FLOAT32)
