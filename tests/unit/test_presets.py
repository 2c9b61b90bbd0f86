"""Presets: what they compose to, what an ablation changes, what a wrong one is refused with."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from rlhf_cluster import cli
from rlhf_cluster.config import Config
from rlhf_cluster.config_io import ConfigError, compose_config, load_config
from rlhf_cluster.config_keys import unknown_keys
from rlhf_cluster.presets import load_preset, preset_names

BASES = sorted(Path("configs").glob("*.yaml"))
TINY = Path("configs/tiny_test.yaml")
# Words of the base of the tests: `${model.policy}` and `${model.reward}` stand for these.
SFT, REWARD = "models/tiny/policy", "models/tiny/reward"

PPO_MAX = {
    "reward.normalize": "running",
    "reward.clip": 0.8,
    "algorithm.value_clip": 0.2,
    "algorithm.kl.coef": 0.05,
    "learner.critic_pretrain_steps": 50,
}

# Every arm of the paper: the keys it sets, and whether that is the parent's value already (the control arm).
ABLATIONS: dict[str, dict[str, Any]] = {
    "reward_scaling": {"reward.normalize": "scale"},
    "reward_norm_clip_0_3": {"reward.normalize": "running", "reward.clip": 0.3},
    "reward_norm_clip_0_8": {"reward.normalize": "running", "reward.clip": 0.8},
    "advantage_norm_clip_0_12": {"algorithm.advantage_norm": True, "algorithm.advantage_clip": 0.12},
    "advantage_norm_clip_0_5": {"algorithm.advantage_norm": True, "algorithm.advantage_clip": 0.5},
    "value_clip": {"algorithm.value_clip": 0.2},
    "scores_mixed": {
        "reward.normalize": "running",
        "reward.clip": 0.8,
        "algorithm.advantage_norm": True,
        "algorithm.advantage_clip": 0.5,
        "algorithm.value_clip": 0.2,
    },
    "kl_0_05": {"algorithm.kl.coef": 0.05},
    "kl_0_1": {"algorithm.kl.coef": 0.1},
    "kl_0_2": {"algorithm.kl.coef": 0.2},
    "entropy_bonus": {"algorithm.entropy.coef": 0.01},
    "entropy_bonus_clip": {"algorithm.entropy.coef": 0.01, "algorithm.entropy.clip": 1.0},
    "importance_reference": {"algorithm.proximal": "reference"},
    "critic_reward_model": {"model.critic": REWARD},
    "critic_sft": {"model.critic": SFT},
    "critic_pretrained": {"learner.critic_pretrain_steps": 50},
    "lambda_0": {"algorithm.lam": 0.0},
    "lambda_0_9": {},
    "lambda_1": {"algorithm.lam": 1.0},
    "clip_0_1": {"algorithm.clip_low": 0.1, "algorithm.clip_high": 0.1},
    "clip_0_2": {},
    "clip_0_3": {"algorithm.clip_low": 0.3, "algorithm.clip_high": 0.3},
    "clip_0_4": {"algorithm.clip_low": 0.4, "algorithm.clip_high": 0.4},
    "clip_0_5": {"algorithm.clip_low": 0.5, "algorithm.clip_high": 0.5},
    "grad_clip_off": {"learner.grad_clip": None},
    "grad_clip_0_5": {"learner.grad_clip": 0.5},
    "grad_clip_1": {},
}
CONTROLS = {
    "lambda_0_9": {"algorithm.lam": 0.9},
    "clip_0_2": {"algorithm.clip_low": 0.2, "algorithm.clip_high": 0.2},
    "grad_clip_1": {"learner.grad_clip": 1.0},
}


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


def composed(*presets: str, overrides: tuple[str, ...] = ()) -> dict[str, Any]:
    return flat(load_config(TINY, overrides, presets).model_dump())


def changed(preset: str, parent: str) -> dict[str, Any]:
    before, after = composed(parent), composed(preset)
    return {key: value for key, value in after.items() if before.get(key) != value}


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(("base", "preset"), list(product(BASES, preset_names())), ids=lambda value: Path(value).stem)
def test_every_preset_composes_with_every_shipped_config(base: Path, preset: str) -> None:
    config = load_config(base, presets=[preset])
    assert config.model.policy == load_config(base).model.policy
    assert config.rollout.workers == load_config(base).rollout.workers


def test_the_four_recipes_and_every_arm_of_the_paper_ship_and_nothing_else() -> None:
    assert set(preset_names()) == {"vanilla_ppo", "ppo_max", "grpo", "rloo"} | {
        f"ablation_{name}" for name in ABLATIONS
    }


@pytest.mark.parametrize("name", ABLATIONS)
def test_an_ablation_differs_from_vanilla_ppo_in_exactly_the_keys_it_names(name: str) -> None:
    assert changed(f"ablation_{name}", "vanilla_ppo") == ABLATIONS[name]


@pytest.mark.parametrize("name", CONTROLS)
def test_a_control_arm_names_the_value_that_vanilla_ppo_already_has(name: str) -> None:
    file = load_preset(f"ablation_{name}").files[-1]
    assert flat(dict(file.sections)) == CONTROLS[name]
    assert CONTROLS[name].items() <= composed("vanilla_ppo").items()


def test_ppo_max_is_vanilla_ppo_with_the_parts_that_the_paper_keeps() -> None:
    assert changed("ppo_max", "vanilla_ppo") == PPO_MAX


def test_both_ppo_recipes_train_with_the_rates_and_sizes_of_the_paper() -> None:
    for preset in ("vanilla_ppo", "ppo_max"):
        config = load_config(TINY, presets=[preset])
        assert (config.learner.policy_lr, config.learner.critic_lr) == (5e-7, 1.65e-6)
        assert config.learner.warmup_fraction == 0.1
        assert config.queue.groups_per_batch * config.rollout.samples_per_prompt == 128
        assert 128 / config.learner.minibatches == 32
        assert config.algorithm.lam == 0.9
        assert (config.learner.zero_stage, config.learner.gradient_checkpointing) == (2, True)


@pytest.mark.parametrize("preset", ["grpo", "rloo"])
def test_a_group_preset_trains_as_many_answers_and_steps_a_batch_as_ppo_max(preset: str) -> None:
    ppo, group = load_config(TINY, presets=["ppo_max"]), load_config(TINY, presets=[preset])
    assert group.queue.groups_per_batch * group.rollout.samples_per_prompt == 128
    assert group.learner.updates_a_batch == ppo.learner.updates_a_batch
    assert group.algorithm.name == preset and not group.algorithm.uses_critic


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_file_holds_only_known_keys_and_says_what_it_is_its_source_and_what_to_compare(name: str) -> None:
    path = Path("configs/presets") / f"{name}.yaml"
    sections = yaml.safe_load(path.read_text())
    assert list(unknown_keys({key: sections[key] for key in set(sections) - {"parent", "drop"}})) == []
    assert {"run", "data", "publish", "checkpoint", "cluster", "metrics"}.isdisjoint(sections), "the base knows those"
    header = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert len(header[0]) > 20
    assert any(line.startswith("# Source: ") for line in header)
    assert any(line.startswith("# Compare with: ") for line in header)


def test_layers_are_laid_on_in_order_base_presets_overrides(tmp_path: Path) -> None:
    first = write(tmp_path / "first.yaml", "learner: {epochs: 3, minibatches: 4}\nrun: {steps: 5}")
    second = write(tmp_path / "second.yaml", "learner: {epochs: 5}\nrun: {steps: 6}")
    config = load_config(TINY, ["run.steps=7"], [first, second])
    assert (config.learner.minibatches, config.learner.epochs, config.run.steps) == (4, 5, 7)
    assert config.learner.policy_lr == 1e-4, "a key that no preset names stays the base's"
    assert load_config(TINY, [], [second, first]).learner.epochs == 3


def test_the_algorithm_section_is_replaced_whole_and_left_alone_by_a_preset_without_one(tmp_path: Path) -> None:
    base = tmp_path / "base.yaml"
    base.write_text(TINY.read_text() + "\nalgorithm: {gamma: 0.5, kl: {coef: 0.7}}\n")
    lam = write(tmp_path / "lam.yaml", "algorithm: {lam: 0.3}")
    replaced = load_config(base, [], [lam]).algorithm
    assert (replaced.lam, replaced.gamma, replaced.kl.coef) == (0.3, 1.0, 0.05)
    kept = load_config(base, [], [write(tmp_path / "steps.yaml", "run: {steps: 2}")]).algorithm
    assert (kept.gamma, kept.kl.coef) == (0.5, 0.7)


def test_a_second_preset_replaces_the_algorithm_of_the_first_too() -> None:
    assert composed("ppo_max", "ablation_kl_0_1") == composed("ablation_kl_0_1")


def test_a_child_is_merged_over_its_parent_also_in_the_algorithm_section(tmp_path: Path) -> None:
    write(tmp_path / "parent.yaml", "algorithm: {lam: 0.3, kl: {estimator: k2, coef: 0.1}}\nlearner: {epochs: 2}")
    child = write(tmp_path / "child.yaml", "parent: parent.yaml\nalgorithm: {kl: {coef: 0.2}}")
    algorithm = load_config(TINY, [], [child]).algorithm
    assert (algorithm.lam, algorithm.kl.estimator, algorithm.kl.coef) == (0.3, "k2", 0.2)


def test_dropped_keys_go_back_to_their_defaults_and_absent_ones_are_no_matter() -> None:
    base = ["model.critic=models/other", "learner.critic_layers=3"]
    with pytest.raises(ConfigError, match=r"model\.critic"):
        load_config(TINY, base, ["grpo"])
    config = load_config(TINY, [], ["grpo"])
    assert config.learner.critic_lr == Config.model_fields["learner"].default.critic_lr
    assert config.learner.critic_pretrain_steps == 0


def test_a_whole_section_can_be_dropped(tmp_path: Path) -> None:
    base = tmp_path / "base.yaml"
    base.write_text(TINY.read_text().replace("max_prompt_tokens", "eval_prompts: x.jsonl\n  max_prompt_tokens"))
    with base.open("a") as file:
        file.write("\nevaluation: {samples_per_prompt: 2}\n")
    preset = write(tmp_path / "blind.yaml", "drop: [evaluation, data.eval_prompts]")
    assert load_config(base).evaluation is not None
    assert load_config(base, [], [preset]).evaluation is None


def test_a_reference_follows_an_override_of_the_key_it_names_and_gives_way_to_one_of_its_own() -> None:
    assert composed("ablation_critic_sft", overrides=("model.policy=other",))["model.critic"] == "other"
    assert composed("ablation_critic_sft", overrides=("model.critic=mine",))["model.critic"] == "mine"


def test_a_reference_to_a_key_without_a_value_is_refused_with_the_key_to_set() -> None:
    with pytest.raises(
        ConfigError, match=r"preset ablation_critic_reward_model: model\.critic is \$\{model\.reward\}.*set"
    ):
        load_config(TINY, ["model.reward=null"], ["ablation_critic_reward_model"])


def test_in_a_base_file_or_an_override_dollar_braces_are_text() -> None:
    assert load_config(TINY, ["run.name=${model.policy}"]).run.name == "${model.policy}"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("learner: {policy_lrr: 1}", ["preset {path}: learner.policy_lrr: unknown key", "learner.policy_lr?"]),
        ("algoritm: {lam: 1}", ["preset {path}: algoritm: unknown key", "algorithm"]),
        ("reward: {components: [{nam: x, kind: model}]}", ["reward.components.0.nam: unknown key", "name"]),
        ("drop: [learner.critic_lrr]", ["preset {path}: drop: learner.critic_lrr: unknown key", "learner.critic_lr?"]),
        ("drop: learner.critic_lr", ["drop: must be a list of section.key"]),
        ("model:\n  critic: ${model.polcy}", ["${...}: model.polcy: unknown key", "model.policy?"]),
        ("parent: nothing", ["preset 'nothing' is unknown"]),
        ("parent: 3", ["parent: must be the name of a preset"]),
        ("parent: wrong.yaml", ["parent: wrong.yaml has this preset among its own parents"]),
        ("- a list", ["the file must hold sections"]),
        ("learner: {epochs: 2", ["not valid YAML"]),
        ("learner: {epochs: 0}", ["preset {path}: learner.epochs", "got 0"]),
    ],
)
def test_a_wrong_preset_is_refused_by_name_and_key(text: str, words: list[str], tmp_path: Path) -> None:
    path = write(tmp_path / "wrong.yaml", text)
    with pytest.raises(ConfigError) as refused:
        load_config(TINY, [], [path])
    for word in words:
        assert word.replace("{path}", path) in str(refused.value)
    assert str(TINY) not in str(refused.value)


def test_an_unknown_preset_is_refused_with_the_nearest_name_and_all_of_them() -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(TINY, presets=["ppo-mux"])
    assert "did you mean ppo_max?" in str(refused.value)
    assert all(name in str(refused.value) for name in preset_names())


def test_a_preset_path_that_is_not_there_is_refused_by_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.yaml: cannot read"):
        load_config(TINY, presets=[str(tmp_path / "gone.yaml")])


def test_an_error_names_the_layers_that_its_values_came_from(tmp_path: Path) -> None:
    preset = write(tmp_path / "mine.yaml", "learner: {minibatches: 9}")
    with pytest.raises(ConfigError) as refused:
        load_config(TINY, ["run.steps=2"], [preset])
    assert str(refused.value).startswith(
        f"{TINY} + preset {preset}: config: learner.minibatches 9 exceeds the 8 samples"
    )
    with pytest.raises(ConfigError) as refused:
        load_config(TINY, ["learner.minibatches=200", "run.steps=2"], ["ppo_max"])
    assert str(refused.value).startswith("preset vanilla_ppo + override 'learner.minibatches=200': ")


def test_a_missing_key_is_asked_of_the_base_file(tmp_path: Path) -> None:
    base = tmp_path / "short.yaml"
    base.write_text(TINY.read_text().replace(", steps: 4", ""))
    with pytest.raises(ConfigError, match=r"^\S*short\.yaml: run\.steps: required and missing"):
        load_config(base, [], ["ppo_max"])


def test_a_composition_tells_what_each_layer_changed() -> None:
    base, preset, override = compose_config(TINY, ["run.steps=9"], ["rloo"]).layers
    assert (base.source, base.changes) == (str(TINY), ())
    assert preset.source == "preset rloo"
    assert "learner.minibatches: 4 (was 2)" in preset.changes
    assert "learner.critic_pretrain_steps: the default (was 2)" in preset.changes
    assert 'algorithm.name: "rloo"' in preset.changes
    assert (override.source, override.changes) == ("override run.steps=9", ("run.steps: 9 (was 4)",))


def test_dry_run_shows_the_composition_as_comments_over_the_resolved_config() -> None:
    arguments = ["train", str(TINY), "--preset", "ppo_max", "run.steps=9", "--dry-run"]
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 0
    shown = result.stdout.partition("What this comes to")[0]
    assert "# preset ppo_max on vanilla_ppo\n" in shown and "#   run.steps: 9 (was 4)\n" in shown
    assert Config.model_validate(yaml.safe_load(shown)) == load_config(TINY, ["run.steps=9"], ["ppo_max"])


def test_a_doubtful_combination_is_warned_of_on_standard_error() -> None:
    quiet = CliRunner().invoke(cli.app, ["train", str(TINY), "--dry-run"])
    assert (quiet.exit_code, quiet.stderr) == (0, "")
    warned = CliRunner().invoke(cli.app, ["train", str(TINY), "learner.minibatches=1", "--dry-run"])
    assert warned.exit_code == 0
    assert warned.stderr.startswith("warning: one optimizer step a batch") and "warning:" not in warned.stdout


def test_the_command_presets_lists_each_with_the_first_line_of_its_header() -> None:
    result = CliRunner().invoke(cli.app, ["presets"])
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines] == preset_names()
    assert all(len(line.split()) > 4 for line in lines)


@pytest.mark.parametrize("command", ["train", "eval", "submit"])
def test_an_unknown_preset_ends_a_command_with_2_before_anything_starts(command: str) -> None:
    result = CliRunner().invoke(cli.app, [command, str(TINY), "--preset", "nothing"])
    assert result.exit_code == 2
    assert "preset 'nothing' is unknown" in result.stderr
