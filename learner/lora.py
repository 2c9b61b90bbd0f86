"""Low-rank adapters on the policy's linear layers (Hu et al. 2021): they alone are trained.

    W' = W + alpha / rank * B A        W (out, in) as loaded, A (rank, in) random, B (out, rank) zeros

The learner computes x W' without ever writing into W. Everybody else gets W' itself, under the name of W, computed
afresh and cast once: engines and checkpoints need no adapters, and no number of publications moves W. The reference is
a model of its own, so training adapters cannot reach it.

W lies on the grid of its dtype, so in bfloat16 rounding to the nearest would give W back until an entry has changed by
half a step of that grid, and most of an update would never leave. W' is rounded up or down at random instead, so that
it is right on average, by numbers that depend on the layer alone: equal adapters give equal bits.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from rlhf_cluster.config import LoraConfig
from rlhf_cluster.seeds import derive_seed

_ADAPTERS = ("lora_a", "lora_b")


class AdaptedLinear(nn.Linear):
    """``layer`` with its weights frozen and an adapter of its own, in the dtype of the weights.

    ``rounding_seed``: of the numbers that decide which way an entry of W' is rounded.
    """

    def __init__(
        self, layer: nn.Linear, config: LoraConfig, generator: torch.Generator, *, rounding_seed: int = 0
    ) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        self.requires_grad_(False)
        self.scale = config.alpha / config.rank
        self._rounding_seed = rounding_seed
        start = torch.empty(config.rank, layer.in_features)
        nn.init.kaiming_uniform_(start, a=math.sqrt(5), generator=generator)
        self.lora_a = nn.Parameter(start.to(self.weight))
        self.lora_b = nn.Parameter(self.weight.new_zeros(layer.out_features, config.rank))

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + self.scale * linear(linear(input, self.lora_a), self.lora_b)

    @torch.no_grad()
    def merged(self) -> Tensor:
        """(out, in) W': a new tensor, summed in float32 and rounded to the dtype of W. Whole weights only."""
        merged = torch.addmm(self.weight.float(), self.lora_b.float(), self.lora_a.float(), alpha=self.scale)
        if self.weight.dtype == torch.bfloat16:
            return round_at_random(merged, seed=self._rounding_seed)
        return merged.to(self.weight.dtype)


def round_at_random(values: Tensor, *, seed: int) -> Tensor:
    """Finite float32 ``values`` in bfloat16, up or down in proportion to what lies between; what bfloat16 holds stays.

    bfloat16 is the upper half of float32's bits, so a random lower half is added before the lower half is cut off.
    ``values`` are overwritten.
    """
    bits = values.view(torch.int32)
    generator = torch.Generator(values.device).manual_seed(seed)
    bits += torch.empty_like(bits).random_(0, 2**16, generator=generator)
    return bits.bitwise_and_(-(2**16)).view(torch.float32).to(torch.bfloat16)


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
            rounding_seed = derive_seed(seed, "rounding", name)
            adapted = AdaptedLinear(layer, config, generator, rounding_seed=rounding_seed)
            setattr(decoder.get_submodule(parent), own, adapted)


def is_adapter(name: str) -> bool:
    """Whether the parameter called ``name`` belongs to an adapter."""
    return name.rpartition(".")[2] in _ADAPTERS


def adapted_layers(model: nn.Module) -> dict[str, AdaptedLinear]:
    """Layers with an adapter, by the name of their weight."""
    return {f"{name}.weight": module for name, module in model.named_modules() if isinstance(module, AdaptedLinear)}
