"""The demo, stage by stage; every stage leaves files behind and is skipped when they are there.

unpack SmolLM2 -> sample answers (vLLM) -> label pairs by the rule -> fit the reward head -> PPO -> compare
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from rlhf_cluster import launch
from rlhf_cluster.config import Config
from rlhf_cluster.config_io import load_config
from rlhf_cluster.data.chat import ChatRenderer
from rlhf_cluster.data.preferences import save_preferences
from rlhf_cluster.data.prompts import load_prompts
from rlhf_cluster.demo.model import unpack
from rlhf_cluster.demo.pairs import SampledAnswer, label_pairs
from rlhf_cluster.demo.report import compare, verdict
from rlhf_cluster.progress import ProgressView

CONFIG = Path("configs/demo_smollm2.yaml")
# Prompts and answers for the preference pairs: about 42,000 tokens.
PAIR_PROMPTS = 200
PAIR_ANSWERS = 4


def run(out: Path, overrides: list[str]) -> None:
    """Run the whole demo below ``out``.

    Raises:
        RuntimeError: the trained policy misses what the demo promises (see ``report.verdict``).
    """
    console = Console()
    models = out / "models"
    folders = [f"run.dir={out}", f"model.policy={models / 'smollm2'}", f"model.reward={models / 'reward'}"]
    config = load_config(CONFIG, [*folders, *overrides])
    models.mkdir(parents=True, exist_ok=True)
    with _stage(console, 1, "unpack SmolLM2-135M-Instruct"):
        unpack(models / "smollm2")
    pairs = out / "pairs.jsonl"
    with _stage(console, 2, f"sample {PAIR_PROMPTS * PAIR_ANSWERS} answers and label them by the rule"):
        if not pairs.is_file():
            _sample_pairs(config, pairs)
    with _stage(console, 3, "fit the reward model on the pairs"):
        if not (models / "reward" / "pair_accuracy.json").is_file():
            _fit_reward_model(config, models / "smollm2", pairs, models / "reward")
    accuracy = json.loads((models / "reward" / "pair_accuracy.json").read_text())
    console.print(
        f"reward model: {accuracy['held_out_accuracy']:.3f} of {accuracy['pairs']} pairs ranked right, "
        "each by a head that had not seen its prompt"
    )
    with _stage(console, 4, f"train {config.run.steps} steps of asynchronous PPO"):
        launch.train(config, resume="auto")
    folder = Path(config.run.dir) / config.run.name
    compare(folder, console)
    problems = verdict(folder, config, accuracy["held_out_accuracy"])
    if problems:
        raise RuntimeError("the demo missed its promises: " + "; ".join(problems))
    console.print("[bold green]the demo kept all its promises[/bold green]")


@contextmanager
def _stage(console: Console, number: int, title: str) -> Iterator[None]:
    console.print(f"[bold]({number}/4) {title}[/bold]")
    started = time.monotonic()
    yield
    console.print(f"({number}/4) took {time.monotonic() - started:.0f} s")


def _sample_pairs(config: Config, path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(config.model.policy)
    loaded = load_prompts(
        config.data.prompts,
        field=config.data.prompt_field,
        renderer=ChatRenderer(tokenizer),
        max_prompt_tokens=config.data.max_prompt_tokens,
        too_long=config.data.too_long,
    )
    prompts = loaded.prompts[:: max(1, len(loaded.prompts) // PAIR_PROMPTS)][:PAIR_PROMPTS]
    with ProgressView() as view:
        groups = launch.sample_answers(config, prompts, samples_per_prompt=PAIR_ANSWERS, progress=view.update)
    answers = [
        [
            SampledAnswer(prompt, tokenizer.decode(rollout.token_ids, skip_special_tokens=True), rollout.finish_reason)
            for rollout in group
        ]
        for prompt, group in zip(prompts, groups, strict=True)
    ]
    partial = path.with_suffix(".partial")
    save_preferences(partial, label_pairs(answers))
    partial.rename(path)


def _fit_reward_model(config: Config, base: Path, pairs: Path, out: Path) -> None:
    """In a process of its own, whose memory is free again when training starts."""
    command = ["reward-model", str(base), str(pairs), str(out), "--attention", config.model.attention]
    subprocess.run([sys.executable, "-m", "rlhf_cluster", *command], check=True)
