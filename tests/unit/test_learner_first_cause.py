"""When several ranks fail, the one that explains the others is named."""

from __future__ import annotations

import asyncio

import pytest
from ray.exceptions import ActorDiedError

from learner.learner_group import _first_cause

BROKEN = RuntimeError("[gloo] Connection closed by peer [127.0.0.1]")


@pytest.mark.parametrize(
    ("errors", "named"),
    [
        ([BROKEN, ValueError("a batch for version 7")], "learner rank 1 failed in 'train': ValueError"),
        ([ValueError("a batch for version 7"), BROKEN], "learner rank 0 failed in 'train': ValueError"),
        ([BROKEN, ValueError("odd"), ActorDiedError()], "learner rank 2 failed in 'train': ActorDiedError"),
        ([BROKEN, None], "learner rank 0 failed in 'train': RuntimeError"),
    ],
)
def test_a_dead_process_then_an_own_error_explain_a_broken_connection(
    errors: list[BaseException | None], named: str
) -> None:
    async def scenario() -> str:
        tasks: dict[int, asyncio.Future[None]] = {}
        for rank, error in enumerate(errors):
            tasks[rank] = asyncio.get_running_loop().create_future()
            if error is not None:
                tasks[rank].set_exception(error)
        failure = _first_cause(tasks, "train")
        assert failure.__cause__ in errors
        return str(failure)

    assert asyncio.run(scenario()).startswith(named)
