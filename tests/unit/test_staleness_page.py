"""docs/staleness.md: its worked example is what the real queue does, and the names it uses exist."""

from __future__ import annotations

import asyncio
import math
import re
from pathlib import Path

import pytest

from rlhf_cluster.config_keys import all_keys
from rlhf_cluster.controller import Controller
from rlhf_cluster.data.cursor import PromptCursor
from rlhf_cluster.experience_queue import Attempt, BatchTimeout, ExperienceQueue, PutResult
from rlhf_cluster.schedule import Schedule
from tests.unit.builders import ManualClock, async_test, make_group, make_prompt, make_queue

PAGE = Path("docs/staleness.md").read_text()
DEADLINE_S = 10.0


class Example:
    """The queue of the page, moved by the words of its event column."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.queue = make_queue(groups_per_batch=2, max_staleness=2, clock=self.clock, group_deadline_s=DEADLINE_S)
        self.attempts: dict[str, list[Attempt]] = {}
        self.in_training = False

    async def do(self, event: str) -> None:
        verb, *words = re.split(r"[ ,]+", event)
        await getattr(self, verb)(*words)

    async def admit(self, *words: str) -> None:
        *names, _, start_version = words
        for name in names:
            attempt = self.queue.admit(make_prompt(name), int(start_version))
            self.attempts.setdefault(name, []).append(attempt)
            assert attempt.attempt == len(self.attempts[name]) - 1

    async def refuse(self, start_version: str) -> None:
        assert not self.queue.can_admit(int(start_version))

    async def put(self, *words: str) -> None:
        names, version = (words[:-2], int(words[-1])) if "of" in words else (words, None)
        for name in names:
            group = make_group(self.attempts[name][-1], versions=None if version is None else [version] * 2)
            assert self.queue.put(group) is PutResult.QUEUED

    async def late(self, name: str) -> None:
        assert self.queue.put(make_group(self.attempts[name][0])) is PutResult.DUPLICATE

    async def batch(self, *words: str) -> None:
        names, lags = words[: words.index("lag")], words[words.index("lag") + 1 :]
        groups = await asyncio.wait_for(self.queue.next_batch(), 1)
        assert [group.group_id for group in groups] == list(names)
        assert [self.queue.learner_version - group.min_version for group in groups] == list(map(int, lags))
        self.in_training = True

    async def wait(self) -> None:
        waiting = asyncio.ensure_future(self.queue.next_batch())
        await self.clock.run_ready()
        assert not waiting.done()
        waiting.cancel()

    async def advance(self, _: str, version: str) -> None:
        assert self.queue.advance(int(version)) == []
        self.in_training = False

    async def deadline(self, _: str, name: str) -> None:
        waiting = asyncio.ensure_future(self.queue.next_batch())
        await self.clock.advance(DEADLINE_S)
        with pytest.raises(BatchTimeout) as timeout:
            await waiting
        assert timeout.value.group_ids == (name,)
        assert self.queue.retire(name, self.attempts[name][-1].attempt, "failed")

    def outstanding(self) -> str:
        by_due: dict[int, list[str]] = {}
        for name, entry in sorted(self.queue._entries.items()):
            by_due.setdefault(entry.due, []).append(name + ("*" if entry.group else ""))
        return "; ".join(f"{due}: {' '.join(names)}" for due, names in sorted(by_due.items()))

    def lacks(self) -> str:
        if self.in_training:
            return "in training"
        unmet = self.queue._schedule.unmet(self.queue.learner_version)
        return ", ".join(f"{n} in all" if math.isinf(d) else f"{n} due by {d}" for d, n in unmet) or "nothing"


@async_test
async def test_the_worked_example_is_what_the_queue_does() -> None:
    example = Example()
    rows = re.findall(r"^\| ([a-z][^|]*) \| (\d[^|]*) \| ([^|]*) \|$", PAGE, re.MULTILINE)
    assert len(rows) == 26
    for event, outstanding, lacks in rows:
        await example.do(event)
        assert (event, example.outstanding(), example.lacks()) == (event, outstanding, lacks)
    counts = {state: count.groups for state, count in example.queue.ledger.counts.items() if count.groups}
    assert counts == {"dispatched": 1, "queued": 1, "trained": 10, "failed": 1, "duplicate": 1}


def test_every_key_and_every_member_that_the_page_names_exists() -> None:
    keys = set(re.findall(r"`((?:queue|guardrails)\.[a-z_]+)`", PAGE))
    assert len(keys) >= 4
    assert keys <= set(all_keys())
    members = re.findall(r"`(Controller|ExperienceQueue|Schedule|PromptCursor)\.([a-z_]+)", PAGE)
    classes = {kind.__name__: kind for kind in (Controller, ExperienceQueue, Schedule, PromptCursor)}
    source = Path("rlhf_cluster/controller.py").read_text()
    missing = [
        (owner, name)
        for owner, name in members
        if not hasattr(classes[owner], name) and not (owner == "Controller" and f"self.{name}" in source)
    ]
    assert members and missing == []
    called = set(re.findall(r"`(?:queue\.)?([a-z_]+)(?:\([a-z_+1]*\))`", PAGE))
    assert {"forget", "fail_over", "advance"} <= called
    assert [name for name in called if not hasattr(ExperienceQueue, name)] == []


def test_the_files_and_sections_that_the_page_names_exist() -> None:
    files = re.findall(r"`([a-z_/]+\.py)`", PAGE)
    assert (
        files and [name for name in files if not Path(name).exists() and not Path("rlhf_cluster", name).exists()] == []
    )
    titles = re.findall(r"^## (\d+\. .*)$", PAGE, re.MULTILINE)
    assert re.findall(r"^(\d+)\. \[(.*?)\]", PAGE, re.MULTILINE) == [tuple(title.split(". ", 1)) for title in titles]
