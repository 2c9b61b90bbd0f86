"""Deaths, restarts, fences and scaling of rollout workers: real actor processes, real SIGKILL, no engine inside."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlhf_cluster.config import Config
from rlhf_cluster.config_io import load_config
from rlhf_cluster.protocols import RolloutRequest, WeightSnapshot, WorkerFailed, WorkerSlot
from rlhf_cluster.supervision import Event, SupervisionSettings
from rlhf_cluster.types import Prompt, Rollout, Sampling
from tests.integration.fake_worker import FakeRolloutWorker
from tests.unit.builders import async_test

ray = pytest.importorskip("ray")

from actors.rollout_pool import NoWorkersLeft, RolloutPool  # noqa: E402 - after the skip
from actors.supervisor import stacks_from_outside  # noqa: E402

# Ten misses: on a busy machine a live worker may be slow to answer.
PATIENT = SupervisionSettings(heartbeat_s=0.5, heartbeat_misses=10, restarts=3, backoff_s=0.1, jitter=0.2)
NEVER = replace(PATIENT, restarts=0)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


class Pool:
    """A pool of fake workers, the events it told, and what the tests ask of it."""

    def __init__(self, folder: Path, settings: SupervisionSettings, configuration: Config) -> None:
        self.folder = folder
        self.events: list[Event] = []
        self.pool = RolloutPool(
            configuration,
            supervision=settings,
            on_event=self.events.append,
            worker_class=FakeRolloutWorker,
        )

    def generate(self, index: int, text: str, version: int = 0) -> asyncio.Future[list[Rollout]]:
        request = RolloutRequest(text, 0, Prompt("p", (1, 2), text), (Sampling(1.0, 4, 1),))
        return asyncio.ensure_future(self.pool.generate(WorkerSlot(index, version), request))

    async def ask(self, index: int) -> tuple[int, int]:
        """(process id, version) of the worker in a slot, from a rollout."""
        (rollout,) = await self.generate(index, "now")
        return int(rollout.token_ids[0]), rollout.min_version

    def snapshot(self, version: int, **manifest: Any) -> WeightSnapshot:
        path = self.folder / f"v{version}.safetensors"
        path.touch()
        return WeightSnapshot(version, path, manifest)

    def up(self) -> list[tuple[bool, int]]:
        return [(status.up, status.version) for status in self.pool.status()]

    def kinds(self, slot: int) -> list[str]:
        return [event.kind for event in self.events if event.slot == slot]


def config(folder: Path, workers: int, *overrides: str) -> Config:
    return load_config(
        Path("configs/tiny_test.yaml"),
        [f"model.policy={folder}", f"rollout.workers={workers}", "cluster.start_timeout_s=30", *overrides],
    )


@contextlib.asynccontextmanager
async def running(
    folder: Path,
    *,
    settings: SupervisionSettings = PATIENT,
    workers: int = 2,
    overrides: tuple[str, ...] = (),
    configuration: Config | None = None,
) -> AsyncIterator[Pool]:
    pool = Pool(folder, settings, configuration or config(folder, workers, *overrides))
    await pool.pool.start(30)
    try:
        yield pool
    finally:
        await pool.pool.close()


async def until(holds: Callable[[], bool], seconds: float = 15.0) -> float:
    """Seconds until ``holds()``."""
    started = time.monotonic()
    while not holds():
        assert time.monotonic() - started < seconds, "waited in vain"
        await asyncio.sleep(0.01)
    return time.monotonic() - started


@async_test
async def test_a_killed_worker_fails_its_groups_at_once_by_name_and_comes_back_as_another_process(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as pool:
        before, _ = await pool.ask(0)
        lost = [pool.generate(0, f"slow {seconds}") for seconds in (20, 21)]
        kept = pool.generate(1, "slow 1")
        await asyncio.sleep(0.3)
        os.kill(before, signal.SIGKILL)
        started = time.monotonic()
        for call in lost:
            with pytest.raises(WorkerFailed, match=r"worker 0 died during group slow 2\d: ActorDiedError \(pid"):
                await call
        assert time.monotonic() - started < 5
        assert pool.up() == [(False, 0), (True, 0)]
        assert pool.pool.choose() == WorkerSlot(1, 0)
        assert len(await kept) == 1
        await until(lambda: pool.up()[0][0])
        after, version = await pool.ask(0)
        assert (after != before, version) == (True, 0)
        assert pool.kinds(0) == ["up", "down", "restart", "up"]
        assert pool.kinds(1) == ["up"]


@async_test
async def test_an_idle_worker_that_dies_is_found_by_its_heartbeat(tmp_path: Path) -> None:
    async with running(tmp_path, workers=1) as pool:
        process, _ = await pool.ask(0)
        os.kill(process, signal.SIGKILL)
        assert await until(lambda: "down" in pool.kinds(0)) < 5
        await until(lambda: pool.up()[0][0])


@async_test
async def test_a_stopped_process_misses_its_heartbeats_and_is_replaced(tmp_path: Path) -> None:
    async with running(tmp_path, settings=replace(PATIENT, heartbeat_misses=3), workers=1) as pool:
        process, _ = await pool.ask(0)
        stuck = pool.generate(0, "slow 0.5")
        await asyncio.sleep(0.1)
        os.kill(process, signal.SIGSTOP)
        with pytest.raises(WorkerFailed, match=r"group slow 0\.5: missed 3 heartbeats of 0\.5 s in a row"):
            await stuck
        await until(lambda: pool.up()[0][0])
        assert (await pool.ask(0))[0] != process
        assert pool.kinds(0)[:5] == ["up", *["heartbeat_missed"] * 3, "down"]


@async_test
async def test_a_fatal_engine_error_replaces_the_worker_and_an_ordinary_one_does_not(tmp_path: Path) -> None:
    async with running(tmp_path, workers=1) as pool:
        process, _ = await pool.ask(0)
        with pytest.raises(WorkerFailed, match="rollout worker 0, group error: ValueError: this prompt is too long"):
            await pool.generate(0, "error")
        assert (await pool.ask(0))[0] == process
        neighbour = pool.generate(0, "slow 20")
        await asyncio.sleep(0.1)
        with pytest.raises(WorkerFailed, match=r"rollout worker 0 died .*EngineDied: .*illegal memory access"):
            await pool.generate(0, "fatal")
        with pytest.raises(WorkerFailed, match="rollout worker 0 died during group slow 20: EngineDied"):
            await neighbour
        await until(lambda: pool.up()[0][0])
        assert (await pool.ask(0))[0] != process


@async_test
async def test_a_group_that_misses_its_deadline_ends_the_worker_and_names_it(tmp_path: Path) -> None:
    async with running(tmp_path, workers=1, overrides=("rollout.timeout_s=0.5",)) as pool:
        process, _ = await pool.ask(0)
        with pytest.raises(TimeoutError, match=r"rollout worker 0 did not finish group slow 9 within 0\.5 s"):
            await pool.generate(0, "slow 9")
        await until(lambda: pool.up()[0][0])
        assert (await pool.ask(0))[0] != process


@async_test
async def test_a_restarted_worker_is_routable_only_with_the_newest_version(tmp_path: Path) -> None:
    async with running(tmp_path) as pool:
        await pool.pool.publish(pool.snapshot(11))
        await pool.pool.publish(pool.snapshot(12, seconds=1.0))
        process, version = await pool.ask(1)
        assert version == 12
        os.kill(process, signal.SIGKILL)
        await until(lambda: not pool.up()[1][0])
        seen = set()

        def back() -> bool:
            status = pool.pool.status()[1]
            seen.add((status.up, status.version))
            return status.up

        # Its update takes a second: before it is over, the new process holds the base weights and gets nothing.
        assert await until(back) > 1.0
        assert {version for up, version in seen if up} == {12}
        assert (await pool.ask(1))[1] == 12


@async_test
async def test_a_version_published_during_a_restart_is_the_one_the_worker_comes_back_with(tmp_path: Path) -> None:
    async with running(tmp_path) as pool:
        await pool.pool.publish(pool.snapshot(1, seconds=1.0))
        process, _ = await pool.ask(1)
        os.kill(process, signal.SIGKILL)
        # It is in the middle of taking version 1 when that is overtaken and, as old ones are, removed.
        await until(lambda: "the update to version 1" in [wait.waiter for wait in pool.pool.waits()])
        (tmp_path / "v1.safetensors").unlink()
        report = await pool.pool.publish(pool.snapshot(2))
        assert (report.applied, dict(report.failed)) == ((0,), {})
        await until(lambda: pool.up()[1][0])
        assert (await pool.ask(1))[1] == 2
        assert pool.kinds(1).count("restart") == 1


@async_test
async def test_a_worker_killed_in_its_update_is_named_and_the_others_serve_the_version(tmp_path: Path) -> None:
    async with running(tmp_path) as pool:
        report = await pool.pool.publish(pool.snapshot(1, die=[1]))
        assert report.applied == (0,)
        assert "rollout worker 1 died during the update to version 1" in report.failed[1]
        await until(lambda: pool.up()[1][0])
        assert [(await pool.ask(index))[1] for index in range(2)] == [1, 1]


@async_test
async def test_the_only_worker_killed_in_its_update_is_waited_for(tmp_path: Path) -> None:
    async with running(tmp_path, workers=1) as pool:
        report = await pool.pool.publish(pool.snapshot(1, die=[0]))
        assert (report.applied, dict(report.failed)) == ((0,), {})
        assert (await pool.ask(0))[1] == 1


@async_test
async def test_a_refused_update_fences_until_the_next_and_nobody_waits_for_it(tmp_path: Path) -> None:
    async with running(tmp_path) as pool:
        process, _ = await pool.ask(1)
        report = await pool.pool.publish(pool.snapshot(1, refuse=[0, 1]))
        assert report.applied == () and sorted(report.failed) == [0, 1]
        assert pool.pool.choose() is None
        with pytest.raises(WorkerFailed, match="rollout worker 1 is down or fenced"):
            await pool.generate(1, "now")
        report = await pool.pool.publish(pool.snapshot(2, refuse=[0]))
        assert (report.applied, pool.up()) == ((1,), [(False, 0), (True, 2)])
        assert await pool.ask(1) == (process, 2)
        assert pool.kinds(0) == ["up", "fenced", "fenced"]


@async_test
async def test_an_update_that_hangs_is_ended_within_its_deadline_and_the_worker_replaced(tmp_path: Path) -> None:
    async with running(tmp_path, overrides=("publish.timeout_s=1",)) as pool:
        process, _ = await pool.ask(1)
        started = time.monotonic()
        report = await pool.pool.publish(pool.snapshot(1, hang=[1]))
        assert time.monotonic() - started < 5
        assert report.applied == (0,)
        assert report.failed[1] == "rollout worker 1 did not finish the update to version 1 within 1 s"
        assert pool.up()[1] == (False, 0)
        await until(lambda: pool.up()[1][0])
        after, version = await pool.ask(1)
        assert (after != process, version) == (True, 1)


@async_test
async def test_a_group_admitted_for_a_newer_version_is_not_run_on_an_older_one(tmp_path: Path) -> None:
    async with running(tmp_path, workers=1) as pool:
        with pytest.raises(WorkerFailed, match="rollout worker 0 was restarted and serves version 0 < 3"):
            await pool.generate(0, "now", version=3)


@async_test
async def test_a_snapshot_that_is_gone_leaves_the_worker_fenced_until_the_next_publication(tmp_path: Path) -> None:
    async with running(tmp_path) as pool:
        await pool.pool.publish(pool.snapshot(1))
        (tmp_path / "v1.safetensors").unlink()
        process, _ = await pool.ask(1)
        os.kill(process, signal.SIGKILL)
        await until(lambda: pool.kinds(1)[-2:] == ["restart", "up"])
        assert pool.up() == [(True, 1), (False, 0)]
        await pool.pool.publish(pool.snapshot(2))
        assert pool.up() == [(True, 2), (True, 2)]
        assert pool.kinds(1).count("restart") == 1


@async_test
async def test_when_none_is_left_and_none_can_come_back_the_first_cause_is_named(tmp_path: Path) -> None:
    async with running(tmp_path, settings=NEVER) as pool:
        with pytest.raises(WorkerFailed):
            await pool.generate(1, "fatal")
        await until(lambda: "exhausted" in pool.kinds(1))
        assert pool.pool.choose() == WorkerSlot(0, 0)
        with pytest.raises(WorkerFailed):
            await pool.generate(0, "die")
        await until(lambda: "exhausted" in pool.kinds(0))
        for ask in (pool.pool.choose, lambda: asyncio.ensure_future(pool.pool.publish(pool.snapshot(1)))):
            with pytest.raises(NoWorkersLeft, match=r"first cause: rollout worker 1: EngineDied: .*illegal memory"):
                answer = ask()
                if answer is not None:
                    await answer


@async_test
async def test_a_worker_that_cannot_start_again_uses_up_its_budget(tmp_path: Path) -> None:
    async with running(tmp_path, settings=replace(PATIENT, restarts=2)) as pool:
        (tmp_path / "no_start_0").touch()
        with pytest.raises(WorkerFailed):
            await pool.generate(0, "die")
        await until(lambda: "exhausted" in pool.kinds(0))
        assert pool.kinds(0) == ["up", "down", "restart", "down", "restart", "down", "exhausted"]
        assert "the engine refused a setting" in [e.reason for e in pool.events if e.kind == "down"][-1]
        assert pool.pool.choose() == WorkerSlot(1, 0)


@async_test
async def test_scaling_up_adds_workers_that_hold_the_newest_version_before_they_take_work(tmp_path: Path) -> None:
    async with running(tmp_path, workers=1) as pool:
        await pool.pool.publish(pool.snapshot(4))
        assert await pool.pool.scale(3) == "1 -> 3 rollout workers"
        assert pool.up() == [(True, 4)] * 3
        assert {(await pool.ask(index))[1] for index in range(3)} == {4}
        assert await pool.pool.scale(3) == "there are 3 rollout workers already"


@async_test
async def test_scaling_down_lets_running_groups_finish_and_takes_no_new_ones(tmp_path: Path) -> None:
    async with running(tmp_path, workers=3) as pool:
        # The worker that stays is the busiest: it gets the next group only because the others get none.
        running_groups = [pool.generate(index, "slow 1") for index in (0, 0, 1, 2)]
        await asyncio.sleep(0.2)
        process, _ = await pool.ask(2)
        scaling = asyncio.ensure_future(pool.pool.scale(1))
        await asyncio.sleep(0.1)
        assert pool.pool.choose() == WorkerSlot(0, 0)
        assert await scaling == "3 -> 1 rollout workers"
        assert [len(group) for group in await asyncio.gather(*running_groups)] == [1] * 4
        assert [status.index for status in pool.pool.status()] == [0]
        await until(lambda: not Path(f"/proc/{process}").exists())
        assert await pool.pool.scale(2) == "1 -> 2 rollout workers"
        assert [status.index for status in pool.pool.status()] == [0, 1]


@async_test
async def test_a_group_that_outlasts_the_drain_fails_by_name(tmp_path: Path) -> None:
    async with running(tmp_path) as pool:
        slow = pool.generate(1, "slow 30")
        await asyncio.sleep(0.1)
        started = time.monotonic()
        await pool.pool.scale(1, drain_s=0.3)
        assert time.monotonic() - started < 5
        with pytest.raises(WorkerFailed, match="rollout worker 1 died during group slow 30: it was scaled away"):
            await slow


@async_test
async def test_a_scale_that_cannot_be_done_is_refused_and_leaves_the_pool_as_it_was(tmp_path: Path) -> None:
    async with running(tmp_path, workers=1) as pool:
        with pytest.raises(ValueError, match="at least 1 rollout worker; got 0"):
            await pool.pool.scale(0)
        with pytest.raises(ValueError, match="8 more rollout workers want 8 CPU, the Ray cluster has 7 free"):
            await pool.pool.scale(9)
        (tmp_path / "no_start_2").touch()
        with pytest.raises(WorkerFailed, match="rollout worker 2, start: RuntimeError: the engine refused a setting"):
            await pool.pool.scale(3)
        assert pool.up() == [(True, 0)]


@async_test
async def test_waits_and_stacks_name_the_workers(tmp_path: Path) -> None:
    async with running(tmp_path) as pool:
        slow = pool.generate(1, "slow 1.5")
        await asyncio.sleep(0.5)
        (wait,) = pool.pool.waits()
        assert (wait.waiter, wait.party) == ("group slow 1.5", "rollout worker 1")
        assert 0.4 < time.monotonic() - wait.since < 1.5
        stacks = await pool.pool.dump_stacks()
        assert sorted(stacks) == ["rollout worker 0", "rollout worker 1"]
        assert "in generate" in stacks["rollout worker 1"]
        assert "in generate" not in stacks["rollout worker 0"]
        await slow


@async_test
async def test_a_process_that_does_not_answer_is_looked_at_from_outside(tmp_path: Path) -> None:
    async with running(tmp_path, workers=1) as pool:
        process, _ = await pool.ask(0)
        seen = await asyncio.to_thread(stacks_from_outside, process)
        # Where tracing other processes is forbidden, the reason is what there is to see.
        assert "main_loop" in seen or seen.startswith("py-spy gave nothing:"), seen
    assert (await asyncio.to_thread(stacks_from_outside, 2**22 + 1)).startswith("py-spy gave nothing:")


@async_test
async def test_one_of_three_that_fails_is_named_and_fenced_and_the_others_serve_under_the_right_label(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, workers=3) as pool:
        await pool.pool.publish(pool.snapshot(1))
        report = await pool.pool.publish(pool.snapshot(2, refuse=[1]))
        assert (report.applied, sorted(report.failed)) == ((0, 2), [1])
        assert pool.up() == [(True, 2), (False, 1), (True, 2)]
        answers = [rollout for index in (0, 2) for rollout in await pool.generate(index, "now", version=2)]
        assert [(rollout.min_version, rollout.max_version) for rollout in answers] == [(2, 2)] * 2
        with pytest.raises(WorkerFailed, match="rollout worker 1 is down or fenced"):
            await pool.generate(1, "now")


@async_test
async def test_a_worker_outside_the_transfer_group_comes_back_fenced_and_serves_once_a_group_has_it(
    tmp_path: Path,
) -> None:
    plain = config(tmp_path, 2)
    nccl = plain.model_copy(update={"publish": plain.publish.model_copy(update={"backend": "nccl"})})

    def broadcast(pool: Pool, version: int, *members: int, **manifest: Any) -> WeightSnapshot:
        return replace(pool.snapshot(version, **manifest), transport={"nccl": {}, "members": members})

    async with running(tmp_path, configuration=nccl) as pool:
        await pool.pool.publish(broadcast(pool, 1, 0, 1))
        with pytest.raises(WorkerFailed):
            await pool.generate(1, "die")
        await pool.pool.until_waiting()
        assert (pool.up(), pool.pool.receivers()) == ([(True, 1), (False, 0)], {0: 1, 1: 2})
        # A collective cannot be joined later: what was broadcast before is not sent to it alone.
        report = await pool.pool.publish(broadcast(pool, 2, 0))
        assert (report.applied, pool.up()) == ((0,), [(True, 2), (False, 0)])
        report = await pool.pool.publish(broadcast(pool, 3, 0, 1))
        assert (report.applied, pool.up()) == ((0, 1), [(True, 3), (True, 3)])

        stuck = asyncio.ensure_future(pool.pool.publish(broadcast(pool, 4, 0, 1, hang=[1])))
        await until(lambda: pool.up()[0] == (True, 4))
        pool.pool.fence()
        assert (await stuck).failed[1].endswith("it was in a broadcast that the learner broke off")
        assert pool.pool.choose() is None
        await until(lambda: pool.pool.receivers() == {0: 1, 1: 3})
