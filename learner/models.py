"""Policy and critic forward passes over padded micro-batches: log-probs, entropy and values of response tokens.

Shapes: B rows, L padded prompt + response tokens, T padded response tokens, N response tokens of the micro-batch, H
hidden size, V vocabulary. Rows are padded on the right, with explicit position ids and attention mask, so the result of
a row does not depend on its neighbours.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from learner.heads import HEAD_ROWS, Float32Head, LogprobHead
from rlhf_cluster.config import LearnerConfig, ModelConfig

logger = logging.getLogger(__name__)

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}

_LOGIT_TRANSFORMS = ("final_logit_softcapping", "logit_scale", "logits_scaling")


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """One micro-batch on its device.

    The hidden state at column c predicts the token at column c + 1. So response token k of a row with P prompt tokens
    is predicted, and its value read, at column P - 1 + k; the value after the last token stands at its own column.
    """

    input_ids: Tensor
    """(B, L) int64."""
    attention_mask: Tensor
    """(B, L) int64, 1 on real tokens."""
    position_ids: Tensor
    """(B, L) int64, 0, 1, 2, ... from the first real token."""
    response_ids: Tensor
    """(B, T) int64."""
    response_mask: Tensor
    """(B, T) bool, built from lengths alone."""
    predictor: Tensor
    """(B, T) int64, column of the hidden state before each response token; 0 where there is none."""
    last: Tensor
    """(B,) int64, column of the last real token."""

    @property
    def tokens(self) -> tuple[int, int]:
        """Real tokens, and all slots with padding."""
        return int(self.attention_mask.sum()), self.attention_mask.numel()


TokenPair = tuple[NDArray[np.int32], NDArray[np.int32]]


def collate(rows: Sequence[TokenPair], device: torch.device) -> ModelInputs:
    """Pad (prompt ids, response ids) pairs on the right. No rows give one filler row, so that a rank without work still
    takes part in every collective; its results carry no weight.

    Raises:
        ValueError: a prompt without tokens (nothing predicts the first response token).
    """
    if not rows:
        filler = np.zeros(1, dtype=np.int32)
        rows = [(filler, filler)]
    if any(len(prompt) == 0 for prompt, _ in rows):
        raise ValueError("a prompt has no tokens, so nothing predicts its first response token; give it at least one")
    prompt_lengths = torch.tensor([len(prompt) for prompt, _ in rows])
    response_lengths = torch.tensor([len(response) for _, response in rows])
    lengths = prompt_lengths + response_lengths
    width, response_width = int(lengths.max()), max(1, int(response_lengths.max()))
    input_ids = np.zeros((len(rows), width), dtype=np.int64)
    response_ids = np.zeros((len(rows), response_width), dtype=np.int64)
    for row, (prompt, response) in enumerate(rows):
        input_ids[row, : len(prompt)] = prompt
        input_ids[row, len(prompt) : len(prompt) + len(response)] = response
        response_ids[row, : len(response)] = response
    columns = torch.arange(width).expand(len(rows), width)
    real = columns < lengths[:, None]
    steps = torch.arange(response_width).expand(len(rows), response_width)
    response_mask = steps < response_lengths[:, None]
    return ModelInputs(
        input_ids=torch.from_numpy(input_ids).to(device),
        attention_mask=real.long().to(device),
        position_ids=torch.where(real, columns, 0).to(device),
        response_ids=torch.from_numpy(response_ids).to(device),
        response_mask=response_mask.to(device),
        predictor=torch.where(response_mask, prompt_lengths[:, None] - 1 + steps, 0).to(device),
        last=(lengths - 1).to(device),
    )


class PolicyModel(nn.Module):
    """A causal language model that answers for response tokens only: the LM head never runs on a prompt."""

    def __init__(self, model: PreTrainedModel, *, temperature: float, head_rows: int = HEAD_ROWS) -> None:
        super().__init__()
        _refuse_logit_transforms(model.config)
        self.model = model
        self.temperature = temperature
        model.set_output_embeddings(LogprobHead(model.get_output_embeddings(), head_rows))

    def forward(self, inputs: ModelInputs, *, with_entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        """(B, T) float32 log pi(token) and, under ``torch.no_grad`` if asked for, (B, T) entropies.

        In nats, at the sampling temperature, and 0 outside ``inputs.response_mask``.
        """
        hidden = _hidden_states(self.model, inputs)
        rows = _gather(hidden, inputs.predictor, inputs.response_mask)
        token_ids = inputs.response_ids[inputs.response_mask]
        logprobs, entropies = self.model.get_output_embeddings()(
            rows, token_ids, temperature=self.temperature, with_entropy=with_entropy
        )
        return (
            _scatter(logprobs, inputs.response_mask),
            None if entropies is None else _scatter(entropies, inputs.response_mask),
        )


class CriticModel(nn.Module):
    """A sequence classifier with one label, read at every response position instead of once a sequence."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: ModelInputs) -> tuple[Tensor, Tensor]:
        """(B, T) float32 values of the states before each response token, and the (B,) value after the last token.

        Values are 0 outside ``inputs.response_mask``.
        """
        hidden = _hidden_states(self.model, inputs)
        before = _gather(hidden, inputs.predictor, inputs.response_mask)
        after = _gather(hidden, inputs.last[:, None], torch.ones_like(inputs.last[:, None], dtype=torch.bool))
        scores = self.model.score(torch.cat([before, after])).squeeze(-1)
        values, bootstrap = scores.split([len(before), len(after)])
        return _scatter(values, inputs.response_mask), bootstrap


def load_policy(path: str, config: ModelConfig, learner: LearnerConfig, *, temperature: float) -> PolicyModel:
    """The causal language model at ``path``, without dropout."""
    model = AutoModelForCausalLM.from_pretrained(path, **_load_options(path, config))
    _prepare(model, learner)
    return PolicyModel(model, temperature=temperature)


def load_critic(path: str, config: ModelConfig, learner: LearnerConfig) -> CriticModel:
    """The sequence classifier at ``path``, without dropout.

    A plain language model gets a head of zeros (all values start at 0, the same on every rank), which is logged.

    Raises:
        ValueError: the folder has another number of labels, or lacks more than the head.
    """
    options = _load_options(path, config)
    labels = options["config"].num_labels
    if "ForSequenceClassification" in "".join(options["config"].architectures or ()) and labels != 1:
        raise ValueError(f"model.critic {path} has {labels} labels; a critic or reward model has exactly 1")
    options["config"].num_labels = 1
    model, info = AutoModelForSequenceClassification.from_pretrained(path, output_loading_info=True, **options)
    if not isinstance(getattr(model, "score", None), nn.Linear):
        raise ValueError(
            f"model.critic {path} ({type(model).__name__}) has no linear head called score; choose a decoder-only model"
        )
    missing = set(info["missing_keys"])
    if missing - {"score.weight"}:
        raise ValueError(f"model.critic {path} lacks weights: {sorted(missing)[:5]}; it is not a complete model folder")
    model.score = Float32Head(model.score)
    if missing:
        nn.init.zeros_(model.score.weight)
        logger.warning("critic %s is a plain language model: its value head starts from zeros", path)
    _prepare(model, learner)
    if learner.critic_layers is not None:
        _train_top_layers(model, learner.critic_layers)
    return CriticModel(model)


def _train_top_layers(model: PreTrainedModel, count: int) -> None:
    """Freeze everything below the topmost ``count`` layers; they, the final norm and the head stay trainable."""
    layers = getattr(model.base_model, "layers", None)
    norm = getattr(model.base_model, "norm", None)
    if layers is None or norm is None or count > len(layers):
        there = "no list of layers and final norm" if layers is None or norm is None else f"{len(layers)} layers"
        raise ValueError(
            f"learner.critic_layers is {count}, but the critic ({type(model).__name__}) has {there}; lower it, or "
            "set it to null to train the whole critic"
        )
    model.base_model.requires_grad_(False)
    for module in (*layers[-count:], norm):
        module.requires_grad_(True)


def _load_options(path: str, config: ModelConfig) -> dict[str, Any]:
    model_config = AutoConfig.from_pretrained(path, trust_remote_code=config.trust_remote_code)
    disable_dropout(model_config)
    return {
        "config": model_config,
        "dtype": DTYPES[config.dtype],
        "attn_implementation": config.attention,
        "trust_remote_code": config.trust_remote_code,
    }


def disable_dropout(config: PretrainedConfig) -> None:
    """Every dropout probability becomes 0: log-probs of one token must not differ between two passes."""
    for name, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            disable_dropout(value)
        elif isinstance(value, float) and ("dropout" in name or "pdrop" in name):
            setattr(config, name, 0.0)


def _reentrant(learner: LearnerConfig) -> bool:
    """Which variant of activation checkpointing works under this ZeRO stage.

    ZeRO-3 swaps parameters out between forward and backward, and the non-reentrant variant takes their shapes for an
    error. The reentrant one runs a backward inside the backward, which ZeRO-1 and 2 refuse for a tied embedding
    ("gradient computed twice").
    """
    return learner.zero_stage == 3


def _prepare(model: PreTrainedModel, learner: LearnerConfig) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.config.use_cache = False
    if learner.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": _reentrant(learner)})
    model.train()  # Hugging Face checkpoints activations in training mode only; without dropout the modes agree.


def _refuse_logit_transforms(config: PretrainedConfig) -> None:
    for name in _LOGIT_TRANSFORMS:
        if getattr(config, name, None) not in (None, 1, 1.0):
            raise ValueError(
                f"model.policy: {type(config).__name__} transforms its logits after the head ({name}), which the "
                "learner does not apply; choose another policy"
            )


def _hidden_states(model: PreTrainedModel, inputs: ModelInputs) -> Tensor:
    """(B, L, H) of the last layer, final norm applied."""
    outputs = model.base_model(
        input_ids=inputs.input_ids,
        attention_mask=inputs.attention_mask,
        position_ids=inputs.position_ids,
        use_cache=False,
    )
    return outputs.last_hidden_state


def _gather(hidden: Tensor, columns: Tensor, mask: Tensor) -> Tensor:
    """(B, L, H) at those of the (B, K) columns whose mask is on -> (N, H), row by row."""
    starts = torch.arange(len(columns), device=columns.device)[:, None] * hidden.shape[1]
    return hidden.flatten(0, 1).index_select(0, (starts + columns)[mask])


def _scatter(values: Tensor, mask: Tensor) -> Tensor:
    """(N,) values of the masked-in tokens -> (B, T) float32, 0 elsewhere."""
    return torch.zeros(mask.shape, dtype=torch.float32, device=mask.device).masked_scatter(mask, values.float())


def check_vocabularies(policy: PolicyModel, critic: CriticModel) -> None:
    """Raises ValueError when the critic cannot read the policy's token ids."""
    policy_size = policy.model.get_input_embeddings().num_embeddings
    critic_size = critic.model.get_input_embeddings().num_embeddings
    if critic_size < policy_size:
        raise ValueError(
            f"model.critic has {critic_size} token embeddings, model.policy {policy_size}: the critic reads the "
            "policy's token ids, so it must come from the same family of models"
        )
