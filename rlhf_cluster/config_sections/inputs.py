"""What a run reads: models and prompts."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rlhf_cluster.config_sections.base import PositiveInt, Section


class ModelConfig(Section):
    policy: str = Field(description="Hugging Face folder of the policy (the SFT model).")
    reference: str | None = Field(None, description="Folder of the frozen reference; the policy folder when null.")
    reward: str | None = Field(
        None, description="Folder of the reward model (sequence classification, one label); null: no model reward."
    )
    critic: str | None = Field(None, description="Folder the critic starts from; the reward model when null.")
    dtype: Literal["bfloat16", "float32"] = Field(
        "bfloat16", description="Compute dtype of every model; bfloat16 trains over float32 master weights."
    )
    attention: Literal["eager", "sdpa", "flash_attention_2"] = Field(
        "sdpa", description="Attention of learner and scorers; eager is faster to train on CPU."
    )
    trust_remote_code: bool = Field(False, description="Run code that ships inside a model folder.")

    @property
    def reference_path(self) -> str:
        return self.reference or self.policy


class DataConfig(Section):
    prompts: str = Field(description="JSONL of training prompts.")
    prompt_field: str = Field("prompt", min_length=1, description="Field of a row that holds the prompt.")
    eval_prompts: str | None = Field(None, description="JSONL of held-out prompts; null: no evaluation.")
    max_prompt_tokens: PositiveInt = Field(512, description="Longest prompt in tokens, chat template included.")
    too_long: Literal["error", "drop", "truncate_left"] = Field(
        "error",
        description="What happens to a longer prompt: refuse the file, drop the row, or cut its text on the left.",
    )
