"""The demo's own logic: how answers become pairs, and that a missed promise is said with its number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rlhf_cluster.config_io import load_config
from rlhf_cluster.demo.pairs import MARGIN, SampledAnswer, label_pairs
from rlhf_cluster.demo.report import compare, verdict
from rlhf_cluster.types import FinishReason, Prompt

PROMPT = Prompt("p1", (1, 2), "How are you?")
CONFIG = load_config(Path("configs/demo_smollm2.yaml"))


def answer(text: str, finish_reason: FinishReason = "stop") -> SampledAnswer:
    return SampledAnswer(PROMPT, text, finish_reason)


def test_the_friendlier_and_the_complete_answer_is_chosen() -> None:
    warm, flat, cut = answer("I am wonderful, thank you so much!"), answer("Fine."), answer("Fine, and", "length")
    pairs = label_pairs([[cut, flat, warm]])
    assert [(pair.chosen, pair.rejected) for pair in pairs] == [(warm.text, cut.text), (flat.text, cut.text)]
    assert all(pair.chosen_complete and not pair.rejected_complete for pair in pairs)
    assert len({pair.pair_id for pair in pairs}) == 2


def test_answers_nearer_than_the_margin_make_no_pair() -> None:
    assert label_pairs([[answer("A table."), answer("A chair.")]]) == []
    assert MARGIN > 0
    assert len(label_pairs([[answer("A table."), answer("A nice chair.")]], margin=0.1)) == 1


def run_folder(tmp_path: Path, *, after: dict[str, float], rows: list[dict[str, Any]] | None = None) -> Path:
    summary = {
        "component_model": 0.0,
        "component_rule": 1.0,
        "component_repetition": 0.0,
        "score_std_over_prompts": 1.0,
        "kl_reference_k1": 0.0,
        "kl_reference_k3": 0.0,
        "response_length": 50.0,
        "complete_fraction": 0.4,
    }
    answers = [
        {"prompt_id": f"p{i}", "prompt": "Hello?", "answer": f"answer {i} [bold]", "score": 0.5} for i in range(3)
    ]
    for name, change in (("before", {}), ("after", after)):
        content = {"version": 0, "summary": summary | change, "answers": answers}
        (tmp_path / f"evaluation_{name}.json").write_text(json.dumps(content))
    rows = rows or [_row(0), *[_row(4) for _ in range(5)]]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def _row(overlapping: int, max_lag: int = 1) -> dict[str, Any]:
    return {"event": "step", "rlhf_batch_overlapping_rollouts": overlapping, "rlhf_batch_max_lag": max_lag}


GOOD = {"component_model": 0.6, "component_rule": 1.2, "kl_reference_k1": 0.05, "kl_reference_k3": 0.05}


def test_kept_promises_leave_nothing_to_say(tmp_path: Path) -> None:
    assert verdict(run_folder(tmp_path, after=GOOD), CONFIG, 0.75) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"component_model": 0.49}, "rose by 0.49 of its initial std"),
        ({"component_rule": 1.0}, "true rule score"),
        ({"kl_reference_k1": 0.15}, "KL to the reference"),
        ({"kl_reference_k3": 0.2}, "KL to the reference is 0.200"),
    ],
)
def test_a_missed_promise_of_the_evaluation_is_named_with_its_number(
    tmp_path: Path, change: dict[str, float], words: str
) -> None:
    problems = verdict(run_folder(tmp_path, after=GOOD | change), CONFIG, 0.75)
    assert len(problems) == 1
    assert words in problems[0]


def test_staleness_overlap_and_pair_accuracy_are_promises_too(tmp_path: Path) -> None:
    rows = [_row(0), _row(4, max_lag=2), _row(0), _row(0), _row(4)]
    problems = verdict(run_folder(tmp_path, after=GOOD, rows=rows), CONFIG, 0.69)
    assert len(problems) == 3
    assert "a token had lag 2" in " ".join(problems)
    assert "2 of 4 batches overlapped" in " ".join(problems)
    assert "0.690 is under 0.7" in " ".join(problems)


def test_the_comparison_shows_numbers_and_three_pairs_of_answers_as_they_are(tmp_path: Path) -> None:
    console = Console(record=True, width=120, file=(tmp_path / "out").open("w"))
    compare(run_folder(tmp_path, after=GOOD), console)
    text = console.export_text()
    assert "+0.6000" in text
    assert text.count("Hello?") == 3
    assert "answer 0 [bold]" in text
