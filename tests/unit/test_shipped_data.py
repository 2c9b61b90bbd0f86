"""The prompts that ship with the project: enough of them, varied, and held-out ones that are really held out."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_cluster.data.chat import ChatRenderer
from rlhf_cluster.data.prompts import check_overlap, load_prompts, normalise
from tests.tiny_tokenizers import byte_tokenizer

DATA = Path(__file__).parents[2] / "configs" / "data"


@pytest.fixture(scope="module")
def shipped():
    renderer = ChatRenderer(byte_tokenizer())
    return {
        name: load_prompts(
            DATA / f"{name}_prompts.jsonl", field="prompt", renderer=renderer, max_prompt_tokens=512, too_long="error"
        ).prompts
        for name in ("everyday", "heldout")
    }


def test_there_are_enough_prompts_and_forty_held_out(shipped):
    assert len(shipped["everyday"]) >= 240
    assert len(shipped["heldout"]) == 40


def test_no_prompt_is_repeated_and_none_is_in_both_files(shipped):
    for prompts in shipped.values():
        assert len({normalise(prompt.text) for prompt in prompts}) == len(prompts)
    assert check_overlap(shipped["everyday"], shipped["heldout"]) == []


def test_prompts_are_short_everyday_english(shipped):
    for prompt in shipped["everyday"] + shipped["heldout"]:
        assert 5 <= len(prompt.text.split()) <= 30, prompt.prompt_id
        assert prompt.text.isascii(), prompt.prompt_id


def test_about_half_ask_for_a_short_answer_in_both_files(shipped):
    asks = re.compile(r"sentence|brief|short|quick", re.IGNORECASE)
    for name, prompts in shipped.items():
        share = sum(bool(asks.search(prompt.text)) for prompt in prompts) / len(prompts)
        assert 0.35 <= share <= 0.7, name


def test_prompts_do_not_begin_alike(shipped):
    beginnings = [" ".join(prompt.text.split()[:4]).casefold() for prompt in shipped["everyday"]]
    most_common = max(beginnings.count(beginning) for beginning in set(beginnings))
    assert most_common <= len(beginnings) * 0.15
    assert len(set(beginnings)) >= len(beginnings) * 0.6


def test_data_package_imports_without_torch_ray_vllm_or_transformers():
    code = (
        "import sys, rlhf_cluster.data.prompts, rlhf_cluster.data.preferences, rlhf_cluster.data.cursor\n"
        "print([m for m in ('torch', 'ray', 'vllm', 'transformers', 'tokenizers', 'deepspeed') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert run.stdout.strip() == "[]"
