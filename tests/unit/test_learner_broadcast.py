"""The learner's part of a broadcast: what is announced is what is sent, and nothing trains meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from torch import nn

from learner import learner_group
from learner.learner_group import LearnerGroup
from learner.weight_publisher import WeightBroadcaster
from rlhf_cluster.protocols import WeightSnapshot
from tests.distributed.learner_ranks import make_batch, make_spec
from tests.fakes import RecordingBroadcast


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.z = nn.Linear(3, 2)
        self.a = nn.Linear(2, 1, bias=False)


def broadcaster(rank: int) -> WeightBroadcaster:
    engine: Any = SimpleNamespace(
        name="policy", accumulating=False, zero_stage=0, module=SimpleNamespace(model=TwoLayers())
    )
    return WeightBroadcaster(engine, rank=rank)


def test_names_are_sent_in_the_manifests_order_over_one_connection() -> None:
    channel, sender = RecordingBroadcast(), broadcaster(0)
    manifest = sender.manifest(1)
    assert manifest == {
        "version": 1,
        "tensors": {
            "z.weight": {"dtype": "float32", "shape": [2, 3]},
            "z.bias": {"dtype": "float32", "shape": [2]},
            "a.weight": {"dtype": "float32", "shape": [1, 2]},
        },
    }
    sender.send(1, channel, {"nccl": {}})
    sender.send(2, channel, {"nccl": {}})
    assert channel.sent == [["z.weight", "z.bias", "a.weight"]] * 2 == [list(manifest["tensors"])] * 2
    assert channel.connected == [({"nccl": {}}, manifest)]


def test_another_group_is_met_after_the_old_one_is_left() -> None:
    channel, sender = RecordingBroadcast(), broadcaster(0)
    for version, port in ((1, 4000), (2, 4000), (3, 4001)):
        sender.send(version, channel, {"nccl": {"master_port": port}})
    assert [transport["nccl"]["master_port"] for transport, _ in channel.connected] == [4000, 4001]
    assert (channel.closed, len(channel.sent)) == (1, 3)


def test_the_other_ranks_connect_to_nobody() -> None:
    channel = RecordingBroadcast()
    broadcaster(1).send(1, channel, {"nccl": {}})
    assert (channel.connected, channel.sent) == ([], [])


class Handle:
    """An actor handle in this process: ``handle.method.remote(*args)`` gives an awaitable and notes the call."""

    def __init__(self, calls: list[tuple[Any, ...]], **methods: Callable[..., Any]) -> None:
        for name, method in methods.items():
            setattr(self, name, SimpleNamespace(remote=self._remote(name, method, calls)))

    @staticmethod
    def _remote(name: str, method: Callable[..., Any], calls: list[tuple[Any, ...]]) -> Callable[..., Any]:
        def remote(*args: Any) -> asyncio.Future[Any]:
            calls.append((name, *args))

            async def answer() -> Any:
                result = method(*args)
                return await result if asyncio.iscoroutine(result) else result

            return asyncio.ensure_future(answer())

        return remote


def group_of(tmp_path: Path, handles: list[Handle], channel: RecordingBroadcast) -> LearnerGroup:
    spec = make_spec(tmp_path, tmp_path / "snapshots", ranks=len(handles))
    group = LearnerGroup(spec, actor_options=[{}] * len(handles), start_timeout_s=1, weight_broadcast=channel)
    group._actors = list(handles)
    return group


def test_a_snapshot_writes_nothing_and_tells_the_workers_one_meeting_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learner_group, "_several_nodes", lambda: False)
    calls: list[tuple[Any, ...]] = []
    announced = WeightSnapshot(1, tmp_path / "snapshots" / "v1.safetensors", {"tensors": {}})
    first = Handle(calls, address=lambda loopback: ("127.0.0.1", 4000), announce=lambda: announced)
    group = group_of(tmp_path, [first, Handle(calls)], RecordingBroadcast())

    async def scenario() -> list[WeightSnapshot]:
        return [await group.snapshot(), await group.snapshot()]

    snapshots = asyncio.run(scenario())
    expected = {"nccl": {"master_address": "127.0.0.1", "master_port": 4000}}
    assert [dict(snapshot.transport) for snapshot in snapshots] == [expected] * 2
    # The communicator is made once, so its meeting point is chosen once.
    assert calls == [("address", True), ("announce",), ("announce",)]
    assert not (tmp_path / "snapshots").exists()


def test_a_regrouped_learner_announces_and_sends_at_the_new_meeting_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learner_group, "_several_nodes", lambda: False)
    calls: list[tuple[Any, ...]] = []
    ports = iter((4000, 4001))
    announced = WeightSnapshot(1, tmp_path / "v1.safetensors", {"tensors": {}})
    first = Handle(
        calls,
        address=lambda loopback: ("127.0.0.1", next(ports)),
        announce=lambda: announced,
        broadcast=lambda *args: None,
    )
    channel = RecordingBroadcast()
    group = group_of(tmp_path, [first], channel)

    async def scenario() -> tuple[Any, ...]:
        before = await group.snapshot()
        transport = await group.regroup([0, 2])
        after = await group.snapshot()
        await group.broadcast(1, timeout_s=1)
        return before.transport, transport, after.transport

    before, transport, after = asyncio.run(scenario())
    assert before == {"nccl": {"master_address": "127.0.0.1", "master_port": 4000}}
    assert transport == after == {"nccl": {"master_address": "127.0.0.1", "master_port": 4001}, "members": [0, 2]}
    assert calls[-1] == ("broadcast", 1, channel, transport)


def test_a_rank_that_does_not_send_in_time_is_named(tmp_path: Path) -> None:
    calls: list[tuple[Any, ...]] = []
    channel = RecordingBroadcast()
    silent = Handle(calls, broadcast=lambda *args: asyncio.sleep(60))
    group = group_of(tmp_path, [silent, Handle(calls, broadcast=lambda *args: None)], channel)
    with pytest.raises(TimeoutError, match=r"learner rank \[0\] did not answer 'broadcast' within 0.05 s"):
        asyncio.run(group.broadcast(3, timeout_s=0.05))
    assert calls == [("broadcast", 3, channel, None)] * 2


def test_a_step_that_fails_leaves_no_weights_that_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner_group, "ray", SimpleNamespace(put=lambda value: value, exceptions=ray.exceptions))

    def train(batch: Any) -> None:
        raise ValueError("the loss is not finite")

    group = group_of(tmp_path, [Handle([], train=train)], RecordingBroadcast())

    async def scenario() -> None:
        with pytest.raises(learner_group.LearnerFailed, match="the loss is not finite"):
            await group.train(make_batch(0))
        assert not group.training

    asyncio.run(scenario())


def test_ranks_that_were_rebuilt_are_met_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner_group, "_several_nodes", lambda: False)
    monkeypatch.setattr(learner_group, "ray", SimpleNamespace(kill=lambda actor: None))
    announced = WeightSnapshot(1, tmp_path / "v1.safetensors", {"tensors": {}})

    def rank_at(port: int) -> Handle:
        return Handle(
            [],
            address=lambda loopback: ("127.0.0.1", port),
            announce=lambda: announced,
            renumber=lambda version: version,
        )

    group = group_of(tmp_path, [rank_at(4000)], RecordingBroadcast())

    async def start() -> None:
        group._actors = [rank_at(4001)]

    monkeypatch.setattr(group, "start", start)

    async def scenario() -> list[int]:
        before = await group.snapshot()
        await group.restart(version=5)
        after = await group.snapshot()
        return [snapshot.transport["nccl"]["master_port"] for snapshot in (before, after)]

    assert asyncio.run(scenario()) == [4000, 4001]


@pytest.mark.parametrize("method", ["train", "save"])
def test_live_weights_stay_as_they_are_until_the_publication_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(learner_group, "ray", SimpleNamespace(put=lambda value: value))
    calls: list[tuple[Any, ...]] = []
    training: list[bool] = []

    def train(batch: Any) -> SimpleNamespace:
        training.append(group.training)
        return SimpleNamespace(version=1)

    handle = Handle(calls, train=train, save=lambda folder: training.append(group.training))
    group = group_of(tmp_path, [handle], RecordingBroadcast())
    argument: Any = make_batch(0) if method == "train" else tmp_path

    async def scenario() -> None:
        publication = asyncio.get_running_loop().create_future()
        group.hold_for(publication)
        waiting = asyncio.ensure_future(getattr(group, method)(argument))
        await asyncio.sleep(0.01)
        # Still those of the version: a worker that comes back may be sent them.
        assert (calls, group.training) == ([], False)
        publication.set_result(None)
        await waiting
        assert calls == [(method, argument)]
        assert (training, group.training) == ([method == "train"], False)

        broken = asyncio.get_running_loop().create_future()
        group.hold_for(broken)
        broken.set_exception(RuntimeError("rollout worker 1 died"))
        with pytest.raises(RuntimeError, match="rollout worker 1 died"):
            await getattr(group, method)(argument)
        assert len(calls) == 1

    asyncio.run(scenario())
