"""Config: what is refused, with what words, and what the shipped files come to."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel, ValidationError

from rlhf_cluster.config import Config, RewardComponent
from rlhf_cluster.config_io import ConfigError, all_keys, dump_config, load_config
from rlhf_cluster.config_summary import config_warnings, derived_table
from rlhf_cluster.presets import preset_names

CONFIGS = Path("configs")
TINY = CONFIGS / "tiny_test.yaml"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_config_is_valid_and_survives_a_round_trip(path: Path, tmp_path: Path) -> None:
    config = load_config(path)
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(dump_config(config))
    assert load_config(resolved) == config


def test_all_four_named_configs_ship() -> None:
    names = {path.name for path in CONFIGS.glob("*.yaml")}
    assert {"demo_smollm2.yaml", "tiny_test.yaml", "ppo_7b_single_node.yaml", "ppo_7b_cluster.yaml"} <= names


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("learner.learning_rte=1e-6", ["learner.learning_rte: unknown key", "learner.policy_lr"]),
        ("learning_rate=1e-6", ["learning_rate: unknown key", "learner.policy_lr"]),
        ("learner.num-epochs=2", ["learner.num-epochs: unknown key", "learner.epochs"]),
        ("queue.max_stalenes=2", ["queue.max_stalenes: unknown key", "queue.max_staleness"]),
        ("algorithm.kl.coeff=0.1", ["algorithm.kl.coeff: unknown key", "algorithm.kl.coef"]),
        ("queue.max_staleness=-1", ["queue.max_staleness", "-1"]),
        ("algorithm.lam=1.5", ["algorithm.lam", "1.5"]),
        ("algorithm.clip_low=0", ["algorithm.clip_low"]),
        ("algorithm.kl.controller=adaptive", ["target", "horizon"]),
        ("algorithm.kl.target=0.1", ["do nothing", "controller: adaptive"]),
        ("publish.backend=nccl", ["publish.backend", "cluster.device: cuda"]),
        (
            "rollout.engine.prefix_caching=true",
            ["publish.kv_cache: keep", "older weights", "publish.kv_cache: recompute"],
        ),
        ("rollout.engine.tensor_parallel=2", ["rollout.engine.tensor_parallel", "cluster.device: cuda"]),
        ("queue.group_deadline_s=60", ["rollout.timeout_s 90", "queue.group_deadline_s 60"]),
        ("learner.minibatches=9", ["learner.minibatches 9", "8 samples"]),
        ("model.reward=null", ["kind: model", "model.reward"]),
        ("data.eval_prompts=x.jsonl", ["data.eval_prompts", "evaluation"]),
        ("evaluation.samples_per_prompt=2", ["evaluation", "data.eval_prompts"]),
        ("reward.components=[]", ["reward.components"]),
        ("learner.zero_stage=4", ["learner.zero_stage"]),
        ("checkpoint.keep_last=0", ["checkpoint.keep_last"]),
        ("no_equals_sign", ["section.key=value"]),
        ("run.name.deeper=1", ["run.name holds no keys"]),
    ],
)
def test_a_bad_override_is_refused_naming_file_or_override_and_key(override: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(TINY, [override])
    for word in words:
        assert word in str(refused.value)


GRPO = ["algorithm.name=grpo", "learner.critic_lr=1.65e-6", "learner.critic_pretrain_steps=0"]
ADAPTIVE = ["algorithm.kl.controller=adaptive", "algorithm.kl.target=0.1"]


def test_the_group_config_that_the_next_tests_spoil_is_valid() -> None:
    assert load_config(TINY, GRPO).algorithm.name == "grpo"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        # KL
        (["algorithm.kl.place=both"], ["never into both", "place: reward or place: loss"]),
        (["algorithm.kl.place=[reward, loss]"], ["never into both"]),
        (["algorithm.kl.place=loss"], ["estimator: k1", "place: loss", "gradient is zero in expectation", "k2", "k3"]),
        (["algorithm.kl.coef=0", "algorithm.kl.estimator=full"], ["estimator", "coef: 0"]),
        (
            ["algorithm.kl.coef=0", "algorithm.kl.place=loss", "algorithm.kl.estimator=k3"],
            ["place, estimator", "coef: 0"],
        ),
        (["algorithm.kl.coef=0", *ADAPTIVE, "algorithm.kl.horizon=100"], ["controller", "coef: 0"]),
        ([*ADAPTIVE], ["controller: adaptive", "horizon"]),
        ([*ADAPTIVE, "algorithm.kl.horizon=1.6"], ["algorithm.kl.horizon 1.6", "above 1.6", "8 samples"]),
        (
            [*GRPO, "algorithm.kl.coef=0", "reward.normalize=scale", "reward.clip=null"],
            ["reward.normalize: scale", "algorithm.name: grpo", "normalize: none"],
        ),
        (["algorithm.kl.controller=adaptive", "algorithm.kl.horizon=100"], ["controller: adaptive", "target"]),
        (["algorithm.kl.horizon=100"], ["horizon", "controller: fixed"]),
        # group methods
        (
            [*GRPO, "rollout.samples_per_prompt=1"],
            ["algorithm.name: grpo", "rollout.samples_per_prompt is 1", "at least 2"],
        ),
        *(
            ([*GRPO, f"algorithm.{key}={value}"], [key, "name: grpo", "no critic"])
            for key, value in (("gamma", 0.9), ("lam", 0.9), ("bootstrap_truncated", "false"), ("value_clip", "null"))
        ),
        *(
            ([*GRPO, override], [override.split("=")[0], "algorithm.name: grpo", "no critic"])
            for override in (
                *("learner.critic_lr=1e-3", "learner.critic_decay=linear", "learner.critic_pretrain_steps=3"),
                *("learner.critic_layers=2", "model.critic=models/critic"),
            )
        ),
        (
            [*GRPO, "learner.critic_pretrain_steps=3", "learner.critic_pretrain_loss=0.1"],
            ["learner.critic_pretrain_steps, learner.critic_pretrain_loss", "algorithm.name: grpo"],
        ),
        (
            [*GRPO, "learner.critic_decay=linear", "learner.final_lr_fraction=0.1"],
            ["learner.final_lr_fraction", "learner.policy_decay: constant"],
        ),
        # importance weights
        (["algorithm.proximal=behaviour", "algorithm.importance=token"], ["importance: token", "proximal: behaviour"]),
        (
            ["algorithm.proximal=reference", "algorithm.importance=sequence"],
            ["importance: sequence", "proximal: reference"],
        ),
        (["algorithm.importance=none", "algorithm.importance_cap=3"], ["importance_cap", "importance: none"]),
        (["algorithm.proximal=behaviour", "algorithm.importance_cap=3"], ["importance_cap", "proximal: behaviour"]),
        (
            ["algorithm.importance=sequence", "algorithm.importance_cap=null"],
            ["importance: sequence", "importance_cap"],
        ),
        # losses
        (["algorithm.reduction_constant=100"], ["reduction_constant", "reduction: token_mean", "reduction: constant"]),
        (
            ["algorithm.reduction=sequence_mean", "algorithm.reduction_constant=100"],
            ["reduction_constant", "reduction: sequence_mean"],
        ),
        (["algorithm.entropy.clip=1"], ["algorithm.entropy", "clip", "coef: 0"]),
        (["algorithm.dual_clip=1"], ["algorithm.dual_clip", "1"]),
        (["algorithm.importance_cap=0.5"], ["algorithm.importance_cap", "0.5"]),
        (["algorithm.ptx.coef=0.1"], ["algorithm.ptx.file", "required"]),
        (["algorithm.ptx.file=a.txt", "algorithm.ptx.coef=0"], ["algorithm.ptx.coef"]),
        # learner
        (
            ["learner.target_kl=0.1", "learner.minibatches=1"],
            ["target_kl", "epochs 1, minibatches 1", "learner.epochs"],
        ),
        (
            ["learner.critic_pretrain_loss=0.1", "learner.critic_pretrain_steps=0"],
            ["critic_pretrain_loss", "critic_pretrain_steps: 0"],
        ),
        (["learner.final_lr_fraction=0.1"], ["final_lr_fraction", "policy_decay and critic_decay are constant"]),
        # models
        (
            ["reward.components=[{name: length, kind: length}]", "model.critic=models/critic"],
            ["model.reward is used by nothing", "kind: model"],
        ),
        (
            ["reward.components=[{name: length, kind: length}]", "model.reward=null"],
            ["critic has nothing to start from", "model.critic or model.reward"],
        ),
        (
            [*GRPO, "reward.components=[{name: length, kind: length}]"],
            ["model.reward is used by nothing", "kind: model"],
        ),
    ],
    ids=lambda value: " ".join(value)[-70:] if isinstance(value, list) else value,
)
def test_an_impossible_or_inert_combination_is_refused_naming_its_keys(overrides: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(TINY, overrides)
    for word in words:
        assert word in str(refused.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.kl.place=loss", "algorithm.kl.estimator=k2"],
        ["algorithm.kl.estimator=full"],
        ["algorithm.kl.coef=0"],
        [*ADAPTIVE, "algorithm.kl.horizon=100"],
        ["algorithm.proximal=reference"],
        ["algorithm.importance=sequence"],
        ["algorithm.importance_cap=null"],
        ["algorithm.reduction=constant"],
        ["algorithm.reduction=constant", "algorithm.reduction_constant=100"],
        ["algorithm.entropy.coef=0.1", "algorithm.entropy.clip=1"],
        ["algorithm.ptx.file=a.txt", "algorithm.ptx.coef=0.1"],
        ["learner.target_kl=0.1"],
        ["learner.critic_pretrain_loss=0.1"],
        ["learner.policy_decay=cosine", "learner.final_lr_fraction=0.1"],
        ["learner.critic_decay=linear", "learner.final_lr_fraction=0.1"],
        ["reward.components=[{name: length, kind: length}]"],
        [*GRPO, "model.reward=null", "reward.components=[{name: length, kind: length}]"],
        [*GRPO, "algorithm.advantage_norm=true", "learner.policy_decay=linear", "learner.final_lr_fraction=0.1"],
    ],
    ids=" ".join,
)
def test_a_combination_in_which_every_option_acts_is_accepted(overrides: list[str]) -> None:
    load_config(TINY, overrides)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "reinforce_baseline"])
def test_every_group_method_is_refused_for_groups_of_one(name: str) -> None:
    assert not load_config(TINY, [*GRPO, f"algorithm.name={name}"]).algorithm.uses_critic
    with pytest.raises(ConfigError, match=f"algorithm.name: {name} compares"):
        load_config(TINY, [*GRPO, f"algorithm.name={name}", "rollout.samples_per_prompt=1"])


def test_what_null_stands_for_depends_on_the_method_and_the_proximal_policy() -> None:
    assert load_config(TINY).algorithm.whitens
    assert not load_config(TINY, GRPO).algorithm.whitens
    assert load_config(TINY, [*GRPO, "algorithm.advantage_norm=true"]).algorithm.whitens
    kinds = {
        proximal: load_config(TINY, [f"algorithm.proximal={proximal}"]).algorithm.importance_kind
        for proximal in ("recomputed", "behaviour", "reference")
    }
    assert kinds == {"recomputed": "token", "behaviour": "none", "reference": "none"}


def test_an_error_within_a_section_names_only_the_sources_of_the_keys_it_is_about() -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(TINY, ["learner.epochs=2", "learner.critic_pretrain_loss=0.1", "learner.critic_pretrain_steps=0"])
    assert str(refused.value).startswith(
        "override 'learner.critic_pretrain_loss=0.1' + override 'learner.critic_pretrain_steps=0': learner: "
    )


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([], []),
        (["learner.minibatches=1"], ["learner.epochs 1, learner.minibatches 1", "clip_low, clip_high and dual_clip"]),
        (["learner.minibatches=1", "learner.epochs=2"], []),
        (["learner.minibatches=1", "algorithm.proximal=behaviour"], []),
        (["algorithm.reduction=sequence_mean"], ["algorithm.reduction: sequence_mean", "length bias"]),
        (["algorithm.reduction=constant"], []),
    ],
)
def test_a_doubtful_combination_is_allowed_and_warned_of(overrides: list[str], words: list[str]) -> None:
    warnings = config_warnings(load_config(TINY, overrides))
    assert len(warnings) == (1 if words else 0)
    assert all(word in warning for warning in warnings for word in words)


def test_an_error_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(TINY.read_text() + "\nextra: 1\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml: extra: unknown key"):
        load_config(path)


def test_a_key_given_twice_is_refused_rather_than_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "twice.yaml"
    path.write_text(TINY.read_text() + "\nrun: {name: other, steps: 1}\n")
    with pytest.raises(ConfigError, match="'run' appears twice"):
        load_config(path)


def test_a_missing_file_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: cannot read"):
        load_config(Path("nowhere.yaml"))


@pytest.mark.parametrize(("text", "value"), [("1e-6", 1e-6), ("1E5", 1e5), ("2.5e-3", 2.5e-3), ("5e+2", 500.0)])
def test_scientific_notation_is_a_number(text: str, value: float) -> None:
    assert load_config(TINY, [f"learner.policy_lr={text}"]).learner.policy_lr == value


def test_overrides_are_applied_in_order_and_reach_nested_sections() -> None:
    config = load_config(TINY, ["rollout.engine.max_num_seqs=3", "run.steps=7", "run.steps=9"])
    assert config.rollout.engine.max_num_seqs == 3
    assert config.run.steps == 9


def test_config_is_frozen() -> None:
    config = load_config(TINY)
    with pytest.raises(ValidationError):
        config.run.steps = 3  # type: ignore[misc]


def _sections(model: type[BaseModel]) -> set[type[BaseModel]]:
    found = {model}
    for info in model.model_fields.values():
        for candidate in _models(info.annotation):
            found |= _sections(candidate)
    return found


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models(argument)]


def test_every_section_at_every_level_is_frozen_and_forbids_extras() -> None:
    sections = _sections(Config)
    assert RewardComponent in sections
    assert len(sections) > 15
    for section in sections:
        assert section.model_config.get("extra") == "forbid", section
        assert section.model_config.get("frozen") is True, section


def test_every_field_says_what_it_changes() -> None:
    undocumented = [
        f"{section.__name__}.{name}"
        for section in _sections(Config) - {Config}
        for name, info in section.model_fields.items()
        if not info.description and not _models(info.annotation)
    ]
    assert undocumented == []


def test_the_derived_table_is_worked_out_from_the_config() -> None:
    table = derived_table(load_config(TINY, ["learner.epochs=3", "queue.max_staleness=2"]))
    assert table["samples_a_batch"] == 4 * 2
    assert table["samples_a_minibatch"] == 4
    assert table["optimizer_steps_a_batch"] == 3 * 2
    assert table["optimizer_steps"] == 4 * 3 * 2
    assert table["outstanding_groups_bound"] == (2 + 1) * 4
    # 2 rows a rank and minibatch; 1024 tokens hold 3 rows of 256 + 24 tokens.
    assert table["micro_batches_a_rank"] == 1
    assert derived_table(load_config(TINY, ["learner.micro_batch_tokens=300"]))["micro_batches_a_rank"] == 2


def test_loading_a_config_imports_no_heavy_package() -> None:
    code = (
        "import sys; from pathlib import Path; from rlhf_cluster.config_io import load_config;"
        f"load_config(Path({str(TINY)!r}));"
        "print([m for m in ('torch', 'ray', 'vllm', 'transformers', 'deepspeed') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_the_config_reference_lists_every_key_with_its_description() -> None:
    from docs.generate_config_reference import reference

    page = reference()
    assert Path("docs/config.md").read_text() == page, "run: python -m docs.generate_config_reference"
    assert all(f"`{key}`" in page for key in all_keys() if "." in key)
    assert all(f"`{name}`" in page for name in preset_names())
    assert "One of: token, sequence, none." in page, "choices of a key that may be null"


def test_every_field_is_read_by_the_code() -> None:
    """A field that nothing reads would be accepted and do nothing."""
    sources = [
        path.read_text()
        for package in ("rlhf_cluster", "actors", "learner")
        for path in Path(package).rglob("*.py")
        # These name keys without reading them.
        if path.name not in {"config.py", "config_io.py", "config_keys.py", "config_summary.py", "presets.py"}
        and path.parent.name != "config_sections"
    ]
    # Read inside its section itself, by a property that the code uses instead.
    through_property = {
        "model.reference": "reference_path",
        "algorithm.importance": "importance_kind",
        "algorithm.advantage_norm": "whitens",
    }
    unread = [
        key
        for key in all_keys()
        if not any(re.search(rf"\.{through_property.get(key, key.rsplit('.', 1)[-1])}\b", text) for text in sources)
    ]
    assert unread == []
