"""Whether a model keeps packed samples apart, found by trying it."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from learner.packed_attention import PACKED, Segments

# Relative L2 difference between hidden states of samples packed and alone. Samples that see one another, or count
# their positions on, differ by more than 0.1; bfloat16 alone by about 0.01.
TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3}
HALF_TOLERANCE = 4e-2
_LENGTHS = (12, 7, 11)


def enable_packing(model: PreTrainedModel) -> str | None:
    """Let ``model`` read packed rows, whatever its ``config._attn_implementation`` was. Dropout must be off.

    Returns:
        Why it cannot: it keeps the implementation it had. None when it can.
    """
    before = model.config._attn_implementation
    try:
        reason = _probe(model, PACKED.get(before, PACKED["eager"]))
    except Exception as error:  # models raise what they like; any of it means rows must be padded
        reason = f"{type(error).__name__}: {error}"
    if reason is not None or before not in PACKED:
        model.set_attn_implementation(before)
    return reason


def _probe(model: PreTrainedModel, packed_attention: str) -> str | None:
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.get_input_embeddings().num_embeddings
    device = next(model.parameters()).device
    samples = [torch.randint(vocabulary, (length,), generator=generator).to(device) for length in _LENGTHS]
    segments = Segments.of(_LENGTHS, device)
    positions = [torch.arange(length, device=device) for length in _LENGTHS]
    # Flash attention runs on a GPU only, where the model may not be yet; the plain attention is the same function.
    if model.config._attn_implementation not in PACKED:
        model.set_attn_implementation("eager")
    with torch.no_grad():
        alone = [
            model.base_model(input_ids=ids[None], position_ids=position[None], use_cache=False).last_hidden_state[0]
            for ids, position in zip(samples, positions, strict=True)
        ]
        model.set_attn_implementation(packed_attention)
        if model.config._attn_implementation != packed_attention:
            return "its attention does not go through transformers' AttentionInterface"
        packed = model.base_model(
            input_ids=torch.cat(samples)[None],
            position_ids=torch.cat(positions)[None],
            use_cache=False,
            **segments.model_arguments(packed_attention),
        ).last_hidden_state[0]
    differences = [_difference(a, b) for a, b in zip(packed.split(list(_LENGTHS)), alone, strict=True)]
    # A tensor's maximum keeps NaN, and a comparison with it is false: states that are not finite prove nothing.
    worst = float(torch.tensor(differences).max())
    if worst <= TOLERANCE.get(packed.dtype, HALF_TOLERANCE):
        return None
    return f"packed samples differ from the same samples alone by {worst:.2g}"


def _difference(packed: Tensor, alone: Tensor) -> float:
    return float((packed.float() - alone.float()).norm() / alone.float().norm())
