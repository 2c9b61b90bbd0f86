"""A process that saves checkpoints until it is killed: ``python -m tests.unit.checkpoint_child ROOT MODE``.

MODE ``loop`` saves one step after the other; a number kills this process before that operation of the next save;
``limit`` saves one step under a limit on the size of a file that the learner's files pass.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sys
from pathlib import Path

from rlhf_cluster.checkpoint_files import Files
from rlhf_cluster.checkpoint_retention import Retention
from rlhf_cluster.checkpoint_set import clear_leftovers, newest_checkpoint, step_of
from rlhf_cluster.checkpoint_writer import CheckpointFailed, CheckpointWriter
from tests.unit.checkpoint_builders import ScriptedFiles, state_of, tensors_of

_BYTES = 200_000


async def _save(writer: CheckpointWriter, step: int) -> None:
    await writer.save(step, state_of(step), tensors_of(step, size=_BYTES))
    await writer.finish()
    print("saved", step, flush=True)


async def _run(root: Path, mode: str) -> None:
    clear_leftovers(root)
    newest = newest_checkpoint(root)
    step = 0 if newest is None else step_of(newest)
    retention = Retention(keep_last=1)
    print("ready", step, flush=True)
    if mode == "loop":
        writer = CheckpointWriter(root, retention=retention)
        while True:
            step += 1
            await _save(writer, step)
    elif mode == "limit":
        writer = CheckpointWriter(root, retention=retention)
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (_BYTES // 2, hard))
        try:
            await _save(writer, step + 1)
        except CheckpointFailed as error:
            print("failed", writer.failed, error, flush=True)
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        await _save(writer, step + 2)
    else:
        await _save(CheckpointWriter(root, retention=retention, files=_dying(int(mode))), step + 1)


def _dying(number: int) -> Files:
    def before(count: int, name: str, path: Path) -> None:
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)

    return ScriptedFiles(before)


if __name__ == "__main__":
    asyncio.run(_run(Path(sys.argv[1]), sys.argv[2]))
