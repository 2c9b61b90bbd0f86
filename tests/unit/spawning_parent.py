"""A process that spawns another with ``EndsWithParent`` and prints its id: ``python -m tests.unit.spawning_parent S``.

The child takes S seconds to arrive at it.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from typing import Any

from actors.parent_death import EndsWithParent


class ArrivesLate:
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __reduce__(self) -> tuple[Any, ...]:
        return time.sleep, (self.seconds,)


if __name__ == "__main__":
    child: Any = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
    child.carries = [ArrivesLate(float(sys.argv[1])), EndsWithParent()]
    child.start()
    print(child.pid, flush=True)
    time.sleep(60)
