"""The folder of a run: resolved config, metrics, samples, checkpoints, evaluations."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_cluster.config import Config
from rlhf_cluster.config_io import dump_config
from rlhf_cluster.diagnosis.preflight import check_run_folder
from rlhf_cluster.run_state import newest_checkpoint


@dataclass(frozen=True, slots=True)
class RunFolder:
    """``checkpoint`` is the complete set to resume from, or None for a fresh run."""

    path: Path
    checkpoint: Path | None

    @staticmethod
    def open(config: Config, *, resume: str) -> RunFolder:
        """Create or reopen ``run.dir/run.name`` and write the resolved config into it.

        A fresh run moves an older run's metrics aside instead of mixing the two.

        Raises:
            PreflightError: ``--resume`` and what the folder holds do not go together.
        """
        path = Path(config.run.dir) / config.run.name
        checkpoint = newest_checkpoint(path / "checkpoints")
        check_run_folder(path, resume=resume, has_checkpoint=checkpoint is not None)
        path.mkdir(parents=True, exist_ok=True)
        if checkpoint is None:
            for name in ("metrics.jsonl", "samples.jsonl"):
                _move_aside(path / name)
        (path / "config.yaml").write_text(dump_config(config), encoding="utf-8")
        return RunFolder(path, checkpoint)

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        return self.path / "samples.jsonl"

    def write_evaluation(self, name: str, content: dict[str, Any]) -> Path:
        """Write ``evaluation_NAME.json``, readable by its owner only because it holds answers in clear."""
        path = self.path / f"evaluation_{name}.json"
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1, ensure_ascii=False)
        return path


def _move_aside(path: Path) -> None:
    """Rename ``path`` to the first free ``path.N``."""
    if not path.exists():
        return
    number = 1
    while (target := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    path.rename(target)
