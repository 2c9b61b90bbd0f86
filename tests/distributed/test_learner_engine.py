"""DeepSpeed under two real gloo ranks: one token denominator, and steps that must not be taken."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.learner_ranks import make_batch, make_spec, spawn_ranks

STAGES = (0, 1, 2, 3)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# N09: (tokens, sum of the per-token loss) of two micro-batches on each of two ranks; 52 / 20 tokens = 2.6.
TOKEN_SUMS = (((8, 8.0), (2, 18.0)), ((4, 8.0), (6, 18.0)))


class OneWeight(nn.Module):
    """Loss = weight * x, so the gradient is the sum of all x."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


def _weights(engine: Any) -> dict[str, torch.Tensor]:
    from learner.weight_publisher import iterate_weights

    return {name: weight.clone() for name, weight in iterate_weights(engine)}


def _token_mean_gradient(rank: int, stage: int) -> float:
    from learner.engine import TrainEngine
    from rlhf_cluster.config import LearnerConfig

    config = LearnerConfig(zero_stage=stage, grad_clip=None)
    engine = TrainEngine(
        OneWeight(), lr=1e-3, total_optimizer_steps=1, config=config, dtype=torch.float32, name="policy"
    )
    for index, (_, total) in enumerate(TOKEN_SUMS[rank]):
        engine.accumulate(lambda total=total: engine(torch.tensor([total])) / 20, last=index == 1)
    norm = engine.step().grad_norm
    engine.close()
    return norm


def _poison(rank: int, folder: Path, stage: int, dtype: str) -> dict[str, Any]:
    """Good step, step with one NaN gradient on the last rank, good step; against a twin without the middle one."""
    from learner.engine import TrainEngine
    from learner.models import collate, load_policy

    spec = make_spec(folder, folder, dtype=dtype, zero_stage=stage)
    rows = [(member.rollout.prompt_token_ids, member.rollout.token_ids) for member in make_batch(0).rollouts]
    out: dict[str, Any] = {}
    for name, poisoned in (("poisoned", (1,)), ("twin", ())):
        model = load_policy(spec.model.policy, spec.model, spec.learner, temperature=1.0)
        engine = TrainEngine(
            model, lr=1e-3, total_optimizer_steps=9, config=spec.learner, dtype=DTYPES[dtype], name="policy"
        )
        engine.schedule.warmup_steps = 4
        weight = next(parameter for key, parameter in model.named_parameters() if key.endswith("up_proj.weight"))
        outcomes, kept = [], []
        for step in range(3):
            if name == "twin" and step == 1:
                continue
            before = _weights(engine)
            for part in (0, 1):
                hit = rank == 1 and step in poisoned and part == 0
                hook = weight.register_hook(lambda grad: grad * math.nan) if hit else None
                inputs = collate(rows[rank * 4 + part * 2 :][:2], torch.device("cpu"))
                engine.accumulate(functools.partial(_negative_mean, engine, inputs), last=part == 1)
                if hook is not None:
                    hook.remove()
            outcomes.append(engine.step().stepped)
            after = _weights(engine)
            kept.append(all(torch.equal(before[key], after[key]) for key in before))
        out[name] = {"stepped": outcomes, "kept": kept, "weights": _weights(engine), "lr": engine.schedule.next_lr}
        engine.close()
    return out


def _negative_mean(engine: Any, inputs: Any) -> torch.Tensor:
    return -engine(inputs)[0].sum() / 50


def _group_sizes() -> list[int]:
    """Elements that each of one rank's steps copies to float32, of 40 weights of 100."""
    from learner.engine import TrainEngine
    from rlhf_cluster.config import LearnerConfig

    model = nn.ParameterList(torch.ones(10, 10) for _ in range(40))
    config = LearnerConfig(zero_stage=1)
    engine = TrainEngine(model, lr=1e-3, total_optimizer_steps=1, config=config, dtype=torch.bfloat16, name="policy")
    sizes = [int(size) for size in engine.deepspeed.optimizer.partition_size]
    engine.close()
    return sizes


def _two_ranks(rank: int, folder: Path) -> dict[str, Any]:
    return {
        "group_sizes": _group_sizes(),
        "token_mean": {stage: _token_mean_gradient(rank, stage) for stage in STAGES},
        "poison": {(stage, dtype): _poison(rank, folder, stage, dtype) for stage in STAGES for dtype in DTYPES},
    }


@pytest.fixture(scope="module")
def two_ranks(models: Path) -> list[dict[str, Any]]:
    return spawn_ranks(_two_ranks, 2, models, 200)


def test_every_zero_stage_divides_by_the_global_token_count(two_ranks: list[dict[str, Any]]) -> None:
    for rank in two_ranks:
        assert rank["token_mean"] == pytest.approx(dict.fromkeys(STAGES, 2.6), abs=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stage", STAGES)
def test_one_nan_gradient_on_one_rank_changes_nothing_on_any_rank(
    two_ranks: list[dict[str, Any]], stage: int, dtype: str
) -> None:
    for rank in two_ranks:
        poisoned, twin = (rank["poison"][(stage, dtype)][name] for name in ("poisoned", "twin"))
        assert poisoned["stepped"] == [True, False, True]
        assert poisoned["kept"] == [False, True, False]
        assert twin["stepped"] == [True, True]
        # Neither moments nor schedule moved: the next step is the one the twin took, to the last bit.
        assert poisoned["lr"] == twin["lr"] == pytest.approx(1e-3 * 3 / 4)
        assert all(torch.equal(weight, twin["weights"][name]) for name, weight in poisoned["weights"].items())


def test_a_step_copies_an_eighth_of_the_gradients_at_a_time(two_ranks: list[dict[str, Any]]) -> None:
    for rank in two_ranks:
        assert rank["group_sizes"] == [500 / 2] * 8


def test_small_models_are_stepped_as_one_group_and_order_is_kept() -> None:
    from learner.engine import parameter_groups

    weights = [nn.Parameter(torch.empty(n, device="meta")) for n in (1, 20_000_000, 12_000_000, 0, 50_000_000, 1)]
    groups = parameter_groups(weights)
    assert [[len(weight) for weight in group] for group in groups] == [
        [1, 20_000_000],
        [12_000_000, 0],
        [50_000_000],
        [1],
    ]
    assert [id(weight) for group in groups for weight in group] == [id(weight) for weight in weights]
    assert parameter_groups(weights[:1]) == [weights[:1]]
