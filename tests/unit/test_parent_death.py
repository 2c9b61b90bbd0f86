"""A spawned process ends with its parent, also with one that dies before it is there; nobody else does."""

from __future__ import annotations

import copy
import ctypes
import json
import pickle
import subprocess
import sys
import time

import psutil
import pytest

from actors.parent_death import EndsWithParent

_PR_GET_PDEATHSIG = 2


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's help is Linux's")
@pytest.mark.parametrize(
    ("arrives_after_s", "killed_after_s"), [(0.0, 2.0), (2.0, 0.0)], ids=["armed", "still_starting"]
)
def test_a_spawned_process_ends_with_a_parent_that_is_killed(arrives_after_s: float, killed_after_s: float) -> None:
    command = [sys.executable, "-m", "tests.unit.spawning_parent", str(arrives_after_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        time.sleep(killed_after_s)
        assert child.is_running()
        parent.kill()
    assert psutil.wait_procs([child], timeout=15)[1] == []


def test_a_copy_and_what_is_sent_to_a_running_process_do_nothing() -> None:
    mark = EndsWithParent()
    assert copy.deepcopy(mark) == pickle.loads(pickle.dumps(mark)) == ""
    assert json.dumps({"mark": mark}) == '{"mark": ""}'
    armed = ctypes.c_int(-1)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_GET_PDEATHSIG, ctypes.byref(armed))
        assert armed.value == 0
