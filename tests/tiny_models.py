"""Tiny random models in Hugging Face folders, so that tests run real engines, scorers and learners in seconds.

The head size is 32 because vLLM's CPU attention has none smaller. The tokenizer is byte-level without merges: one
id a byte, so any text can be rendered and every length can be worked out by hand.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
PAD = "<|pad|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_tiny_tokenizer(folder: Path) -> int:
    """Save a byte-level tokenizer with a chat template; returns its vocabulary size (256 bytes + 3 specials)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: index for index, piece in enumerate([PAD, IM_START, IM_END, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, bos_token=IM_START, eos_token=IM_END, model_max_length=2048
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    return len(vocab)


def _tiny_llama_config(vocab_size: int, **overrides: Any) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        # Wider than the usual 0.02: distributions that differ visibly from uniform make wrong weights show.
        initializer_range=0.2,
        **overrides,
    )


def build_tiny_policy(folder: Path, *, tied: bool = True, seed: int = 0) -> Path:
    """Save a random Llama with its tokenizer and generation config under ``folder`` (float32) and return it."""
    import torch
    from transformers import LlamaForCausalLM

    folder = Path(folder)
    vocab_size = save_tiny_tokenizer(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(_tiny_llama_config(vocab_size, tie_word_embeddings=tied))
    model.save_pretrained(folder)
    return folder


def build_tiny_reward_model(folder: Path, *, seed: int = 1) -> Path:
    """Save a random Llama with one scalar output (sequence classification, one label) and return the folder."""
    import torch
    from transformers import LlamaForSequenceClassification

    folder = Path(folder)
    vocab_size = save_tiny_tokenizer(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForSequenceClassification(_tiny_llama_config(vocab_size, num_labels=1))
    model.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    import sys

    target = Path(sys.argv[1])
    print(build_tiny_policy(target / "policy"), build_tiny_reward_model(target / "reward"))
