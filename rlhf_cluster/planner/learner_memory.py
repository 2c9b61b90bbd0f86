"""Memory of one model under DeepSpeed on one rank, by ZeRO stage, as ``learner.engine`` sets it up.

P parameters of which T are trained, R ranks, e bytes of a number in the model's dtype. Rajbhandari et al. 2020 (ZeRO,
section 3) count 2P weights, 2P gradients and 12P of float32 masters and AdamW moments for bfloat16. Resident memory, as
``docs/planning.md`` has it stage by stage, also holds the copies that an optimizer step makes.

    stage  weights      masters            moments  gradients     step
    0      e P          4T if bfloat16     8T       e T           4T: gradients in float32, or flat for the reduction
    1      e P          4T / R             8T / R   e T           flat, and in float32: (e + 4) T/R; float32: e T/R
    2      e P          4T / R             8T / R   e T / R       the same
    3      e P/R + live 4T / R             8T / R   e T / R       4T/R if bfloat16, at most a sub-group of 1e9 numbers

``live`` are the weights that ZeRO-3 keeps gathered, e times at most 1e9 numbers, also on one rank.
"""

from __future__ import annotations

from dataclasses import dataclass

_FLOAT32 = 4
# learner.engine sets the buckets; the others are DeepSpeed's defaults for what it keeps gathered under ZeRO-3 and for
# the parameters that it steps at once.
BUCKET_ELEMENTS = 50_000_000
LIVE_ELEMENTS = 1_000_000_000
SUB_GROUP_ELEMENTS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Bytes on one rank. ``weights``, ``optimizer`` stay; ``gradients`` and ``step`` come with an optimizer step."""

    weights: float
    optimizer: float
    """Float32 master weights and AdamW's two moments."""
    gradients: float
    """With the bucket they are reduced in."""
    step: float
    """Copies an optimizer step makes of them."""


def engine_memory(parameters: int, trained: int, *, ranks: int, stage: int, element: int, on_gpu: bool) -> EngineMemory:
    """``parameters`` of a model of which ``trained`` have gradients; ``element``: 2 (bfloat16) or 4 (float32)."""
    half = element != _FLOAT32
    share = trained / ranks if stage > 0 else trained
    weights = float(element * parameters)
    if stage == 3:
        weights = element * (parameters / ranks + min(parameters, LIVE_ELEMENTS))
    masters = _FLOAT32 * share if half or stage > 0 else 0.0
    gradients = float(element * (trained if stage < 2 else share))
    if on_gpu and half and stage > 0:
        # data_types.grad_accum_dtype fp32: a float32 sum beside what a backward pass leaves.
        gradients += _FLOAT32 * (trained if stage == 1 else share)
    if stage in (1, 3):
        gradients += element * min(BUCKET_ELEMENTS, trained)
    if stage == 0:
        step = _FLOAT32 * share
    elif stage == 3:
        step = _FLOAT32 * min(share, SUB_GROUP_ELEMENTS) if half else 0.0
    else:
        step = (element + _FLOAT32 if half else element) * share
    return EngineMemory(weights, masters + 2 * _FLOAT32 * share, gradients, step)
