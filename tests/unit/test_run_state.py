"""F04: what a resumed run trains next, through the bytes of a real set on disk."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rlhf_cluster import checkpoint_set, run_state
from rlhf_cluster.checkpoint_retention import Retention
from rlhf_cluster.checkpoint_writer import CheckpointWriter
from rlhf_cluster.clock import SystemClock
from rlhf_cluster.data.cursor import PromptCursor
from rlhf_cluster.experience_queue import ExperienceQueue
from rlhf_cluster.metrics.recorder import MetricsRecorder
from tests.unit.builders import async_test, make_group, make_prompt, make_queue
from tests.unit.checkpoint_builders import save_set, tensors_of

PROMPTS = [make_prompt(f"p{index}") for index in range(8)]


def make_cursor() -> PromptCursor:
    return PromptCursor(PROMPTS, seed=3, epochs=1)


async def train_one_batch(cursor: PromptCursor, queue: ExperienceQueue) -> list[str]:
    batch = await asyncio.wait_for(queue.next_batch(), timeout=5)
    for group in batch:
        cursor.consumed(group.group_id)
    queue.advance(queue.learner_version + 1)
    return [group.group_id for group in batch]


def generate(cursor: PromptCursor, queue: ExperienceQueue, count: int, *, finished: int) -> list[str]:
    """Dispatch ``count`` prompts; the first ``finished`` of them come back and wait in the queue."""
    attempts = []
    for _ in range(count):
        issue = cursor.next()
        assert issue is not None
        attempts.append(queue.admit(issue.prompt, queue.learner_version, group_id=issue.group_id))
    for attempt in attempts[:finished]:
        queue.put(make_group(attempt))
    return [attempt.group_id for attempt in attempts]


async def saved_and_loaded(root: Path, state: dict[str, Any]) -> dict[str, Any]:
    writer = CheckpointWriter(root, retention=Retention(2))
    await writer.save(state["step"], state, tensors_of(1))
    await writer.finish()
    folder = checkpoint_set.newest_checkpoint(root)
    assert folder is not None
    return run_state.load_state(folder)


@async_test
async def test_generated_but_untrained_prompts_are_trained_once_after_a_resume(tmp_path: Path) -> None:
    # Batches of 2, 4 generated at a time: 0 and 1 are trained, 2 is queued and 3 still on a worker at the save.
    cursor, queue = make_cursor(), make_queue(groups_per_batch=2, max_staleness=1)
    recorder = MetricsRecorder(max_staleness=1, total_steps=4, clock=SystemClock(), sinks=())
    order = generate(cursor, queue, 4, finished=3)
    assert await train_one_batch(cursor, queue) == order[:2]
    state = run_state.snapshot(1, cursor=cursor, queue=queue, recorder=recorder)
    loaded = await saved_and_loaded(tmp_path, state)
    assert loaded == state, "JSON on disk gives back what was saved, to the bit"

    cursor, queue = make_cursor(), make_queue(groups_per_batch=2, max_staleness=1)
    assert run_state.restore(loaded, cursor=cursor, queue=queue) == 1
    assert queue.learner_version == 1
    assert generate(cursor, queue, 1, finished=1) == [order[3]], "the prompt on the worker is issued again, first"
    trained = [*order[:2], *await train_one_batch(cursor, queue)]
    assert trained == order
    while not cursor.done:
        generate(cursor, queue, 2, finished=2)
        trained += await train_one_batch(cursor, queue)
    assert sorted(trained) == [f"0:p{index}" for index in range(8)], "each prompt once an epoch"
    queue.ledger.check()
    assert queue.ledger.counts["trained"].groups == 8


def test_a_refused_state_names_what_differs(tmp_path: Path) -> None:
    cursor, queue = make_cursor(), make_queue(groups_per_batch=2)
    recorder = MetricsRecorder(max_staleness=1, total_steps=4, clock=SystemClock(), sinks=())
    state = run_state.snapshot(0, cursor=cursor, queue=queue, recorder=recorder, more={"kept": 1})
    assert state["more"] == {"kept": 1}
    try:
        run_state.restore(state, cursor=cursor, queue=make_queue(groups_per_batch=3))
    except ValueError as error:
        assert "queue.groups_per_batch is 3 but the saved queue was built with 2" in str(error)
    else:
        raise AssertionError("a queue of another batch size took the state")


@async_test
async def test_queued_groups_too_stale_for_the_version_a_run_goes_on_as_come_again(tmp_path: Path) -> None:
    # As above, but versions 2 and 3 were published before the driver died: the run goes on as 4, and K is 1.
    cursor, queue = make_cursor(), make_queue(groups_per_batch=2, max_staleness=1)
    recorder = MetricsRecorder(max_staleness=1, total_steps=4, clock=SystemClock(), sinks=())
    order = generate(cursor, queue, 4, finished=3)
    await train_one_batch(cursor, queue)
    state = run_state.snapshot(1, cursor=cursor, queue=queue, recorder=recorder)

    cursor, queue = make_cursor(), make_queue(groups_per_batch=2, max_staleness=1)
    assert run_state.restore(state, cursor=cursor, queue=queue, version=4) == 1
    assert queue.learner_version == 4
    assert queue.outstanding == 0
    assert generate(cursor, queue, 2, finished=2) == order[2:]
    assert await train_one_batch(cursor, queue) == order[2:]
    queue.ledger.check()


def test_the_frontier_of_a_set_that_cannot_be_read_has_nothing_below_it(tmp_path: Path) -> None:
    folder = save_set(tmp_path, 5)
    assert run_state.frontier(folder) == 10
    for text in ("[", "[]", '{"step": 4, "cursor": {"frontier": 10}}', '{"step": 5}', '{"step": 5, "cursor": null}'):
        (folder / "run_state.json").write_text(text)
        assert run_state.frontier(folder) == 0
    (folder / "run_state.json").unlink()
    assert run_state.frontier(folder) == 0


def test_a_state_of_another_step_is_not_that_of_the_set(tmp_path: Path) -> None:
    folder = save_set(tmp_path, 5).rename(tmp_path / "step_00000006")
    with pytest.raises(ValueError, match=r"step_00000006/run_state\.json is that of step 5"):
        run_state.load_state(folder)
