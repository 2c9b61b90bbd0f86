"""F07: real processes killed with SIGKILL in the middle of a save, and real full disks, leave a complete set."""

from __future__ import annotations

import asyncio
import random
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf_cluster.checkpoint_retention import Retention
from rlhf_cluster.checkpoint_set import clear_leftovers, newest_checkpoint, sets, step_of
from rlhf_cluster.checkpoint_writer import CheckpointFailed, CheckpointWriter
from tests.unit.checkpoint_builders import holds_step, save_set, state_of, tensors_of
from tests.unit.test_checkpoint_writer import OPERATIONS

KILLS = 30
ROOT = Path(__file__).resolve().parents[2]


def child(root: Path, mode: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.unit.checkpoint_child", str(root), mode],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def check(root: Path, at_least: int) -> int:
    """The newest set is complete, whole and not older than what was reported durable; nothing else keeps a name."""
    newest = newest_checkpoint(root)
    assert newest is not None
    step = step_of(newest)
    assert step >= at_least, f"step {at_least} was reported durable, the newest set is that of {step}"
    assert holds_step(newest, step)
    clear_leftovers(root)
    assert sorted(root.iterdir()) == sets(root)
    return step


def test_kills_at_random_moments_of_saves_leave_a_complete_set(tmp_path: Path) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    started = time.monotonic()
    save_set(tmp_path, 1)
    longest_s = max(0.06, 4 * (time.monotonic() - started))  # A few saves: a kill meets any moment of one.
    step, in_the_middle = 1, 0
    for _ in range(KILLS):
        process = child(tmp_path, "loop")
        assert process.stdout is not None
        assert process.stdout.readline() == f"ready {step}\n"
        time.sleep(rng.uniform(0, longest_s))
        process.send_signal(signal.SIGKILL)
        output, errors = process.communicate(timeout=20)
        assert process.returncode == -signal.SIGKILL, errors
        in_the_middle += any(tmp_path.glob(".partial_*")) or any(tmp_path.glob(".deleting_*"))
        reported = [int(line.split()[1]) for line in output.splitlines()]
        step = check(tmp_path, max([step, *reported]))
    print(f"{in_the_middle} of {KILLS} kills left something behind; {step - 1} saves were durable")
    assert in_the_middle >= 3, "the kills missed the saves: longest_s does not fit this machine"
    assert step > 1


@pytest.mark.parametrize("number", range(OPERATIONS))
def test_a_kill_before_any_operation_of_a_save_leaves_the_old_set_or_the_new_one(tmp_path: Path, number: int) -> None:
    save_set(tmp_path, 1)
    process = child(tmp_path, str(number))
    output, errors = process.communicate(timeout=20)
    assert process.returncode == -signal.SIGKILL, output + errors
    rename = OPERATIONS - 4  # The name, the parent, and the two operations of retention come last.
    assert check(tmp_path, 1) == (2 if number > rename else 1)


def test_a_file_that_the_system_refuses_to_let_grow_fails_the_save_and_not_the_run(tmp_path: Path) -> None:
    """A real refusal of the kernel (RLIMIT_FSIZE, EFBIG) in the middle of the learner's files."""
    save_set(tmp_path, 1)
    output, errors = child(tmp_path, "limit").communicate(timeout=20)
    lines = output.splitlines()
    assert lines[0] == "ready 1", errors
    assert lines[1].startswith("failed 1 checkpoint of step 2 was not saved: [Errno 27] File too large; the newest set")
    assert lines[2] == "saved 3"
    assert check(tmp_path, 3) == 3


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(mount, capture_output=True, text=True, timeout=20, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if mounted.returncode != 0:
        pytest.skip(f"this user may not mount a file system: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], timeout=20, check=True)


def test_a_full_file_system_fails_the_save_and_not_the_run(tiny_disk: Path) -> None:
    root = tiny_disk / "checkpoints"
    first = save_set(root, 1)

    async def run() -> None:
        writer = CheckpointWriter(root, retention=Retention(1))
        # The first set was tiny, so the check of the free space lets this one begin.
        await writer.save(2, state_of(2), tensors_of(2, size=400_000))
        with pytest.raises(CheckpointFailed, match=r"step 2 was not saved: \[Errno 28\] No space left on device"):
            await writer.finish()
        assert sorted(root.iterdir()) == [first], "the failed save gave its space back"
        await writer.save(3, state_of(3), tensors_of(3, size=100_000))
        third = await writer.finish()
        assert third is not None
        assert holds_step(third, 3)
        # Two sets of 520 kB do not fit into 1 MiB, and that is seen before the learner writes anything.
        await writer.save(4, state_of(4), tensors_of(4, size=130_000))
        await writer.finish()
        await writer.save(5, state_of(5), tensors_of(5, size=130_000))
        with pytest.raises(CheckpointFailed, match=r"a set needs about 0\.55 MiB and .* has 0\.\d+ MiB free"):
            await writer.finish()

    asyncio.run(run())
    assert check(root, 4) == 4
