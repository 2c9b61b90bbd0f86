"""Saves run beside the training, one at a time, and whatever the disk does the older set stays as it is."""

from __future__ import annotations

import asyncio
import errno
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhf_cluster import checkpoint_writer
from rlhf_cluster.checkpoint_files import Files, disk_error
from rlhf_cluster.checkpoint_retention import Retention, prune
from rlhf_cluster.checkpoint_set import clear_leftovers, newest_checkpoint, read_manifest, sets, step_folder, verify
from rlhf_cluster.checkpoint_writer import CheckpointFailed, CheckpointWriter, SaveReport
from tests.unit.builders import async_test
from tests.unit.checkpoint_builders import ScriptedFiles, holds_step, save_set, state_of, tensors_of

# Of the first operation to the last of a save of step 2 with keep_last 1, root and step 1 being there.
OPERATIONS = 19


class GatedFiles(Files):
    """A disk that takes no file before ``gate`` is set."""

    def __init__(self) -> None:
        self.gate = threading.Event()

    def digest_and_sync(self, path: Path) -> str:
        assert self.gate.wait(timeout=20)
        return super().digest_and_sync(path)


@pytest.fixture
def slow() -> Iterator[GatedFiles]:
    files = GatedFiles()
    yield files
    files.gate.set()


def writer_of(root: Path, files: Files | None = None, *, keep_last: int = 9, **more: Any) -> CheckpointWriter:
    return CheckpointWriter(root, retention=Retention(keep_last), files=files, **more)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


@async_test
async def test_training_goes_on_while_the_disk_takes_the_set(tmp_path: Path, slow: GatedFiles) -> None:
    reports: list[SaveReport] = []
    writer = writer_of(tmp_path, slow, on_report=reports.append)
    await writer.save(1, state_of(1), tensors_of(1))
    for _ in range(50):
        await asyncio.sleep(0.001)
    assert sets(tmp_path) == [] and reports == [], "the set is not there before every file is on disk"
    slow.gate.set()
    folder = await writer.finish()
    assert folder == step_folder(tmp_path, 1)
    assert holds_step(folder, 1)
    [report] = reports
    assert (report.step, report.path, report.error) == (1, folder, None)
    assert report.bytes == verify(folder).total_bytes
    assert report.total_s - report.blocked_s >= 0.05, "the seconds above were not waited for in save"
    assert (writer.saved, writer.failed, writer.late) == (1, 0, 0)


@async_test
async def test_the_next_save_waits_for_the_one_before(
    tmp_path: Path, slow: GatedFiles, caplog: pytest.LogCaptureFixture
) -> None:
    writer = writer_of(tmp_path, slow)
    await writer.save(1, state_of(1), tensors_of(1))
    second = asyncio.create_task(writer.save(2, state_of(2), tensors_of(2)))
    await asyncio.sleep(0.05)
    assert not second.done()
    assert len(list(tmp_path.glob(".partial_*"))) == 1, "the learner does not write the second beside the first"
    slow.gate.set()
    await second
    await writer.finish()
    assert names(tmp_path) == ["step_00000001", "step_00000002"]
    assert (writer.saved, writer.late) == (2, 1)
    assert "step 1 is still being written when the next is due" in caplog.text


@async_test
async def test_the_state_is_that_of_the_call_whatever_happens_to_it_later(tmp_path: Path, slow: GatedFiles) -> None:
    writer = writer_of(tmp_path, slow)
    await writer.save(1, state_of(1), tensors_of(1))
    state = {"step": 2, "queue": ["a"]}
    second = asyncio.create_task(writer.save(2, state, tensors_of(2)))
    await asyncio.sleep(0.01)
    state["queue"].append("arrived while the save waited")  # type: ignore[attr-defined]
    slow.gate.set()
    await second
    await writer.finish()
    assert (step_folder(tmp_path, 2) / "run_state.json").read_text() == '{"step": 2, "queue": ["a"]}'


@async_test
async def test_a_state_of_another_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="checkpoint of step 4 was given the state of step 3"):
        await writer_of(tmp_path).save(4, state_of(3), tensors_of(4))
    assert names(tmp_path) == []


@async_test
async def test_a_step_that_is_saved_is_not_saved_again(tmp_path: Path) -> None:
    writer = writer_of(tmp_path)
    await writer.save(1, state_of(1), tensors_of(1))
    folder = await writer.finish()
    assert folder is not None
    before = (folder / "manifest.json").stat()
    await writer.save(1, state_of(1), tensors_of(99))
    assert await writer.finish() == folder
    assert (folder / "manifest.json").stat() == before
    assert writer.saved == 1


@async_test
async def test_a_folder_of_the_same_step_that_is_no_set_is_set_aside(tmp_path: Path) -> None:
    folder = step_folder(tmp_path, 1)
    folder.mkdir()
    (folder / "half").touch()
    writer = writer_of(tmp_path)
    await writer.save(1, state_of(1), tensors_of(1))
    await writer.finish()
    assert holds_step(folder, 1)
    assert names(tmp_path) == ["step_00000001", "step_00000001.superseded"]


@async_test
async def test_a_run_that_went_back_saves_the_same_steps_again(tmp_path: Path) -> None:
    writer = writer_of(tmp_path)
    for step in (1, 2, 3):
        await writer.save(step, state_of(step), tensors_of(step))
        await writer.finish()
    writer.go_back(1)
    await writer.save(1, state_of(1), tensors_of(99))
    await writer.save(2, state_of(2), tensors_of(102))
    assert await writer.finish() == step_folder(tmp_path, 2)
    assert holds_step(step_folder(tmp_path, 1), 1), "where the run went back to is saved already"
    tensors = (step_folder(tmp_path, 2) / "learner/learner.json").read_bytes()
    assert tensors[0] == 102
    assert names(tmp_path) == [
        "step_00000001",
        "step_00000002",
        "step_00000002.superseded",
        "step_00000003.superseded",
    ]


@async_test
async def test_a_save_that_was_given_up_makes_no_set_once_its_files_are_there(tmp_path: Path) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def before(number: int, name: str, path: Path) -> None:
        if name == "write" and path.name == "manifest.json":
            reached.set()
            go_on.wait(10)

    writer = CheckpointWriter(tmp_path, retention=Retention(9), files=ScriptedFiles(before))
    await writer.save(4, state_of(4), tensors_of(4))
    await asyncio.to_thread(reached.wait, 10)
    with pytest.raises(CheckpointFailed):
        await writer.finish(timeout_s=0.01)
    go_on.set()
    async with asyncio.timeout(10):
        while names(tmp_path):
            await asyncio.sleep(0.01)
    writer.go_back(2)
    await writer.save(3, state_of(3), tensors_of(3))
    await writer.finish()
    assert names(tmp_path) == ["step_00000003"]


@async_test
async def test_a_set_that_gets_its_name_after_the_run_went_back_counts_for_nothing(tmp_path: Path) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def before(number: int, name: str, path: Path) -> None:
        if name == "rename" and path.name == "step_00000010" and not reached.is_set():
            reached.set()
            go_on.wait(10)

    await asyncio.to_thread(save_set, tmp_path, 5)
    reports: list[SaveReport] = []
    writer = CheckpointWriter(
        tmp_path, retention=Retention(1), files=ScriptedFiles(before), on_report=reports.append, wait_s=5
    )
    await writer.save(10, state_of(10), tensors_of(99))
    await asyncio.to_thread(reached.wait, 10)
    with pytest.raises(CheckpointFailed):
        await writer.finish(timeout_s=0.01)
    writer.go_back(5)
    go_on.set()
    assert not await asyncio.to_thread(until_idle, writer)
    assert names(tmp_path) == ["step_00000005", "step_00000010.superseded"]
    await writer.save(10, state_of(10), tensors_of(10))
    assert await writer.finish() == step_folder(tmp_path, 10)
    assert holds_step(step_folder(tmp_path, 10), 10)
    assert [report.path is not None for report in reports] == [False, True]


def until_idle(writer: CheckpointWriter, seconds: float = 10.0) -> bool:
    """Whether it still saves after that time."""
    deadline = time.monotonic() + seconds
    while writer.busy and time.monotonic() < deadline:
        time.sleep(0.01)
    return writer.busy


@async_test
async def test_a_set_of_a_past_that_came_through_late_never_costs_one_of_now(tmp_path: Path) -> None:
    for step in (2, 4):
        await asyncio.to_thread(save_set, tmp_path, step)
    writer = writer_of(tmp_path, keep_last=1)
    writer.go_back(2)
    await writer.save(3, state_of(3), tensors_of(3))
    assert await writer.finish() == step_folder(tmp_path, 3)
    assert names(tmp_path) == ["step_00000003", "step_00000004.superseded"]


@async_test
async def test_a_set_of_a_past_that_comes_through_during_a_save_costs_none_of_now_and_the_report_names_what_stays(
    tmp_path: Path,
) -> None:
    def before(number: int, name: str, path: Path) -> None:
        if name == "write" and path.name == "manifest.json":
            step_folder(tmp_path, 2).rename(step_folder(tmp_path, 4))
            for file in (step_folder(tmp_path, 4) / "manifest.json", step_folder(tmp_path, 4) / "run_state.json"):
                file.write_text(file.read_text().replace('"step": 2', '"step": 4'))

    for step in (1, 2):
        await asyncio.to_thread(save_set, tmp_path, step)
    reports: list[SaveReport] = []
    writer = writer_of(tmp_path, ScriptedFiles(before), keep_last=1, on_report=reports.append)
    writer.go_back(1)
    await writer.save(3, state_of(3), tensors_of(3))
    assert await writer.finish() == step_folder(tmp_path, 3)
    assert names(tmp_path) == ["step_00000003", "step_00000004"]
    assert [report.stay for report in reports] == [(3,)]


def test_retention_never_deletes_the_set_that_was_just_made(tmp_path: Path) -> None:
    for step in (2, 3, 4):
        save_set(tmp_path, step)
    assert prune(tmp_path, Retention(1), newest=3) == [step_folder(tmp_path, 2)]


@async_test
async def test_a_set_is_saved_though_deleting_older_ones_takes_longer_than_the_run_waits(tmp_path: Path) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def before(number: int, name: str, path: Path) -> None:
        if name == "remove":
            reached.set()
            go_on.wait(10)

    await asyncio.to_thread(save_set, tmp_path, 1)
    writer = CheckpointWriter(tmp_path, retention=Retention(1), files=ScriptedFiles(before))
    await writer.save(2, state_of(2), tensors_of(2))
    await asyncio.to_thread(reached.wait, 10)
    assert await writer.finish(timeout_s=0.0) == step_folder(tmp_path, 2)
    assert writer.failed == 0
    go_on.set()


# -- a disk that fails -----------------------------------------------------------------------------------------------


def full_at(number: int, code: int = errno.ENOSPC) -> ScriptedFiles:
    """A disk on which operation ``number`` fails, and no other."""

    def before(count: int, name: str, path: Path) -> None:
        if count == number:
            raise OSError(code, f"refused {name}", str(path))

    return ScriptedFiles(before)


@pytest.mark.parametrize("number", range(OPERATIONS))
def test_a_disk_that_is_full_at_any_operation_leaves_the_old_set_intact(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    first = save_set(tmp_path, 1)
    files = full_at(number)
    reports: list[SaveReport] = []

    async def run() -> None:
        writer = writer_of(tmp_path, files, keep_last=1, on_report=reports.append)
        await writer.save(2, state_of(2), tensors_of(2))
        second = step_folder(tmp_path, 2)
        if number < OPERATIONS - 2:
            with pytest.raises(CheckpointFailed, match=r"step 2 was not saved: .*refused .*; the newest set is .*step"):
                await writer.finish()
            assert (writer.saved, writer.failed) == (0, 1)
            assert holds_step(first, 1)
            verify(first)
            assert reports[0].error is not None and "refused" in reports[0].error
        else:
            # Only the deletion of step 1 failed.
            assert await writer.finish() == second
            assert (writer.saved, writer.failed) == (1, 0)
            assert holds_step(second, 2)
        assert any(record.levelno == logging.ERROR and "refused" in record.getMessage() for record in caplog.records)
        newest = newest_checkpoint(tmp_path)
        assert newest is not None
        assert holds_step(newest, int(newest.name[-1]))
        assert not list(tmp_path.glob(".partial_*"))
        await writer.save(3, state_of(3), tensors_of(3))
        assert await writer.finish() == step_folder(tmp_path, 3), "a later save that succeeds heals the run"

    asyncio.run(run())
    assert names(tmp_path)[-1] == "step_00000003"


def test_the_operations_of_a_save_are_those_that_fail_above(tmp_path: Path) -> None:
    save_set(tmp_path, 1)
    files = ScriptedFiles()

    async def run() -> None:
        writer = writer_of(tmp_path, files, keep_last=1)
        await writer.save(2, state_of(2), tensors_of(2))
        await writer.finish()

    asyncio.run(run())
    assert len(files.operations) == OPERATIONS


@async_test
async def test_a_learner_whose_disk_is_full_ends_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class LearnerFailed(RuntimeError):
        """As learner_group raises it, with Ray's error as its cause."""

    class RayTaskError(Exception):
        cause = OSError(errno.ENOSPC, "No space left on device")

    async def full(folder: Path) -> None:
        await tensors_of(2)(folder)
        raise LearnerFailed("learner rank 1 failed in 'save'") from RayTaskError()

    first = tmp_path / "step_00000001"
    writer = writer_of(tmp_path)
    await writer.save(1, state_of(1), tensors_of(1))
    await writer.save(2, state_of(2), full)
    assert names(tmp_path) == [first.name], "the failed save gives its space back"
    assert writer.failed == 1
    assert "checkpoint of step 2 was not saved: [Errno 28] No space left on device; the newest set is" in caplog.text
    with pytest.raises(CheckpointFailed, match=r"step 2 .*No space left on device; the newest set is .*step_00000001"):
        await writer.finish()


@pytest.mark.parametrize(
    "error",
    [
        TimeoutError("learner rank [1] did not answer 'save' within 600 s"),
        ConnectionResetError(errno.ECONNRESET, "peer"),
        RuntimeError("bug"),
    ],
)
def test_what_is_not_about_the_disk_passes_through_counted(tmp_path: Path, error: BaseException) -> None:
    first = save_set(tmp_path, 1)

    async def breaks(folder: Path) -> None:
        await tensors_of(2)(folder)
        raise error

    async def run() -> None:
        writer = writer_of(tmp_path)
        with pytest.raises(type(error)):
            await writer.save(2, state_of(2), breaks)
        assert writer.failed == 1

    asyncio.run(run())
    assert newest_checkpoint(tmp_path) == first
    assert names(tmp_path) == [first.name]


@async_test
async def test_a_save_that_is_cancelled_is_a_leftover_of_the_next_start(tmp_path: Path) -> None:
    async def long(folder: Path) -> None:
        await tensors_of(2)(folder)
        await asyncio.sleep(60)

    first = await asyncio.to_thread(save_set, tmp_path, 1)
    writer = writer_of(tmp_path)
    save = asyncio.create_task(writer.save(2, state_of(2), long))
    await asyncio.sleep(0.1)
    save.cancel()
    with pytest.raises(asyncio.CancelledError):
        await save
    with pytest.raises(CheckpointFailed, match="step 2 was not saved: the run was stopped; the newest set is"):
        await writer.finish()
    [left] = clear_leftovers(tmp_path)
    assert left.name.startswith(".partial_00000002_")
    assert names(tmp_path) == [first.name]


def test_the_disks_error_is_found_behind_others_and_a_deadline_is_none() -> None:
    full = OSError(errno.EDQUOT, "quota")
    outer = RuntimeError("save failed")
    outer.__cause__ = ValueError("middle")
    outer.__cause__.__cause__ = full
    assert disk_error(outer) is full
    assert disk_error(TimeoutError(errno.ETIMEDOUT, "late")) is None
    assert disk_error(OSError("not from the system: no error number")) is None
    assert disk_error(None) is None


@async_test
async def test_files_of_the_learner_that_this_node_does_not_see_end_the_run(tmp_path: Path) -> None:
    async def elsewhere(folder: Path) -> None:
        """Writes to the disk of another node."""

    with pytest.raises(CheckpointFailed, match=r"nothing is there: run\.dir must be a folder that every node"):
        await writer_of(tmp_path).save(1, state_of(1), elsewhere)


# -- free space ------------------------------------------------------------------------------------------------------


class SmallDisk(Files):
    def __init__(self, free: int) -> None:
        self.free = free

    def free_bytes(self, folder: Path) -> int:
        return self.free


async def _not_called(folder: Path) -> None:
    raise AssertionError("nothing may be written")


@async_test
async def test_a_set_that_will_not_fit_is_not_begun(tmp_path: Path) -> None:
    writer = writer_of(tmp_path)
    await writer.save(1, state_of(1), tensors_of(1, size=1_000_000))
    first = await writer.finish()
    assert first is not None
    size = read_manifest(first).total_bytes
    assert 4_000_000 < size < 4_001_000
    # Room for a set as large as the last, but not for the tenth by which the next may be larger.
    cramped = writer_of(tmp_path, SmallDisk(size + 300_000))
    await cramped.save(2, state_of(2), _not_called)
    assert cramped.failed == 1
    with pytest.raises(CheckpointFailed, match=r"a set needs about 4\.20 MiB and .* has 4\.10 MiB free"):
        await cramped.finish()
    roomy = writer_of(tmp_path, SmallDisk(size + 500_000))
    await roomy.save(2, state_of(2), tensors_of(2, size=1_000_000))
    assert await roomy.finish() == step_folder(tmp_path, 2)


@async_test
async def test_the_first_set_is_checked_against_the_size_it_is_expected_to_have(tmp_path: Path) -> None:
    writer = writer_of(tmp_path / "new", SmallDisk(999), first_bytes=1000)
    await writer.save(1, state_of(1), _not_called)
    with pytest.raises(CheckpointFailed, match="there is no set under"):
        await writer.finish()
    writer = writer_of(tmp_path / "new", SmallDisk(1000), first_bytes=1000)
    await writer.save(1, state_of(1), tensors_of(1))
    assert await writer.finish() is not None


# -- a disk that is slow or hangs ------------------------------------------------------------------------------------


@async_test
async def test_a_hung_disk_ends_no_run_and_is_named_at_its_end(tmp_path: Path, slow: GatedFiles) -> None:
    first = await asyncio.to_thread(save_set, tmp_path, 1)
    writer = writer_of(tmp_path, slow, wait_s=1.0)
    await writer.save(2, state_of(2), tensors_of(2))
    started = time.monotonic()
    await writer.save(3, state_of(3), _not_called)
    assert 1.0 <= time.monotonic() - started < 10.0
    started = time.monotonic()
    await writer.save(4, state_of(4), _not_called)
    assert time.monotonic() - started < 0.8, "one deadline is enough to know that the disk hangs"
    assert (writer.saved, writer.failed, writer.late) == (0, 2, 2)
    with pytest.raises(
        CheckpointFailed, match=r"step 2 was not saved: the disk .* did not take it in time; the newest"
    ):
        await writer.finish(timeout_s=0.1)
    assert newest_checkpoint(tmp_path) == first


@async_test
async def test_an_older_set_that_completes_late_does_not_stand_for_the_newest(tmp_path: Path, slow: GatedFiles) -> None:
    writer = writer_of(tmp_path, slow, wait_s=1.0)
    await writer.save(1, state_of(1), tensors_of(1))
    await writer.save(2, state_of(2), _not_called)
    slow.gate.set()
    with pytest.raises(CheckpointFailed, match=r"step 2 was not saved: the save of step 1 still waits for the disk"):
        await writer.finish(timeout_s=20)
    assert names(tmp_path) == ["step_00000001"]


@async_test
async def test_a_disk_that_hangs_before_the_first_file_does_not_hang_the_run(tmp_path: Path) -> None:
    release = threading.Event()

    class Hanging(Files):
        def free_bytes(self, folder: Path) -> int:
            release.wait(timeout=20)
            return super().free_bytes(folder)

    writer = writer_of(tmp_path, Hanging(), wait_s=0.1)
    await writer.save(1, state_of(1), _not_called)
    release.set()
    with pytest.raises(
        CheckpointFailed, match=r"the disk under .* did not answer within 0\.1 s; there is no set under"
    ):
        await writer.finish()


@async_test
async def test_a_save_that_was_given_up_spoils_no_later_one(tmp_path: Path, slow: GatedFiles) -> None:
    writer = writer_of(tmp_path, slow)
    await writer.save(1, state_of(1), tensors_of(1))
    with pytest.raises(CheckpointFailed, match="step 1"):
        await writer.finish(timeout_s=0.05)
    slow.gate.set()
    with pytest.raises(CheckpointFailed, match="step 1"):
        await writer.finish(timeout_s=20)
    assert names(tmp_path) == [], "what was given up is deleted when the disk answers"
    await writer.save(2, state_of(2), tensors_of(2))
    assert await writer.finish(timeout_s=20) == step_folder(tmp_path, 2)
    assert sets(tmp_path) == [step_folder(tmp_path, 2)]


@async_test
async def test_a_disk_that_comes_back_heals_the_run(tmp_path: Path, slow: GatedFiles) -> None:
    writer = writer_of(tmp_path, slow, wait_s=1.0)
    await writer.save(1, state_of(1), tensors_of(1))
    await writer.save(2, state_of(2), _not_called)
    slow.gate.set()
    with pytest.raises(CheckpointFailed, match="step 2"):
        await writer.finish(timeout_s=20)
    await writer.save(3, state_of(3), tensors_of(3))
    assert await writer.finish(timeout_s=20) == step_folder(tmp_path, 3)
    assert names(tmp_path) == ["step_00000001", "step_00000003"]
    assert (writer.saved, writer.failed) == (2, 1)


def test_a_hung_disk_does_not_keep_the_process(tmp_path: Path) -> None:
    """The loop closes, and the interpreter may end, with the thread still in the disk."""
    files = GatedFiles()

    async def run() -> None:
        writer = writer_of(tmp_path, files)
        await writer.save(1, state_of(1), tensors_of(1))
        with pytest.raises(CheckpointFailed):
            await writer.finish(timeout_s=0.05)

    started = time.monotonic()
    asyncio.run(run())
    assert time.monotonic() - started < 5.0
    [thread] = [thread for thread in threading.enumerate() if thread.name == "checkpoint"]
    assert thread.daemon
    files.gate.set()
    thread.join(timeout=5)
    assert sets(tmp_path) == [], "an abandoned save stops and makes no set"


@async_test
async def test_finish_without_a_save_has_nothing_to_wait_for(tmp_path: Path) -> None:
    assert await writer_of(tmp_path).finish() is None


# -- power loss ------------------------------------------------------------------------------------------------------


class PowerLoss(ScriptedFiles):
    """Stops before operation ``number``; then every file that was not synced is lost, and has 0 bytes."""

    class Off(BaseException):
        pass

    def __init__(self, number: int) -> None:
        super().__init__(self._maybe_off)
        self._number = number
        self._synced: set[int] = set()

    def _maybe_off(self, count: int, name: str, path: Path) -> None:
        if count >= self._number:
            raise self.Off

    def write(self, path: Path, text: str) -> None:
        super().write(path, text)
        self._synced.add(path.stat().st_ino)

    def digest_and_sync(self, path: Path) -> str:
        digest = super().digest_and_sync(path)
        self._synced.add(path.stat().st_ino)
        return digest

    def lose_unsynced(self, root: Path, durable: set[int]) -> None:
        for path in root.rglob("*"):
            if path.is_file() and path.stat().st_ino not in self._synced | durable:
                path.write_bytes(b"")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("number", range(OPERATIONS + 1))
def test_a_power_loss_at_any_operation_leaves_a_complete_set(tmp_path: Path, number: int) -> None:
    save_set(tmp_path, 1)
    durable = {path.stat().st_ino for path in tmp_path.rglob("*") if path.is_file()}
    files = PowerLoss(number)

    async def run() -> None:
        writer = writer_of(tmp_path, files, keep_last=1)
        await writer.save(2, state_of(2), tensors_of(2))
        await writer.finish()

    try:
        asyncio.run(run())
        assert number == OPERATIONS
    except PowerLoss.Off:
        pass
    files.lose_unsynced(tmp_path, durable)
    newest = newest_checkpoint(tmp_path)
    assert newest is not None
    step = int(newest.name[-1])
    assert holds_step(newest, step)
    renamed = ("rename", step_folder(tmp_path, 2)) in files.operations[:number]
    assert step == (2 if renamed else 1)


@pytest.mark.parametrize("turns", range(4))
@async_test
async def test_a_cancellation_that_comes_with_the_disks_answer_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    answer = asyncio.get_running_loop().create_future()

    async def in_thread(work: Any) -> Any:
        return await answer

    monkeypatch.setattr(checkpoint_writer, "in_disk_thread", in_thread)
    writer = writer_of(tmp_path)
    saving = asyncio.ensure_future(writer.save(1, state_of(1), tensors_of(1)))
    await asyncio.sleep(0.01)
    answer.set_result(True)
    for _ in range(turns):
        await asyncio.sleep(0)
    still_saving = saving.cancel()
    await asyncio.wait([saving])
    assert saving.cancelled() == still_saving
    if writer._running is not None:
        # The rest of a save that was over takes this disk's answer for a manifest; its error is not for the next test.
        await asyncio.wait([writer._running])
        assert isinstance(writer._running.exception(), AttributeError)
