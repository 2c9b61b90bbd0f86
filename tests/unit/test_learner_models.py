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

from learner.models import CriticModel, PolicyModel, TokenPair, check_vocabularies, collate, load_critic, load_policy
from learner.reference import load_reference
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
        self.config = SimpleNamespace(_attn_implementation="packed_eager")
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
    return ModelConfig(**{"policy": "unused", "dtype": "float32", "attention": "eager", **overrides})


def policy_of(folder: Path, **learner: Any) -> PolicyModel:
    return load_policy(str(folder), model_config(), LearnerConfig(**learner), temperature=1.0)


def critic_of(folder: Path, **learner: Any) -> CriticModel:
    return load_critic(str(folder), model_config(), LearnerConfig(**learner))


LAYOUTS = pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])


@LAYOUTS
def test_each_logprob_belongs_to_its_own_token_and_not_to_a_neighbour(packed: bool) -> None:
    policy = PolicyModel(CounterModel(), temperature=1.0, packed=packed)
    inputs = collate([pair([3, 4], [5, 6, 7]), pair([1, 2, 3, 4, 5, 6], [7])], CPU, packed=packed)
    with torch.no_grad():
        logprobs = policy(inputs).logprobs
    expected = torch.tensor([[math.log(0.999)] * 3, [math.log(0.999), 0.0, 0.0]])
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=0)


@LAYOUTS
def test_a_value_is_the_critic_output_just_before_its_token_and_the_bootstrap_comes_after_the_last(
    packed: bool,
) -> None:
    model = CounterModel()
    model.feature = "position"
    model.score.weight.data.fill_(1.0 / VOCAB)
    inputs = collate([pair([3, 4], [5, 6, 7]), pair([9, 9, 9], [1])], CPU, packed=packed)
    values, after_last = CriticModel(model, packed=packed)(inputs)
    torch.testing.assert_close(values, torch.tensor([[1.0, 2.0, 3.0], [2.0, 0.0, 0.0]]))
    torch.testing.assert_close(after_last, torch.tensor([4.0, 3.0]))


def test_a_packed_row_holds_the_samples_end_to_end_with_positions_from_zero() -> None:
    inputs = collate([pair([3, 4], [5, 6]), pair([7], []), pair([8], [9])], CPU, packed=True)
    assert inputs.input_ids.tolist() == [[3, 4, 5, 6, 7, 8, 9]]
    assert inputs.position_ids.tolist() == [[0, 1, 2, 3, 0, 0, 1]]
    assert inputs.attention_mask is None and inputs.segments is not None
    assert inputs.segments.lengths == (4, 1, 2)
    assert inputs.response_ids.tolist() == [[5, 6], [0, 0], [9, 0]]
    assert inputs.response_mask.tolist() == [[True, True], [False, False], [True, False]]
    assert inputs.predictor.tolist() == [[1, 2], [0, 0], [5, 0]]
    assert inputs.last.tolist() == [3, 4, 6]
    assert inputs.tokens == (7, 7)


def test_padded_rows_end_in_padding_and_their_positions_count_it() -> None:
    inputs = collate([pair([3, 4], [5, 6]), pair([7], []), pair([8], [9])], CPU)
    assert inputs.input_ids.tolist() == [[3, 4, 5, 6], [7, 0, 0, 0], [8, 9, 0, 0]]
    assert inputs.position_ids.tolist() == [[0, 1, 2, 3], [0, 0, 0, 0], [0, 1, 0, 0]]
    assert inputs.predictor.tolist() == [[1, 2], [0, 0], [8, 0]]
    assert inputs.last.tolist() == [3, 4, 9]
    assert inputs.tokens == (7, 12)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("layout", ["padded", "padded beside packing", "packed"])
def test_padding_and_neighbours_change_neither_logprobs_nor_values(gpt2: Path, layout: str, attention: str) -> None:
    """Absolute positions: a sample whose positions count on, or that sees a neighbour, differs by far more."""
    config, learner = model_config(attention=attention), LearnerConfig(packing=layout != "padded")
    policy = load_policy(str(gpt2 / "policy"), config, learner, temperature=1.0)
    critic = load_critic(str(gpt2 / "critic"), config, learner)
    reference = load_reference(str(gpt2 / "policy"), config, learner)
    assert policy.packed == critic.packed == reference.packed == learner.packing
    row = pair([3, 4, 5], [6, 7])
    neighbours = [pair([8], [9]), pair(list(range(20)), list(range(17))), pair([1, 2], [])]
    plain = model_config(), LearnerConfig(packing=False)
    alone, together = collate([row], CPU), collate([*neighbours, row], CPU, packed=layout == "packed")
    expected = load_policy(str(gpt2 / "policy"), *plain, temperature=1.0)(alone).logprobs[0]
    value, after = load_critic(str(gpt2 / "critic"), *plain)(alone)
    states = load_reference(str(gpt2 / "policy"), *plain).rows(alone).hidden

    torch.testing.assert_close(policy(together).logprobs[3, :2], expected, atol=1e-5, rtol=0)
    values, after_last = critic(together)
    torch.testing.assert_close(values[3, :2], value[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(after_last[3], after[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(reference.rows(together).hidden[-2:], states, atol=1e-5, rtol=0)


@LAYOUTS
def test_logprobs_are_those_of_the_whole_model_at_the_temperature(gpt2: Path, packed: bool) -> None:
    whole = GPT2LMHeadModel.from_pretrained(gpt2 / "policy").eval()
    with torch.no_grad():
        logits = whole(torch.tensor([[3, 4, 5, 6, 7]])).logits[0]
    policy = load_policy(str(gpt2 / "policy"), model_config(), LearnerConfig(), temperature=0.7)
    inputs = collate([pair([3, 4, 5], [6, 7])], CPU, packed=packed)
    for temperature, asked in ((0.7, None), (1.0, 1.0)):
        expected = torch.log_softmax(logits / temperature, dim=-1)[[2, 3], [6, 7]]
        logprobs = policy(inputs, temperature=asked).logprobs[0]
        torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=0)


def test_packed_and_padded_rows_give_the_same_gradients(gpt2: Path) -> None:
    rows = [pair([3, 4, 5], [6, 7]), pair([8], [9]), pair(list(range(20)), list(range(17))), pair([1, 2], [])]
    policy, critic, gradients = policy_of(gpt2 / "policy"), critic_of(gpt2 / "critic"), []
    reference = load_reference(str(gpt2 / "critic"), model_config(), LearnerConfig())
    for packed in (False, True):
        inputs = collate(rows, CPU, packed=packed)
        policy.zero_grad()
        critic.zero_grad()
        outputs = policy(inputs, entropy_gradient=True, reference=reference.rows(inputs))
        weights = torch.linspace(-1, 1, outputs.logprobs.numel()).view_as(outputs.logprobs)
        assert outputs.entropy is not None and outputs.kl is not None
        (outputs.logprobs * weights + outputs.entropy.square() + outputs.kl.square()).sum().backward()
        values, after_last = critic(inputs)
        ((values * weights).sum() + after_last.square().sum()).backward()
        gradients.append([p.grad.clone() for model in (policy, critic) for p in model.parameters()])
    for padded, packed_gradient in zip(*gradients, strict=True):
        torch.testing.assert_close(packed_gradient, padded, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_activations_computed_again_in_backward_know_the_samples_of_the_row(gpt2: Path, zero_stage: int) -> None:
    """ZeRO-3 takes the reentrant variant of checkpointing, the others the other one."""
    inputs = collate([pair([3, 4, 5], [6, 7]), pair([8], [9]), pair(list(range(9)), [1])], CPU, packed=True)
    gradients = []
    for checkpointing in (False, True):
        policy = policy_of(gpt2 / "policy", gradient_checkpointing=checkpointing, zero_stage=zero_stage)
        policy(inputs).logprobs.sum().backward()
        gradients.append([parameter.grad for parameter in policy.parameters()])
    for kept, again in zip(*gradients, strict=True):
        torch.testing.assert_close(again, kept, atol=1e-6, rtol=1e-6)


@LAYOUTS
def test_dropout_of_the_model_folder_is_off_in_training_mode(gpt2: Path, packed: bool) -> None:
    """So the ratio of the first step is 1: two passes give the same bits, whatever the mode is."""
    rows = [pair([3, 4, 5], [6, 7]), pair([8], [9, 10])]
    inputs = collate(rows, CPU, packed=packed)
    policy, critic = policy_of(gpt2 / "policy"), critic_of(gpt2 / "critic")
    reference = load_reference(str(gpt2 / "policy"), model_config(), LearnerConfig())
    assert policy.training and critic.training
    before = policy(inputs).logprobs, critic(inputs)[0], reference.rows(inputs).hidden
    again = policy(inputs, with_entropy=True).logprobs, critic(inputs)[0], reference.rows(inputs).hidden
    for model in (policy, critic):
        model.eval()
    reference.train()
    switched = policy(inputs).logprobs, critic(inputs)[0], reference.rows(inputs).hidden
    for first, second, third in zip(before, again, switched, strict=True):
        torch.testing.assert_close(second, first, atol=1e-6, rtol=0)
        assert torch.equal(third, first)
    for model in (policy, critic, reference):
        assert not [name for name, module in model.named_modules() if getattr(module, "p", 0)]
    # A row by itself is another micro-batch size: the ratio stays 1.
    split = torch.cat([policy(collate([row], CPU, packed=packed)).logprobs for row in rows])
    torch.testing.assert_close(split, before[0], atol=1e-6, rtol=0)


def test_a_policy_equal_to_its_reference_has_a_full_kl_of_exactly_zero(gpt2: Path) -> None:
    policy = policy_of(gpt2 / "policy")
    reference = load_reference(str(gpt2 / "policy"), model_config(), LearnerConfig())
    other = load_reference(str(gpt2 / "critic"), model_config(), LearnerConfig())
    for packed in (False, True):
        inputs = collate([pair([3, 4, 5], [6, 7]), pair([8], [9])], CPU, packed=packed)
        outputs = policy(inputs, reference=reference.rows(inputs))
        assert outputs.kl is not None and not outputs.kl.any()
        kl = policy(inputs, reference=other.rows(inputs)).kl
        assert (kl[inputs.response_mask] > 0).all() and not kl[~inputs.response_mask].any()


def test_the_reference_is_frozen(gpt2: Path) -> None:
    reference = load_reference(str(gpt2 / "policy"), model_config(), LearnerConfig())
    rows = reference.rows(collate([pair([3, 4, 5], [6, 7])], CPU))
    assert not reference.training
    assert not any(tensor.requires_grad for tensor in (*reference.parameters(), rows.hidden, rows.weight))


def test_entropy_of_a_uniform_model_is_the_log_of_the_vocabulary() -> None:
    model = CounterModel()
    model.lm_head.weight.data.zero_()
    outputs = PolicyModel(model, temperature=1.0)(collate([pair([1], [2, 3]), pair([1], [])], CPU), with_entropy=True)
    torch.testing.assert_close(outputs.entropy, torch.tensor([[math.log(VOCAB)] * 2, [0.0, 0.0]]))


def test_the_lm_head_sees_response_positions_only(gpt2: Path) -> None:
    policy = policy_of(gpt2 / "policy")
    seen: list[int] = []
    policy.model.get_output_embeddings().register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    for packed in (False, True):
        policy(collate([pair(list(range(30)), [6, 7]), pair([1], [2, 3, 4])], CPU, packed=packed))
    assert seen == [5, 5]


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


@LAYOUTS
def test_a_prompt_without_tokens_is_refused_and_no_rows_give_one_filler(packed: bool) -> None:
    with pytest.raises(ValueError, match="no tokens"):
        collate([pair([], [1])], CPU, packed=packed)
    filler = collate([], CPU, packed=packed)
    assert filler.input_ids.shape == (1, 2)
    assert filler.response_mask.tolist() == [[True]]


def test_packed_rows_are_refused_by_a_model_that_cannot_read_them(gpt2: Path) -> None:
    inputs = collate([pair([3], [4])], CPU, packed=True)
    with pytest.raises(ValueError, match="packed=False"):
        policy_of(gpt2 / "policy", packing=False)(inputs)
    with pytest.raises(ValueError, match="packed=False"):
        critic_of(gpt2 / "critic", packing=False)(inputs)
