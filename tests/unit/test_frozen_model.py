"""Frozen models: batching, padding, and reward-model scoring (case N25), reference log-probs, unscorable answers."""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GPT2Config,
    GPT2ForSequenceClassification,
)

from actors.frozen_model import FrozenModel, PaddedBatch, pad_right
from actors.micro_batcher import MicroBatcher
from actors.reference_scorer import ReferenceScorer
from actors.reward_scorer import RewardScorer, last_token_scores
from rlhf_cluster.config import ModelConfig, RewardConfig, ScorerConfig
from rlhf_cluster.types import Prompt, Rollout, Sampling, VersionSpan
from tests.tiny_models import build_tiny_policy, build_tiny_reward_model
from tests.tiny_tokenizers import byte_tokenizer
from tests.unit.builders import async_test

END = 2  # <|im_end|> of the tiny models
QUESTION = Prompt("p0", (1, 120, 121), "How do I boil an egg?")
SECRET = "do not log me"


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return str(build_tiny_policy(tmp_path_factory.mktemp("policy")))


@pytest.fixture(scope="module")
def reward(tmp_path_factory):
    """A reward model whose ids mean other letters than the policy's, with another template, and pad = end of turn."""
    folder = build_tiny_reward_model(tmp_path_factory.mktemp("reward"))
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def fails_on_request(prompt, answer, finish_reason):
    if "fail" in answer:
        raise RuntimeError(f"cannot judge {answer}")
    if "exit" in answer:
        sys.exit(answer)
    if "stop" in answer:
        raise KeyboardInterrupt
    return math.nan if "nan" in answer else 1.0


def model_config(policy, reward=None, **options):
    return ModelConfig(policy=policy, reward=reward, dtype="float32", attention="eager", **options)


def scorer(policy, reward, *components, **options):
    components = components or ({"name": "model", "kind": "model"},)
    return RewardScorer(model_config(policy, reward), RewardConfig(components=components), ScorerConfig(**options))


def answer(policy, text, *, finish_reason="stop", sample=0, temperature=1.0):
    ids = AutoTokenizer.from_pretrained(policy).encode(text, add_special_tokens=False)
    ids = [*ids, END] if finish_reason == "stop" else ids
    return Rollout(
        rollout_id=f"p0/0/{sample}",
        attempt=0,
        group_id="p0",
        prompt_token_ids=np.array(QUESTION.token_ids),
        token_ids=np.array(ids, dtype=np.int32),
        behaviour_logprobs=np.zeros(len(ids), np.float32),
        version_spans=(VersionSpan(0, 0, len(ids)),),
        finish_reason=finish_reason,
        sampling=Sampling(temperature, 64, sample),
    )


def batch_in(layout, rows):
    """Rows padded with the end-of-turn id, the pad id that comparing ids would trip over."""
    width = max(map(len, rows))
    ids, mask = torch.full((len(rows), width), END), torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        where = slice(0, len(row)) if layout == "right" else slice(width - len(row), width)
        ids[i, where], mask[i, where] = torch.tensor(row), True
    return PaddedBatch(ids, mask)


# -- case N25: padding layouts, turn-boundary end tokens, own tokenizer, over-long input -------------------------------


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_score_is_the_same_alone_beside_a_longer_row_and_padded_on_either_side(reward, attention):
    model = FrozenModel(reward, "score", dtype="float32", attention=attention)
    short = [1, 50, 51, END, 1, 60, 61, 62, END]  # ends every turn with the id that also pads
    long = [1, *range(10, 35), END]
    alone = last_token_scores(model, pad_right([short]))[0]
    plain = AutoModelForSequenceClassification.from_pretrained(reward)
    with torch.no_grad():
        by_hand = float(plain.score(plain.model(torch.tensor([short])).last_hidden_state[0, len(short) - 1]))
    assert alone == pytest.approx(by_hand, abs=1e-4)
    for layout in ("left", "right"):
        assert last_token_scores(model, batch_in(layout, [long, short]))[1] == pytest.approx(alone, abs=1e-3)
    # One token earlier is another score, so the tolerance above cannot hide an off-by-one.
    assert abs(last_token_scores(model, pad_right([short[:-1]]))[0] - alone) > 1e-2


def test_padding_on_the_left_shifts_no_position_of_a_model_with_learned_positions(tmp_path):
    """Rotary positions are relative and would hide a shift; GPT-2's are absolute."""
    config = GPT2Config(
        vocab_size=64, n_positions=64, n_embd=32, n_layer=2, n_head=2, num_labels=1, pad_token_id=0,
        bos_token_id=1, eos_token_id=END, initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    GPT2ForSequenceClassification(config).save_pretrained(tmp_path)
    model = FrozenModel(str(tmp_path), "score", dtype="float32", attention="eager")
    short, long = [1, 50, 51, END], [1, *range(10, 35), END]
    alone = last_token_scores(model, pad_right([short]))[0]
    for layout in ("left", "right"):
        assert last_token_scores(model, batch_in(layout, [long, short]))[1] == pytest.approx(alone, abs=1e-3)


@async_test
async def test_text_crosses_to_the_reward_models_own_tokenizer_and_template(policy, reward):
    rollout = answer(policy, "Boil it.")
    [result] = await scorer(policy, reward).score(QUESTION, [rollout])
    tokenizer = AutoTokenizer.from_pretrained(reward)
    text = "<s><|user|>How do I boil an egg?</s>\n<|assistant|>Boil it.</s>"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert not set(rollout.token_ids.tolist()[:4]) <= set(ids)  # the policy's ids mean other letters
    model = FrozenModel(reward, "score", dtype="float32", attention="eager")
    assert result.score == pytest.approx(last_token_scores(model, pad_right([ids]))[0], abs=1e-5)
    assert result.components == {"model": result.score} and result.reason is None


@async_test
async def test_a_truncated_answer_is_read_without_the_end_of_turn_token(policy, reward):
    complete, truncated = answer(policy, "Boil it."), answer(policy, "Boil it.", finish_reason="length", sample=1)
    whole, cut = await scorer(policy, reward).score(QUESTION, [complete, truncated])
    tokenizer = AutoTokenizer.from_pretrained(reward)
    ids = tokenizer.encode("<s><|user|>How do I boil an egg?</s>\n<|assistant|>Boil it.", add_special_tokens=False)
    model = FrozenModel(reward, "score", dtype="float32", attention="eager")
    assert cut.score == pytest.approx(last_token_scores(model, pad_right([ids]))[0], abs=1e-5)
    assert abs(cut.score - whole.score) > 1e-3


@async_test
async def test_over_long_input_is_unscorable_and_counted_never_cut(policy, reward):
    # <s> <|user|> 21 bytes </s> \n <|assistant|> = 26 ids, the answer, </s>.
    rollouts = [answer(policy, "x" * n, sample=n) for n in (10, 11)]
    fits, over = await scorer(policy, reward, max_tokens=37).score(QUESTION, rollouts)
    assert math.isfinite(fits.score) and fits.reason is None
    assert math.isnan(over.score) and over.reason == "too_long" and math.isnan(over.components["model"])


@async_test
async def test_scores_stay_with_their_rollouts_whatever_the_batching(policy, reward):
    texts = ["a", "a much longer answer than the others " * 3, "middle sized answer", "b", "x" * 50, "yy"]
    rollouts = [answer(policy, text, sample=i) for i, text in enumerate(texts)]
    alone = [(await scorer(policy, reward).score(QUESTION, [rollout]))[0].score for rollout in rollouts]
    shared = scorer(policy, reward, batch_tokens=150)
    groups = await asyncio.gather(
        *(shared.score(QUESTION, [rollouts[i], rollouts[(i + 2) % 6]]) for i in (5, 0, 3, 1, 4, 2))
    )
    for i, group in zip((5, 0, 3, 1, 4, 2), groups, strict=True):
        assert [reply.rollout_id for reply in group] == [f"p0/0/{i}", f"p0/0/{(i + 2) % 6}"]
        assert [reply.score for reply in group] == pytest.approx([alone[i], alone[(i + 2) % 6]], abs=1e-3)
    assert len({round(score, 3) for score in alone}) == 6


# -- case F12: a component that fails is excluded and counted, never 0 -------------------------------------------------


@async_test
async def test_a_failing_function_gives_nan_with_a_reason_and_no_text_in_the_log(policy, caplog):
    components = (
        {"name": "judge", "kind": "function", "function": f"{__name__}:fails_on_request"},
        {"name": "length", "kind": "length", "weight": -1.0},
    )
    texts = ["good", f"fail {SECRET}", "nan"]
    with caplog.at_level(logging.DEBUG):
        replies = await scorer(policy, None, *components).score(
            QUESTION, [answer(policy, text, sample=i) for i, text in enumerate(texts)]
        )
    assert [reply.reason for reply in replies] == [None, "function_error", "not_finite"]
    assert replies[0].score == pytest.approx(1 - 5 / 64)  # four bytes and the end token of 64
    assert math.isnan(replies[1].score) and math.isnan(replies[2].score)
    assert replies[1].components["length"] == pytest.approx(19 / 64)
    assert "RuntimeError" in caplog.text and SECRET not in caplog.text


@async_test
async def test_a_function_that_exits_is_one_that_fails(policy):
    judge = {"name": "judge", "kind": "function", "function": f"{__name__}:fails_on_request"}
    (reply,) = await scorer(policy, None, judge).score(QUESTION, [answer(policy, "exit")])
    assert reply.reason == "function_error"


def test_an_interrupt_in_a_function_ends_the_process_that_was_interrupted(policy):
    judge = {"name": "judge", "kind": "function", "function": f"{__name__}:fails_on_request"}
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(scorer(policy, None, judge).score(QUESTION, [answer(policy, "stop")]))


@async_test
async def test_function_rewards_see_the_text_without_the_sampled_end_token(policy):
    seen = {"name": "seen", "kind": "function", "function": f"{__name__}:length_of_text"}
    truncated = answer(policy, "abc", finish_reason="length")
    # A special token that ended nothing is the policy's own doing, and stays visible: len("abc<|im_start|>") is 15.
    forged = replace(
        truncated,
        token_ids=np.append(truncated.token_ids, 1),
        behaviour_logprobs=np.zeros(4, np.float32),
        version_spans=(VersionSpan(0, 0, 4),),
    )
    rollouts = [answer(policy, "abc"), truncated, answer(policy, ""), forged]
    assert [reply.score for reply in await scorer(policy, None, seen).score(QUESTION, rollouts)] == [3, 3, 0, 15]


def length_of_text(prompt, answer, finish_reason):
    return len(answer)


# -- loading -----------------------------------------------------------------------------------------------------------


def test_a_language_model_is_refused_as_a_reward_model_for_its_head_would_be_random(policy):
    with pytest.raises(ValueError, match=r"no reward model.*score\.weight"):
        FrozenModel(policy, "score", dtype="float32", attention="eager")


def test_an_architecture_that_transforms_its_logits_is_refused(tmp_path):
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=32, final_logit_softcapping=0.5, initializer_range=0.5,
    )  # fmt: skip
    Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="transforms the output of its head"):
        FrozenModel(str(tmp_path), "lm_head", dtype="float32", attention="eager")


# -- reference log-probs -----------------------------------------------------------------------------------------------


@async_test
async def test_reference_logprobs_are_those_of_the_response_at_the_sampling_temperature(policy):
    reference = ReferenceScorer(model_config(policy), ScorerConfig(batch_tokens=64))
    rollouts = [answer(policy, "abc", temperature=1.0), answer(policy, "a longer one", temperature=0.5, sample=1)]
    empty = answer(policy, "", finish_reason="length", sample=2)
    results = await reference.logprobs([rollouts[0], empty, rollouts[1]])
    assert [len(values) for values in results] == [4, 0, 13]
    plain = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    for rollout, values in zip(rollouts, (results[0], results[2]), strict=True):
        ids = torch.tensor([[*rollout.prompt_token_ids, *rollout.token_ids]], dtype=torch.long)
        with torch.no_grad():
            table = torch.log_softmax(plain(ids).logits[0] / rollout.sampling.temperature, dim=-1)
        expected = [float(table[3 + t - 1, token]) for t, token in enumerate(rollout.token_ids.tolist())]
        np.testing.assert_allclose(values, expected, atol=1e-4)


@async_test
async def test_the_reference_folder_is_used_when_it_differs_from_the_policy(policy, tmp_path):
    other = str(build_tiny_policy(tmp_path, seed=5))
    rollout = answer(policy, "abc")
    [own] = await ReferenceScorer(model_config(policy), ScorerConfig()).logprobs([rollout])
    [reference] = await ReferenceScorer(model_config(policy, reference=other), ScorerConfig()).logprobs([rollout])
    assert np.abs(own - reference).max() > 0.1


# -- micro-batching ----------------------------------------------------------------------------------------------------


@async_test
async def test_callers_within_the_window_share_a_batch_and_the_token_budget_splits_it():
    batches = []

    def run(items):
        batches.append(list(items))
        assert threading.current_thread() is not threading.main_thread()
        return [item * 10 for item in items]

    batcher = MicroBatcher(run, length=lambda item: item, batch_tokens=12, window_s=0.2)

    async def submit_later(items):
        await asyncio.sleep(0.01)
        return await batcher.submit(items)

    results = await asyncio.gather(batcher.submit([3, 6]), batcher.submit([]), submit_later([4, 20, 2]))
    assert results == [[30, 60], [], [40, 200, 20]]
    assert batches == [[20], [6, 4], [3, 2]]  # 20 is over the budget and runs alone; 2 * 6 and 2 * 3 fit, 3 * 6 do not


@async_test
async def test_an_error_reaches_only_the_callers_of_its_batch_and_later_work_goes_on():
    def run(items):
        if 9 in items:
            raise RuntimeError("nine")
        return items

    batcher = MicroBatcher(run, length=lambda item: item, batch_tokens=9, window_s=0.0)
    bad, good = await asyncio.gather(batcher.submit([9]), batcher.submit([1, 2]), return_exceptions=True)
    assert str(bad) == "nine" and good == [1, 2]
    assert await batcher.submit([5]) == [5]


@async_test
async def test_an_item_that_cannot_be_measured_fails_everyone_who_waits_with_it_and_later_work_goes_on():
    batcher = MicroBatcher(list, length=len, batch_tokens=9, window_s=0.0)
    calls = [asyncio.create_task(batcher.submit([item])) for item in ("abc", 7)]
    done, pending = await asyncio.wait(calls, timeout=1)
    assert not pending
    assert all("has no len" in str(call.exception()) for call in done)
    assert await batcher.submit(["abc"]) == ["abc"]


@async_test
async def test_an_error_reaches_those_who_still_wait_for_the_batch():
    def run(items):
        time.sleep(0.05)
        raise ValueError("no batch today")

    batcher = MicroBatcher(run, length=lambda item: 1, batch_tokens=9, window_s=0.0)
    hasty, patient = (asyncio.create_task(batcher.submit([number])) for number in (1, 2))
    await asyncio.sleep(0.02)
    hasty.cancel()
    with pytest.raises(ValueError, match="no batch today"):
        await asyncio.wait_for(patient, 2)


@async_test
async def test_a_batch_with_a_wrong_number_of_results_is_an_error():
    batcher = MicroBatcher(lambda items: items[:-1], length=lambda item: item, batch_tokens=99, window_s=0.0)
    with pytest.raises(RuntimeError, match="2 items went into a batch and 1 results came out"):
        await batcher.submit([1, 2])


@async_test
async def test_work_of_a_caller_that_gave_up_is_not_run():
    ran = []

    def run(items):
        ran.extend(items)
        time.sleep(0.05)
        return items

    batcher = MicroBatcher(run, length=lambda item: 1, batch_tokens=1, window_s=0.0)
    patient = asyncio.create_task(batcher.submit([1]))
    hasty = asyncio.create_task(batcher.submit([2]))
    await asyncio.sleep(0.02)
    hasty.cancel()
    assert await patient == [1]
    await asyncio.sleep(0.02)
    assert ran == [1]
