"""What every supervised actor answers besides its work: a pulse, and its stacks when it seems stuck."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

from rlhf_cluster.watchdog import own_stacks


@dataclass(frozen=True, slots=True)
class Pulse:
    """Where the process runs."""

    host: str
    pid: int


class Health:
    """Mixed into the classes that become actors; both methods run on the actor's event loop, beside its work."""

    async def ping(self) -> Pulse:
        return Pulse(socket.gethostname(), os.getpid())

    async def dump_stacks(self) -> str:
        """Stacks of all threads and tasks of this process."""
        return own_stacks()
