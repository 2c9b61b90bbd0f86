"""samples.jsonl: only what was asked for, and only for its owner."""

from __future__ import annotations

import json
from pathlib import Path

from rlhf_cluster.experience_queue import Attempt
from rlhf_cluster.metrics.samples import SampleWriter
from rlhf_cluster.types import TrainBatch
from tests.unit.builders import make_group


def test_the_first_answers_of_a_step_are_written_in_clear_to_a_file_of_the_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    writer = SampleWriter(path, per_step=3, decode=lambda ids: f"{len(ids)} ids")
    batch = TrainBatch(1, tuple(make_group(Attempt(name, 0, 0), versions=[0, 0, 1]) for name in "ab"))
    writer.write(2, batch)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    writer.close()
    assert [row["rollout_id"] for row in rows] == ["a/0/0", "a/0/1", "b/0/0"]
    assert rows[0]["step"] == 2
    assert (rows[0]["prompt"], rows[0]["answer"]) == ("3 ids", "3 ids")
    assert rows[0]["versions"] == [[0, 0, 2], [1, 2, 3]]
    assert path.stat().st_mode & 0o077 == 0


def test_a_line_that_a_kill_left_torn_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "ans')
    writer = SampleWriter(path, per_step=1, decode=lambda ids: "")
    writer.write(2, TrainBatch(1, (make_group(Attempt("a", 0, 0)),)))
    writer.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]
