"""The learner as Ray actors: two real ranks train, publish, save and resume, and a dead or silent rank is named."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from safetensors.torch import load_file

from learner.learner_group import LearnerFailed, LearnerGroup, LearnerStalled
from tests.distributed.learner_ranks import make_batch, make_spec
from tests.tiny_models import build_tiny_policy, build_tiny_reward_model


@pytest.fixture(scope="module")
def ray_here() -> Iterator[None]:
    ray.init(num_cpus=4, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    yield
    ray.shutdown()


def test_two_ranks_train_publish_save_resume_and_a_dead_rank_is_named(ray_here: None, tmp_path: Path) -> None:
    build_tiny_policy(tmp_path / "policy")
    build_tiny_reward_model(tmp_path / "reward")
    spec = make_spec(
        tmp_path, tmp_path / "snapshots", zero_stage=2, ranks=2, minibatches=2, timeout_s=60, stall_timeout_s=3
    )

    async def scenario() -> None:
        group = LearnerGroup(spec, actor_options=[{"num_cpus": 1}] * 2, start_timeout_s=120)
        try:
            await group.start()
            result = await group.train(make_batch(0))
            assert (result.version, result.stepped, group.version) == (1, True, 1)
            snapshot = await group.snapshot()
            assert snapshot.version == 1
            assert snapshot.transport == {"node_id": ray.get_runtime_context().get_node_id()}
            assert load_file(snapshot.path).keys() == dict(snapshot.manifest)["tensors"].keys()

            await group.save(tmp_path / "checkpoint")
            went_on = await group.train(make_batch(1))
            assert group.version == 2
            await group.load(tmp_path / "checkpoint")
            assert group.version == 1
            again = await group.train(make_batch(1))
            for name in ("policy_loss", "value_loss", "grad_norm_policy"):
                assert again.metrics[name] == went_on.metrics[name]

            with pytest.raises(LearnerFailed, match=r"learner rank . failed in 'train': .*a batch for version 7"):
                await group.train(make_batch(7))

            # Rank 0, so that nobody is left who could remove the snapshots but the driver.
            process = await group._actors[0].__ray_call__.remote(lambda rank: os.getpid())
            os.kill(process, signal.SIGSTOP)
            started = time.monotonic()
            with pytest.raises(TimeoutError, match=r"rank \[0, 1\] did not answer 'train' within 2 s"):
                await group._call("train", make_batch(2), timeout_s=2.0)
            assert time.monotonic() - started < 10
            with pytest.raises(LearnerStalled, match=r"ranks \[0, 1\] ran no micro-batch for 3 s"):
                await group.train(make_batch(2))
            stacks = await group.dump_stacks()
            assert "does not answer" in stacks["learner rank 0"]
            assert "in train" in stacks["learner rank 1"], "it waits for rank 0 in a collective"
            os.kill(process, signal.SIGKILL)
            with pytest.raises(LearnerFailed, match=r"learner rank 0 failed in 'train'"):
                await group.train(make_batch(2))

            await group.restart(version=9)
            await group.load(tmp_path / "checkpoint", version=9)
            assert group.version == 9
            rebuilt = await group.train(make_batch(9))
            assert rebuilt.version == 10
            newest = await group.snapshot()
            assert [path.name for path in sorted(spec.snapshot_dir.iterdir())] == [
                "v1.safetensors",
                newest.path.name,
            ], "a worker may still be reading the snapshot of the group that died"
        finally:
            await group.close()
        assert not spec.snapshot_dir.exists()

    asyncio.run(scenario())
