"""What one learner step does and leaves alone, on the real learner: ratios, old log-probs, early stop, pre-training,
small learning rates, numbers that are not finite, uneven ranks."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.learner_ranks import make_batch, make_spec, spawn_ranks

TINY_LR = {"policy_lr": 1e-30, "critic_lr": 1e-30}


def _learner(folder: Path, rank: int = 0, world_size: int = 1, **spec: Any) -> Any:
    from learner.learner import LearnerRank

    return LearnerRank(make_spec(folder, folder / "none", **spec), rank=rank, world_size=world_size)


def _weights(engine: Any) -> torch.Tensor:
    from learner.weight_publisher import iterate_weights

    return torch.cat([weight.flatten().clone() for _, weight in iterate_weights(engine)])


def _seen_experience(learner: Any) -> list[Any]:
    """Every experience that the policy's steps will get."""
    seen: list[Any] = []
    trainer = learner._updater.policy
    step: Callable[..., Any] = trainer.step

    def watched(minibatch: Any, tensors: Any, experience: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(experience)
        return step(minibatch, tensors, experience, *args, **kwargs)

    trainer.step = watched
    return seen


def _untouched_policy(folder: Path, dtype: str, budget: int) -> dict[str, float]:
    """Two passes over a batch with a learning rate of nothing; the folder's config asks for dropout."""
    learner = _learner(
        folder,
        dtype=dtype,
        epochs=2,
        minibatches=2,
        micro_batch_tokens=budget,
        algorithm={"kl": {"estimator": "full"}},
        **TINY_LR,
    )
    metrics = learner.train(make_batch(0)).metrics
    learner.close()
    names = ("ratio_q01", "ratio_q99", "approx_kl", "clip_fraction", "kl_reference_full")
    return {name: metrics[name].value for name in names}


def _old_logprobs(folder: Path) -> dict[str, Any]:
    learner = _learner(folder, epochs=2, minibatches=2, policy_lr=1e-3)
    seen = _seen_experience(learner)
    metrics = learner.train(make_batch(0)).metrics
    learner.close()
    return {
        "same": all(torch.equal(seen[0].proximal, experience.proximal) for experience in seen),
        "passes": len(seen),
        "grads": [x.requires_grad for x in (seen[0].proximal, seen[0].advantages, seen[0].returns)],
        "ratios": [metrics[name].value for name in ("ratio_q01", "ratio_q99")],
        "clip_fraction": metrics["clip_fraction"].value,
    }


def _fused(folder: Path) -> dict[str, Any]:
    """GRPO with one update: the training forward as the proximal pass, and a pass of its own."""
    out = {}
    for name in ("fused", "apart"):
        learner = _learner(folder, algorithm={"name": "grpo", "kl": {"place": "loss", "estimator": "k3"}})
        updater = learner._updater
        out[f"{name} needs a pass"] = updater._needs_policy_pass
        if name == "apart":
            updater._needs_policy_pass = True
        metrics = learner.train(make_batch(0)).metrics
        out[name] = _weights(learner.policy)
        out[f"{name} metrics"] = {
            key: (ratio.total, ratio.count)
            for key, ratio in metrics.items()
            if "seconds" not in key and not key.startswith("padding")
        }
        learner.close()
    return out


def _kl_in_the_loss(folder: Path) -> list[torch.Tensor]:
    advantages = []
    for kl in ({"place": "loss", "estimator": "k2", "coef": 3.0}, {"coef": 0.0}, {"coef": 3.0}):
        learner = _learner(folder, algorithm={"kl": kl})
        seen = _seen_experience(learner)
        learner.train(make_batch(0))
        advantages.append(seen[0].advantages.clone())
        learner.close()
    return advantages


def _target_kl(folder: Path) -> dict[str, float]:
    learner = _learner(folder, epochs=3, policy_lr=1e-3, target_kl=1e-6)
    metrics = learner.train(make_batch(0)).metrics
    learner.close()
    names = ("optimizer_steps_policy", "optimizer_steps_critic", "target_kl_left_out")
    return {name: metrics[name].total for name in names}


def _pretraining(folder: Path) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for limit in (None, 1e6):
        learner = _learner(folder, minibatches=2, critic_pretrain_steps=7, critic_pretrain_loss=limit)
        before = _weights(learner.policy)
        first, second = learner.train(make_batch(0)), learner.train(make_batch(1))
        out[str(limit)] = {
            "steps": first.metrics["critic_pretrain_steps"].total,
            "loss": first.metrics["critic_pretrain_loss"].value,
            "critic": [result.metrics["optimizer_steps_critic"].total for result in (first, second)],
            "policy": [result.metrics["optimizer_steps_policy"].total for result in (first, second)],
            "policy moved": not torch.equal(before, _weights(learner.policy)),
            "again": "critic_pretrain_steps" in second.metrics,
        }
        learner.close()
    return out


def _small_rate(folder: Path) -> dict[str, Any]:
    """Ten learner steps at 1e-6 in bfloat16; and a weight of 1 that takes a thousand steps down."""
    from deepspeed.utils import safe_get_full_fp32_param
    from torch import nn

    from learner.engine import TrainEngine
    from rlhf_cluster.config import LearnerConfig

    learner = _learner(folder, dtype="bfloat16", policy_lr=1e-6, critic_lr=1e-6)

    def masters() -> torch.Tensor:
        return torch.cat([safe_get_full_fp32_param(p).flatten().clone() for p in learner.policy.module.parameters()])

    before = masters()
    for version in range(10):
        learner.train(make_batch(version))
    changed = (masters() != before).double().mean().item()
    learner.close()

    class OneWeight(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))

        def forward(self) -> torch.Tensor:
            return self.weight.float().sum()

    config = LearnerConfig(warmup_fraction=0.0, grad_clip=None)
    engine = TrainEngine(
        OneWeight(), lr=1e-6, total_optimizer_steps=1000, config=config, dtype=torch.bfloat16, name="policy"
    )
    for _ in range(1000):
        engine.accumulate(engine, last=True)
        engine.step()
    out = {
        "changed": changed,
        "master": float(safe_get_full_fp32_param(engine.module.weight)),
        "bf16": float(engine.module.weight),
    }
    engine.close()
    return out


def _not_finite(folder: Path) -> dict[str, Any]:
    """One forward pass without gradient puts NaN into one row of the values, or of the policy's log-probs."""
    from learner.batch_tensors import BadData
    from learner.learner import LearnerDiverged

    out: dict[str, Any] = {}
    for engine_name, kind in (("critic", "values"), ("policy", "proximal_logprobs")):
        for rows in (1, 3):
            learner = _learner(folder, minibatches=2, micro_batch_tokens=30)
            broken = [rows]

            def spoil(module: Any, args: Any, output: Any, broken: list[int] = broken) -> Any:
                if torch.is_grad_enabled() or not broken[0]:
                    return output
                broken[0] -= 1
                spoiled = output[0].clone()
                spoiled[0, 0] = math.nan
                return output._replace(logprobs=spoiled) if hasattr(output, "_replace") else (spoiled, *output[1:])

            getattr(learner, engine_name).module.register_forward_hook(spoil)
            try:
                result = learner.train(make_batch(0, rollouts=20))
                out[kind] = {
                    "stepped": result.stepped,
                    "excluded": result.metrics[f"excluded_{kind}"].total,
                    "group": result.metrics["excluded_group"].total,
                    "tokens": result.metrics["response_length"].count,
                    "finite": all(math.isfinite(ratio.total) for ratio in result.metrics.values()),
                }
            except (BadData, LearnerDiverged) as error:
                out[f"{kind} too much"] = f"{type(error).__name__}: {error}"
            learner.close()
    return out


def _one_rank(rank: int, folder: Path) -> dict[str, Any]:
    config = json.loads((folder / "policy/config.json").read_text())
    (folder / "policy/config.json").write_text(json.dumps({**config, "attention_dropout": 0.1}))
    untouched = {
        (dtype, budget): _untouched_policy(folder, dtype, budget)
        for dtype, budget in (("float32", 1000), ("float32", 20), ("bfloat16", 1000), ("bfloat16", 20))
    }
    (folder / "policy/config.json").write_text(json.dumps(config))
    return {
        "untouched": untouched,
        "old_logprobs": _old_logprobs(folder),
        "fused": _fused(folder),
        "kl_in_the_loss": _kl_in_the_loss(folder),
        "target_kl": _target_kl(folder),
        "pretraining": _pretraining(folder),
        "small_rate": _small_rate(folder),
        "not_finite": _not_finite(folder),
    }


def _infinite_gradient(rank: int, folder: Path) -> dict[str, Any]:
    """F10: rank 1 has an infinite gradient in five learner steps in a row."""
    from learner.learner import LearnerDiverged

    learner = _learner(folder, rank, 2, zero_stage=1, warmup_fraction=1.0)
    before, lr = _weights(learner.policy), learner.policy.schedule.next_lr
    if rank == 1:
        next(learner.policy.module.parameters()).register_hook(lambda grad: grad * math.inf)
    results = [learner.train(make_batch(0)) for _ in range(3)]
    out: dict[str, Any] = {
        "skipped": sum(result.metrics["optimizer_steps_skipped_policy"].total for result in results),
        "versions": [result.version for result in results],
        "lr": learner.policy.schedule.next_lr == lr,
        "same": torch.equal(before, _weights(learner.policy)),
    }
    learner.train(make_batch(0))
    try:
        learner.train(make_batch(0))
    except LearnerDiverged as error:
        out["error"] = str(error)
    learner.close()
    return out


def _uneven(rank: int, folder: Path) -> dict[str, Any]:
    """F13: ZeRO-3, three micro-batches on one rank and one on the other; then none on the other."""
    out: dict[str, Any] = {}
    for lengths in ((29, 9, 9, 9), (9,)):
        for budget in (10, 1000):
            learner = _learner(folder, rank, 2, zero_stage=3, micro_batch_tokens=budget)
            batch = make_batch(0, rollouts=len(lengths) + len(lengths) % 2, lengths=(*lengths, 0))
            started = time.monotonic()
            result = learner.train(batch)
            out[f"{len(lengths)} rows, {budget} tokens"] = {
                "seconds": time.monotonic() - started,
                "stepped": result.stepped,
                "policy": [(result.metrics[name].total, result.metrics[name].count) for name in ("ratio_mean",)],
                "norms": [result.metrics[f"grad_norm_{name}"].total for name in ("policy", "critic")],
                "padding": result.metrics["padding_policy"].total,
            }
            learner.close()
    return out


def _two_ranks(rank: int, folder: Path) -> dict[str, Any]:
    return {"infinite": _infinite_gradient(rank, folder), "uneven": _uneven(rank, folder)}


@pytest.fixture(scope="module")
def one(models: Path) -> dict[str, Any]:
    return spawn_ranks(_one_rank, 1, models, 200)[0]


@pytest.fixture(scope="module")
def two(models: Path, one: dict[str, Any]) -> list[dict[str, Any]]:
    return spawn_ranks(_two_ranks, 2, models, 120)


@pytest.mark.parametrize("budget", [1000, 20])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 2e-2)])
def test_an_untouched_policy_has_ratio_one_whatever_dropout_its_folder_asks_for(
    one: dict[str, Any], dtype: str, tolerance: float, budget: int
) -> None:
    """N15."""
    found = one["untouched"][(dtype, budget)]
    assert found["ratio_q01"] == pytest.approx(1.0, abs=tolerance)
    assert found["ratio_q99"] == pytest.approx(1.0, abs=tolerance)
    assert found["approx_kl"] == pytest.approx(0.0, abs=tolerance**2 * 10)
    assert found["clip_fraction"] == 0.0
    assert found["kl_reference_full"] == 0.0, "policy and reference are the same weights"


def test_old_logprobs_are_computed_once_a_batch_and_clipping_fires_when_the_policy_moves(one: dict[str, Any]) -> None:
    """N16."""
    found = one["old_logprobs"]
    assert found["passes"] == 4
    assert found["same"]
    assert found["grads"] == [False, False, False]
    assert max(abs(ratio - 1) for ratio in found["ratios"]) > 0.05
    assert found["clip_fraction"] > 0


def test_one_update_without_a_pass_of_its_own_is_the_same_update(one: dict[str, Any]) -> None:
    found = one["fused"]
    assert (found["fused needs a pass"], found["apart needs a pass"]) == (False, False)
    torch.testing.assert_close(found["fused"], found["apart"], atol=1e-7, rtol=0)
    assert found["fused metrics"].keys() == found["apart metrics"].keys()
    for name, values in found["fused metrics"].items():
        assert values == pytest.approx(found["apart metrics"][name], rel=1e-5, abs=1e-6), name


def test_a_penalty_in_the_loss_leaves_the_reward_alone(one: dict[str, Any]) -> None:
    """N13."""
    in_loss, none, in_reward = one["kl_in_the_loss"]
    assert torch.equal(in_loss, none)
    assert not torch.allclose(in_reward, none)


def test_beyond_the_target_kl_the_policy_rests_and_the_critic_goes_on(one: dict[str, Any]) -> None:
    # The first pass sees ratios of 1, the second sees what the first one did and is still applied.
    assert one["target_kl"] == {"optimizer_steps_policy": 2, "optimizer_steps_critic": 3, "target_kl_left_out": 1}


def test_the_critic_is_pretrained_until_its_steps_or_its_loss_and_the_batch_is_still_trained(
    one: dict[str, Any],
) -> None:
    by_steps, by_loss = one["pretraining"]["None"], one["pretraining"]["1000000.0"]
    assert (by_steps["steps"], by_loss["steps"]) == (7, 2)
    assert by_steps["critic"] == [9, 2]
    assert by_steps["loss"] < by_loss["loss"]
    for found in (by_steps, by_loss):
        assert found["policy"] == [2, 2]
        assert found["policy moved"]
        assert not found["again"]


def test_a_small_learning_rate_reaches_float32_masters_of_bfloat16_weights(one: dict[str, Any]) -> None:
    """N23."""
    found = one["small_rate"]
    assert found["changed"] >= 0.5
    assert found["master"] == pytest.approx(0.998987, abs=2e-6)
    assert found["bf16"] == 1.0


@pytest.mark.parametrize("kind", ["values", "proximal_logprobs"])
def test_a_model_output_that_is_not_finite_takes_its_group_out_and_too_many_end_the_run(
    one: dict[str, Any], kind: str
) -> None:
    found = one["not_finite"][kind]
    assert found == {"stepped": True, "excluded": 1, "group": 1, "tokens": 18, "finite": True}
    assert one["not_finite"][f"{kind} too much"].startswith("BadData: 3 of the 20 rollouts of a batch")
    assert f"3 with {kind}" in one["not_finite"][f"{kind} too much"]


def test_infinite_gradients_on_one_rank_make_no_version_and_the_fifth_in_a_row_ends_the_run(
    two: list[dict[str, Any]],
) -> None:
    """F10."""
    for rank in two:
        found = rank["infinite"]
        assert (found["skipped"], found["versions"], found["lr"], found["same"]) == (3, [0, 0, 0], True, True)
        assert "5 learner steps in a row" in found["error"]


@pytest.mark.parametrize("rows", [4, 1])
def test_ranks_with_fewer_micro_batches_pad_with_ones_that_weigh_nothing(two: list[dict[str, Any]], rows: int) -> None:
    """F13."""
    for rank in two:
        many, few = rank["uneven"][f"{rows} rows, 10 tokens"], rank["uneven"][f"{rows} rows, 1000 tokens"]
        assert max(many["seconds"], few["seconds"]) < 10
        assert many["stepped"]
        assert many["policy"] == few["policy"]
        assert many["norms"] == pytest.approx(few["norms"], rel=1e-4)
        assert many["padding"] > 0, "nothing was padded, so this tests nothing"
