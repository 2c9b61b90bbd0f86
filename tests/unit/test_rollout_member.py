"""Which failures of an update only the next publication can cure."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import OwnerDiedError, RayTaskError

from actors.rollout_member import RolloutMember, SnapshotGone
from rlhf_cluster.protocols import WeightSnapshot, WorkerFailed
from tests.unit.builders import async_test


class Handle:
    """An actor whose update raises ``cause``."""

    def __init__(self, cause: Exception) -> None:
        self._cause = cause

    @property
    def update_weights(self) -> Any:
        return self

    def remote(self, snapshot: WeightSnapshot) -> asyncio.Future[Any]:
        answer = asyncio.get_running_loop().create_future()
        answer.set_exception(RayTaskError("update_weights", "remote traceback", self._cause))
        return answer


async def brought_up(member: RolloutMember) -> None: ...


@pytest.mark.parametrize(
    ("cause", "gone"),
    [
        (FileNotFoundError("v5.safetensors"), True),
        (OwnerDiedError("00" * 28, None, ""), True),
        (RuntimeError("it refused"), False),
    ],
    ids=["file_removed", "learner_died", "refused"],
)
@async_test
async def test_an_update_whose_weights_are_nowhere_any_more_says_so(cause: Exception, gone: bool) -> None:
    member = RolloutMember("rollout worker 3", 1, Handle(cause), brought_up)
    with pytest.raises(WorkerFailed, match="rollout worker 3, the update to version 5") as failure:
        await member.update(WeightSnapshot(5, Path("x"), {}), 5)
    assert isinstance(failure.value, SnapshotGone) is gone
    assert member.fenced
