"""A rollout worker without an engine: a real actor process behind the real worker's methods, with faults on request.

What happens is said by the prompt's text (``slow 2``: sleep so long; ``die``: SIGKILL itself; ``fatal``: the engine
died; ``error``: an ordinary error) and by a snapshot's manifest (``refuse``: slots that raise; ``die``: slots that
SIGKILL themselves and ``hang``: slots that never finish, both once; ``seconds``: how long it takes). Answers carry the
version that the worker held when it took the request, and the process id as their only token id.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np

from actors.health import Health
from actors.rollout_worker import EngineDied, UpdateTiming
from rlhf_cluster.protocols import RolloutRequest, WeightSnapshot
from rlhf_cluster.types import Rollout, VersionSpan


class FakeRolloutWorker(Health):
    def __init__(self, index: int, model: str, **_: Any) -> None:
        self._index = index
        self._folder = Path(model)
        self._version = 0

    async def start(self) -> dict[str, Any]:
        if (self._folder / f"no_start_{self._index}").exists():
            raise RuntimeError("the engine refused a setting")
        return {"temperature": 1.0}

    async def generate(self, request: RolloutRequest) -> list[Rollout]:
        version, (what, *arguments) = self._version, request.prompt.text.split()
        if what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "fatal":
            raise EngineDied("rollout worker: the engine process died: illegal memory access")
        if what == "error":
            raise ValueError("this prompt is too long")
        if what == "slow":
            await asyncio.sleep(float(arguments[0]))
        return [
            Rollout(
                rollout_id=f"{request.group_id}/{request.attempt}/{number}",
                attempt=request.attempt,
                group_id=request.group_id,
                prompt_token_ids=np.array(request.prompt.token_ids),
                token_ids=np.array([os.getpid()]),
                behaviour_logprobs=np.array([-1.0]),
                version_spans=(VersionSpan(version, 0, 1),),
                finish_reason="stop",
                sampling=sampling,
            )
            for number, sampling in enumerate(request.sampling)
        ]

    async def update_weights(self, snapshot: WeightSnapshot) -> UpdateTiming:
        if self._index in snapshot.manifest.get("refuse", ()):
            raise RuntimeError("checksum of lm_head differs")
        if self._once("hang", snapshot):
            await asyncio.Event().wait()
        if self._once("die", snapshot):
            os.kill(os.getpid(), signal.SIGKILL)
        await asyncio.sleep(snapshot.manifest.get("seconds", 0.0))
        if not snapshot.path.exists():
            raise FileNotFoundError(f"snapshot {snapshot.path} is not on this node")
        self._version = snapshot.version
        return UpdateTiming(0.01, 0.02)

    def _once(self, fault: str, snapshot: WeightSnapshot) -> bool:
        done = self._folder / f"{fault}_{self._index}_{snapshot.version}"
        if self._index not in snapshot.manifest.get(fault, ()) or done.exists():
            return False
        done.touch()
        return True

    async def close(self) -> None: ...
