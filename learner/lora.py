"""Low-rank adapters on the policy's linear layers (Hu et al. 2021): they alone are trained.

    W' = W + alpha / rank * B A        W (out, in) as loaded, A (rank, in) random, B (out, rank) zeros

The learner computes x W' without ever writing into W. Everybody else gets W' itself, under the name of W, computed
afresh and cast once: engines and checkpoints need no adapters, and no number of publications moves W. The reference is
a model of its own, so training adapters cannot reach it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from rlhf_cluster.config import LoraConfig

_ADAPTERS = ("lora_a", "lora_b")


class AdaptedLinear(nn.Linear):
    """``layer`` with its weights frozen and an adapter of its own, in the dtype of the weights."""

    def __init__(self, layer: nn.Linear, config: LoraConfig, generator: torch.Generator) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        self.requires_grad_(False)
        self.scale = config.alpha / config.rank
        start = torch.empty(config.rank, layer.in_features)
        nn.init.kaiming_uniform_(start, a=math.sqrt(5), generator=generator)
        self.lora_a = nn.Parameter(start.to(self.weight))
        self.lora_b = nn.Parameter(self.weight.new_zeros(layer.out_features, config.rank))

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + self.scale * linear(linear(input, self.lora_a), self.lora_b)

    @torch.no_grad()
    def merged(self) -> Tensor:
        """(out, in) W': a new tensor, summed in float32 and cast to the dtype of W. Whole weights only."""
        change = self.lora_b.float() @ self.lora_a.float()
        return (self.weight.float() + self.scale * change).to(self.weight.dtype)


def add_adapters(model: PreTrainedModel, config: LoraConfig, *, seed: int) -> None:
    """Put an adapter on every linear layer of the decoder, or on those that ``config.target_modules`` names, and freeze
    everything else. Equal seeds give equal adapters, and a new adapter changes no answer.

    Raises:
        ValueError: a target that no linear layer is called, or no linear layer at all.
    """
    decoder = model.base_model
    found = {name: module for name, module in decoder.named_modules() if isinstance(module, nn.Linear)}
    if not found:
        raise ValueError(f"learner.lora: {type(model).__name__} has no linear layers to adapt; set it to null")
    names = {name.rpartition(".")[2] for name in found}
    targets = names if config.target_modules is None else set(config.target_modules)
    if unmapped := sorted(targets - names):
        raise ValueError(
            f"learner.lora.target_modules: {', '.join(unmapped)} names no linear layer of {type(model).__name__}; "
            f"choose from {', '.join(sorted(names))}"
        )
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, layer in found.items():
        parent, _, own = name.rpartition(".")
        if own in targets:
            setattr(decoder.get_submodule(parent), own, AdaptedLinear(layer, config, generator))


def is_adapter(name: str) -> bool:
    """Whether the parameter called ``name`` belongs to an adapter."""
    return name.rpartition(".")[2] in _ADAPTERS


def adapted_layers(model: nn.Module) -> dict[str, AdaptedLinear]:
    """Layers with an adapter, by the name of their weight."""
    return {f"{name}.weight": module for name, module in model.named_modules() if isinstance(module, AdaptedLinear)}
