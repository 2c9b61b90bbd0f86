"""A rollout worker in a plain process, told to start: ``python -m tests.integration.starting_worker FOLDER``."""

from __future__ import annotations

import asyncio
import sys

from actors.rollout_worker import RolloutWorker
from rlhf_cluster.config import EngineConfig, PublishConfig


async def start(folder: str) -> None:
    engine = EngineConfig(max_num_seqs=4, cpu_threads=1)
    worker = RolloutWorker(0, folder, "float32", engine, 200, 1, "cpu", PublishConfig())
    await worker.start()
    print("started", flush=True)
    await asyncio.sleep(60)


if __name__ == "__main__":
    asyncio.run(start(sys.argv[1]))
