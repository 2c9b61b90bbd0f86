"""Two gloo ranks save while the disk of one refuses: all raise at once, all train and save again."""

from __future__ import annotations

import errno
import functools
import resource
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.learner_ranks import make_batch, make_spec, spawn_ranks

STAGES = (0, 1, 3)


def _weights(engine: Any) -> dict[str, torch.Tensor]:
    from learner.weight_publisher import iterate_weights

    return {name: weight.clone() for name, weight in iterate_weights(engine)}


def _refuse_large_files(refuse: bool) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000 if refuse else hard, hard))


def _negative_mean(engine: Any, inputs: Any) -> torch.Tensor:
    return -engine(inputs)[0].sum() / 50


def _scenario(rank: int, folder: Path) -> dict[str, Any]:
    from learner.checkpoint import load_engine, save_engine
    from learner.engine import TrainEngine
    from learner.models import collate, load_policy

    rows = [(member.rollout.prompt_token_ids, member.rollout.token_ids) for member in make_batch(0).rollouts]
    out: dict[str, Any] = {}
    for stage in STAGES:
        spec = make_spec(folder, folder, zero_stage=stage)
        model = load_policy(spec.model.policy, spec.model, spec.learner, temperature=1.0)
        engine = TrainEngine(
            model, lr=1e-3, total_optimizer_steps=9, config=spec.learner, dtype=torch.float32, name="policy"
        )

        def step(engine: Any = engine) -> None:
            inputs = collate(rows[rank * 4 :][:4], torch.device("cpu"))
            engine.accumulate(functools.partial(_negative_mean, engine, inputs), last=True)
            assert engine.step().stepped

        save = functools.partial(save_engine, engine, source=spec.model.policy, rank=rank)
        step()
        for failing in (0, 1):
            before = _weights(engine)
            _refuse_large_files(rank == failing)
            started = time.monotonic()
            try:
                save(folder / f"full-{stage}-{failing}")
                said: tuple[int, str] = (0, "")
            except OSError as error:
                said = (error.errno or 0, str(error))
            _refuse_large_files(False)
            kept = all(torch.equal(before[name], weight) for name, weight in _weights(engine).items())
            out[f"{stage}/{failing}"] = {"said": said, "seconds": time.monotonic() - started, "kept": kept}
        save(folder / f"good-{stage}")
        at_save = _weights(engine)
        step()
        went_on = _weights(engine)
        load_engine(engine, folder / f"good-{stage}")
        loaded = _weights(engine)
        step()
        out[f"{stage}/resumed"] = (
            all(torch.equal(at_save[name], weight) for name, weight in loaded.items()),
            all(torch.equal(went_on[name], weight) for name, weight in _weights(engine).items()),
            not all(torch.equal(at_save[name], weight) for name, weight in went_on.items()),
        )
        engine.close()
    return out


@pytest.fixture(scope="module")
def ranks(models: Path) -> list[dict[str, Any]]:
    return spawn_ranks(_scenario, 2, models, 120)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("failing", [0, 1])
def test_a_disk_that_refuses_one_rank_fails_the_save_of_all_at_once(
    ranks: list[dict[str, Any]], stage: int, failing: int
) -> None:
    if stage == 0 and failing == 1:
        # Without ZeRO every state is rank 0's to write: a full disk of rank 1 is in nobody's way.
        assert [rank["0/1"]["said"] for rank in ranks] == [(0, ""), (0, "")]
        return
    outcomes = [rank[f"{stage}/{failing}"] for rank in ranks]
    assert [outcome["said"][0] for outcome in outcomes] == [errno.EFBIG, errno.EFBIG]
    assert "File too large" in outcomes[failing]["said"][1]
    assert f"learner rank {failing} could not write its part: File too large" in outcomes[1 - failing]["said"][1]
    assert max(outcome["seconds"] for outcome in outcomes) < 20, "nobody waits for a collective's deadline (60 s)"
    assert all(outcome["kept"] for outcome in outcomes)


@pytest.mark.parametrize("stage", STAGES)
def test_after_a_failed_save_the_next_one_is_whole(ranks: list[dict[str, Any]], stage: int) -> None:
    for rank in ranks:
        loaded, same_step_again, step_changes_weights = rank[f"{stage}/resumed"]
        assert loaded and same_step_again and step_changes_weights


def test_no_program_is_copied_into_a_checkpoint(ranks: list[dict[str, Any]], models: Path) -> None:
    found = {path.suffix for path in models.glob("good-*/**/*") if path.is_file()}
    assert found - {".jinja"} == {".json", ".pt", ".safetensors"}
