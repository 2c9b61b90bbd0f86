"""Tiny tokenizers with every BOS behaviour that real ones have; ids can be worked out by hand."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

PAD, BOS, EOS, UNK, USER, SYSTEM, ASSISTANT = 0, 1, 2, 3, 4, 5, 6
SPECIALS = ["<pad>", "<s>", "</s>", "<unk>", "<|user|>", "<|system|>", "<|assistant|>"]
WORDS = [f"w{i}" for i in range(20)]

TURNS = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}</s>\n{% endfor %}"
GENERATION = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
WITHOUT_BOS = TURNS + GENERATION
WITH_BOS = "{{ bos_token }}" + WITHOUT_BOS


def word(i: int) -> int:
    """The id of ``w<i>`` in ``word_tokenizer``."""
    return len(SPECIALS) + i


def word_tokenizer(template: str | None = WITH_BOS) -> Any:
    """One id a word ``w0`` .. ``w19``; anything else is <unk>. Around one user message the template takes 4 ids."""
    vocab = {token: index for index, token in enumerate([*SPECIALS, *WORDS])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return _wrap(backend, template, bos=True)


def byte_tokenizer(template: str | None = WITH_BOS, *, bos: bool = True, adds_bos: bool = False) -> Any:
    """One id a byte; ``adds_bos`` puts <s> before plain text, as Llama's tokenizers do."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*SPECIALS, *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", BOS)]
        )
    return _wrap(backend, template, bos=bos)


def _wrap(backend: Tokenizer, template: str | None, *, bos: bool) -> Any:
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<s>" if bos else None,
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=["<|user|>", "<|system|>", "<|assistant|>"],
    )
    fast.chat_template = template
    return fast
