"""One incarnation of a rollout worker as the pool knows it: the version it serves, its fence, how busy it is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from ray.exceptions import ObjectLostError

from actors.engine_weights import UpdateTiming
from actors.rollout_worker import INITIAL_VERSION, EngineDied, WorkerFenced
from actors.supervisor import ActorMember, WorkerDied
from rlhf_cluster.protocols import WeightSnapshot, WorkerFailed


class SnapshotGone(WorkerFailed):
    """The newest snapshot is no longer where it was written: only the next one can bring a worker up to date."""


class RolloutMember(ActorMember):
    """One incarnation: what it serves and how busy it is. Fenced until it holds the newest published version."""

    fatal = (EngineDied,)

    def __init__(
        self, name: str, incarnation: int, handle: Any, bring_up: Callable[[RolloutMember], Awaitable[None]]
    ) -> None:
        super().__init__(name, incarnation, handle)
        self.version = INITIAL_VERSION
        self.applied: int | None = None
        """The version it was told to hold and verified; None: what it started from, taken on trust."""
        self.in_flight = 0
        self.updating = False
        self.fenced = True
        self._bring_up = bring_up

    async def start(self) -> None:
        await self._bring_up(self)

    def raised(self, cause: BaseException) -> None:
        self.fenced |= isinstance(cause, WorkerFenced)

    async def update(self, snapshot: WeightSnapshot, timeout_s: float) -> UpdateTiming:
        """Apply ``snapshot``. Raises WorkerFailed (fenced now) or WorkerDied; one that misses the deadline is dead."""
        what = f"the update to version {snapshot.version}"
        self.updating = True
        try:
            timing: UpdateTiming = await self.call("update_weights", snapshot, timeout_s=timeout_s, what=what)
        except TimeoutError as error:
            # An update that hangs holds the engine: nothing that is sent after it would ever be answered.
            self.life.end(str(error))
            raise WorkerDied(str(error)) from error
        except WorkerFailed as error:
            self.fenced = True
            # The object that carries the weights to other nodes dies with the learner that made it.
            if isinstance(getattr(error.__cause__, "cause", None), (FileNotFoundError, ObjectLostError)):
                raise SnapshotGone(str(error)) from error
            raise
        finally:
            self.updating = False
        self.version = self.applied = snapshot.version
        self.fenced = False
        return timing
