"""Whether an engine's model holds exactly the learner's tensors, in every copy that it computes with.

Loaders fuse (q, k and v into one matrix), shard and pad; on CPU vLLM then packs each linear weight for oneDNN and
drops the original. So the comparison goes the way of a load, without one:

    checkpoint tensor -> the parameter's own loader -> a scratch copy of what is held -> must have changed nothing

A packed weight W is read back to the bit by multiplying the identity by it: every output is 1 * w plus zeros. What a
kernel keeps in a layout of its own (quantised weights, the stacked weights of experts) cannot be read back: there the
log-prob probe alone judges.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.model_loader.reload.layerwise import (
    _get_original_loader,
    _place_kernel_tensors,
    get_layerwise_info,
)
from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor, restore_layer_on_meta
from vllm.model_executor.model_loader.reload.utils import get_layer_params_buffers

# What rounds to zero inside a bfloat16 dot product, and the two zeros, are no difference.
_SMALLEST_NORMAL = torch.finfo(torch.float32).tiny


class _Held:
    """The copies of one parameter: the parameter itself, and what a linear layer has packed of it."""

    def __init__(self, layer: nn.Module, name: str, live: Tensor, shape: torch.Size) -> None:
        self._layer, self._name, self._live, self._shape = layer, name, live, shape

    def copies(self) -> list[Tensor]:
        """All of full shape; none when a kernel may keep this parameter in a layout of its own."""
        copies = [self._live] if self._live.shape == self._shape and self._live.ndim <= 2 else []
        if self._name == "weight" and hasattr(self._layer, "cpu_linear") and len(self._shape) == 2:
            copies.append(self._unpacked())
        return copies

    def _unpacked(self) -> Tensor:
        identity = torch.eye(self._shape[1], dtype=self._live.dtype)
        return self._layer.cpu_linear(identity, self._live, None).t()


@torch.no_grad()
def differing_parameters(model: nn.Module, tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of the engine's parameters that differ in any copy from what loading ``tensors`` would make of them.

    ``tensors``: checkpoint tensors by name, complete; a parameter that none of them reaches is not compared. The model
    is left as it was; nothing may run in it meanwhile.
    """
    wrong: set[str] = set()
    compared: set[str] = set()

    def compare(name: str, held: _Held, original: Callable[..., Any], scratch: Callable[[], Tensor]) -> Any:
        signature = inspect.signature(original)
        if "param" not in signature.parameters:
            raise RuntimeError(f"the weight loader of {name} takes no param, so what it would load cannot be diverted")

        def loader(*args: Any, **kwargs: Any) -> None:
            compared.add(name)
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            copies = held.copies()
            if not copies:
                return
            bound.arguments["param"] = expected = scratch()
            expected.copy_(copies[0])
            original(*bound.args, **bound.kwargs)
            if not all(_same(expected, copy) for copy in copies):
                wrong.add(name)

        return loader

    with _loaders_replaced(model, compare):
        model.load_weights(iter(tensors.items()))
    for prefix, layer in model.named_modules():
        # A tied head is sent no tensor of its own, but has packed the one it shares.
        name, weight = f"{prefix}.weight", layer._parameters.get("weight")
        if name not in compared and weight is not None and weight.ndim == 2 and hasattr(layer, "cpu_linear"):
            copies = _Held(layer, "weight", weight, weight.shape).copies()
            if not all(_same(weight, copy) for copy in copies):
                wrong.add(name)
    return sorted(wrong)


@contextmanager
def _loaders_replaced(model: nn.Module, replacement: Callable[..., Any]) -> Iterator[None]:
    """Give every parameter the shape it was first loaded in and another loader, and put everything back after."""
    layers = list(model.named_modules())
    kept: list[tuple[Tensor, Any]] = []
    try:
        for prefix, layer in layers:
            info = get_layerwise_info(layer)
            info.kernel_tensors = get_layer_params_buffers(layer)
            info.kernel_non_persistent_buffers = set(layer._non_persistent_buffers_set)
            restore_layer_on_meta(layer, info)
            for name, parameter in get_layer_params_buffers(layer)[0].items():
                original = _get_original_loader(parameter)
                live = info.kernel_tensors[0].get(name, parameter)
                held = _Held(layer, name, live, parameter.shape)
                kept.append((parameter, getattr(parameter, "weight_loader", None)))
                parameter.weight_loader = replacement(
                    f"{prefix}.{name}", held, original, _scratch_of(parameter, live.device)
                )
        yield
    finally:
        for parameter, loader in kept:
            if loader is None:
                del parameter.weight_loader
            else:
                parameter.weight_loader = loader
        for _, layer in layers:
            info = get_layerwise_info(layer)
            if info.kernel_tensors is not None:
                _place_kernel_tensors(layer, info)
            info.reset()


def _scratch_of(parameter: Tensor, device: torch.device) -> Callable[[], Tensor]:
    """Makes memory of the parameter's shape that its loader accepts for it."""

    def make() -> Tensor:
        with device:
            return materialize_meta_tensor(parameter)

    return make


def _same(expected: Tensor, held: Tensor) -> bool:
    if torch.equal(expected, held):
        return True
    return bool(((expected.float() - held.float()).abs() <= _SMALLEST_NORMAL).all())
