"""Advantages: GAE over tokens, group baselines over samples, whitening over all data-parallel ranks."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_cluster.algorithms.masking import as_mask, select, upcast

GroupKind = Literal["grpo", "dr_grpo", "rloo", "reinforce_baseline"]
GROUP_KINDS: tuple[GroupKind, ...] = ("grpo", "dr_grpo", "rloo", "reinforce_baseline")


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float, bootstrap: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16) -> (advantages, returns), both [B, T].

    ``rewards``, ``values`` [B, T]. The recursion runs over masked-in tokens only, as if the others were cut out: the
    token before a gap sees the value after the gap. ``bootstrap`` [B] is the value after the last token of a truncated
    response, 0 for an ended one (default: all ended). ``returns = advantages + values``; both are 0 under mask 0.

    Raises:
        ValueError: shapes that do not fit.
    """
    keep = as_mask(mask, rewards=rewards, values=values)
    if bootstrap is not None and bootstrap.shape != mask.shape[:1]:
        raise ValueError(f"bootstrap has shape {tuple(bootstrap.shape)}, expected [B] = [{mask.shape[0]}]")
    rewards, values = select(rewards, keep), select(values, keep)
    carried = torch.zeros(mask.shape[:1], dtype=torch.result_type(rewards, values), device=values.device)
    next_value = carried if bootstrap is None else bootstrap.to(carried.dtype)
    zero = torch.zeros((), dtype=carried.dtype, device=values.device)
    advantages: list[Tensor] = []
    for t in reversed(range(mask.shape[1])):
        here = keep[:, t]
        advantage = rewards[:, t] + gamma * next_value - values[:, t] + gamma * lam * carried
        carried = torch.where(here, advantage, carried)
        next_value = torch.where(here, values[:, t], next_value)
        advantages.append(torch.where(here, advantage, zero))
    if not advantages:
        return rewards + values, rewards + values
    stacked = torch.stack(advantages[::-1], dim=1)
    return stacked, stacked + values


def group_advantages(scores: Tensor, group_ids: Tensor | Sequence[Hashable], kind: GroupKind) -> Tensor:
    """One advantage a sample from the scores of its group (same prompt): [B] -> [B], no gradient.

    With m and s the mean and population std of the group's finite scores, n their number:

    - ``grpo``: (score - m) / s (Shao et al. 2024, eq. 3, without its epsilon).
    - ``dr_grpo``: score - m (Liu et al. 2025, "Understanding R1-Zero-like training").
    - ``rloo``: score - mean of the others = (score - m) * n / (n - 1) (Ahmadian et al. 2024).
    - ``reinforce_baseline``: (score - m) over the population std of that difference in the whole batch
      (Hu 2025, REINFORCE++-baseline).

    Equal scores give exact zeros. A score that is not finite is unscorable: it gets 0 and takes no part in m, s, n.

    Raises:
        ValueError: unknown kind, ids that do not fit the scores, or a group with one member (there is no other answer
            to compare it with; sample at least 2 a prompt).
    """
    if kind not in GROUP_KINDS:
        raise ValueError(f"group advantage {kind!r} is unknown; choose one of {GROUP_KINDS}")
    ids = group_ids.tolist() if isinstance(group_ids, Tensor) else list(group_ids)
    if scores.shape != (len(ids),):
        raise ValueError(f"scores has shape {tuple(scores.shape)}, group_ids {len(ids)} entries; both must be [B]")
    members: dict[Hashable, list[int]] = {}
    for row, group in enumerate(ids):
        members.setdefault(group, []).append(row)
    lonely = [group for group, rows in members.items() if len(rows) == 1]
    if lonely:
        raise ValueError(f"{kind}: group {lonely[0]!r} has one member; a group baseline needs at least 2 samples")

    # float64 on the host: B numbers only, and the result does not depend on how the batch is ordered on a device.
    exact = scores.detach().to(device="cpu", dtype=torch.float64)
    out = torch.zeros_like(exact)
    finite = exact.isfinite()
    for rows in members.values():
        index = torch.tensor([row for row in rows if finite[row]], dtype=torch.long)
        group_scores = exact[index]
        # max == min before any division: the mean of equal floats may differ from them by rounding, and dividing that
        # by a std of rounding noise gives advantages near 1 (an epsilon only hides it).
        if len(index) == 0 or group_scores.max() == group_scores.min():
            continue
        centred = group_scores - group_scores.mean()
        if kind == "grpo":
            centred = centred / centred.square().mean().sqrt()
        elif kind == "rloo":
            centred = centred * (len(index) / (len(index) - 1))
        out[index] = centred
    if kind == "reinforce_baseline" and bool(out.any()):
        batch = out[finite]
        out = torch.where(finite, out / (batch - batch.mean()).square().mean().sqrt(), torch.zeros_like(out))
    return out.to(device=scores.device, dtype=upcast(scores).dtype)


def whiten(x: Tensor, mask: Tensor, *, process_group: dist.ProcessGroup | None = None) -> Tensor:
    """Zero mean and unit population variance over masked-in tokens, 0 under mask 0. Any shape.

    Without a process group the statistics are local and an empty batch gives zeros. With one they are those of all
    ranks, which must all call, also those without a token. Statistics are constants for the gradient. Equal values
    give exact zeros.

    Raises:
        ValueError: shapes differ; or, with a process group and on every rank alike, no rank has a token.
    """
    keep = as_mask(mask, x=x)
    valid = x.detach()[keep].to(torch.float64)
    low_high = torch.stack([-valid.min(), valid.max()]) if valid.numel() else valid.new_full((2,), -torch.inf)
    totals = torch.stack([valid.sum(), valid.new_tensor(float(valid.numel()))])
    if process_group is not None:
        dist.all_reduce(low_high, op=dist.ReduceOp.MAX, group=process_group)
        dist.all_reduce(totals, group=process_group)
    total, count = totals.tolist()
    if count == 0:
        if process_group is not None:
            ranks = dist.get_world_size(process_group)
            raise ValueError(f"whiten: none of the {ranks} ranks has a token under mask 1; skip this batch")
        return select(x, keep)
    # Reductions of MAX may lose a NaN; sums keep it.
    mean = total / count
    squares = (valid - mean).square().sum()
    if process_group is not None:
        dist.all_reduce(squares, group=process_group)
    low, high = (-low_high[0]).item(), low_high[1].item()
    std = math.sqrt(squares.item() / count)
    # Equality decides before any division: equal floats may miss their own mean by rounding.
    constant = std == 0 or (low == high and not math.isnan(mean))
    kept = select(x, keep)
    white = (kept.double() - mean) * (0.0 if constant else 1.0 / std)
    return torch.where(keep, white.to(kept.dtype), torch.zeros_like(kept))
