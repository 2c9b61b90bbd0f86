"""The only ``deepspeed.initialize``, ``backward`` and ``step``: one optimised model under ZeRO stage 0 to 3.

Gradients are d(sum of the losses of all ranks and micro-batches): losses come in already divided by the global token
count, DeepSpeed's averaging over ranks is undone, and nothing is divided by the number of micro-batches. So one
optimizer step does not depend on how a minibatch was split.

A step whose gradients are not finite on any rank changes nothing on every rank. DeepSpeed decides that from the norm of
the reduced gradients, except for its plain float32 path without ZeRO, which would step on NaN and is guarded here.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn

from learner.host_memory import return_freed_memory
from learner.schedule import Schedule
from rlhf_cluster.config import LearnerConfig

logger = logging.getLogger(__name__)

# DeepSpeed allocates buffers of this many elements; its default of 5e8 is a GiB a model for nothing on a small one.
_BUCKET_ELEMENTS = 50_000_000
# ZeRO-1 and 2 step one parameter group after the other and hold a float32 copy of its gradients meanwhile. Groups of
# this many elements, or of an eighth of a large model, bound that copy.
_GROUP_ELEMENTS, _MOST_GROUPS = 32_000_000, 8
# Parameters below this many elements stay whole on every rank under ZeRO-3: gathering them costs more than it saves.
_PERSISTENT_ELEMENTS = 10_000


LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """``stepped`` is False when the gradients were not finite: parameters, moments and schedule are as before.

    ``grad_norm`` is the global L2 norm before clipping; infinite or NaN when not stepped.
    """

    stepped: bool
    grad_norm: float


def init_distributed(*, backend: str, rank: int, world_size: int, host: str, port: int, timeout_s: float) -> None:
    """Join the process group of the learner's ranks. ``backend``: gloo on CPU, nccl on CUDA.

    Raises:
        torch.distributed.DistError: not every rank came within ``timeout_s``.
    """
    if host == LOOPBACK:
        # Gloo would otherwise listen on the address that the host's name resolves to.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK="0",
        MASTER_ADDR=host,
        MASTER_PORT=str(port),
    )
    # DeepSpeed's shared-memory collectives are compiled with g++ at first use (a minute on 2 cores, and a compiler to
    # have); gloo moves the few hundred megabytes of a CPU learner well enough.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(
        dist_backend=backend,
        auto_mpi_discovery=False,
        verbose=False,
        timeout=timedelta(seconds=timeout_s),
        rank=rank,
        world_size=world_size,
    )


class TrainEngine:
    """One model and its AdamW (betas 0.9 and 0.95, no weight decay) on this rank.

    Every public method but the properties is collective: all ranks call it alike.

    Args:
        model: on its device, in ``dtype``, the same on every rank.
        lr: peak learning rate.
        total_optimizer_steps: steps the whole run plans; the schedule spreads over them.
        dtype: torch.bfloat16 (float32 master weights) or torch.float32.
        name: "policy" or "critic": whose decay it takes, and what messages call it.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: float,
        total_optimizer_steps: int,
        config: LearnerConfig,
        dtype: torch.dtype,
        name: str,
    ) -> None:
        self.name = name
        self.zero_stage = config.zero_stage
        self.schedule = Schedule(
            lr,
            warmup_steps=math.ceil(config.warmup_fraction * total_optimizer_steps),
            total_steps=total_optimizer_steps,
            decay=config.policy_decay if name == "policy" else config.critic_decay,
            final_fraction=config.final_lr_fraction,
        )
        self.accumulating = False
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        groups = parameter_groups(trained) if self.zero_stage in (1, 2) else [trained]
        optimizer = torch.optim.AdamW(
            [{"params": group} for group in groups], lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        self.deepspeed, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            config=_deepspeed_config(config, dtype, next(model.parameters()).device),
            dist_init_required=False,
        )
        self._guarded_here = self.zero_stage == 0 and dtype == torch.float32
        self._on_host = self.deepspeed.device.type == "cpu"

    @property
    def module(self) -> nn.Module:
        return self.deepspeed.module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward (inside ``accumulate``, or under ``torch.no_grad``)."""
        return self.deepspeed(*args, **kwargs)

    def accumulate(self, loss: Callable[[], Tensor], *, last: bool) -> None:
        """Run one micro-batch forward and backward; ``last`` marks the final one before ``step``.

        ``loss`` calls this engine and returns this micro-batch's part of the loss: a sum over its tokens divided by the
        token count of all ranks and micro-batches.
        """
        self.accumulating = True
        self.deepspeed.set_gradient_accumulation_boundary(last)
        # DeepSpeed averages gradients over ranks; the loss is a share of one sum over all of them.
        self.deepspeed.backward(loss() * dist.get_world_size(), scale_wrt_gas=False)
        if self._on_host:
            return_freed_memory()

    def step(self) -> StepOutcome:
        """Clip, apply and clear the gradients, or clear them alone when they are not finite on any rank."""
        for group in self.deepspeed.optimizer.param_groups:
            group["lr"] = self.schedule.next_lr
        if self._guarded_here:
            outcome = self._guarded_step()
        else:
            self.deepspeed.step()
            # ZeRO reports inf for what it skipped, whatever the gradients were.
            outcome = StepOutcome(self.deepspeed.was_step_applied(), float(self.deepspeed.get_global_grad_norm()))
        self.accumulating = False
        if outcome.stepped:
            self.schedule.applied += 1
        return outcome

    def _guarded_step(self) -> StepOutcome:
        # The gradients are already all-reduced, so every rank computes the same norm.
        norm = float(nn.utils.get_total_norm([p.grad for p in self.module.parameters() if p.grad is not None]))
        if not math.isfinite(norm):
            self.deepspeed.zero_grad()
            return StepOutcome(False, norm)
        self.deepspeed.step()
        return StepOutcome(True, norm)

    def close(self) -> None:
        """Free DeepSpeed's buffers and hooks."""
        self.deepspeed.destroy()


def parameter_groups(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Neighbours together, each group as large as ``_GROUP_ELEMENTS`` and ``_MOST_GROUPS`` allow (one parameter may be
    larger)."""
    limit = max(_GROUP_ELEMENTS, math.ceil(sum(parameter.numel() for parameter in parameters) / _MOST_GROUPS))
    groups: list[list[nn.Parameter]] = []
    size = 0
    for parameter in parameters:
        if not groups or size + parameter.numel() > limit:
            groups.append([])
            size = 0
        groups[-1].append(parameter)
        size += parameter.numel()
    return groups


def _deepspeed_config(config: LearnerConfig, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    half = dtype == torch.bfloat16
    settings: dict[str, Any] = {
        # One micro-batch by DeepSpeed's books: ours vary, and ``accumulate`` marks the last one.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.grad_clip or 0.0,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 2**31,
        # Without check_grad_overflow ZeRO-2 in bfloat16 steps on NaN.
        "bf16": {"enabled": half, "check_grad_overflow": half},
        "zero_optimization": {
            "stage": config.zero_stage,
            "reduce_bucket_size": _BUCKET_ELEMENTS,
            "allgather_bucket_size": _BUCKET_ELEMENTS,
            "stage3_prefetch_bucket_size": _BUCKET_ELEMENTS,
            "stage3_param_persistence_threshold": _PERSISTENT_ELEMENTS,
        },
    }
    # On a CPU a float32 copy of every gradient costs 0.4 s a micro-batch and 0.5 GB for a model of 135M, to save the
    # rounding of a few additions; there gradients add up in bfloat16 (DeepSpeed's own default).
    if half and config.zero_stage > 0 and device.type != "cpu":
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    return settings
