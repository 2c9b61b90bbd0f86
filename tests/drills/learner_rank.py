"""A learner rank for drills: a policy-gradient step in numpy over two real processes, with the files of a real one.

The ranks meet over a socket as gloo's do, and exchange gradients after every micro-batch: when one dies, the other
fails in its collective.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from learner.learner_group import RankActor
from learner.spec import LearnerSpec
from rlhf_cluster.protocols import WeightSnapshot
from rlhf_cluster.types import Floats, Ratio, Rollout, ScoredRollout, TrainBatch, UpdateResult
from tests.drills import policy
from tests.drills.processes import register

RATE, MOMENTUM = 0.5, 0.5
_MICRO_BATCHES = 4
_MICRO_BATCH_S = 0.008
_FILE_S = 0.02
_KEPT_SNAPSHOTS = 2
_VERSIONS_REMEMBERED = 4
_KEY = b"drill"
STATE = "learner.json"


class Ranks:
    """Two processes that exchange values. A peer that dies ends the exchange with an error, as gloo does."""

    def __init__(self, rank: int, host: str, port: int) -> None:
        self._connection: Connection[Any, Any]
        if rank == 0:
            with Listener((host, port), authkey=_KEY) as listener:
                self._connection = listener.accept()
            return
        deadline = time.monotonic() + 30
        while True:
            try:
                self._connection = Client((host, port), authkey=_KEY)
                return
            except ConnectionRefusedError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)

    def exchange(self, value: Any) -> Any:
        """The other rank's value. Collective."""
        try:
            self._connection.send(value)
            return self._connection.recv()
        except (EOFError, OSError) as error:
            raise RuntimeError(f"Connection closed by peer: {error}") from error


class DrillRank:
    """What ``RankActor`` delegates to. The lineage of the weights is part of its state: every group they were trained
    on, in order."""

    def __init__(self, spec: LearnerSpec, rank: int, ranks: Ranks) -> None:
        self.progress = 0
        self._spec = spec
        self._rank = rank
        self._ranks = ranks
        self._weights = policy.initial_weights()
        self._momentum = {name: np.zeros_like(value) for name, value in self._weights.items()}
        self._lineage: list[str] = []
        self._of_version: dict[int, policy.Weights] = {}
        self._written: list[Path] = []
        self.version = 0

    @property
    def version(self) -> int:
        return self._version

    @version.setter
    def version(self, version: int) -> None:
        self._version = version
        self._of_version[version] = {name: value.copy() for name, value in self._weights.items()}
        while len(self._of_version) > _VERSIONS_REMEMBERED:
            del self._of_version[min(self._of_version)]

    def train(self, batch: TrainBatch) -> UpdateResult:
        if batch.learner_version != self.version:
            raise ValueError(f"a batch for version {batch.learner_version} came to version {self.version}")
        members = batch.rollouts
        mean = np.mean([member.score for member in members])
        total = {name: np.zeros(value.shape) for name, value in self._weights.items()}
        for part in range(_MICRO_BATCHES):
            time.sleep(_MICRO_BATCH_S)
            # Rank r has every second member; a micro-batch is every fourth of those.
            mine = self._gradient(members[self._rank :: 2][part::_MICRO_BATCHES], float(mean))
            other = self._ranks.exchange(mine)
            for name in total:
                total[name] += mine[name] + other[name]
            self.progress += 1
        for name, weight in self._weights.items():
            self._momentum[name] = (MOMENTUM * self._momentum[name] + total[name] / len(members)).astype(np.float32)
            weight += (RATE * self._momentum[name] * len(self._weights)).astype(np.float32)
        if self._ranks.exchange(self._digest()) != self._digest():
            raise RuntimeError("the ranks hold different weights after the same step")
        error, checked = self._behaviour_error(members)
        self._lineage += [group.group_id for group in batch.groups]
        self.version += 1
        metrics = {
            "behaviour_error": Ratio(error, 1),
            "behaviour_checked": Ratio(checked, 1),
            "score_mean": Ratio(float(sum(member.score for member in members)), len(members)),
        }
        return UpdateResult(self.version, True, metrics)

    def _gradient(self, members: Sequence[ScoredRollout], mean: float) -> dict[str, NDArray[np.float64]]:
        """Ascent direction of the score: advantage times (one-hot minus probabilities), summed over tokens."""
        gradient = {name: np.zeros(value.shape) for name, value in self._weights.items()}
        for member in members:
            rollout = member.rollout
            kind = policy.kind_of(rollout.prompt_token_ids)
            probabilities = np.exp(policy.log_distribution(self._weights, kind, rollout.sampling.temperature))
            counts = np.bincount(rollout.token_ids, minlength=policy.VOCABULARY)
            direction = (member.score - mean) * (counts - rollout.n_tokens * probabilities)
            gradient["head"] += direction
            gradient["kind"][kind] += direction
        return gradient

    def _behaviour_error(self, members: Sequence[ScoredRollout]) -> tuple[float, int]:
        """Largest |difference| in nats between what a worker said of a token and the weights of the version that it
        named, over tokens whose version this process knows; and how many those are."""
        worst, checked = 0.0, 0
        for member in members:
            rollout = member.rollout
            kind = policy.kind_of(rollout.prompt_token_ids)
            for version, start, end in rollout.version_spans:
                if version not in self._of_version or start == end:
                    continue
                distribution = policy.log_distribution(self._of_version[version], kind, rollout.sampling.temperature)
                expected = distribution[rollout.token_ids[start:end]]
                worst = max(worst, float(np.abs(expected - rollout.behaviour_logprobs[start:end]).max()))
                checked += end - start
        return worst, checked

    def logprobs(self, rollouts: Sequence[Rollout]) -> list[Floats]:
        return [
            policy.log_distribution(
                self._weights, policy.kind_of(rollout.prompt_token_ids), rollout.sampling.temperature
            )[rollout.token_ids].astype(np.float32)
            for rollout in rollouts
        ]

    def snapshot(self) -> WeightSnapshot | None:
        if self._rank != 0:
            return None
        folder = self._spec.snapshot_dir
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"v{self.version}.safetensors"
        partial = path.with_suffix(".partial")
        save_file(self._weights, partial)
        os.replace(partial, path)
        self._written = sorted(folder.glob("v*.safetensors"), key=lambda file: file.stat().st_mtime_ns)
        while len(self._written) > _KEPT_SNAPSHOTS:
            self._written.pop(0).unlink(missing_ok=True)
        return WeightSnapshot(self.version, path, policy.manifest(self.version, self._weights))

    def save(self, folder: Path) -> None:
        """Weights and lineage by rank 0, its part of the momentum by each; slowly, so that a kill finds half of it."""
        folder.mkdir(parents=True, exist_ok=True)
        time.sleep(_FILE_S)
        save_file(self._momentum, folder / f"momentum_{self._rank}.safetensors")
        if self._rank == 0:
            save_file(self._weights, folder / "weights.safetensors")
            time.sleep(_FILE_S)
            state = {"layout": self._spec.layout, "version": self.version, "lineage": self._lineage}
            (folder / STATE).write_text(json.dumps(state))
        self._ranks.exchange("saved")

    def load(self, folder: Path, *, version: int | None = None) -> None:
        state = json.loads((folder / STATE).read_text())
        self._weights = load_file(folder / "weights.safetensors")
        self._momentum = load_file(folder / f"momentum_{self._rank}.safetensors")
        self._lineage = list(state["lineage"])
        self._of_version.clear()
        self.version = int(state["version"]) if version is None else version
        self._ranks.exchange("loaded")

    def close(self) -> None:
        for path in self._written:
            path.unlink(missing_ok=True)

    def _digest(self) -> bytes:
        return b"".join(value.tobytes() for value in self._weights.values())


class DrillRankActor(RankActor):
    """The production shell with a ``DrillRank`` inside."""

    def build(self, spec: LearnerSpec, host: str, port: int) -> Any:
        folder = Path(spec.model.policy)
        register(folder, f"starting_rank_{self._rank}")
        rank = DrillRank(spec, self._rank, Ranks(self._rank, host, port))
        register(folder, f"learner_rank_{self._rank}")
        return rank
