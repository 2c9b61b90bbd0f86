"""What a run reads and checks before anything starts: model folders and prompts."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf_cluster.config import Config
from rlhf_cluster.data.chat import ChatRenderer
from rlhf_cluster.data.jsonl import DataError
from rlhf_cluster.data.prompts import check_overlap, load_prompts
from rlhf_cluster.data.text_blocks import read_blocks
from rlhf_cluster.diagnosis.preflight import check_model_folders
from rlhf_cluster.types import Prompt

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Inputs:
    """Everything read and checked before Ray starts."""

    train: list[Prompt] = field(repr=False)
    held_out: list[Prompt] = field(repr=False)
    tokenizer: Any = field(repr=False)

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False)
        return text


def read_inputs(config: Config) -> Inputs:
    """Check model folders and read prompts, without Ray.

    Raises:
        PreflightError, DataError, ChatTemplateError: naming key, file or row, and the fix.
    """
    check_model_folders(config)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(config.model.policy, trust_remote_code=config.model.trust_remote_code)
    renderer = ChatRenderer(tokenizer)

    def load(path: str) -> list[Prompt]:
        loaded = load_prompts(
            path,
            field=config.data.prompt_field,
            renderer=renderer,
            max_prompt_tokens=config.data.max_prompt_tokens,
            too_long=config.data.too_long,
        )
        if loaded.dropped_too_long or loaded.truncated:
            log.warning(
                "%s: %d of %d prompts were longer than data.max_prompt_tokens %d: %d dropped, %d cut on the left",
                path,
                loaded.dropped_too_long + loaded.truncated,
                loaded.n_rows,
                config.data.max_prompt_tokens,
                loaded.dropped_too_long,
                loaded.truncated,
            )
        return loaded.prompts

    train = load(config.data.prompts)
    held_out = load(config.data.eval_prompts) if config.data.eval_prompts is not None else []
    overlaps = check_overlap(train, held_out)
    if overlaps:
        first = overlaps[0]
        raise DataError(
            config.data.eval_prompts or "",
            f"{len(overlaps)} held-out prompts are training prompts too "
            f"(held-out {first.heldout_id} is training prompt {first.train_id})",
            fix="Remove them from one of the files; an evaluation on trained prompts measures nothing.",
        )
    if config.algorithm.ptx is not None:
        read_blocks(config.algorithm.ptx.file, tokenizer, config.algorithm.ptx.block_tokens)
    return Inputs(train, held_out, tokenizer)
