"""Engine processes that end with the process that started them, however suddenly it dies.

Without it an actor that is killed leaves its engine behind, with all its memory and nobody to ask it anything. The
kernel does it (Linux; elsewhere nothing happens) from the moment a process asks for it. vLLM hands its configuration to
every process that it spawns before anything else, so that is where the request lies: unpickling it is making it.

    rollout worker -- spawns, with VllmConfig.additional_config --> EngineCore -- the same --> tensor-parallel workers
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from multiprocessing.context import get_spawning_popen
from typing import Any

_PR_SET_PDEATHSIG = 1


class EndsWithParent(str):
    """A value that ends the process it is handed to at its start with the one that starts it.

    Everywhere else, copied or sent to a process that runs already, it is an empty text, which JSON can write.
    """

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        if get_spawning_popen() is None:
            return EndsWithParent, ()
        return _end_with_parent, (os.getpid(),)


def _end_with_parent(parent: int) -> EndsWithParent:
    """``parent``: the process that this one has for a parent as long as that lives."""
    if sys.platform == "linux":
        # The kernel watches the thread that started this process: for an actor its event loop's, which ends with it.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            # It died before it could be watched.
            os.kill(os.getpid(), signal.SIGKILL)
    return EndsWithParent()
