"""The whole learner on two gloo ranks: checkpoints, snapshots, skipped batches, first ratios, critic pre-training."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.learner_ranks import make_batch, make_spec, spawn_ranks
from tests.fakes import RecordingBroadcast

CHECKPOINTS = ((0, "bfloat16"), (1, "bfloat16"), (2, "float32"), (3, "bfloat16"), (3, "float32"))
# A run may be called so; a glob would take it for a pattern that matches something else.
RUN = "ppo[lr=1]*?"
ADAPTED = ((1, "bfloat16"), (3, "float32"))


def _weights(engine: Any) -> dict[str, torch.Tensor]:
    from learner.weight_publisher import iterate_weights

    return {name: weight.clone() for name, weight in iterate_weights(engine)}


def _all_weights(learner: Any) -> dict[str, torch.Tensor]:
    return {
        f"{engine.name}/{name}": weight
        for engine in (learner.policy, learner.critic)
        for name, weight in _weights(engine).items()
    }


def _resume(rank: int, folder: Path, stage: int, dtype: str, **options: Any) -> dict[str, Any]:
    """Train, save, train; then load into a fresh learner and train again."""
    from learner.learner import LearnerRank

    saved = folder / RUN / "-".join(map(str, ["checkpoint", stage, dtype, *options]))
    spec = make_spec(folder, folder, dtype=dtype, zero_stage=stage, minibatches=2, warmup_fraction=1.0, **options)
    straight = LearnerRank(spec, rank=rank, world_size=2)
    straight.train(make_batch(0))
    at_save = _all_weights(straight)
    straight.save(saved)
    went_on = straight.train(make_batch(1))
    # It is to train longer; its warm-up, which is not over, stays the one that it began.
    resumed = LearnerRank(replace(spec, steps=10 * spec.steps), rank=rank, world_size=2)
    resumed.load(saved)
    loaded = _all_weights(resumed)
    again = resumed.train(make_batch(1))
    names = ("lr_policy", "lr_critic", "policy_loss", "value_loss", "normalised_score_mean", "grad_norm_policy")
    out = {
        "versions": (went_on.version, again.version),
        "metrics": [[result.metrics[name].value for name in names] for result in (went_on, again)],
        "loaded": all(torch.equal(at_save[name], weight) for name, weight in loaded.items()),
        "straight": _all_weights(straight),
        "resumed": _all_weights(resumed),
        "at_save": at_save,
    }
    straight.close()
    resumed.close()
    return out


def _snapshots(rank: int, folder: Path) -> dict[str, Any]:
    from learner import engine
    from learner.learner import LearnerRank
    from learner.weight_publisher import iterate_weights, weight_metadata

    spec = make_spec(folder, folder / "snapshots", zero_stage=3)
    # So that the tiny model's matrices are sharded too, not its embedding alone.
    persistent, engine._PERSISTENT_ELEMENTS = engine._PERSISTENT_ELEMENTS, 1_000
    learner = LearnerRank(spec, rank=rank, world_size=2)
    engine._PERSISTENT_ELEMENTS = persistent
    snapshots = [learner.snapshot()]
    for version in (0, 1):
        learner.train(make_batch(version))
        snapshots.append(learner.snapshot())
    out: dict[str, Any] = {"weights": _weights(learner.policy), "none": [snapshot is None for snapshot in snapshots]}
    in_small_buckets, gathered = {}, []
    sharded = [weight for weight in learner.policy.module.parameters() if not weight.ds_persist]
    out["largest_bytes"] = max(weight.ds_numel * weight.element_size() for weight in sharded)
    out["sharded_bytes"] = sum(weight.ds_numel * weight.element_size() for weight in sharded)
    for name, weight in iterate_weights(learner.policy, bucket_bytes=100_000):
        in_small_buckets[name] = weight.clone()
        gathered.append(sum(weight.numel() * weight.element_size() for weight in sharded))
    out["gathered_bytes"] = (max(gathered), sum(weight.numel() for weight in sharded))
    out["buckets_agree"] = all(torch.equal(out["weights"][name], weight) for name, weight in in_small_buckets.items())
    out["metadata"] = {name: shape for name, (_, shape) in weight_metadata(learner.policy).items()}
    channel = RecordingBroadcast()
    announced = learner.announce()
    learner.broadcast(2, channel, {"nccl": {"master_port": 1}})
    out["announced"] = (announced.version, list(announced.manifest["tensors"]))
    out["sent"] = channel.sent
    try:
        learner.broadcast(1, channel, {})
    except ValueError as error:
        out["too_late"] = str(error)
    if rank == 0:
        out["files"] = sorted(path.name for path in (folder / "snapshots").iterdir())
        out["content"] = load_file(snapshots[-1].path)
        out["manifest"] = dict(snapshots[-1].manifest)
    learner.policy.accumulating = True
    try:
        learner.snapshot()
    except RuntimeError as error:
        out["mid_accumulation"] = str(error)
    learner.policy.accumulating = False
    learner.close()
    out["left"] = (folder / "snapshots").exists()
    return out


def _diverge(rank: int, folder: Path) -> dict[str, Any]:
    """Every policy gradient of rank 1 is NaN."""
    from learner.learner import LearnerDiverged, LearnerRank

    spec = make_spec(folder, folder, zero_stage=2, max_skipped_steps=2, minibatches=2)
    learner = LearnerRank(spec, rank=rank, world_size=2)
    before = _all_weights(learner)
    if rank == 1:
        next(learner.policy.module.parameters()).register_hook(lambda grad: grad * math.nan)
    first = learner.train(make_batch(0))
    out = {
        "stepped": first.stepped,
        "version": first.version,
        "counts": {
            name: first.metrics[name].total
            for name in first.metrics
            if name.startswith("optimizer_steps") or name.startswith("grad_norm_policy")
        },
        "same": all(torch.equal(before[name], weight) for name, weight in _all_weights(learner).items()),
        "moments": learner.state()["update"]["moments"]["count"],
    }
    try:
        learner.train(make_batch(0))
    except LearnerDiverged as error:
        out["error"] = str(error)
    learner.close()
    return out


def _first_step(rank: int, folder: Path) -> dict[str, Any]:
    from learner.learner import LearnerRank

    spec = make_spec(folder, folder, zero_stage=1, critic_pretrain_steps=3, minibatches=2, micro_batch_tokens=40)
    learner = LearnerRank(spec, rank=rank, world_size=2)
    nothing = learner.train(make_batch(0, empty=8))
    first, second = learner.train(make_batch(0, empty=1)), learner.train(make_batch(1))
    learner.close()
    # One step a batch sees the proximal policy itself; two steps do not.
    single = LearnerRank(make_spec(folder, folder, zero_stage=1), rank=rank, world_size=2)
    exact = single.train(make_batch(0)).metrics
    single.close()
    return {
        "nothing": (nothing.stepped, nothing.version, nothing.metrics["empty_fraction"].value),
        "critic_steps": [result.metrics["optimizer_steps_critic"].total for result in (first, second)],
        "policy_steps": [result.metrics["optimizer_steps_policy"].total for result in (first, second)],
        "exact": [
            exact[name].total - (exact[name].count if name == "ratio_mean" else 0)
            for name in ("ratio_mean", "clip_fraction", "approx_kl")
        ],
        "moved": second.metrics["approx_kl"].value,
        "empty_fraction": first.metrics["empty_fraction"].value,
        "lags": [second.metrics[f"kl_behaviour_lag{lag}"].count for lag in (0, 1)],
        "tokens": second.metrics["kl_behaviour"].count,
    }


def _two_ranks(rank: int, folder: Path) -> dict[str, Any]:
    out: dict[str, Any] = {"resume": {case: _resume(rank, folder, *case) for case in CHECKPOINTS}}
    # So large a rate that bfloat16 does not round away what adapters add. Checkpointing, because frozen layers whose
    # inputs need no gradient may leave their adapters without one.
    adapted = {"lora": {"rank": 4}, "policy_lr": 0.02, "gradient_checkpointing": True}
    out["adapted"] = {case: _resume(rank, folder, *case, **adapted) for case in ADAPTED}
    out["snapshots"] = _snapshots(rank, folder)
    out["diverge"] = _diverge(rank, folder)
    out["first"] = _first_step(rank, folder)
    from learner.learner import LearnerRank

    other = LearnerRank(make_spec(folder, folder, zero_stage=1), rank=rank, world_size=2)
    try:
        other.load(folder / RUN / "checkpoint-2-float32")
    except ValueError as error:
        out["refused"] = str(error)
    other.close()
    return out


@pytest.fixture(scope="module")
def ranks(models: Path) -> list[dict[str, Any]]:
    return spawn_ranks(_two_ranks, 2, models, 200)


@pytest.mark.parametrize("case", CHECKPOINTS, ids=str)
def test_a_loaded_checkpoint_goes_on_exactly_as_the_run_that_wrote_it_whatever_its_name(
    ranks: list[dict[str, Any]], case: tuple[int, str]
) -> None:
    for rank in ranks:
        check_resumed(rank["resume"][case])


def test_a_run_that_is_resumed_to_train_longer_keeps_its_warm_up(ranks: list[dict[str, Any]]) -> None:
    for case in CHECKPOINTS:
        straight, resumed = ranks[0]["resume"][case]["metrics"]
        assert straight[:2] == resumed[:2]
        # The mean of steps 3 and 4 of the 20 that were planned when it began.
        assert resumed[0] == pytest.approx(1e-4 * 3.5 / 20)


def check_resumed(run: dict[str, Any]) -> None:
    assert run["versions"] == (2, 2)
    assert run["loaded"]
    assert run["metrics"][0] == run["metrics"][1]
    assert all(torch.equal(run["straight"][name], weight) for name, weight in run["resumed"].items())


@pytest.mark.parametrize("case", ADAPTED, ids=str)
def test_adapters_alone_are_trained_under_checkpointing_and_resumed_exactly(
    ranks: list[dict[str, Any]], models: Path, case: tuple[int, str]
) -> None:
    loaded = load_file(models / "policy/model.safetensors")
    for rank in ranks:
        run = rank["adapted"][case]
        check_resumed(run)
        at_save = {name: run["at_save"][f"policy/{name}"] for name in loaded}
        moved = {name for name, weight in at_save.items() if not torch.equal(weight, loaded[name].to(weight.dtype))}
        assert moved == {name for name in loaded if "_proj." in name}


def test_the_policy_folder_of_a_checkpoint_with_adapters_is_a_plain_model(
    ranks: list[dict[str, Any]], models: Path
) -> None:
    stage, dtype = ADAPTED[1]
    (folder,) = (models / RUN).glob(f"checkpoint-{stage}-{dtype}-lora*")
    saved = load_file(folder / "policy/model.safetensors")
    assert saved.keys() == load_file(models / "policy/model.safetensors").keys()
    at_save = ranks[0]["adapted"][(stage, dtype)]["at_save"]
    assert all(torch.equal(weight, at_save[f"policy/{name}"]) for name, weight in saved.items())


def test_the_model_folders_of_a_checkpoint_hold_the_weights_and_the_tokenizer(
    ranks: list[dict[str, Any]], models: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = models / RUN / "checkpoint-3-bfloat16" / "policy"
    at_save = ranks[0]["resume"][(3, "bfloat16")]["at_save"]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    for name, weight in model.named_parameters():
        assert torch.equal(weight, at_save[f"policy/{name}"]), name
    assert AutoTokenizer.from_pretrained(folder).chat_template is not None
    assert load_file(folder / "model.safetensors").keys() == load_file(models / "policy/model.safetensors").keys()


def test_a_checkpoint_of_another_zero_stage_is_refused_by_name(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert "learner.zero_stage 2, the configuration 1" in rank["refused"]


def test_a_snapshot_of_a_sharded_policy_is_the_whole_policy_under_the_names_of_its_folder(
    ranks: list[dict[str, Any]], models: Path
) -> None:
    run = ranks[0]["snapshots"]
    assert [rank["snapshots"]["none"] for rank in ranks] == [[False] * 3, [True] * 3]
    assert run["content"].keys() == load_file(models / "policy/model.safetensors").keys()
    for name, weight in run["content"].items():
        assert torch.equal(weight, run["weights"][name])
    assert all(rank["snapshots"]["buckets_agree"] for rank in ranks)
    assert run["metadata"] == {name: tuple(weight.shape) for name, weight in run["content"].items()}
    assert run["announced"] == (2, list(run["metadata"]))
    assert [rank["snapshots"]["sent"] for rank in ranks] == [[list(run["metadata"])], []]
    assert run["too_late"] == "version 1 was to be broadcast, but the learner is at version 2"


def test_the_manifest_of_a_snapshot_describes_its_tensors(ranks: list[dict[str, Any]]) -> None:
    from rlhf_cluster.weight_manifest import check_names, check_tensor

    run = ranks[0]["snapshots"]
    assert run["manifest"]["version"] == 2
    check_names(run["manifest"]["tensors"], run["content"], what="snapshot")
    for name, weight in run["content"].items():
        raw = weight.flatten().view(torch.uint8).numpy()
        check_tensor(name, run["manifest"]["tensors"][name], "float32", weight.shape, raw)


def test_only_the_newest_two_snapshots_are_kept_and_none_after_close(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["snapshots"]["files"] == ["v1.safetensors", "v2.safetensors"]
    assert not ranks[0]["snapshots"]["left"], "the folder in shared memory is removed with the last snapshot"


def test_gathering_holds_no_more_than_a_bucket_and_the_largest_weight(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        found = rank["snapshots"]
        most, left = found["gathered_bytes"]
        # 100,000 bytes a bucket; counted by full sizes, as the sharded tensors say 0 of themselves.
        assert 0 < most <= 100_000 + found["largest_bytes"] < found["sharded_bytes"]
        assert left == 0


def test_after_two_steps_every_weight_has_changed(ranks: list[dict[str, Any]], models: Path) -> None:
    before = load_file(models / "policy/model.safetensors")
    after = ranks[0]["snapshots"]["content"]
    assert [name for name in before if torch.equal(before[name], after[name])] == []


def test_a_snapshot_carries_the_learners_own_answers_to_the_probe(ranks: list[dict[str, Any]], models: Path) -> None:
    from transformers import AutoModelForCausalLM

    found = ranks[0]["snapshots"]
    model = AutoModelForCausalLM.from_pretrained(models / "policy", dtype=torch.float32)
    model.load_state_dict(found["content"], strict=False)
    for ids, logprobs in zip(*(found["manifest"]["probe"][key] for key in ("sequences", "logprobs")), strict=True):
        # At temperature 1, whatever the learner trains at (0.9 here).
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, :-1]
        expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(logprobs), expected, atol=1e-4, rtol=0)


def test_a_snapshot_in_the_middle_of_accumulation_is_refused(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert "in the middle of gradient accumulation" in rank["snapshots"]["mid_accumulation"]


def test_a_batch_without_a_finite_gradient_makes_no_version_and_too_many_end_the_run(
    ranks: list[dict[str, Any]],
) -> None:
    for rank in ranks:
        run = rank["diverge"]
        assert (run["stepped"], run["version"], run["same"]) == (False, 0, True)
        assert run["counts"] == {
            "optimizer_steps_policy": 0.0,
            "optimizer_steps_skipped_policy": 2.0,
            "grad_norm_policy": 0.0,
        }
        assert run["moments"] == 0, "the scores of a skipped batch come again with its prompts"
        assert "2 learner steps in a row" in run["error"]


def test_the_first_step_of_a_batch_sees_ratios_of_exactly_one(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["first"]["exact"] == [0.0, 0.0, 0.0]
        assert rank["first"]["moved"] > 0


def test_the_critic_is_pretrained_once_before_the_first_policy_step(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["first"]["critic_steps"] == [5.0, 2.0]
    assert ranks[0]["first"]["policy_steps"] == [2.0, 2.0]


def test_empty_rollouts_take_no_part_and_a_batch_of_them_makes_no_version(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["first"]["nothing"] == (False, 0, 1.0)
    assert ranks[0]["first"]["empty_fraction"] == 1 / 8


def test_every_token_is_counted_under_its_own_lag(ranks: list[dict[str, Any]]) -> None:
    by_lag = ranks[0]["first"]["lags"]
    expected = [0, 0]
    for member in make_batch(1).rollouts:
        expected[1] += member.rollout.n_tokens // 2
        expected[0] += member.rollout.n_tokens - member.rollout.n_tokens // 2
    assert by_lag == expected
    assert sum(by_lag) == ranks[0]["first"]["tokens"]
