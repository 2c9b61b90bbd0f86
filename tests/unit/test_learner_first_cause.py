"""When several ranks fail, the one that explains the others is named."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    ActorUnschedulableError,
    LocalRayletDiedError,
    NodeDiedError,
    OutOfMemoryError,
    RayTaskError,
    RuntimeEnvSetupError,
    WorkerCrashedError,
)

from learner.learner_group import LearnerDied, LearnerDisconnected, LearnerFailed, _first_cause
from rlhf_cluster.protocols import LearnerLost

BROKEN = RuntimeError("[gloo] Connection closed by peer [127.0.0.1]")


def first_cause(errors: Sequence[BaseException | None], method: str = "train") -> LearnerFailed:
    """Of a call in which each rank has failed so, or (None) has not answered yet."""

    async def scenario() -> LearnerFailed:
        tasks: dict[int, asyncio.Future[None]] = {}
        for rank, error in enumerate(errors):
            tasks[rank] = asyncio.get_running_loop().create_future()
            if error is not None:
                tasks[rank].set_exception(error)
        return _first_cause(tasks, method)

    return asyncio.run(scenario())


@pytest.mark.parametrize(
    ("errors", "named"),
    [
        ([BROKEN, ValueError("a batch for version 7")], "learner rank 1 failed in 'train': ValueError"),
        ([ValueError("a batch for version 7"), BROKEN], "learner rank 0 failed in 'train': ValueError"),
        ([BROKEN, ValueError("odd"), ActorDiedError()], "learner rank 2 failed in 'train': ActorDiedError"),
        ([BROKEN, BROKEN], "learner rank [0, 1] lost the connection to a peer in 'train': RuntimeError"),
        (
            [BROKEN, None],
            "learner rank [0] lost the connection to a peer in 'train', rank [1] says nothing: RuntimeError",
        ),
    ],
)
def test_a_dead_process_then_an_own_error_explain_a_broken_connection(
    errors: list[BaseException | None], named: str
) -> None:
    failure = first_cause(errors)
    assert failure.__cause__ in errors
    assert str(failure).startswith(named)


@pytest.mark.parametrize(
    "death",
    [
        ActorDiedError(),
        ActorUnavailableError("the node does not answer", None),
        ActorUnschedulableError("no node has the room"),
        LocalRayletDiedError(),
        NodeDiedError("the node is gone"),
        OutOfMemoryError("killed, because the node was running low on memory"),
        RuntimeEnvSetupError("no such package"),
        WorkerCrashedError(),
    ],
    ids=lambda death: type(death).__name__,
)
def test_a_learner_whose_process_is_gone_is_to_be_rebuilt_whatever_ray_calls_the_death(death: BaseException) -> None:
    failure = first_cause([BROKEN, death])
    assert isinstance(failure, LearnerDied) and isinstance(failure, LearnerLost)
    assert str(failure).startswith(f"learner rank 1 failed in 'train': {type(death).__name__}")


@pytest.mark.parametrize("errors", [[BROKEN, None], [BROKEN, BROKEN]])
def test_ranks_that_only_say_that_a_peer_is_gone_are_to_be_rebuilt_before_ray_tells_of_the_death(
    errors: list[BaseException | None],
) -> None:
    failure = first_cause(errors)
    assert isinstance(failure, LearnerDisconnected) and isinstance(failure, LearnerLost)


def test_an_own_error_is_no_broken_connection_for_what_its_traceback_names() -> None:
    raised = ValueError("the batch has no tokens")
    error = RayTaskError("train", "File torch/distributed/ProcessGroup ... gloo", raised)
    failure = first_cause([BROKEN, error.as_instanceof_cause()])
    assert str(failure) == "learner rank 1 failed in 'train': ValueError: the batch has no tokens"
    assert not isinstance(failure, LearnerLost)


@pytest.mark.parametrize("text", ["ProcessGroupNCCL is only supported with GPUs", "Duplicate GPU detected (NCCL)"])
def test_a_backend_that_refuses_its_settings_at_the_start_ends_the_run(text: str) -> None:
    failure = first_cause([ValueError(text), ValueError(text)], "setup")
    assert str(failure) == f"learner rank 0 failed in 'setup': ValueError: {text}"
    assert not isinstance(failure, LearnerLost)
