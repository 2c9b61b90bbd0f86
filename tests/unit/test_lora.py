"""Adapters of the policy's linear layers: W' = W + alpha / rank * B A leaves the learner, and W never moves."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from learner.lora import AdaptedLinear, adapted_layers, is_adapter
from learner.models import PolicyModel, collate, load_policy
from learner.weight_publisher import iterate_weights, weight_metadata
from rlhf_cluster.config import LearnerConfig, LoraConfig, ModelConfig
from rlhf_cluster.planner.model_shapes import read_shape
from tests.tiny_models import build_tiny_policy

CPU = torch.device("cpu")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
INPUTS = collate([(np.array([3, 4], np.int32), np.array([5, 6, 7], np.int32))], CPU)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_policy(tmp_path_factory.mktemp("policy"))


def policy_of(folder: Path, lora: LoraConfig | None, *, seed: int = 5, **model: Any) -> PolicyModel:
    config = ModelConfig(**{"policy": "unused", "dtype": "float32", "attention": "eager", **model})
    return load_policy(str(folder), config, LearnerConfig(lora=lora), temperature=1.0, seed=seed)


def published(policy: PolicyModel) -> dict[str, torch.Tensor]:
    engine: Any = SimpleNamespace(name="policy", zero_stage=0, accumulating=False, module=policy)
    weights = {name: weight.clone() for name, weight in iterate_weights(engine)}
    assert {name: tuple(weight.shape) for name, weight in weights.items()} == {
        name: shape for name, (_, shape) in weight_metadata(engine).items()
    }
    return weights


def train_adapters(policy: PolicyModel, seed: int) -> None:
    """Any other values; what counts is that B is no longer 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in policy.named_parameters():
            if is_adapter(name):
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.1)


def test_what_leaves_a_layer_is_its_weight_plus_the_scaled_product_by_hand() -> None:
    plain = nn.Linear(2, 2)
    with torch.no_grad():
        plain.weight.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        plain.bias.copy_(torch.tensor([10.0, 20.0]))
    layer = AdaptedLinear(plain, LoraConfig(rank=1, alpha=2.0), torch.Generator())
    with torch.no_grad():
        layer.lora_a.copy_(torch.tensor([[1.0, 5.0]]))
        layer.lora_b.copy_(torch.tensor([[0.0], [3.0]]))
    # alpha / rank = 2, so the second row grows by 2 * 3 * [1, 5].
    assert layer.merged().tolist() == [[1.0, 2.0], [9.0, 34.0]]
    # x = [1, 1]: [1 + 2 + 10, 9 + 34 + 20].
    assert layer(torch.ones(2)).tolist() == [13.0, 63.0]


def test_new_adapters_change_no_answer_and_no_published_byte(folder: Path) -> None:
    plain, adapted = policy_of(folder, None), policy_of(folder, LoraConfig())
    assert torch.equal(adapted(INPUTS).logprobs, plain(INPUTS).logprobs)
    loaded, weights = load_file(folder / "model.safetensors"), published(adapted)
    assert weights.keys() == loaded.keys()
    assert all(torch.equal(weights[name], loaded[name]) for name in loaded)


def test_a_hundred_publications_each_bring_the_sum_and_leave_the_weights_as_loaded(folder: Path) -> None:
    policy = policy_of(folder, LoraConfig(rank=4, alpha=6.0))
    loaded = load_file(folder / "model.safetensors")
    adapted = {name.removesuffix(".weight") for name in adapted_layers(policy.model)}
    for publication in range(100):
        train_adapters(policy, publication)
        weights, parameters = published(policy), dict(policy.model.named_parameters())
        for name in loaded:
            layer, expected = name.removesuffix(".weight"), loaded[name]
            if layer in adapted:
                a, b = parameters[f"{layer}.lora_a"].detach(), parameters[f"{layer}.lora_b"].detach()
                expected = expected.double() + 1.5 * b.double() @ a.double()
                assert (expected - loaded[name]).abs().max() > 0.01
            torch.testing.assert_close(weights[name], expected.float(), atol=1e-6, rtol=0, msg=name)
            assert torch.equal(parameters[name], loaded[name]), f"{name} moved at publication {publication}"


@pytest.mark.parametrize(("dtype", "nats"), [("float32", 1e-4), ("bfloat16", 0.1)])
def test_a_plain_model_of_the_published_weights_gives_the_answers_of_the_adapted_one(
    folder: Path, tmp_path: Path, dtype: str, nats: float
) -> None:
    policy = policy_of(folder, LoraConfig(), dtype=dtype)
    train_adapters(policy, 1)
    weights = published(policy)
    assert {weight.dtype for weight in weights.values()} == {getattr(torch, dtype)}
    plain = policy_of(folder, None, dtype=dtype)
    before = plain(INPUTS).logprobs
    with torch.no_grad():
        for name, weight in plain.model.named_parameters():
            weight.copy_(weights[name])
    logprobs = policy(INPUTS).logprobs
    torch.testing.assert_close(plain(INPUTS).logprobs, logprobs, atol=nats, rtol=0)
    assert (before - logprobs).abs().max() > 0.3


def test_changes_far_below_a_step_of_bfloat16_arrive_on_average_and_the_same_each_time() -> None:
    # In [1, 2) bfloat16 has steps of 1/128: to the nearest, a change of a tenth of one would never leave.
    plain = nn.Linear(400, 300, bias=False, dtype=torch.bfloat16)
    nn.init.uniform_(plain.weight, 1.0, 1.9, generator=torch.Generator().manual_seed(0))
    plain.weight.data *= torch.tensor([1.0, -1.0], dtype=torch.bfloat16).repeat(200)
    start = plain.weight.detach().clone()
    layer, twin = (AdaptedLinear(plain, LoraConfig(rank=1, alpha=1.0), torch.Generator()) for _ in range(2))
    assert torch.equal(layer.merged(), start)
    step = 1 / 128
    for part in (0.1, -0.1, 0.5, 2.25):
        with torch.no_grad():
            for each in (layer, twin):
                each.lora_a.fill_(1.0)
                each.lora_b.fill_(part * step)
        exact = start.double() + float(layer.lora_b.detach()[0, 0])
        merged = layer.merged()
        assert (merged.double() - exact).abs().max() < step
        # 120,000 coins: the mean is off by 0.5 / sqrt(120000) steps as a rule, here by four times that at most.
        assert (merged.double() - exact).mean().abs() < 0.006 * step
        assert torch.equal(merged, twin.merged())
    assert torch.equal(plain.weight, start)


@pytest.mark.parametrize("targets", [None, ("q_proj", "down_proj")])
def test_only_adapters_of_the_named_layers_get_gradients(folder: Path, targets: tuple[str, ...] | None) -> None:
    policy = policy_of(folder, LoraConfig(target_modules=targets))
    train_adapters(policy, 0)
    policy(INPUTS).logprobs.sum().backward()
    with_gradient = {name for name, weight in policy.named_parameters() if weight.grad is not None}
    layers = {name.rpartition(".")[0].rpartition(".")[2] for name in with_gradient}
    assert layers == set(targets or (*ATTENTION, *MLP))
    assert {name.rpartition(".")[2] for name in with_gradient} == {"lora_a", "lora_b"}
    assert len(with_gradient) == 2 * 2 * len(layers)  # two layers of the model, A and B


def test_a_target_that_no_layer_is_called_is_refused_naming_those_there_are(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"target_modules: Wqkv names no linear layer.*down_proj.*q_proj"):
        policy_of(folder, LoraConfig(target_modules=("q_proj", "Wqkv")))


def test_a_model_without_linear_layers_is_refused(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=20, n_embd=8, n_layer=1, n_head=1, n_positions=16)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"learner\.lora: GPT2LMHeadModel has no linear layers"):
        policy_of(tmp_path, LoraConfig())


@pytest.mark.parametrize("targets", [None, ("k_proj", "up_proj")])
def test_the_memory_plan_counts_the_adapters_there_are(folder: Path, targets: tuple[str, ...] | None) -> None:
    policy = policy_of(folder, LoraConfig(rank=3, target_modules=targets))
    trained = sum(weight.numel() for weight in policy.parameters() if weight.requires_grad)
    assert read_shape(str(folder), "model.policy").adapters(3, targets) == trained


def test_equal_seeds_draw_equal_adapters_and_others_do_not(folder: Path) -> None:
    first, again, other = (policy_of(folder, LoraConfig(), seed=seed) for seed in (1, 1, 2))
    drawn = {name: weight for name, weight in first.named_parameters() if name.endswith("lora_a")}
    assert len({float(weight.detach().flatten()[0]) for weight in drawn.values()}) == len(drawn)
    for name, weight in drawn.items():
        assert torch.equal(weight, again.get_parameter(name))
        assert not torch.equal(weight, other.get_parameter(name))
