"""The frozen reference model inside the learner, for a KL over the whole vocabulary."""

from __future__ import annotations

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from learner.heads import ReferenceRows
from learner.models import ModelInputs, hidden_states, load_options, prepare, refuse_logit_transforms
from rlhf_cluster.config import LearnerConfig, ModelConfig

__all__ = ["ReferenceModel", "ReferenceRows", "load_reference"]


class ReferenceModel(nn.Module):
    """A causal language model without gradient or dropout. Its logits are made where the policy's are, in the head.

    ``packed``: whether it reads packed micro-batches; it reads padded ones in any case.
    """

    def __init__(self, model: PreTrainedModel, *, packed: bool = False) -> None:
        super().__init__()
        refuse_logit_transforms(model.config, "reference")
        head = model.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            raise ValueError(f"model.reference has an LM head of type {type(head).__name__}; it must be linear")
        self.model = model.requires_grad_(False)
        self.head = head
        self.packed = packed
        self.eval()

    @torch.no_grad()
    def rows(self, inputs: ModelInputs) -> ReferenceRows:
        """The hidden states before each response token of ``inputs``, and the head's weights.

        Raises:
            ValueError: packed inputs to a model that cannot read them.
        """
        hidden = hidden_states(self.model, inputs, packed=self.packed)
        selected = hidden.index_select(0, inputs.predictor[inputs.response_mask])
        return ReferenceRows(selected, self.head.weight, self.head.bias)


def load_reference(path: str, config: ModelConfig, learner: LearnerConfig) -> ReferenceModel:
    """The causal language model at ``path``, in the policy's dtype and layout, so that equal weights give a KL of 0."""
    model = AutoModelForCausalLM.from_pretrained(path, **load_options(path, config))
    packed = prepare(model, learner, f"reference {path}")
    return ReferenceModel(model, packed=packed)
