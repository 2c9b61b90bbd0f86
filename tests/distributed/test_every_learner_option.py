"""Every field of ``algorithm``, ``learner`` and of the reward's normalisation changes something that can be seen.

Each case trains the tiny models twice, once with the field at its base value and once changed, and names what differs.
A field without a case fails the test.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_cluster.config import AlgorithmConfig, LearnerConfig, RewardConfig
from rlhf_cluster.config_keys import all_keys
from tests.distributed.learner_ranks import make_batch, make_spec, spawn_ranks


@dataclass(frozen=True)
class Case:
    """``observable`` names what differs between ``base`` and ``base`` with ``changed``: dotted keys to values."""

    changed: Mapping[str, Any]
    observable: str
    base: Mapping[str, Any] = field(default_factory=dict)


FAR = {"learner.policy_lr": 1e-3, "learner.epochs": 3}
"""The policy moves so far that ratios leave the clip range."""
GRPO = {"algorithm.name": "grpo"}
DECAY = {"learner.policy_decay": "linear", "learner.critic_decay": "linear"}
ADAPTIVE = {"algorithm.kl.controller": "adaptive", "algorithm.kl.target": 1.0, "algorithm.kl.horizon": 100.0}
LORA = {"learner.lora.rank": 4}
PTX = {"algorithm.ptx.file": "text", "algorithm.ptx.coef": 0.5, "algorithm.ptx.block_tokens": 16}

CASES: dict[str, list[Case]] = {
    "algorithm.name": [
        Case({"algorithm.name": name}, "policy", base={"algorithm.name": other})
        for name, other in (
            ("grpo", "ppo"),
            ("dr_grpo", "grpo"),
            ("rloo", "dr_grpo"),
            ("reinforce_baseline", "rloo"),
        )
    ],
    "algorithm.gamma": [Case({"algorithm.gamma": 0.5}, "critic")],
    "algorithm.lam": [Case({"algorithm.lam": 0.1}, "policy")],
    "algorithm.bootstrap_truncated": [Case({"algorithm.bootstrap_truncated": False}, "metric return_mean")],
    "algorithm.clip_low": [Case({"algorithm.clip_low": 0.01}, "metric clip_fraction", base=FAR)],
    "algorithm.clip_high": [Case({"algorithm.clip_high": 0.01}, "metric clip_fraction", base=FAR)],
    "algorithm.dual_clip": [Case({"algorithm.dual_clip": 1.001}, "metric dual_clip_fraction", base=FAR)],
    "algorithm.proximal": [
        Case({"algorithm.proximal": "behaviour"}, "policy"),
        Case({"algorithm.proximal": "reference"}, "policy", base={"algorithm.proximal": "behaviour"}),
    ],
    "algorithm.importance": [
        Case({"algorithm.importance": "sequence"}, "policy"),
        Case({"algorithm.importance": "none"}, "policy"),
    ],
    "algorithm.importance_cap": [
        Case({"algorithm.importance_cap": 1.0}, "metric importance_cap_fraction"),
        Case({"algorithm.importance_cap": None}, "metric importance_weight_mean"),
    ],
    "algorithm.kl.place": [
        Case({"algorithm.kl.place": "loss"}, "policy", base={"algorithm.kl.estimator": "k2"}),
    ],
    "algorithm.kl.estimator": [
        Case({"algorithm.kl.estimator": estimator}, "policy", base={"algorithm.kl.place": place, **other})
        for place, estimator, other in (
            ("reward", "k2", {}),
            ("reward", "k3", {"algorithm.kl.estimator": "k2"}),
            ("reward", "full", {}),
            ("loss", "k3", {"algorithm.kl.estimator": "k2"}),
            ("loss", "full", {"algorithm.kl.estimator": "k2"}),
        )
    ],
    "algorithm.kl.coef": [Case({"algorithm.kl.coef": 1.0}, "policy"), Case({"algorithm.kl.coef": 0.0}, "policy")],
    "algorithm.kl.controller": [Case(ADAPTIVE, "metric kl_coef")],
    "algorithm.kl.target": [Case({"algorithm.kl.target": 1.1}, "metric kl_coef", base=ADAPTIVE)],
    "algorithm.kl.horizon": [Case({"algorithm.kl.horizon": 50.0}, "metric kl_coef", base=ADAPTIVE)],
    "algorithm.entropy.coef": [Case({"algorithm.entropy.coef": 0.1}, "policy")],
    "algorithm.entropy.clip": [
        Case({"algorithm.entropy.clip": 0.5}, "metric entropy_bonus", base={"algorithm.entropy.coef": 0.1})
    ],
    "algorithm.ptx": [Case(PTX, "policy")],
    "algorithm.ptx.file": [Case({"algorithm.ptx.file": "other text"}, "metric ptx_nll", base=PTX)],
    "algorithm.ptx.coef": [Case({"algorithm.ptx.coef": 5.0}, "policy", base=PTX)],
    "algorithm.ptx.block_tokens": [Case({"algorithm.ptx.block_tokens": 8}, "count ptx_nll", base=PTX)],
    "algorithm.ptx.blocks_per_step": [Case({"algorithm.ptx.blocks_per_step": 3}, "count ptx_nll", base=PTX)],
    "algorithm.value_clip": [
        Case({"algorithm.value_clip": 1e-6}, "metric value_clip_fraction", base={"learner.epochs": 2}),
        Case({"algorithm.value_clip": None}, "critic", base={"algorithm.value_clip": 1e-6, "learner.epochs": 2}),
    ],
    "algorithm.advantage_norm": [
        Case({"algorithm.advantage_norm": False}, "policy"),
        Case({"algorithm.advantage_norm": True}, "policy", base=GRPO),
    ],
    "algorithm.advantage_clip": [Case({"algorithm.advantage_clip": 0.1}, "policy")],
    "algorithm.reduction": [
        Case({"algorithm.reduction": "sequence_mean"}, "policy"),
        Case({"algorithm.reduction": "constant"}, "metric policy_loss"),
    ],
    "algorithm.reduction_constant": [
        Case({"algorithm.reduction_constant": 3}, "metric policy_loss", base={"algorithm.reduction": "constant"})
    ],
    "learner.ranks": [Case({"learner.ranks": 2}, "actors wanted")],
    "learner.zero_stage": [Case({"learner.zero_stage": 2}, "zero stage")],
    "learner.epochs": [Case({"learner.epochs": 2}, "total optimizer_steps_policy")],
    "learner.minibatches": [Case({"learner.minibatches": 2}, "total optimizer_steps_policy")],
    "learner.micro_batch_tokens": [Case({"learner.micro_batch_tokens": 20}, "forwards")],
    "learner.packing": [Case({"learner.packing": False}, "shape of inputs")],
    "learner.policy_lr": [Case({"learner.policy_lr": 1e-3}, "policy")],
    "learner.critic_lr": [Case({"learner.critic_lr": 1e-3}, "critic")],
    "learner.warmup_fraction": [Case({"learner.warmup_fraction": 1.0}, "metric lr_policy")],
    "learner.policy_decay": [
        Case({"learner.policy_decay": "linear"}, "metric lr_policy"),
        Case({"learner.policy_decay": "cosine"}, "metric lr_policy", base={"learner.policy_decay": "linear"}),
    ],
    "learner.critic_decay": [Case({"learner.critic_decay": "cosine"}, "metric lr_critic")],
    "learner.final_lr_fraction": [Case({"learner.final_lr_fraction": 0.5}, "metric lr_policy", base=DECAY)],
    "learner.grad_clip": [
        Case({"learner.grad_clip": 1e-9}, "policy"),
        Case({"learner.grad_clip": None}, "policy", base={"learner.grad_clip": 1e-9}),
    ],
    "learner.target_kl": [Case({"learner.target_kl": 1e-9}, "total optimizer_steps_policy", base=FAR)],
    "learner.critic_pretrain_steps": [Case({"learner.critic_pretrain_steps": 4}, "critic")],
    "learner.critic_pretrain_loss": [
        Case(
            {"learner.critic_pretrain_loss": 1e6},
            "total critic_pretrain_steps",
            base={"learner.critic_pretrain_steps": 4},
        )
    ],
    "learner.critic_layers": [Case({"learner.critic_layers": 1}, "critic")],
    "learner.lora": [Case({"learner.lora.rank": 4}, "policy")],
    "learner.lora.rank": [Case({"learner.lora.rank": 2}, "policy", base=LORA)],
    "learner.lora.alpha": [Case({"learner.lora.alpha": 8.0}, "policy", base=LORA)],
    "learner.lora.target_modules": [Case({"learner.lora.target_modules": ("q_proj",)}, "policy", base=LORA)],
    "learner.gradient_checkpointing": [Case({"learner.gradient_checkpointing": True}, "layer calls")],
    "learner.cpu_threads": [Case({"learner.cpu_threads": 3}, "OMP_NUM_THREADS")],
    "learner.timeout_s": [Case({"learner.timeout_s": 0.02}, "error of a silent rank")],
    "learner.stall_timeout_s": [Case({"learner.stall_timeout_s": 0.02}, "error of a stalled learner")],
    "reward.normalize": [
        Case({"reward.normalize": "scale"}, "metric normalised_score_mean"),
        Case({"reward.normalize": "none"}, "metric normalised_score_mean"),
    ],
    "reward.clip": [
        Case({"reward.clip": 0.1}, "metric normalised_score_mean"),
        Case({"reward.clip": None}, "metric normalised_score_mean", base={"reward.clip": 0.1}),
    ],
}


def _fields() -> set[str]:
    """Every key of the sections of these numerics; a section that may be null counts as a key too."""
    sections = {"algorithm": AlgorithmConfig, "learner": LearnerConfig}
    keys = {f"{name}.{key}" for name, section in sections.items() for key in all_keys(section)}
    never_null = {"algorithm.kl", "algorithm.entropy"}
    return keys - never_null | {f"reward.{name}" for name in RewardConfig.model_fields if name != "components"}


def test_every_field_has_a_case() -> None:
    assert set(CASES) == _fields()


def _settings(case: Case, *, changed: bool) -> dict[str, Any]:
    return {**case.base, **(case.changed if changed else {})}


def _nested(values: Mapping[str, Any], section: str) -> dict[str, Any]:
    """The dotted keys of ``section`` as nested mappings."""
    out: dict[str, Any] = {}
    for key, value in values.items():
        first, *path = key.split(".")
        if first == section:
            node = out
            for part in path[:-1]:
                node = node.setdefault(part, {})
            node[path[-1]] = value
    return out


def _spec(folder: Path, values: Mapping[str, Any]) -> Any:
    algorithm = _nested(values, "algorithm")
    if "ptx" in algorithm:
        path = folder / algorithm["ptx"]["file"].replace(" ", "_")
        path.write_text(f"{algorithm['ptx']['file']} in many words, again and again. " * 20)
        algorithm["ptx"] = {"blocks_per_step": 2, **algorithm["ptx"], "file": str(path)}
    learner = {"minibatches": 1, "grad_clip": 1.0, **_nested(values, "learner")}
    return make_spec(folder, folder / "none", algorithm=algorithm, reward=_nested(values, "reward"), **learner)


def _observe(rank: int, folder: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    from learner.learner import LearnerRank
    from learner.weight_publisher import iterate_weights

    spec = _spec(folder, values)
    learner = LearnerRank(spec, rank=rank, world_size=1)
    engine = learner.policy
    forwards, shapes, layer_calls = [0], set(), [0]
    base = engine.module.model.base_model
    base.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.add(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    base.layers[0].register_forward_pre_hook(lambda *args: layer_calls.__setitem__(0, layer_calls[0] + 1))
    base.register_forward_pre_hook(lambda *args: forwards.__setitem__(0, forwards[0] + 1))
    # A KL of about one nat a token, as an adaptive controller would see it.
    results = [learner.train(make_batch(version, reference_gap=3.0)) for version in (0, 1)]
    out: dict[str, Any] = {
        "forwards": forwards[0],
        "shape of inputs": sorted(shapes),
        "layer calls": layer_calls[0],
        "zero stage": engine.deepspeed.zero_optimization_stage(),
    }
    engines = {"policy": engine, **({"critic": learner.critic} if spec.algorithm.uses_critic else {})}
    for name, trained in engines.items():
        raw = b"".join(weight.numpy().tobytes() for _, weight in iterate_weights(trained))
        out[name] = hashlib.sha256(raw).hexdigest()
    for name, ratio in results[1].metrics.items():
        out[f"metric {name}"] = ratio.value
        out[f"count {name}"] = ratio.count
        out[f"total {name}"] = ratio.total
    for name in ("critic_pretrain_steps", "critic_pretrain_loss"):
        if name in results[0].metrics:
            out[f"total {name}"] = results[0].metrics[name].total
    learner.close()
    return out


def _key(values: Mapping[str, Any]) -> str:
    return json.dumps(values, sort_keys=True)


def _train_all(rank: int, folder: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    wanted = {
        _key(values): values
        for cases in CASES.values()
        for case in cases
        if case.observable not in OUTSIDE
        for values in (_settings(case, changed=False), _settings(case, changed=True))
    }
    observed = {key: _observe(rank, folder, values) for key, values in wanted.items()}
    return {**observed, "again": _observe(rank, folder, {})}


def _actors_wanted(spec: Any) -> str:
    from learner.learner_group import LearnerGroup

    with pytest.raises(ValueError, match=r"learner\.ranks is \d+") as refused:
        LearnerGroup(spec, actor_options=[{}] * 7, start_timeout_s=1)
    return str(refused.value)


def _omp_threads(spec: Any) -> str:
    from learner.learner_group import RankActor

    before = os.environ.get("OMP_NUM_THREADS")
    try:
        RankActor(0, 1, spec.learner.cpu_threads)
        return os.environ["OMP_NUM_THREADS"]
    finally:
        os.environ.pop("OMP_NUM_THREADS")
        if before is not None:
            os.environ["OMP_NUM_THREADS"] = before


class _Remote:
    """A method of an actor that answers at once, or never."""

    def __init__(self, *, answers: bool) -> None:
        self._answers = answers

    def remote(self, *args: Any) -> asyncio.Future[Any]:
        future = asyncio.get_running_loop().create_future()
        if self._answers:
            future.set_result(0)
        return future


class _SilentRank:
    train = _Remote(answers=False)
    progress = _Remote(answers=True)
    dump_stacks = _Remote(answers=True)


def _error_of_a_silent_rank(spec: Any, *, watched: bool = False) -> str:
    from learner.learner_group import LearnerGroup, LearnerStalled

    async def call() -> str:
        group = LearnerGroup(spec, actor_options=[{}], start_timeout_s=1)
        group._actors = [_SilentRank]
        with pytest.raises(LearnerStalled if watched else TimeoutError) as late:
            await (group._watched(group._call("train")) if watched else group._call("train"))
        return str(late.value)

    return asyncio.run(call())


OUTSIDE: dict[str, Callable[[Any], str]] = {
    "actors wanted": _actors_wanted,
    "OMP_NUM_THREADS": _omp_threads,
    "error of a silent rank": _error_of_a_silent_rank,
    "error of a stalled learner": functools.partial(_error_of_a_silent_rank, watched=True),
}
"""What shows outside the rank itself."""


@pytest.fixture(scope="module")
def observed(models: Path) -> dict[str, Any]:
    return spawn_ranks(_train_all, 1, models, 280)[0]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=f"{key}-{index}") for key, cases in CASES.items() for index, case in enumerate(cases)],
)
def test_the_field_changes_what_its_case_names(observed: dict[str, Any], models: Path, case: Case) -> None:
    before, after = _settings(case, changed=False), _settings(case, changed=True)
    if case.observable.startswith("error of"):
        before = {**before, next(iter(case.changed)): 0.01}
    if case.observable in OUTSIDE:
        look = OUTSIDE[case.observable]
        assert look(_spec(models, before)) != look(_spec(models, after))
        return
    old, new = observed[_key(before)], observed[_key(after)]
    assert case.observable in new
    assert old.get(case.observable) != new[case.observable]


def test_two_equal_configurations_show_no_difference(observed: dict[str, Any]) -> None:
    """Else every case above would pass by chance."""
    first, again = (
        {name: repr(value) for name, value in observed[key].items() if "seconds" not in name}
        for key in (_key({}), "again")
    )
    assert first == again
