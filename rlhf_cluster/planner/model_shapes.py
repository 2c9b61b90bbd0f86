"""How large a model is, from its Hugging Face folder: dimensions from config.json, counts from safetensors headers.

No weight is read. A folder with config.json alone will do for the usual decoder (attention, gated MLP, two norms a
layer): its parameters are counted by formula then.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from safetensors import safe_open

from rlhf_cluster.config_yaml import ConfigError

Kind = Literal["embedding", "head", "attention", "mlp", "norm", "other"]

# Families spell the same parts differently; the first pattern that a name matches decides.
_KINDS: tuple[tuple[str, Kind], ...] = (
    (r"lm_head|embed_out|(^|\.)score\.", "head"),
    (r"embed|\bwte\b|\bwpe\b", "embedding"),
    (r"norm|\bln_|layernorm", "norm"),
    (r"attn|attention", "attention"),
    (r"mlp|feed_forward|expert", "mlp"),
)
# Old checkpoints carry this derived buffer; no model has it as a weight.
_NO_WEIGHT = re.compile(r"rotary_emb\.inv_freq$")
_SPELLINGS: Mapping[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head"),
    "vocabulary": ("vocab_size",),
}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Dimensions of a decoder and how many parameters of each kind it has. A tied head has none of its own."""

    layers: int
    hidden: int
    heads: int
    key_value_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied: bool
    parameters: Mapping[Kind, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Parameters."""
        return sum(self.parameters.values())

    @property
    def per_layer(self) -> float:
        """Parameters of one layer: what is neither embedding nor head nor the final norm."""
        body = sum(count for kind, count in self.parameters.items() if kind not in ("embedding", "head"))
        return (body - self.hidden) / self.layers

    def kv_bytes_per_token(self, element: int) -> int:
        """KV cache of one token over all layers; ``element``: bytes of a number."""
        return 2 * self.layers * self.key_value_heads * self.head_dim * element

    def classifier(self) -> ModelShape:
        """The same body with one output instead of a vocabulary of them: a reward model or critic."""
        return ModelShape(
            self.layers,
            self.hidden,
            self.heads,
            self.key_value_heads,
            self.head_dim,
            self.intermediate,
            self.vocabulary,
            False,
            {**self.parameters, "head": self.hidden},
        )

    def adapters(self, rank: int, targets: Collection[str] | None) -> int:
        """Parameters of adapters of ``rank`` on the linear layers called ``targets``, None: on all (``learner.lora``).

        By the formula of the usual decoder; a name that it lacks counts as its largest layer.
        """
        width, key_values = self.heads * self.head_dim, self.key_value_heads * self.head_dim
        sides = {
            "q_proj": self.hidden + width,
            "k_proj": self.hidden + key_values,
            "v_proj": self.hidden + key_values,
            "o_proj": self.hidden + width,
            "gate_proj": self.hidden + self.intermediate,
            "up_proj": self.hidden + self.intermediate,
            "down_proj": self.hidden + self.intermediate,
        }
        wanted = sides if targets is None else targets
        return self.layers * rank * sum(sides.get(name, max(sides.values())) for name in wanted)

    def top_layers(self, count: int) -> int:
        """Parameters of the topmost ``count`` layers, the final norm and the head (``learner.critic_layers``)."""
        return round(self.per_layer * min(count, self.layers)) + self.hidden + self.parameters.get("head", 0)


def read_shape(folder: str, key: str) -> ModelShape:
    """The shape of the model in ``folder``; ``key`` is the setting that names it.

    Raises:
        ConfigError: no folder, no config.json, or one that lacks a dimension.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ConfigError(
            f"{key}: {folder} has no config.json here; rlhf plan needs the model folder, or its config.json alone"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{key}: {path} is not valid JSON: {error}") from None
    dimensions = _dimensions(config.get("text_config") or config, f"{key}: {path}")
    tied = bool(config.get("tie_word_embeddings", False))
    counts = _counted(Path(folder), tied) or _by_formula(dimensions, tied, config, f"{key}: {folder}")
    return ModelShape(**dimensions, tied=tied and not counts.get("head"), parameters=counts)


def count_parameters(folder: Path) -> int:
    """Parameters in the weight files of a model folder, a tied head once."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return sum(_counted(folder, bool(config.get("tie_word_embeddings", False))).values())


def _dimensions(config: Mapping[str, Any], where: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, spellings in _SPELLINGS.items():
        value = next((config[spelling] for spelling in spellings if config.get(spelling)), None)
        if value is None:
            raise ConfigError(f"{where} has none of {', '.join(spellings)}")
        found[name] = int(value)
    found["key_value_heads"] = int(config.get("num_key_value_heads") or found["heads"])
    found["head_dim"] = int(config.get("head_dim") or found["hidden"] // found["heads"])
    found["intermediate"] = int(config.get("intermediate_size") or config.get("n_inner") or 4 * found["hidden"])
    return found


def _counted(folder: Path, tied: bool) -> dict[Kind, int]:
    """Parameters by kind from the headers of all weight files; empty without files."""
    counts: dict[Kind, int] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(str(file), framework="numpy") as opened:
            for name in opened.keys():  # noqa: SIM118 - a safetensors file is no dict
                kind = _kind(name)
                if _NO_WEIGHT.search(name) or (tied and kind == "head" and not name.startswith("score")):
                    continue
                counts[kind] = counts.get(kind, 0) + math.prod(opened.get_slice(name).get_shape())
    return counts


def _kind(name: str) -> Kind:
    return next((kind for pattern, kind in _KINDS if re.search(pattern, name)), "other")


def _by_formula(size: Mapping[str, int], tied: bool, config: Mapping[str, Any], where: str) -> dict[Kind, int]:
    if any(config.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        raise ConfigError(f"{where} is a mixture of experts without weight files; its parameters cannot be counted")
    layers, hidden, width = size["layers"], size["hidden"], size["heads"] * size["head_dim"]
    vocabulary = size["vocabulary"] * hidden
    counts: dict[Kind, int] = {
        "embedding": vocabulary,
        "attention": layers * 2 * hidden * (width + size["key_value_heads"] * size["head_dim"]),
        "mlp": layers * 3 * hidden * size["intermediate"],
        "norm": (2 * layers + 1) * hidden,
    }
    if not tied:
        counts["head"] = vocabulary
    return counts
