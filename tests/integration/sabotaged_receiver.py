"""A receiver whose engine can be damaged on request, behind the parameters as well (``worker_extension_cls``)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

from actors import weight_receiver
from actors.weight_receiver import WeightReceiverExtension


class SabotagedReceiver(WeightReceiverExtension):
    def _module(self, name: str) -> Any:
        worker: Any = self
        return worker.weight_transfer_engine.model.get_submodule(name)

    def spoil_packed_copy(self, name: str, rows: int, columns: int) -> None:
        """Let linear layer ``name`` compute with other weights than its parameters say."""

        class Other(torch.nn.Module):
            pass

        other = Other()
        weight = torch.nn.Parameter(torch.full((rows, columns), 0.25), requires_grad=False)
        other.weight = weight
        dispatch_cpu_unquantized_gemm(other, remove_weight=False)
        self._module(name).cpu_linear = other.cpu_linear

    def flip_one_element(self, name: str) -> None:
        self._module(name).weight.data[3] *= -1

    def break_next_load(self, after: int) -> None:
        """Let the next load end in an error after so many tensors."""
        worker: Any = self
        model = worker.weight_transfer_engine.model
        load = model.load_weights

        def broken(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            model.load_weights = load
            load(itertools.islice(weights, after))
            raise RuntimeError("the load broke half way")

        model.load_weights = broken

    def repack_tied_heads(self, repack: bool) -> None:
        weight_receiver.repack_tied_head = _REPACK if repack else _leave_the_head  # type: ignore[assignment]


_REPACK = weight_receiver.repack_tied_head


def _leave_the_head(model: torch.nn.Module) -> None: ...
