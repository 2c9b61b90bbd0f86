"""metrics.jsonl, TensorBoard event files and the console view."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

from rich.console import Console

from rlhf_cluster.metrics.console import ConsoleView
from rlhf_cluster.metrics.jsonl import JsonlSink
from rlhf_cluster.metrics.tensorboard import TensorBoardSink
from rlhf_cluster.types import Ratio, UpdateResult
from tests.unit.metrics_run import record_step, recorder


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_step_and_every_evaluation_is_a_line_at_once(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    metrics = recorder(JsonlSink(path))
    metrics.evaluated("before", {"score": 0.25})
    record_step(metrics, 0, [0])
    metrics.evaluated("after", {"score": 0.75})
    before, step, after = lines(path)  # the file is still open
    assert before == {"event": "evaluation", "name": "before", "step": 0, "version": 0, "score": 0.25}
    assert (step["event"], step["step"], step["version"], step["rlhf_clip_fraction"]) == ("step", 1, 1, 0.25)
    assert after == {"event": "evaluation", "name": "after", "step": 1, "version": 1, "score": 0.75}


def test_a_value_that_is_not_finite_is_null_so_that_every_line_is_json(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = recorder(JsonlSink(path))
    metrics.step_done(UpdateResult(0, False, {"grad_norm_policy": Ratio(math.inf, 1)}), seconds=1.0)
    metrics.close_step(0, 1)
    assert "Infinity" not in path.read_text()
    assert lines(path)[0]['rlhf_grad_norm{model="policy"}'] is None


def test_a_resume_appends_and_cuts_off_the_line_a_kill_left_torn(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"event": "step", "step": 1}\n{"event": "st')
    sink = JsonlSink(path)
    sink.step(2, 2, {"rlhf_step": 2.0})
    sink.close()
    sink.close()
    assert [line["step"] for line in lines(path)] == [1, 2]


def test_tensorboard_files_hold_the_scalars_of_the_rows(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    metrics = recorder(TensorBoardSink(tmp_path))
    record_step(metrics, 0, [0])
    record_step(metrics, 1, [1])
    metrics.evaluated("after", {"score": 0.75})
    metrics.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("rlhf_clip_fraction")] == [(1, 0.25), (2, 0.25)]
    assert [event.value for event in events.Scalars("rlhf_tokens_total/trained")] == [1.0, 2.0]
    assert [(event.step, event.value) for event in events.Scalars("evaluation/after/score")] == [(2, 0.75)]
    tags = events.Tags()["scalars"]
    assert not any("rlhf_version_" in tag or "bucket" in tag for tag in tags)


def test_away_from_a_terminal_every_step_is_one_plain_line() -> None:
    out = io.StringIO()
    view = ConsoleView(Console(file=out, force_terminal=False, width=40))
    metrics = recorder(view, total_steps=10)
    view.phase("starting engines")
    view.phase("starting engines")
    result = UpdateResult(1, True, {"kl_reference_k3": Ratio(0.5, 10), "score_mean": Ratio(1.0, 4)})
    metrics.step_done(result, seconds=1.0)
    record_step(metrics, 1, [0, 1])
    metrics.evaluated("after", {"score": 0.75})
    view.message("saved [checkpoint]")
    metrics.close()
    phase, step, evaluation, message = out.getvalue().splitlines()
    assert phase == "[starting engines]"
    assert step.startswith("step 2/10  version 2  score 0.2500  KL 0.0500  lag mean 0.50 max 1  queue -/-")
    assert evaluation == "evaluation after (version 2): score 0.75"
    assert message == "saved [checkpoint]"
    assert "\x1b" not in out.getvalue()


def test_on_a_terminal_the_panel_shows_step_phase_and_live_values() -> None:
    out = io.StringIO()
    view = ConsoleView(Console(file=out, force_terminal=True, width=100, height=40))
    metrics = recorder(view, total_steps=10)
    view.phase("generating [first] batch")
    record_step(metrics, 0, [0])
    view.message("checkpoint saved")
    view._live.refresh()  # what its own thread does four times a second
    shown = out.getvalue()
    metrics.close()
    assert "1/10" in shown
    assert "generating [first] batch" in shown
    assert "checkpoint saved" in shown
