"""Forward passes of policy and critic: which position speaks for which token, and what may not change a number."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel

from learner.heads import LogprobHead
from learner.models import CriticModel, PolicyModel, TokenPair, check_vocabularies, collate, load_critic, load_policy
from rlhf_cluster.algorithms.losses import entropy, token_logprobs
from rlhf_cluster.config import LearnerConfig, ModelConfig
from tests.tiny_models import build_tiny_reward_model

CPU = torch.device("cpu")
VOCAB = 100


def pair(prompt: list[int], response: list[int]) -> TokenPair:
    return np.array(prompt, dtype=np.int32), np.array(response, dtype=np.int32)


class CounterModel(nn.Module):
    """Puts probability 0.999 on (previous id + 1) mod VOCAB; its other feature is the position id."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace()
        self.lm_head = nn.Linear(VOCAB, VOCAB, bias=False)
        self.lm_head.weight.data = torch.eye(VOCAB) * math.log(0.999 * (VOCAB - 1) / 0.001)
        self.score = nn.Linear(VOCAB, 1, bias=False)
        self.feature = "next"

    def base_model(self, input_ids: Tensor, position_ids: Tensor, **_: Any) -> Any:
        if self.feature == "next":
            hidden = nn.functional.one_hot((input_ids + 1) % VOCAB, VOCAB).float()
        else:
            hidden = position_ids[..., None].expand(*position_ids.shape, VOCAB).float()
        return SimpleNamespace(last_hidden_state=hidden)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, head: nn.Module) -> None:
        self.lm_head = head


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Absolute learned positions and dropout 0.1: rotary positions would hide a wrong position id."""
    folder = tmp_path_factory.mktemp("gpt2")
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=2, n_positions=64, initializer_range=0.2)
    GPT2LMHeadModel(config).save_pretrained(folder / "policy")
    config.num_labels = 1
    GPT2ForSequenceClassification(config).save_pretrained(folder / "critic")
    config.num_labels = 2
    GPT2ForSequenceClassification(config).save_pretrained(folder / "two_labels")
    return folder


def model_config(**overrides: Any) -> ModelConfig:
    return ModelConfig(policy="unused", dtype="float32", attention="eager", **overrides)


def policy_of(folder: Path, **learner: Any) -> PolicyModel:
    return load_policy(str(folder), model_config(), LearnerConfig(**learner), temperature=1.0)


def critic_of(folder: Path, **learner: Any) -> CriticModel:
    return load_critic(str(folder), model_config(), LearnerConfig(**learner))


def test_each_logprob_belongs_to_its_own_token_and_not_to_a_neighbour() -> None:
    policy = PolicyModel(CounterModel(), temperature=1.0)
    inputs = collate([pair([3, 4], [5, 6, 7]), pair([1, 2, 3, 4, 5, 6], [7])], CPU)
    with torch.no_grad():
        logprobs = policy(inputs).logprobs
    expected = torch.tensor([[math.log(0.999)] * 3, [math.log(0.999), 0.0, 0.0]])
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=0)


def test_a_value_is_the_critic_output_just_before_its_token_and_the_bootstrap_comes_after_the_last() -> None:
    model = CounterModel()
    model.feature = "position"
    model.score.weight.data.fill_(1.0 / VOCAB)
    values, after_last = CriticModel(model)(collate([pair([3, 4], [5, 6, 7]), pair([9, 9, 9], [1])], CPU))
    torch.testing.assert_close(values, torch.tensor([[1.0, 2.0, 3.0], [2.0, 0.0, 0.0]]))
    torch.testing.assert_close(after_last, torch.tensor([4.0, 3.0]))


def test_padding_and_neighbours_change_neither_logprobs_nor_values(gpt2: Path) -> None:
    policy, critic = policy_of(gpt2 / "policy"), critic_of(gpt2 / "critic")
    row = pair([3, 4, 5], [6, 7])
    neighbours = [pair([8], [9]), pair(list(range(20)), list(range(17))), pair([1, 2], [])]
    alone, together = collate([row], CPU), collate([*neighbours, row], CPU)
    torch.testing.assert_close(policy(together)[0][3, :2], policy(alone)[0][0], atol=1e-5, rtol=0)
    (many, many_after), (one, one_after) = critic(together), critic(alone)
    torch.testing.assert_close(many[3, :2], one[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(many_after[3], one_after[0], atol=1e-5, rtol=0)


def test_logprobs_are_those_of_the_whole_model_at_the_sampling_temperature(gpt2: Path) -> None:
    reference = GPT2LMHeadModel.from_pretrained(gpt2 / "policy").eval()
    with torch.no_grad():
        logits = reference(torch.tensor([[3, 4, 5, 6, 7]])).logits[0]
    expected = torch.log_softmax(logits / 0.7, dim=-1)[[2, 3], [6, 7]]
    policy = load_policy(str(gpt2 / "policy"), model_config(), LearnerConfig(), temperature=0.7)
    torch.testing.assert_close(policy(collate([pair([3, 4, 5], [6, 7])], CPU))[0][0], expected, atol=1e-5, rtol=0)


def test_dropout_of_the_model_folder_is_off_in_training_mode(gpt2: Path) -> None:
    inputs = collate([pair([3, 4, 5], [6, 7])], CPU)
    for model in (policy_of(gpt2 / "policy"), critic_of(gpt2 / "critic")):
        assert model.training
        assert torch.equal(model(inputs)[0], model(inputs)[0])


def test_entropy_of_a_uniform_model_is_the_log_of_the_vocabulary() -> None:
    model = CounterModel()
    model.lm_head.weight.data.zero_()
    with torch.no_grad():
        _, entropies = PolicyModel(model, temperature=1.0)(collate([pair([1], [2, 3])], CPU), with_entropy=True)
    torch.testing.assert_close(entropies, torch.full((1, 2), math.log(VOCAB)))


def test_the_lm_head_sees_response_positions_only(gpt2: Path) -> None:
    policy = policy_of(gpt2 / "policy")
    seen: list[int] = []
    policy.model.get_output_embeddings().register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    policy(collate([pair(list(range(30)), [6, 7]), pair([1], [2, 3, 4])], CPU))
    assert seen == [5]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1000, 200])
def test_the_head_has_the_values_gradients_and_entropies_of_the_plain_numerics(bias: bool, rows: int) -> None:
    torch.manual_seed(0)
    head = nn.Linear(16, 50, bias=bias)
    n = 450  # more than one chunk and more than one block in it
    token_ids, weights = torch.randint(50, (n,)), torch.randn(n)
    start = 40 * torch.randn(n, 16)

    def gradients(logprobs: Tensor, hidden: Tensor) -> list[Tensor]:
        head.zero_grad()
        (logprobs * weights).sum().backward()
        assert hidden.grad is not None
        return [hidden.grad, *(parameter.grad.clone() for parameter in head.parameters() if parameter.grad is not None)]

    hidden = start.clone().requires_grad_()
    logits = head(hidden)
    expected = token_logprobs(logits, token_ids, 0.8)
    expected_entropy = entropy(logits.detach() / 0.8, torch.ones(n))
    expected_gradients = gradients(expected, hidden)

    hidden = start.clone().requires_grad_()
    logprobs, _ = LogprobHead(head, rows)(hidden, token_ids, temperature=0.8, with_entropy=False)
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-5)
    for got, wanted in zip(gradients(logprobs, hidden), expected_gradients, strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)
    with torch.no_grad():
        again, entropies = LogprobHead(head, rows)(start, token_ids, temperature=0.8, with_entropy=True)
    torch.testing.assert_close(again, logprobs, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(entropies, expected_entropy, atol=1e-5, rtol=1e-4)


def test_a_logit_of_minus_infinity_adds_nothing_to_the_entropy_of_the_head() -> None:
    head = nn.Linear(1, 3)
    head.weight.data.zero_()
    head.bias.data = torch.tensor([0.0, 0.0, -math.inf])
    with torch.no_grad():
        logprobs, entropies = LogprobHead(head)(
            torch.ones(2, 1), torch.tensor([0, 1]), temperature=1.0, with_entropy=True
        )
    torch.testing.assert_close(logprobs, torch.full((2,), -math.log(2)))
    torch.testing.assert_close(entropies, torch.full((2,), math.log(2)))


def test_a_plain_language_model_becomes_a_critic_whose_values_start_at_zero(
    gpt2: Path, caplog: pytest.LogCaptureFixture
) -> None:
    values, after_last = critic_of(gpt2 / "policy")(collate([pair([3, 4], [5, 6])], CPU))
    assert not values.any() and not after_last.any()
    assert "starts from zeros" in caplog.text


def test_only_the_top_layers_the_norm_and_the_head_of_a_partly_frozen_critic_are_trained(tmp_path: Path) -> None:
    folder = build_tiny_reward_model(tmp_path)
    critic = critic_of(folder, critic_layers=1)
    values, _ = critic(collate([pair([3, 4], [5, 6])], CPU))
    values.sum().backward()
    with_gradient = {name for name, parameter in critic.named_parameters() if parameter.grad is not None}
    parts = {name.removeprefix("model.").removeprefix("model.").split(".self_attn")[0] for name in with_gradient}
    assert not [name for name in parts if name.startswith(("embed_tokens", "layers.0"))]
    assert {name.split(".")[0] for name in parts} == {"layers", "norm", "score"}
    assert all(parameter.requires_grad for parameter in critic_of(folder).parameters())


def test_more_trained_critic_layers_than_there_are_is_refused(tmp_path: Path, gpt2: Path) -> None:
    with pytest.raises(ValueError, match=r"critic_layers is 3.*has 2 layers"):
        critic_of(build_tiny_reward_model(tmp_path), critic_layers=3)
    with pytest.raises(ValueError, match=r"critic_layers is 1.*no list of layers"):
        critic_of(gpt2 / "critic", critic_layers=1)


def test_a_critic_with_two_labels_is_refused(gpt2: Path) -> None:
    with pytest.raises(ValueError, match="has 2 labels"):
        critic_of(gpt2 / "two_labels")


def test_a_critic_that_cannot_read_the_policys_tokens_is_refused(gpt2: Path, tmp_path: Path) -> None:
    small = GPT2Config(vocab_size=50, n_embd=32, n_layer=1, n_head=2, num_labels=1)
    GPT2ForSequenceClassification(small).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="50 token embeddings"):
        check_vocabularies(policy_of(gpt2 / "policy"), critic_of(tmp_path))


def test_a_model_that_caps_its_logits_is_refused() -> None:
    model = CounterModel()
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(ValueError, match="final_logit_softcapping"):
        PolicyModel(model, temperature=1.0)


def test_a_prompt_without_tokens_is_refused_and_no_rows_give_one_filler() -> None:
    with pytest.raises(ValueError, match="no tokens"):
        collate([pair([], [1])], CPU)
    assert collate([], CPU).input_ids.shape == (1, 2)
