"""What the demo shows at the end: held-out numbers before and after, answers side by side, promises kept or not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlhf_cluster.config import Config

# What `make demo` promises (README).
MIN_PAIR_ACCURACY = 0.70
MIN_SCORE_RISE_STDS = 0.5
MAX_KL_NATS = 0.15
MIN_OVERLAPPING_BATCHES = 0.8

_ROWS = (
    ("component_model", "reward-model score"),
    ("component_rule", "true rule score"),
    ("kl_reference_k3", "KL to the reference, nats a token (k3)"),
    ("response_length", "length, tokens"),
    ("complete_fraction", "ended by itself, share"),
    ("component_repetition", "repeated 3-grams, share"),
)


def compare(folder: Path, console: Console) -> None:
    """Print the held-out table and three pairs of answers to the same prompts under the same seeds."""
    before, after = (_evaluation(folder, name) for name in ("before", "after"))
    table = Table(title=f"Held-out prompts, version {before['version']} and version {after['version']}")
    table.add_column("mean over answers")
    for name in ("before", "after", "change"):
        table.add_column(name, justify="right")
    for key, label in _ROWS:
        old, new = before["summary"][key], after["summary"][key]
        table.add_row(label, f"{old:.4f}", f"{new:.4f}", f"{new - old:+.4f}")
    console.print(table)
    prompts = list(dict.fromkeys(answer["prompt_id"] for answer in before["answers"]))
    for prompt_id in prompts[:: max(1, len(prompts) // 3)][:3]:
        old, new = (next(a for a in e["answers"] if a["prompt_id"] == prompt_id) for e in (before, after))
        pair = Table(title=Text(old["prompt"]), show_lines=True)
        pair.add_column(f"before (score {old['score']:.2f})", ratio=1)
        pair.add_column(f"after (score {new['score']:.2f})", ratio=1)
        pair.add_row(Text(old["answer"]), Text(new["answer"]))
        console.print(pair)


def verdict(folder: Path, config: Config, pair_accuracy: float) -> list[str]:
    """The promises that were not kept, each with its number; empty when all were."""
    before, after = (_evaluation(folder, name)["summary"] for name in ("before", "after"))
    steps = [row for row in _rows(folder / "metrics.jsonl") if row["event"] == "step"]
    rise = (after["component_model"] - before["component_model"]) / before["score_std_over_prompts"]
    overlapping = [row["rlhf_batch_overlapping_rollouts"] > 0 for row in steps[1:]]
    max_lag = max(row["rlhf_batch_max_lag"] for row in steps)
    checks = {
        f"held-out pair accuracy {pair_accuracy:.3f} is under {MIN_PAIR_ACCURACY}": pair_accuracy >= MIN_PAIR_ACCURACY,
        f"reward-model score rose by {rise:.2f} of its initial std over prompts, under {MIN_SCORE_RISE_STDS}": (
            rise >= MIN_SCORE_RISE_STDS
        ),
        f"true rule score did not rise: from {before['component_rule']:.3f} to {after['component_rule']:.3f}": (
            after["component_rule"] > before["component_rule"]
        ),
        f"KL to the reference is {after['kl_reference_k3']:.3f} nats a token, over {MAX_KL_NATS}": (
            max(after["kl_reference_k1"], after["kl_reference_k3"]) < MAX_KL_NATS
        ),
        f"a token had lag {max_lag:.0f}, over max_staleness {config.queue.max_staleness}": (
            max_lag <= config.queue.max_staleness
        ),
        f"{sum(overlapping)} of {len(overlapping)} batches overlapped a learner update": (
            sum(overlapping) >= MIN_OVERLAPPING_BATCHES * len(overlapping)
        ),
    }
    return [problem for problem, kept in checks.items() if not kept]


def _evaluation(folder: Path, name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / f"evaluation_{name}.json").read_text(encoding="utf-8"))
    return content


def _rows(path: Path) -> list[dict[str, Any]]:
    # Not splitlines: text may hold characters such as U+0085, which JSON leaves as they are.
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]
