"""A driver for long runs: `rlhf train` on local Ray as it is, with actors that hold no model but move real bytes.

Every answer is thousands of tokens long, so that groups, batches and log-probs go through Ray's object store.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from actors.engine_weights import UpdateTiming
from actors.health import Health
from learner.spec import LearnerSpec
from rlhf_cluster import launch
from rlhf_cluster.config import Config
from rlhf_cluster.config_io import load_config
from rlhf_cluster.ending import guard
from rlhf_cluster.protocols import RolloutRequest, WeightSnapshot
from rlhf_cluster.types import Ratio, Rollout, TrainBatch, UpdateResult, VersionSpan
from tests.integration.fake_scorers import FakeReferenceScorer, FakeRewardScorer
from tests.toy_run import Report, toy_inputs

TOKENS = 4000
SAMPLE_EVERY = 10


def overrides(folder: Path) -> list[str]:
    """What such a run changes in configs/tiny_test.yaml."""
    return [
        f"model.policy={folder / 'policy'}",
        f"model.reward={folder / 'policy'}",
        f"run.dir={folder / 'runs'}",
        "queue.groups_per_batch=1",
        f"rollout.max_new_tokens={TOKENS}",
        "learner.ranks=1",
        "checkpoint.every_steps=10",
        "metrics.prometheus=null",
    ]


class LongWorker(Health):
    """A rollout worker whose answers are of one length and say nothing."""

    def __init__(self, index: int, **_: Any) -> None:
        self._version = 0

    async def start(self) -> dict[str, Any]:
        return {}

    async def generate(self, request: RolloutRequest) -> list[Rollout]:
        return [
            Rollout(
                rollout_id=f"{request.group_id}/{request.attempt}/{number}",
                attempt=request.attempt,
                group_id=request.group_id,
                prompt_token_ids=np.array(request.prompt.token_ids),
                token_ids=np.full(TOKENS, number),
                behaviour_logprobs=np.full(TOKENS, -1.0),
                version_spans=(VersionSpan(self._version, 0, TOKENS),),
                finish_reason="stop",
                sampling=sampling,
            )
            for number, sampling in enumerate(request.sampling)
        ]

    async def update_weights(self, snapshot: WeightSnapshot) -> UpdateTiming:
        np.fromfile(snapshot.path, dtype=np.uint8)
        self._version = snapshot.version
        return UpdateTiming(0.0, 0.0)

    async def close(self) -> None: ...


class LongRank:
    """What ``learner_group.RankActor`` is to its group, over a megabyte of weights."""

    _layout: Mapping[str, Any]

    def __init__(self, rank: int, world_size: int, cpu_threads: int) -> None:
        self._version = 0
        self._weights = np.zeros(2**20, dtype=np.uint8)
        self._folder = Path()

    def address(self, loopback: bool) -> tuple[str, int]:
        return "127.0.0.1", 0

    def setup(self, spec: LearnerSpec, host: str, port: int) -> str:
        self._folder = spec.snapshot_dir
        self._layout = spec.layout
        return "node"

    def train(self, batch: TrainBatch) -> UpdateResult:
        self._weights += np.uint8(batch.n_tokens % 7)
        self._version += 1
        return UpdateResult(self._version, True, {"policy_loss": Ratio(0.0, 1.0)})

    def logprobs(self, rollouts: Sequence[Rollout]) -> list[Any]:
        return [np.array(rollout.behaviour_logprobs) for rollout in rollouts]

    def snapshot(self, with_bytes: bool) -> tuple[WeightSnapshot, Any]:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{self._version}.bin"
        self._weights.tofile(path)
        (self._folder / f"{self._version - 2}.bin").unlink(missing_ok=True)
        return WeightSnapshot(self._version, path, {"tensors": {}}), None

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self._weights.tofile(folder / "weights.bin")
        (folder / "learner.json").write_text(json.dumps({"version": self._version, "layout": self._layout}))

    def load(self, folder: Path, version: int | None) -> int:
        self._weights = np.fromfile(folder / "weights.bin", dtype=np.uint8)
        self._version = (
            int(json.loads((folder / "learner.json").read_text())["version"]) if version is None else version
        )
        return self._version

    def progress(self) -> int:
        return self._version

    def dump_stacks(self) -> str:
        return ""

    def close(self) -> None: ...


def usage(pid: int) -> dict[str, int]:
    """Bytes of its own in memory (what it maps of the object store is counted there), open files, and threads."""
    folder = Path(f"/proc/{pid}")
    status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    return {
        "resident": int(status["RssAnon"].split()[0]) * 1024,
        "files": len(list((folder / "fd").iterdir())),
        "threads": int(status["Threads"]),
    }


def object_store_bytes() -> int:
    import ray
    from ray._private.internal_api import get_memory_info_reply, get_state_from_address

    state = get_state_from_address(ray.get_runtime_context().gcs_address)
    return int(get_memory_info_reply(state).store_stats.object_store_bytes_used)


def train(report: Report, config: Config, samples: Path) -> int:
    """`rlhf train` over these actors; a line of ``samples`` every ten steps."""

    def on_batch(step: int, batch: TrainBatch) -> None:
        if step % SAMPLE_EVERY == 0:
            gc.collect()
            found: dict[str, Any] = {"step": step, "driver": usage(os.getpid()), "store": object_store_bytes()}
            for name, pid in actor_pids().items():
                found[name] = usage(pid)
            with samples.open("a") as file:
                file.write(json.dumps(found) + "\n")

    launch.TrainingRun._sample_writer = lambda self, stack: on_batch  # type: ignore[method-assign]
    return train_as_it_is(config)


def train_as_it_is(config: Config) -> int:
    """`rlhf train` over these actors; returns the exit code."""
    from actors import rollout_pool, scorer_pool
    from learner import learner_group

    launch.read_inputs = lambda _: toy_inputs()  # type: ignore[assignment]
    rollout_pool.RolloutPool = functools.partial(  # type: ignore[assignment,misc]
        rollout_pool.RolloutPool, worker_class=LongWorker
    )
    scorer_pool.ScorerPool = functools.partial(  # type: ignore[assignment,misc]
        scorer_pool.ScorerPool, reward_actor=FakeRewardScorer, reference_actor=FakeReferenceScorer
    )
    learner_group.LearnerGroup = functools.partial(  # type: ignore[assignment,misc]
        learner_group.LearnerGroup, rank_class=LongRank
    )
    return guard(lambda: launch.train(config, resume="auto"))


def actor_pids() -> dict[str, int]:
    """Processes of this session that run an actor of these, by its name."""
    found = {}
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            if folder.name.isdigit() and os.getsid(int(folder.name)) == os.getsid(0):
                # "ray::LongWorker", or "ray::LongWorker.generate" while it works.
                title = re.match(r"ray::((Long|Fake)\w+)", (folder / "cmdline").read_text())
                if title is not None:
                    found[f"{title[1]} {folder.name}"] = int(folder.name)
    return found


if __name__ == "__main__":
    # Under its own name, so that the actors' processes find these classes.
    from tests.integration import long_driver

    sys.exit(long_driver.train_as_it_is(load_config(Path("configs/tiny_test.yaml"), sys.argv[1:])))
