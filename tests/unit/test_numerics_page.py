"""docs/numerics.md keeps up with the config and the presets, and its numbers are those of the code."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from rlhf_cluster.algorithms.losses import reduce_loss, token_weights
from rlhf_cluster.config import Config
from rlhf_cluster.config_keys import all_keys
from rlhf_cluster.presets import preset_names

PAGE = Path("docs/numerics.md").read_text()
# Keys of the learner that change time and memory alone.
NOT_NUMERIC = {
    *("learner.ranks", "learner.zero_stage", "learner.micro_batch_tokens", "learner.packing"),
    *("learner.gradient_checkpointing", "learner.cpu_threads", "learner.timeout_s"),
    "learner.stall_timeout_s",
}
ALSO_NUMERIC = {
    *("rollout.temperature", "reward.normalize", "reward.clip"),
    *("guardrails.max_skipped_steps", "guardrails.max_unscorable_fraction"),
}


def model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for found in map(model_in, get_args(annotation)) if found is not None), None)


def default_of(key: str) -> Any:
    section: type[BaseModel] = Config
    *parents, name = key.split(".")
    for parent in parents:
        found = model_in(section.model_fields[parent].annotation)
        assert found is not None, key
        section = found
    default = section.model_fields[name].default
    return "required" if default is PydanticUndefined else default


def shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def knob_rows() -> dict[str, str]:
    table = PAGE.partition("## 11. ")[2].partition("## 12. ")[0]
    return dict(re.findall(r"^\| `([a-z_.]+)` \| (\S+) \| \d+ \|$", table, re.MULTILINE))


def test_every_numeric_knob_is_listed_with_its_default() -> None:
    sections = {"algorithm.kl", "algorithm.entropy"}
    numeric = {key for key in all_keys() if key.startswith(("algorithm.", "learner."))} - sections - NOT_NUMERIC
    assert set(knob_rows()) == numeric | ALSO_NUMERIC
    assert knob_rows() == {key: shown(default_of(key)) for key in knob_rows()}


def test_every_knob_is_explained_in_the_section_that_its_row_names() -> None:
    sections = dict(re.findall(r"^## (\d+)\. [^\n]*\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
    rows = re.findall(r"^\| `([a-z_.]+)` \| \S+ \| (\d+) \|$", sections["11"], re.MULTILINE)
    missing = [key for key, number in rows if not re.search(rf"\b{key.split('.')[-1]}\b", sections[number])]
    assert missing == []


def test_every_key_and_every_preset_that_the_page_names_exists_and_no_preset_is_left_out() -> None:
    tops = "|".join(Config.model_fields)
    assert set(re.findall(rf"`((?:{tops})\.[a-z_.]+)", PAGE)) <= set(all_keys())
    named = set(re.findall(r"`((?:ablation_|ppo_max|vanilla_ppo)[a-z0-9_]*)`", PAGE))
    assert named | {"grpo", "rloo"} == set(preset_names())


@pytest.mark.parametrize(("mode", "constant"), [("sequence_mean", None), ("token_mean", None), ("constant", 1000.0)])
def test_the_length_bias_table_is_what_the_reductions_weigh(mode: str, constant: float | None) -> None:
    row = re.search(rf"^\| `{mode}`[^|]*\| (-[\d.]+) \| (-[\d.]+) \|", PAGE, re.MULTILINE)
    assert row is not None
    mask = torch.arange(1000) < torch.tensor([[10], [1000]])
    weights = token_weights(mask, mode, constant=constant)  # type: ignore[arg-type]
    for stated, weight in zip(row.groups(), weights[:, 0].tolist(), strict=True):
        assert float(stated) == pytest.approx(-weight, rel=1e-2)


@pytest.mark.parametrize(("mode", "constant"), [("token_mean", None), ("sequence_mean", None), ("constant", 8.0)])
def test_the_reduction_example_is_what_the_code_gives(mode: str, constant: float | None) -> None:
    row = re.search(rf"^\| `{mode}`[^|]*\| `1 /[^|]*\| ([\d.]+) \|", PAGE, re.MULTILINE)
    assert row is not None
    losses = torch.tensor([[2.0, 2.0, 2.0, 2.0], [10.0, 0.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]])
    reduced = reduce_loss(losses, mask, mode, constant=constant)  # type: ignore[arg-type]
    assert float(row[1]) == pytest.approx(float(reduced))


def test_a_mismatch_of_0_012_nats_a_token_is_a_ratio_of_3_3_over_100_tokens() -> None:
    assert "0.012 nats a token over 100 tokens is exp(1.2) = 3.3" in " ".join(PAGE.split())
    assert math.exp(0.012 * 100) == pytest.approx(3.3, abs=0.05)
