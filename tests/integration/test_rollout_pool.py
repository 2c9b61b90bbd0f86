"""Two real rollout workers as Ray actors: routing, publication, fences, deaths. The tests run in file order."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from rlhf_cluster.config import Config
from rlhf_cluster.config_io import load_config
from rlhf_cluster.protocols import WorkerFailed, WorkerSlot
from rlhf_cluster.supervision import SupervisionSettings
from tests.integration.rollout_helpers import probe_of, request, snapshot_of, transformers_logprobs
from tests.tiny_models import build_tiny_policy

ray = pytest.importorskip("ray")
pytest.importorskip("vllm")

from actors.rollout_pool import RolloutPool  # noqa: E402 - after the skips


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    policy = build_tiny_policy(tmp_path_factory.mktemp("policy"))
    overrides = [
        f"model.policy={policy}",
        "rollout.workers=2",
        "rollout.samples_per_prompt=8",
        "rollout.max_new_tokens=300",
        "rollout.engine.max_num_seqs=16",
    ]
    return load_config(Path("configs/tiny_test.yaml"), overrides)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights that differ from those the engines start with: version 2."""
    return build_tiny_policy(tmp_path_factory.mktemp("trained"), seed=5)


@pytest.fixture(scope="module")
def running(config: Config) -> Iterator[tuple[RolloutPool, asyncio.Runner]]:
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        with asyncio.Runner() as runner:
            settings = SupervisionSettings(heartbeat_s=1, heartbeat_misses=30, backoff_s=0.5)
            pool = RolloutPool(config, supervision=settings)
            runner.run(pool.start(150))
            yield pool, runner
            runner.run(pool.close())
    finally:
        ray.shutdown()


def versions(pool: RolloutPool) -> list[tuple[bool, int]]:
    return [(status.up, status.version) for status in pool.status()]


def test_groups_go_to_the_emptier_worker_until_both_are_full(running) -> None:
    pool, runner = running

    async def fill() -> tuple[list[int], WorkerSlot | None, list[int]]:
        chosen, calls = [], []
        while (slot := pool.choose()) is not None:
            chosen.append(slot.index)
            calls.append(asyncio.ensure_future(pool.generate(slot, request(f"g{len(chosen)}", list(range(8))))))
            await asyncio.sleep(0)
        full = [status.in_flight for status in pool.status()]
        await asyncio.gather(*calls)
        return chosen, pool.choose(), full

    chosen, after, full = runner.run(fill())
    # 16 sequences an engine, 8 samples a group: two groups each.
    assert chosen == [0, 1, 0, 1]
    assert full == [2, 2]
    assert after == WorkerSlot(0, 0)


def test_version_0_is_compared_with_the_learners_and_a_worker_that_started_from_other_weights_is_fenced(
    running, config: Config, trained: Path, tmp_path: Path
) -> None:
    pool, runner = running
    report = runner.run(pool.publish(snapshot_of(trained, tmp_path / "other.safetensors", 0)))
    assert (report.applied, sorted(report.failed)) == ((), [0, 1])
    assert "parameters held differ from snapshot" in report.failed[1]
    assert versions(pool) == [(False, 0), (False, 0)]

    policy = Path(config.model.policy)
    learners = snapshot_of(policy, tmp_path / "v0.safetensors", 0, probe=probe_of(policy, 259))
    for _ in range(2):
        # Once fenced they load it; then they hold it, and compare.
        report = runner.run(pool.publish(learners))
        assert (report.applied, versions(pool)) == ((0, 1), [(True, 0), (True, 0)])


def test_a_publication_reaches_every_worker_also_through_the_object_store(
    running, config: Config, tmp_path: Path
) -> None:
    pool, runner = running
    other = build_tiny_policy(tmp_path / "other", seed=3)
    written = snapshot_of(other, tmp_path / "v1.safetensors", 1)
    content = ray.put(np.frombuffer(written.path.read_bytes(), np.uint8))
    elsewhere = replace(written, path=tmp_path / "other_node" / "v1.safetensors", transport={"object": content})

    report = runner.run(pool.publish(elsewhere))
    assert (report.version, report.applied, dict(report.failed)) == (1, (0, 1), {})
    assert 0 < report.paused_s <= report.total_s
    assert versions(pool) == [(True, 1), (True, 1)]
    for index in range(2):
        (rollout,) = runner.run(pool.generate(WorkerSlot(index, 1), request("new", [7])))
        assert rollout.max_version == rollout.min_version == 1
        np.testing.assert_allclose(rollout.behaviour_logprobs, transformers_logprobs(other, rollout), atol=0.02)


def test_workers_that_refuse_an_update_are_fenced_until_the_next_one(running, trained: Path, tmp_path: Path) -> None:
    pool, runner = running
    bad = snapshot_of(trained, tmp_path / "bad.safetensors", 2, in_manifest=lambda e: dict(list(e.items())[1:]))

    report = runner.run(pool.publish(bad))
    assert report.applied == ()
    assert "rollout worker 1" in report.failed[1] and "1 names missing" in report.failed[1]
    assert versions(pool) == [(False, 1), (False, 1)]
    assert pool.choose() is None
    with pytest.raises(WorkerFailed, match="rollout worker 0 is down or fenced"):
        runner.run(pool.generate(WorkerSlot(0, 1), request("refused", [1])))

    runner.run(pool.publish(snapshot_of(trained, tmp_path / "good.safetensors", 2)))
    assert versions(pool) == [(True, 2), (True, 2)]


def actor_and_engine(pool: RolloutPool, index: int) -> tuple[psutil.Process, list[psutil.Process]]:
    """The process of a worker's actor and those of its engine."""
    handle = pool._slots[index].serving.handle
    actor = psutil.Process(ray.get(handle.__ray_call__.remote(lambda self: os.getpid())))
    return actor, [child for child in actor.children() if "resource_tracker" not in " ".join(child.cmdline())]


async def until_up(pool: RolloutPool, *indices: int, seconds: float) -> None:
    async with asyncio.timeout(seconds):
        while not all(pool.status()[index].up for index in indices):
            await asyncio.sleep(0.05)


def test_a_killed_actor_and_a_killed_engine_fail_their_groups_by_name_and_leave_no_process(running) -> None:
    pool, runner = running
    actors, engines = zip(*(actor_and_engine(pool, index) for index in range(2)), strict=True)
    assert [len(engine) for engine in engines] == [1, 1]

    async def kill_while_generating() -> None:
        lost = [
            asyncio.ensure_future(pool.generate(WorkerSlot(index, 2), request(f"lost {index}", list(range(8)))))
            for index in range(2)
        ]
        await asyncio.sleep(0)
        actors[0].kill()
        with pytest.raises(WorkerFailed, match="rollout worker 0 died during group lost 0: ActorDiedError"):
            await lost[0]
        assert versions(pool) == [(False, 2), (True, 2)]
        assert pool.choose() == WorkerSlot(1, 2)
        (engine,) = engines[1]
        engine.kill()
        started = time.monotonic()
        with pytest.raises(WorkerFailed, match="rollout worker 1 died during group lost 1: EngineDied"):
            await lost[1]
        assert time.monotonic() - started < 30
        assert pool.choose() is None

    runner.run(kill_while_generating())
    assert psutil.wait_procs([*engines[0], *engines[1]], timeout=10)[1] == []


def test_both_come_back_with_the_newest_version_and_sample_from_its_weights(running, trained: Path) -> None:
    pool, runner = running
    runner.run(until_up(pool, 0, 1, seconds=150))
    assert versions(pool) == [(True, 2), (True, 2)]
    for index in range(2):
        (rollout,) = runner.run(pool.generate(WorkerSlot(index, 2), request("back", [7])))
        assert rollout.min_version == rollout.max_version == 2
        expected = transformers_logprobs(trained, rollout)
        np.testing.assert_allclose(rollout.behaviour_logprobs, expected, atol=0.02)


def test_an_engine_that_dies_while_idle_is_found_by_a_heartbeat(running) -> None:
    pool, runner = running
    _, (engine,) = actor_and_engine(pool, 0)
    engine.kill()

    async def until_down() -> None:
        async with asyncio.timeout(20):
            while pool.status()[0].up:
                await asyncio.sleep(0.05)

    runner.run(until_down())
    assert versions(pool)[1] == (True, 2)


def test_a_missed_deadline_names_the_worker(running, config: Config) -> None:
    pool, runner = running
    hurried = config.rollout.model_copy(update={"timeout_s": 0.01})
    pool._config = config.model_copy(update={"rollout": hurried})
    with pytest.raises(TimeoutError, match=r"rollout worker 1 did not finish group slow within 0\.01 s"):
        runner.run(pool.generate(WorkerSlot(1, 2), request("slow", list(range(8)))))
