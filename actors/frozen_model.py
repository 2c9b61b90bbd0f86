"""A model that only runs forward: loaded once, no gradients, the head applied by the caller where it is needed.

Padding never shows in a result: attention masks and position ids are explicit and positions are read by mask, so a
row gives the same hidden states alone, beside longer rows, and padded on either side (up to rounding).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

Head = Literal["lm_head", "score"]
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}

_CHECK_TOKENS = 8


class PaddedBatch(NamedTuple):
    """``input_ids`` (B, L) and ``mask`` (B, L) bool, True on real tokens, in any padding layout."""

    input_ids: Tensor
    mask: Tensor


def pad_right(rows: Sequence[Sequence[int] | NDArray[np.int32]]) -> PaddedBatch:
    """Rows of at least one token each, padded on the right. The pad id plays no part: the mask hides it."""
    input_ids = torch.zeros((len(rows), max(map(len, rows))), dtype=torch.long)
    mask = torch.zeros_like(input_ids, dtype=torch.bool)
    for index, row in enumerate(rows):
        input_ids[index, : len(row)] = torch.as_tensor(np.asarray(row, dtype=np.int64))
        mask[index, : len(row)] = True
    return PaddedBatch(input_ids, mask)


class FrozenModel:
    """A causal language model (``head="lm_head"``) or a reward model with one label (``head="score"``).

    Args:
        path: Hugging Face folder.
        attention: ``eager``, ``sdpa`` or ``flash_attention_2``.

    Raises:
        ValueError: weights are missing from the folder, or the architecture does more after its hidden states than
            apply its head (it would be scored wrongly).
    """

    def __init__(
        self, path: str, head: Head, *, dtype: str, attention: str, device: str = "cpu", trust_remote_code: bool = False
    ) -> None:
        self._path, self._device = path, device
        options: dict[str, Any] = {} if head == "lm_head" else {"num_labels": 1}
        auto_class = AutoModelForCausalLM if head == "lm_head" else AutoModelForSequenceClassification
        model, loaded = auto_class.from_pretrained(
            path,
            dtype=DTYPES[dtype],
            attn_implementation=attention,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            **options,
        )
        if loaded["missing_keys"] or loaded["mismatched_keys"]:
            lacking = sorted(map(str, [*loaded["missing_keys"], *loaded["mismatched_keys"]]))
            raise ValueError(
                f"{path} holds no {'language' if head == 'lm_head' else 'reward'} model that fits: {lacking[:3]} would "
                "be random; name a folder whose weights include its head"
            )
        model = model.to(device).eval().requires_grad_(False)
        self._backbone = model.base_model
        output = model.get_output_embeddings() if head == "lm_head" else getattr(model, "score", None)
        if not isinstance(output, torch.nn.Linear) or self._backbone is model:
            raise ValueError(f"{path}: {type(model).__name__} has no linear `{head}` over a backbone")
        self._head = output
        self._check_head(model)

    @torch.inference_mode()
    def hidden_states(self, batch: PaddedBatch) -> Tensor:
        """(B, L, H) after the final norm, in the model's dtype; what stands at padding is arbitrary."""
        mask = batch.mask.to(self._device)
        output = self._backbone(
            input_ids=batch.input_ids.to(self._device),
            # Without padding no mask is given, so that attention takes its fast causal path.
            attention_mask=None if bool(batch.mask.all()) else mask.long(),
            position_ids=(mask.long().cumsum(-1) - 1).clamp_(min=0),
            use_cache=False,
        )
        return output.last_hidden_state

    @torch.inference_mode()
    def apply_head(self, hidden: Tensor, *, float32: bool = False) -> Tensor:
        """(..., H) -> (..., V) logits, or (..., 1) scores; ``float32`` computes a small head without more rounding."""
        if not float32:
            return self._head(hidden)
        bias = None if self._head.bias is None else self._head.bias.float()
        return linear(hidden.float(), self._head.weight.float(), bias)

    def _check_head(self, model: torch.nn.Module) -> None:
        """The head on the last hidden state must be all the model does (Gemma 2, say, caps its logits after it)."""
        # Ids above 2 are not the pad id of any common tokenizer, and the last of them is where the model reads.
        batch = pad_right([list(range(3, 3 + _CHECK_TOKENS))])
        with torch.inference_mode():
            expected = model(input_ids=batch.input_ids.to(self._device)).logits.reshape(-1)
        ours = self.apply_head(self.hidden_states(batch)[0, -1])
        worst = float((expected[-len(ours) :].float() - ours.float()).abs().max())
        # bfloat16 rounds at 2**-8 of a value; two orders of operations differ by a few such steps.
        if not worst <= 0.03 * max(1.0, float(ours.float().abs().max())):
            raise ValueError(
                f"{self._path}: {type(model).__name__} transforms the output of its head (difference {worst:.3g}), "
                "which the scorers do not reproduce; use another architecture"
            )
