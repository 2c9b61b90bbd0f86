"""A checkpoint is loaded whole or the reason is told."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from learner.checkpoint import load_engine
from learner.schedule import Schedule
from learner.updater import Updater


def engine(load_checkpoint: Any) -> Any:
    return SimpleNamespace(name="policy", deepspeed=SimpleNamespace(load_checkpoint=load_checkpoint))


def test_a_folder_without_the_engines_state_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=rf"checkpoint {tmp_path} has no policy state"):
        load_engine(engine(None), tmp_path)


def test_a_load_in_which_deepspeed_found_nothing_does_not_go_on_with_the_weights_at_hand(tmp_path: Path) -> None:
    (tmp_path / "deepspeed" / "policy").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match=rf"checkpoint {tmp_path}: DeepSpeed found no state of the policy"):
        load_engine(engine(lambda folder, tag: (None, {})), tmp_path)


def test_a_checkpoint_of_before_warm_ups_were_kept_goes_on_with_the_one_that_is_planned() -> None:
    schedule = Schedule(8.0, warmup_steps=4, total_steps=40)
    kept = SimpleNamespace(load_state_dict=lambda state: None)
    trainer = SimpleNamespace(engine=SimpleNamespace(name="policy", schedule=schedule))
    updater: Any = SimpleNamespace(trainers=[trainer], _moments=kept, _kl=kept)
    state = {"critic_pretrained": True, "moments": {}, "kl": {}, "optimizer_steps": {"policy": 2}}
    Updater.load_state_dict(updater, state)
    assert (schedule.applied, schedule.warmup_steps) == (2, 4)
    Updater.load_state_dict(updater, {**state, "warmup_steps": {"policy": 3}})
    assert (schedule.applied, schedule.warmup_steps) == (2, 3)
