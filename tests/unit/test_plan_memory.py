"""The memory ledger: counts worked out by hand, and the measured peaks of docs/planning.md planned again."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from actors import reference_scorer
from learner import engine, heads, weight_publisher
from rlhf_cluster.config import Config
from rlhf_cluster.config_io import ConfigError, load_config
from rlhf_cluster.planner import activations, learner_memory, memory
from rlhf_cluster.planner.activations import Pass, kept_by_a_layer, training_head, training_pass
from rlhf_cluster.planner.advice import missing_bytes, remedy, shortages
from rlhf_cluster.planner.learner_memory import engine_memory
from rlhf_cluster.planner.memory import GIB, MIB, Ledger, Shapes, plan_memory, read_shapes
from rlhf_cluster.planner.model_shapes import ModelShape, count_parameters, read_shape
from tests.tiny_models import build_tiny_policy, build_tiny_reward_model

ROOT = Path(__file__).resolve().parents[2]

SMOLLM2 = {
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}
LLAMA_8B = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}


def folder(path: Path, config: dict[str, Any]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder(tmp_path_factory.mktemp("smollm2"), SMOLLM2)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder(tmp_path_factory.mktemp("llama"), LLAMA_8B)


def planned(config: Config, gpu_gib: float = 0.0) -> tuple[Ledger, Shapes]:
    shapes = read_shapes(config)
    return plan_memory(config, shapes, gpu_bytes=gpu_gib * GIB), shapes


# -- model shapes


def test_parameters_are_counted_from_the_headers_by_kind_and_a_tied_head_once(tmp_path: Path) -> None:
    policy = read_shape(str(build_tiny_policy(tmp_path / "policy")), "model.policy")
    assert policy.parameters == {
        "embedding": 259 * 64,
        "attention": 2 * 4 * 64 * 64,
        "mlp": 2 * 3 * 64 * 128,
        "norm": 5 * 64,
    }
    assert policy.tied
    assert (policy.layers, policy.heads, policy.key_value_heads, policy.head_dim) == (2, 2, 2, 32)
    untied = read_shape(str(build_tiny_policy(tmp_path / "untied", tied=False)), "model.policy")
    assert untied.total - policy.total == untied.parameters["head"] == 259 * 64
    assert count_parameters(tmp_path / "untied") == untied.total


def test_a_reward_model_has_one_output_instead_of_a_vocabulary_of_them(tmp_path: Path) -> None:
    reward = read_shape(str(build_tiny_reward_model(tmp_path / "reward")), "model.reward")
    assert reward.parameters["head"] == 64
    assert reward.classifier().total == reward.total
    policy = read_shape(str(build_tiny_policy(tmp_path / "untied", tied=False)), "model.policy")
    assert policy.classifier().total == reward.total
    # The top layer has 4 x 64 x 64 + 3 x 64 x 128 and two norms; then come the final norm and the head.
    assert reward.top_layers(1) == 16384 + 24576 + 128 + 64 + 64


def test_a_config_alone_gives_the_published_sizes(smollm2: Path, llama: Path) -> None:
    assert read_shape(str(smollm2), "model.policy").total == 134_515_008
    assert read_shape(str(llama), "model.policy").total == 8_030_261_248
    # 32 layers of 2 x 8 heads of 128 features in bfloat16.
    assert read_shape(str(llama), "model.policy").kv_bytes_per_token(2) == 131_072


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"model\.policy: .* has no config\.json here"),
        ("{", r"model\.policy: .* is not valid JSON"),
        (json.dumps({"hidden_size": 8}), "has none of num_hidden_layers, n_layer"),
        (json.dumps({**LLAMA_8B, "num_local_experts": 8}), "mixture of experts without weight files"),
    ],
)
def test_a_folder_that_tells_no_size_is_refused_by_name(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_shape(str(tmp_path), "model.policy")


# -- one engine under DeepSpeed


@pytest.mark.parametrize(
    ("stage", "element", "ranks", "expected"),
    [
        # (weights, optimizer, gradients with the bucket, copies of a step), bytes of 100 parameters all trained.
        (0, 2, 4, (200, 1200, 200, 400)),
        (0, 4, 4, (400, 800, 400, 400)),
        (1, 2, 4, (200, 300, 200 + 200, 150)),
        (1, 4, 4, (400, 300, 400 + 400, 100)),
        (2, 2, 4, (200, 300, 50, 150)),
        (3, 2, 4, (50 + 200, 300, 50 + 200, 100)),
        (3, 4, 4, (100 + 400, 300, 100 + 400, 0)),
    ],
)
def test_states_of_each_zero_stage(stage: int, element: int, ranks: int, expected: tuple[float, ...]) -> None:
    found = engine_memory(100, 100, ranks=ranks, stage=stage, element=element, on_gpu=False)
    assert (found.weights, found.optimizer, found.gradients, found.step) == expected


def test_frozen_parameters_have_weights_and_nothing_else() -> None:
    found = engine_memory(100, 10, ranks=1, stage=1, element=2, on_gpu=False)
    assert (found.weights, found.optimizer, found.gradients, found.step) == (200, 120, 20 + 20, 60)


def test_on_a_gpu_bfloat16_gradients_add_up_in_float32() -> None:
    on_cpu, on_gpu = (engine_memory(100, 100, ranks=2, stage=2, element=2, on_gpu=gpu) for gpu in (False, True))
    assert on_gpu.gradients - on_cpu.gradients == 4 * 50


# -- activations

SMALL = ModelShape(
    layers=3, hidden=8, heads=2, key_value_heads=1, head_dim=4, intermediate=16, vocabulary=100, tied=True
)


def test_a_layer_keeps_what_its_docstring_lists() -> None:
    # bfloat16, 10 slots, longest 5, eager: norms 2 x (4 x 8 + 2 x 8), inputs 2 x 2 x 8, attention 2 x (2 + 2) x 4,
    # scores 2 x 2 x 5, output 2 x 2 x 4, MLP 4 x 2 x 16.
    run = Pass(slots=10, longest=5, element=2, eager=True)
    assert kept_by_a_layer(SMALL, run) == 10 * (96 + 32 + 32 + 20 + 16 + 128)
    # A fused attention keeps its output and a float32 sum a head instead of the scores.
    assert kept_by_a_layer(SMALL, Pass(10, 5, 2, eager=False)) == 10 * (96 + 32 + 32 + 16 + 8 + 16 + 128)


def test_checkpointing_keeps_one_layer_and_the_inputs_of_all() -> None:
    run = Pass(slots=10, longest=5, element=2, eager=True)
    whole = training_pass(SMALL, run, checkpointing=False, trained_layers=3)
    less = training_pass(SMALL, run, checkpointing=True, trained_layers=3)
    assert whole - less == 2 * kept_by_a_layer(SMALL, run) - 3 * 10 * 8 * 2
    assert training_pass(SMALL, run, checkpointing=False, trained_layers=1) == whole - 2 * kept_by_a_layer(SMALL, run)


def test_logits_are_those_of_one_chunk_of_rows_and_of_a_reference_beside_them() -> None:
    assert training_head(SMALL, 10, 2, reference=False) == 10 * 100 * 2 + 100 * 8 * 2
    assert training_head(SMALL, 5000, 2, reference=True) == 2 * 1024 * 100 * 2 + 100 * 8 * 2


def test_the_constants_are_those_of_the_code_they_speak_of() -> None:
    assert activations.HEAD_ROWS == heads.HEAD_ROWS
    assert activations.SCORER_LOGIT_ROWS == reference_scorer._LOGIT_ROWS
    assert learner_memory.BUCKET_ELEMENTS == engine._BUCKET_ELEMENTS
    assert memory._SNAPSHOTS == weight_publisher.KEPT_SNAPSHOTS + 1


# -- against measurements


def measured_ranks() -> list[dict[str, str]]:
    page = (ROOT / "docs" / "planning.md").read_text()
    table = page.partition("<!-- ranks -->")[2].partition("<!-- /ranks -->")[0].strip().splitlines()
    names, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in [table[0], *table[2:]])
    return [dict(zip(names, row, strict=True)) for row in rows]


@pytest.mark.parametrize("row", measured_ranks(), ids=lambda row: "-".join(row.values()))
def test_a_learner_rank_is_planned_within_a_tenth_of_what_was_measured(row: dict[str, str], smollm2: Path) -> None:
    model = read_shape(str(smollm2), "model.policy")
    element = 2 if row["dtype"] == "bfloat16" else 4
    slots = int(row["slots"])
    states = engine_memory(
        model.total, model.total, ranks=int(row["ranks"]), stage=int(row["ZeRO"]), element=element, on_gpu=False
    )
    run = Pass(slots, int(row["longest"]), element, eager=row["attention"] == "eager")
    work = training_pass(model, run, checkpointing=row["checkpointing"] == "yes", trained_layers=model.layers)
    work += training_head(model, slots // 2, element, reference=False)
    # Measured without Ray's part of the process.
    base = (memory.PROCESS_MIB["learner rank"] - 56) * MIB
    total = base + states.weights + states.optimizer + states.gradients + states.step + work
    assert total / MIB == pytest.approx(int(row["measured MiB"]), rel=0.1)


# -- the ledger


def demo(smollm2: Path, *overrides: str) -> Config:
    models = (f"model.policy={smollm2}", f"model.reward={smollm2}")
    return load_config(ROOT / "configs" / "demo_smollm2.yaml", [*models, *overrides])


def node(llama: Path, *overrides: str) -> Config:
    models = (f"model.policy={llama}", f"model.reward={llama}")
    return load_config(ROOT / "configs" / "ppo_7b_single_node.yaml", [*models, *overrides])


def test_the_demo_is_planned_within_a_tenth_of_its_measured_processes(smollm2: Path) -> None:
    ledger, _ = planned(demo(smollm2))
    # The folder of this test has no tokenizer.json: 42 MB a copy, two of them in the worker and the reward scorer.
    measured = {
        "engine": 2097,
        "rollout worker": 733 - 81,
        "reward scorer": 976 - 81,
        "reference scorer": 1071,
        "learner rank": 5229,
        "driver": 539 - 40,
    }
    for role, mib in measured.items():
        assert ledger.process(role).total / MIB == pytest.approx(mib, rel=0.11), role


def test_pages_that_processes_share_are_counted_once(smollm2: Path) -> None:
    ledger, _ = planned(demo(smollm2))
    on_host = [process for process in ledger.processes if process.device == "host"]
    apart = sum(process.count * process.total for process in on_host)
    # Five torch processes share 170 MiB each, the driver 80, Ray 220; the largest stays.
    assert apart - ledger.host_bytes == pytest.approx((5 * 170 + 80 + 220 - 220) * MIB)


def test_a_method_without_a_critic_and_without_a_reward_model_needs_neither(smollm2: Path) -> None:
    ppo, _ = planned(demo(smollm2))
    grpo = load_config(
        ROOT / "configs" / "demo_smollm2.yaml",
        [
            f"model.policy={smollm2}",
            "model.reward=null",
            "algorithm={name: grpo}",
            "reward.components=[{name: length, kind: length}]",
            "learner.critic_pretrain_steps=0",
            "learner.critic_layers=null",
            "learner.critic_lr=1.65e-6",
        ],
    )
    ledger, shapes = planned(grpo)
    assert (shapes.reward, shapes.critic) == (None, None)
    assert ledger.process("reward scorer").parts.get("weights", 0.0) == 0.0
    weights = 2 * 134_515_008
    assert ledger.process("learner rank").parts["weights"] == weights
    # The critic's body is the policy's; its output of 576 numbers comes on top.
    assert ppo.process("learner rank").parts["weights"] == 2 * weights + 2 * 576


def test_a_reference_inside_the_learner_adds_its_weights(smollm2: Path) -> None:
    ordinary, _ = planned(demo(smollm2))
    full, _ = planned(demo(smollm2, "algorithm.kl.estimator=full"))
    added = full.process("learner rank").parts["weights"] - ordinary.process("learner rank").parts["weights"]
    assert added == 2 * 134_515_008


def test_adapters_of_the_policy_alone_have_gradients_masters_and_moments(smollm2: Path) -> None:
    overrides = ["learner.lora={rank: 16}", "learner.critic_layers=1"]
    whole, _ = planned(demo(smollm2, overrides[1]))
    adapted, shapes = planned(demo(smollm2, *overrides))
    # 30 layers, rank 16: q and o 576 + 576 each, k and v 576 + 192 each, three of the MLP 576 + 1536 each.
    adapters = 30 * 16 * (2 * 1152 + 2 * 768 + 3 * 2112)
    before, after = (ledger.process("learner rank").parts for ledger in (whole, adapted))
    assert after["weights"] - before["weights"] == 2 * adapters
    # Masters and two moments, float32.
    assert before["optimizer"] - after["optimizer"] == 12 * (134_515_008 - adapters)
    assert after["gradients"] < before["gradients"] / 5
    assert shapes.policy.adapters(16, ("q_proj",)) == 30 * 16 * 1152


def test_adapters_are_advised_where_nothing_cheaper_makes_it_fit(smollm2: Path) -> None:
    config = demo(smollm2)
    cure = remedy(config, planned(config)[1], 8 * GIB)
    assert cure.fits
    assert cure.changes[-1].overrides == ("learner.lora={rank: 16}",)
    overrides = [override for change in cure.changes for override in change.overrides]
    again, _ = planned(demo(smollm2, *overrides))
    assert again.host_bytes <= 8 * GIB


def test_an_engine_on_gpus_has_its_share_of_the_weights_and_what_is_left_as_cache(llama: Path) -> None:
    ledger, _ = planned(node(llama, "rollout.engine.tensor_parallel=2"), 80)
    engine_row = ledger.process("engine")
    assert engine_row.count == 4
    assert engine_row.parts["weights"] == 8_030_261_248
    assert engine_row.total == pytest.approx(0.9 * 80 * GIB)
    # Half of 131,072 bytes a token lies on each of the two.
    assert ledger.kv.tokens == pytest.approx(engine_row.parts["KV cache"] / 65_536)
    assert ledger.kv.sequences == pytest.approx(ledger.kv.tokens / 2048)


# -- advice


def test_what_fits_needs_no_advice(smollm2: Path) -> None:
    config = demo(smollm2)
    ledger, shapes = planned(config)
    assert shortages(config, ledger, 16 * GIB) == []
    assert remedy(config, shapes, 16 * GIB).changes == ()


def test_changes_are_planned_again_and_the_last_one_makes_it_fit(llama: Path) -> None:
    config = node(llama)
    limit = 60 * GIB
    ledger, shapes = planned(config, 60)
    assert [shortage.what for shortage in shortages(config, ledger, limit)] == ["GPU of a learner rank"]
    cure = remedy(config, shapes, limit)
    assert cure.fits
    overrides = [override for change in cure.changes for override in change.overrides]
    again, _ = planned(node(llama, *overrides), 60)
    assert missing_bytes(node(llama, *overrides), again, limit) == 0
    without_the_last = [override for change in cure.changes[:-1] for override in change.overrides]
    before, _ = planned(node(llama, *without_the_last), 60)
    assert missing_bytes(node(llama, *without_the_last), before, limit) > 0
    assert sum(change.saved for change in cure.changes) >= missing_bytes(config, ledger, limit)


def test_no_change_is_enough_for_a_host_that_is_far_too_small(smollm2: Path) -> None:
    config = demo(smollm2)
    _, shapes = planned(config)
    cure = remedy(config, shapes, 2 * GIB)
    assert not cure.fits
    keys = [change.keys for change in cure.changes]
    assert ("learner.gradient_checkpointing",) in keys
    assert len(keys) == len(set(keys))


def test_an_engine_without_room_for_one_sequence_is_a_shortage(smollm2: Path) -> None:
    # 2 x 30 x 3 x 64 x 2 bytes a token, 192 tokens: 4.2 MiB, of a cache of 1 MiB.
    config = demo(smollm2, f"rollout.engine.cpu_kv_cache_gib={1 / 1024}")
    ledger, _ = planned(config)
    (shortage,) = shortages(config, ledger, 64 * GIB)
    assert shortage.needed == 192 * 23_040
    assert math.isclose(ledger.kv.sequences, MIB / shortage.needed)
