"""Policy and critic forward passes over padded or packed micro-batches: log-probs, entropy, KL and values of response
tokens.

Shapes: B samples, T padded response tokens, N response tokens of the micro-batch, H hidden size, V vocabulary. The
model reads R rows of L tokens: R = B samples padded on the right, or R = 1 row with all of them behind one another. In
both layouts position ids start at 0 for each sample and none sees another, so a result does not depend on neighbours.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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

from learner.heads import HEAD_ROWS, Float32Head, LogprobHead, ReferenceRows
from learner.lora import add_adapters
from learner.packed_attention import Segments
from learner.packing_probe import enable_packing
from rlhf_cluster.config import LearnerConfig, ModelConfig

logger = logging.getLogger(__name__)

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}

_LOGIT_TRANSFORMS = ("final_logit_softcapping", "logit_scale", "logits_scaling")


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """One micro-batch on its device.

    Positions are indices into the (R * L) flattened hidden states. The state at one position predicts the token at the
    next. So response token k of a sample that starts at s with P prompt tokens is predicted, and its value read, at
    s + P - 1 + k; the value after the last token stands at that token's own position.
    """

    input_ids: Tensor
    """(R, L) int64."""
    attention_mask: Tensor | None
    """(R, L) int64, 1 on real tokens; None for a packed row, where all are."""
    position_ids: Tensor
    """(R, L) int64, 0, 1, 2, ... from the first token of each sample; 0 on padding."""
    response_ids: Tensor
    """(B, T) int64."""
    response_mask: Tensor
    """(B, T) bool, built from lengths alone."""
    predictor: Tensor
    """(B, T) int64, position of the hidden state before each response token; 0 where there is none."""
    last: Tensor
    """(B,) int64, position of the last token."""
    segments: Segments | None
    """Where the samples lie in a packed row; None for padded rows."""

    @property
    def tokens(self) -> tuple[int, int]:
        """Real tokens, and all slots with padding."""
        slots = self.input_ids.numel()
        return slots if self.attention_mask is None else int(self.attention_mask.sum()), slots


TokenPair = tuple[NDArray[np.int32], NDArray[np.int32]]


def collate(rows: Sequence[TokenPair], device: torch.device, *, packed: bool = False) -> ModelInputs:
    """Lay (prompt ids, response ids) pairs out as one row (``packed``) or as rows padded on the right.

    No rows give one filler row, so that a rank without work still takes part in every collective; its results carry no
    weight.

    Raises:
        ValueError: a prompt without tokens (nothing predicts the first response token).
    """
    if not rows:
        filler = np.zeros(1, dtype=np.int32)
        rows = [(filler, filler)]
    if any(len(prompt) == 0 for prompt, _ in rows):
        raise ValueError("a prompt has no tokens, so nothing predicts its first response token; give it at least one")
    prompt_lengths = np.array([len(prompt) for prompt, _ in rows])
    response_lengths = np.array([len(response) for _, response in rows])
    lengths = prompt_lengths + response_lengths
    samples = [np.concatenate([prompt, response]).astype(np.int64) for prompt, response in rows]
    if packed:
        starts = np.cumsum(lengths) - lengths
        input_ids = np.concatenate(samples)[None]
        position_ids = np.concatenate([np.arange(length) for length in lengths])[None]
        attention_mask = None
    else:
        width = lengths.max()
        starts = np.arange(len(rows)) * width
        input_ids, position_ids = (np.zeros((len(rows), width), dtype=np.int64) for _ in range(2))
        for row, sample in enumerate(samples):
            input_ids[row, : len(sample)] = sample
            position_ids[row, : len(sample)] = np.arange(len(sample))
        attention_mask = (np.arange(width) < lengths[:, None]).astype(np.int64)
    steps = np.arange(max(1, response_lengths.max()))
    response_mask = steps < response_lengths[:, None]
    response_ids = np.zeros(response_mask.shape, dtype=np.int64)
    response_ids[response_mask] = np.concatenate([response for _, response in rows])
    predictor = np.where(response_mask, (starts + prompt_lengths - 1)[:, None] + steps, 0)

    def tensor(array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(device)

    return ModelInputs(
        input_ids=tensor(input_ids),
        attention_mask=None if attention_mask is None else tensor(attention_mask),
        position_ids=tensor(position_ids),
        response_ids=tensor(response_ids),
        response_mask=tensor(response_mask),
        predictor=tensor(predictor),
        last=tensor(starts + lengths - 1),
        segments=Segments.of(lengths.tolist(), device) if packed else None,
    )


class PolicyOutputs(NamedTuple):
    """(B, T) float32, nats, at the temperature asked for, 0 outside ``inputs.response_mask``."""

    logprobs: Tensor
    """log pi(token)"""
    entropy: Tensor | None
    """None where not asked for."""
    kl: Tensor | None
    """KL(policy || reference) over the whole vocabulary; None without a reference."""


class PolicyModel(nn.Module):
    """A causal language model that answers for response tokens only: the LM head never runs on a prompt.

    ``packed``: whether it reads packed micro-batches; it reads padded ones in any case.
    """

    def __init__(
        self, model: PreTrainedModel, *, temperature: float, head_rows: int = HEAD_ROWS, packed: bool = False
    ) -> None:
        super().__init__()
        refuse_logit_transforms(model.config, "policy")
        self.model = model
        self.temperature = temperature
        self.packed = packed
        model.set_output_embeddings(LogprobHead(model.get_output_embeddings(), head_rows))

    def forward(
        self,
        inputs: ModelInputs,
        *,
        with_entropy: bool = False,
        entropy_gradient: bool = False,
        temperature: float | None = None,
        reference: ReferenceRows | None = None,
    ) -> PolicyOutputs:
        """Log-probs, and what else is asked for. All are differentiable but the entropy, which is for the metrics.

        Args:
            with_entropy: also the entropy, at little cost.
            entropy_gradient: the entropy with its gradient.
            temperature: of the softmax; None: the sampling temperature the model was made with.
            reference: rows of these same inputs, for the full KL.

        Raises:
            ValueError: packed inputs to a model that cannot read them, or a reference of another vocabulary.
        """
        hidden = hidden_states(self.model, inputs, packed=self.packed)
        outputs = self.model.get_output_embeddings()(
            hidden.index_select(0, inputs.predictor[inputs.response_mask]),
            inputs.response_ids[inputs.response_mask],
            temperature=self.temperature if temperature is None else temperature,
            with_entropy=with_entropy,
            entropy_gradient=entropy_gradient,
            reference=reference,
        )
        return PolicyOutputs(*(None if each is None else _scatter(each, inputs.response_mask) for each in outputs))


class CriticModel(nn.Module):
    """A sequence classifier with one label, read at every response position instead of once a sequence.

    ``packed``: whether it reads packed micro-batches; it reads padded ones in any case.
    """

    def __init__(self, model: PreTrainedModel, *, packed: bool = False) -> None:
        super().__init__()
        self.model = model
        self.packed = packed

    def forward(self, inputs: ModelInputs) -> tuple[Tensor, Tensor]:
        """(B, T) float32 values of the states before each response token, and the (B,) value after the last token.

        Values are 0 outside ``inputs.response_mask``.

        Raises:
            ValueError: packed inputs to a model that cannot read them.
        """
        hidden = hidden_states(self.model, inputs, packed=self.packed)
        before = inputs.predictor[inputs.response_mask]
        scores = self.model.score(hidden.index_select(0, torch.cat([before, inputs.last]))).squeeze(-1)
        values, bootstrap = scores.split([len(before), len(inputs.last)])
        return _scatter(values, inputs.response_mask), bootstrap


def load_policy(
    path: str, config: ModelConfig, learner: LearnerConfig, *, temperature: float, seed: int = 0
) -> PolicyModel:
    """The causal language model at ``path``, without dropout; with ``learner.lora``, adapters drawn from ``seed``.

    Raises:
        ValueError: adapters on layers that the model lacks, or a head that transforms its logits.
    """
    model = AutoModelForCausalLM.from_pretrained(path, **load_options(path, config))
    packed = prepare(model, learner, f"policy {path}")
    if learner.lora is not None:
        add_adapters(model, learner.lora, seed=seed)
    return PolicyModel(model, temperature=temperature, packed=packed)


def load_critic(path: str, config: ModelConfig, learner: LearnerConfig) -> CriticModel:
    """The sequence classifier at ``path``, without dropout.

    A plain language model gets a head of zeros (all values start at 0, the same on every rank), which is logged.

    Raises:
        ValueError: the folder has another number of labels, or lacks more than the head.
    """
    options = load_options(path, config)
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
    packed = prepare(model, learner, f"critic {path}")
    if learner.critic_layers is not None:
        _train_top_layers(model, learner.critic_layers)
    return CriticModel(model, packed=packed)


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


def load_options(path: str, config: ModelConfig) -> dict[str, Any]:
    """Arguments of ``from_pretrained``: the folder's own config without dropout, our dtype and attention."""
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


def prepare(model: PreTrainedModel, learner: LearnerConfig, name: str) -> bool:
    """Dropout off, no KV cache, packing and activation checkpointing as configured; returns whether it reads packed
    rows. A model that cannot is padded, which one line of the log explains."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.config.use_cache = False
    reason = enable_packing(model) if learner.packing else None
    if reason is not None:
        logger.warning("%s cannot read packed micro-batches and is padded: %s", name, reason)
    if learner.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": _reentrant(learner)})
    model.train()  # Hugging Face checkpoints activations in training mode only; without dropout the modes agree.
    return learner.packing and reason is None


def refuse_logit_transforms(config: PretrainedConfig, role: str) -> None:
    for name in _LOGIT_TRANSFORMS:
        if getattr(config, name, None) not in (None, 1, 1.0):
            raise ValueError(
                f"model.{role}: {type(config).__name__} transforms its logits after the head ({name}), which the "
                f"learner does not apply; choose another {role}"
            )


def hidden_states(model: PreTrainedModel, inputs: ModelInputs, *, packed: bool) -> Tensor:
    """(R * L, H) of the last layer, final norm applied.

    Raises:
        ValueError: packed inputs to a model that cannot read them.
    """
    if inputs.segments is None:
        layout = {"attention_mask": inputs.attention_mask}
    elif packed:
        layout = inputs.segments.model_arguments(model.config._attn_implementation)
    else:
        raise ValueError(f"{type(model).__name__} cannot read packed rows; collate with packed=False")
    outputs = model.base_model(input_ids=inputs.input_ids, position_ids=inputs.position_ids, use_cache=False, **layout)
    return outputs.last_hidden_state.flatten(0, 1)


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
