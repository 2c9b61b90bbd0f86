"""Packed rows: attention of each sample to itself alone, without a mask, and models that cannot do it."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from learner.models import PolicyModel, collate, load_policy
from learner.packed_attention import PACKED, Segments, packed_eager, packed_sdpa
from learner.packing_probe import enable_packing
from rlhf_cluster.config import LearnerConfig, ModelConfig

CPU = torch.device("cpu")
ATTENTION = {"eager": packed_eager, "sdpa": packed_sdpa}
SCALE = 0.3


def dense_attention(query: Tensor, key: Tensor, value: Tensor, lengths: list[int], window: int | None) -> Tensor:
    """The definition: one L x L mask over the whole row, keys repeated for their query heads."""
    sample = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    place = torch.arange(len(sample))
    seen = (sample[:, None] == sample) & (place[:, None] >= place)
    if window is not None:
        seen &= place[:, None] - place < window
    repeats = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    scores = (SCALE * query @ key.transpose(2, 3)).masked_fill(~seen, float("-inf"))
    return (scores.softmax(-1) @ value).transpose(1, 2)


def random_heads(heads: int, key_heads: int, length: int, rows: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(rows, heads, length, 8), (rows, key_heads, length, 8), (rows, key_heads, length, 8)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(("heads", "key_heads"), [(2, 2), (6, 2), (4, 1)])
@pytest.mark.parametrize("lengths", [[7], [1, 1, 1], [9, 8, 3], [2, 10, 1, 9, 10]], ids=str)
def test_values_and_gradients_are_those_of_a_block_diagonal_mask(
    lengths: list[int], heads: int, key_heads: int, window: int | None, attention: str
) -> None:
    inputs = random_heads(heads, key_heads, sum(lengths))
    expected = dense_attention(*inputs, lengths, window)
    weights = torch.randn_like(expected)
    wanted = torch.autograd.grad((expected * weights).sum(), inputs)

    mask = None if window is None else torch.tensor(window)
    out, _ = ATTENTION[attention](
        SimpleNamespace(), *inputs, mask, scaling=SCALE, sliding_window=window, segments=Segments.of(lengths, CPU)
    )
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-10)
    for mine, theirs in zip(torch.autograd.grad((out * weights).sum(), inputs), wanted, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_without_segments_every_row_is_one_sample(attention: str) -> None:
    inputs = random_heads(4, 2, 6, rows=3)
    out, _ = ATTENTION[attention](SimpleNamespace(), *inputs, None, scaling=SCALE)
    for row in range(3):
        expected = dense_attention(*(x[row : row + 1] for x in inputs), [6], None)
        torch.testing.assert_close(out[row : row + 1], expected, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_nan_in_one_sample_reaches_no_other(attention: str) -> None:
    query, key, value = random_heads(2, 2, 12)
    with torch.no_grad():
        for x in (query, key, value):
            x[:, :, 4:7] = float("nan")
    out, _ = ATTENTION[attention](
        SimpleNamespace(), query, key, value, None, scaling=SCALE, segments=Segments.of([4, 3, 5], CPU)
    )
    assert torch.isnan(out[0, 4:7]).all()
    assert torch.isfinite(out[0, :4]).all() and torch.isfinite(out[0, 7:]).all()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=12))
def test_groups_hold_each_sample_once_and_pad_it_by_a_fifth_at_most(lengths: list[int]) -> None:
    segments = Segments.of(lengths, CPU)
    assert sum(group.samples for group in segments.groups) == len(lengths)
    assert segments.bounds.tolist() == [0, *np.cumsum(lengths).tolist()]
    by_length = sorted(lengths, reverse=True)
    for group in segments.groups:
        mine, by_length = by_length[: group.samples], by_length[group.samples :]
        assert group.longest == mine[0] and mine[-1] >= 0.8 * mine[0]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"softcap": 30.0}, "softcap"),
        ({"s_aux": torch.ones(1)}, "s_aux"),
        ({"dropout": 0.1}, "dropout"),
        ({"is_causal": False}, "attention to later tokens"),
        ({"attention_mask": torch.tensor(4)}, "local attention"),
    ],
)
def test_what_it_would_leave_out_is_refused(asked: dict[str, Any], message: str) -> None:
    arguments = {"attention_mask": None, "segments": Segments.of([3], CPU)} | asked
    with pytest.raises(ValueError, match=f"SimpleNamespace asks for {message}"):
        packed_eager(SimpleNamespace(), *random_heads(2, 2, 3), **arguments)


def test_segments_that_do_not_fit_the_row_are_refused() -> None:
    with pytest.raises(ValueError, match="segments of 4 tokens do not fit 1 rows of 5"):
        packed_eager(SimpleNamespace(), *random_heads(2, 2, 5), None, segments=Segments.of([1, 3], CPU))


COMMON = dict(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4)
GROUPED = dict(**COMMON, num_key_value_heads=2)
MODELS: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "qwen2": GROUPED,
    "qwen3": dict(**GROUPED, head_dim=8),
    # Windows shorter than the probe's samples, in every layer and in every second one.
    "mistral": dict(**GROUPED, sliding_window=4),
    "olmo3": dict(**GROUPED, sliding_window=4, layer_types=["sliding_attention", "full_attention"]),
    "gpt_neox": COMMON,
    "opt": dict(vocab_size=64, hidden_size=32, ffn_dim=32, num_hidden_layers=2, num_attention_heads=4),
}


def random_model(kind: str, attention: str = "eager", **config: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    settings_ = AutoConfig.for_model(kind, **config)
    settings_.initializer_range = 0.3
    return AutoModelForCausalLM.from_config(settings_, attn_implementation=attention).eval()


def rows_of(lengths: list[int]) -> list[tuple[np.ndarray, np.ndarray]]:
    generator = np.random.default_rng(0)
    return [(generator.integers(64, size=n - 2, dtype=np.int32), np.array([1, 2], dtype=np.int32)) for n in lengths]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", MODELS)
def test_models_of_many_families_read_packed_rows_as_they_read_each_alone(kind: str, attention: str) -> None:
    model = random_model(kind, attention, **MODELS[kind])
    rows = rows_of([20, 9, 19, 5])
    with torch.no_grad():
        alone = PolicyModel(model, temperature=1.0)
        expected = torch.cat([alone(collate([row], CPU)).logprobs for row in rows])
        assert enable_packing(model) is None
        assert model.config._attn_implementation == PACKED[attention]
        alone.packed = True
        for packed in (True, False):
            logprobs = alone(collate(rows, CPU, packed=packed)).logprobs
            torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=0)


UNFIT: dict[str, tuple[dict[str, Any], str]] = {
    # A recurrence runs from one sample into the next.
    "mamba": (dict(vocab_size=64, hidden_size=32, num_hidden_layers=1, state_size=4), "differ from the same samples"),
    # Positions are added to the scores from a mask of the whole row.
    "bloom": (dict(vocab_size=64, hidden_size=32, n_layer=1, n_head=2), "does not go through .* AttentionInterface"),
    "gemma2": (dict(**GROUPED, head_dim=8, attn_logit_softcapping=20.0), "Gemma2Attention asks for softcap"),
}


@pytest.mark.parametrize("kind", UNFIT)
def test_a_model_that_would_mix_samples_says_why_and_stays_as_it_was(kind: str) -> None:
    config, why = UNFIT[kind]
    model = random_model(kind, **config)
    ids = torch.arange(6)[None]
    before = model(ids).logits
    assert re.search(why, enable_packing(model) or "")
    assert model.config._attn_implementation == "eager"
    assert torch.equal(model(ids).logits, before)


def test_a_policy_that_cannot_be_packed_is_padded_and_one_line_tells(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    random_model("mamba", **UNFIT["mamba"][0]).save_pretrained(tmp_path)
    config = ModelConfig(policy="unused", dtype="float32", attention="eager")
    with caplog.at_level(logging.WARNING, "learner.models"):
        policy = load_policy(str(tmp_path), config, LearnerConfig(), temperature=1.0)
    assert not policy.packed
    (line,) = [record.message for record in caplog.records if record.name == "learner.models"]
    assert line.startswith(f"policy {tmp_path} cannot read packed micro-batches and is padded: packed samples differ")
    rows = rows_of([7, 4])
    logprobs = policy(collate(rows, CPU)).logprobs
    torch.testing.assert_close(logprobs[1], policy(collate(rows[1:], CPU)).logprobs[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("packing", [True, False])
def test_dropout_in_the_attention_of_the_model_folder_is_off(tmp_path: Path, packing: bool) -> None:
    random_model("llama", **GROUPED, attention_dropout=0.5).save_pretrained(tmp_path)
    config = ModelConfig(policy="unused", dtype="float32", attention="eager")
    policy = load_policy(str(tmp_path), config, LearnerConfig(packing=packing), temperature=1.0)
    assert policy.packed == packing and policy.training
    inputs = collate(rows_of([7, 4]), CPU, packed=packing)
    assert torch.equal(policy(inputs).logprobs, policy(inputs).logprobs)


def test_the_saved_config_does_not_name_our_attention(tmp_path: Path) -> None:
    model = random_model("llama", **GROUPED)
    enable_packing(model)
    model.save_pretrained(tmp_path)
    assert "packed" not in (tmp_path / "config.json").read_text()


def test_flash_attention_gets_the_bounds_it_takes() -> None:
    arguments = Segments.of([3, 5], CPU).model_arguments("flash_attention_2")
    assert arguments.pop("max_length_q") == arguments.pop("max_length_k") == 5
    assert {name: bounds.tolist() for name, bounds in arguments.items()} == {
        "cu_seq_lens_q": [0, 3, 8],
        "cu_seq_lens_k": [0, 3, 8],
    }
    assert {bounds.dtype for bounds in arguments.values()} == {torch.int32}
