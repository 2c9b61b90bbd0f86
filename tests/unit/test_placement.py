"""Placement: what each role books, and what a user reads when a cluster is too small."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from actors import placement
from rlhf_cluster.config import Config
from rlhf_cluster.config_io import load_config


def config(*overrides: str) -> Config:
    return load_config(Path("configs/tiny_test.yaml"), list(overrides))


GPU = ("cluster.device=cuda", "publish.backend=nccl", "rollout.engine.tensor_parallel=4", "rollout.workers=2")


def test_on_cpu_a_role_books_its_threads_and_no_gpu() -> None:
    sizes = {
        role.role: (role.count, role.cpus, role.gpus)
        for role in placement.wanted(
            config(
                "rollout.workers=2",
                "rollout.engine.cpu_threads=3",
                "scorers.cpu_threads=4",
                "scorers.reference_replicas=2",
                "learner.ranks=2",
                "learner.cpu_threads=5",
            )
        )
    }
    assert sizes == {
        "rollout workers": (2, 3, 0),
        "reward scorers": (1, 4, 0),
        "reference scorers": (2, 4, 0),
        "learner ranks": (2, 5, 0),
    }


def test_total_adds_count_times_size_over_roles() -> None:
    # 2 engines x 4 GPUs + 1 reward + 1 reference scorer + 3 ranks; one CPU an actor.
    assert placement.total(placement.wanted(config(*GPU, "learner.ranks=3"))) == {"CPU": 7, "GPU": 13}


def test_a_cluster_with_exactly_enough_fits() -> None:
    placement.check_fits(placement.wanted(config(*GPU, "learner.ranks=3")), {"CPU": 7.0, "GPU": 13.0})


def test_too_few_gpus_names_wanted_present_shares_and_settings() -> None:
    with pytest.raises(ValueError) as refused:
        placement.check_fits(placement.wanted(config(*GPU, "learner.ranks=3")), {"CPU": 64.0, "GPU": 12.0})
    text = str(refused.value)
    assert "wants 13 GPUs" in text and "has 12" in text
    assert "rollout workers 2 x 4, reward scorers 1 x 1, reference scorers 1 x 1, learner ranks 3 x 1" in text
    assert "rollout.workers" in text and "learner.ranks" in text
    assert "cluster.device: cpu" not in text


def test_a_cluster_without_gpus_is_told_of_the_cpu_device() -> None:
    with pytest.raises(ValueError, match=r"has 0\..*or set cluster\.device: cpu"):
        placement.check_fits(placement.wanted(config(*GPU)), {"CPU": 64.0})


def test_too_few_cpus_are_refused_too() -> None:
    roles = placement.wanted(config("rollout.workers=1", "learner.ranks=2"))
    with pytest.raises(ValueError, match=r"wants \d+ logical CPUs .*has 1"):
        placement.check_fits(roles, {"CPU": 1.0})


def test_ray_options_follow_the_role_and_carry_threads_on_cpu() -> None:
    on_cpu: dict[str, Any] = placement.learner_options(config("learner.cpu_threads=2"))
    assert (on_cpu["num_cpus"], on_cpu["num_gpus"]) == (2, 0)
    assert on_cpu["runtime_env"]["env_vars"]["OMP_NUM_THREADS"] == "2"

    on_gpu = placement.rollout_options(config(*GPU))
    assert (on_gpu["num_cpus"], on_gpu["num_gpus"]) == (1, 4)
    assert "OMP_NUM_THREADS" not in placement.scorer_options(config(*GPU))["runtime_env"]["env_vars"]
