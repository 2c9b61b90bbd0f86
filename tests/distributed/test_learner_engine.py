"""DeepSpeed under two real gloo ranks: one token denominator, skipped steps, the same update however it is split."""

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
SPLITS = {"one micro-batch": 10_000, "several micro-batches": 20}
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


def _train_twice(spec: Any, rank: int, world_size: int) -> dict[str, Any]:
    from learner.learner import LearnerRank

    learner = LearnerRank(spec, rank=rank, world_size=world_size)
    results = [learner.train(make_batch(version, empty=version)) for version in (0, 1)]
    out = {
        "versions": [result.version for result in results],
        "metrics": {
            f"{name}/{index}": (ratio.total, ratio.count)
            for index, result in enumerate(results)
            for name, ratio in result.metrics.items()
            if not name.endswith("_seconds") and name != "padding_share"
        },
        "policy": _weights(learner.policy),
        "critic": _weights(learner.critic),
    }
    learner.close()
    return out


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


def _two_ranks(rank: int, folder: Path) -> dict[str, Any]:
    out: dict[str, Any] = {"token_mean": {}, "train": {}, "poison": {}}
    for stage in STAGES:
        out["token_mean"][stage] = _token_mean_gradient(rank, stage)
        for split, tokens in SPLITS.items():
            spec = make_spec(folder, folder / f"s{stage}", zero_stage=stage, minibatches=2, micro_batch_tokens=tokens)
            out["train"][(stage, split)] = _train_twice(spec, rank, 2)
        for dtype in DTYPES:
            out["poison"][(stage, dtype)] = _poison(rank, folder, stage, dtype)
    return out


def _one_rank(rank: int, folder: Path) -> dict[str, Any]:
    out = {}
    for stage in STAGES:
        for split, tokens in SPLITS.items():
            spec = make_spec(folder, folder / f"o{stage}", zero_stage=stage, minibatches=2, micro_batch_tokens=tokens)
            out[(stage, split)] = _train_twice(spec, rank, 1)
    return out


@pytest.fixture(scope="module")
def one_rank(models: Path) -> dict[Any, Any]:
    return spawn_ranks(_one_rank, 1, models, 120)[0]


@pytest.fixture(scope="module")
def two_ranks(models: Path) -> list[dict[str, Any]]:
    return spawn_ranks(_two_ranks, 2, models, 200)


@pytest.fixture(scope="module")
def reference(one_rank: dict[Any, Any]) -> dict[str, Any]:
    return one_rank[(0, "one micro-batch")]


def test_every_zero_stage_divides_by_the_global_token_count(two_ranks: list[dict[str, Any]]) -> None:
    for rank in two_ranks:
        assert rank["token_mean"] == pytest.approx(dict.fromkeys(STAGES, 2.6), abs=1e-6)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_update_does_not_depend_on_ranks_micro_batches_or_zero_stage(
    one_rank: dict[Any, Any],
    two_ranks: list[dict[str, Any]],
    reference: dict[str, Any],
    ranks: int,
    stage: int,
    split: str,
) -> None:
    runs = [one_rank[(stage, split)]] if ranks == 1 else [rank["train"][(stage, split)] for rank in two_ranks]
    for run in runs:
        assert run["versions"] == [1, 2]
        assert run["metrics"].keys() == reference["metrics"].keys()
        for name, (total, count) in run["metrics"].items():
            assert (total, count) == pytest.approx(reference["metrics"][name], rel=2e-5, abs=2e-5), name
        for model in ("policy", "critic"):
            assert run[model].keys() == reference[model].keys()
            for name, weight in run[model].items():
                torch.testing.assert_close(weight, reference[model][name], atol=1e-5, rtol=0, msg=name)


def test_both_models_have_moved_in_every_weight(models: Path, reference: dict[str, Any]) -> None:
    from safetensors.torch import load_file

    for model, folder in (("policy", "policy"), ("critic", "reward")):
        start = load_file(models / folder / "model.safetensors")
        assert start.keys() == reference[model].keys()
        assert [name for name, weight in reference[model].items() if torch.equal(weight, start[name])] == []


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
