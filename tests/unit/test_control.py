"""Requests to a running driver through files in its run folder."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from rlhf_cluster.clock import SystemClock
from rlhf_cluster.control import ControlRefused, ControlServer, ask, scale_handler


class Driver:
    """A driver that scales, refuses when it should, and counts what it did."""

    def __init__(self, folder: Path) -> None:
        self.scaled: list[int] = []
        self.server = ControlServer(folder, {"scale": scale_handler(self._scale)}, clock=SystemClock(), poll_s=0.01)

    async def _scale(self, workers: int) -> str:
        if workers > 8:
            raise ValueError("the Ray cluster has 0 CPU free")
        self.scaled.append(workers)
        return f"1 -> {workers} rollout workers"

    async def while_serving(self, *calls: Any) -> list[Any]:
        """Run blocking ``calls`` in threads while the driver serves; exceptions come back as values."""
        serving = asyncio.create_task(self.server.serve())
        await asyncio.sleep(0.05)
        try:
            return await asyncio.gather(*(asyncio.to_thread(call) for call in calls), return_exceptions=True)
        finally:
            serving.cancel()


def request_scale(folder: Path, arguments: Mapping[str, Any], timeout_s: float = 5.0) -> Any:
    return lambda: ask(folder, "scale", arguments, timeout_s=timeout_s, poll_s=0.01)


def test_a_request_is_done_once_and_answered_and_leaves_no_file(tmp_path: Path) -> None:
    driver = Driver(tmp_path)
    assert asyncio.run(driver.while_serving(request_scale(tmp_path, {"workers": 3}))) == ["1 -> 3 rollout workers"]
    assert driver.scaled == [3]
    assert list((tmp_path / "control").iterdir()) == []


def test_several_askers_get_each_their_own_answer(tmp_path: Path) -> None:
    driver = Driver(tmp_path)
    answers = asyncio.run(driver.while_serving(*(request_scale(tmp_path, {"workers": n}) for n in (2, 3, 4))))
    assert answers == [f"1 -> {n} rollout workers" for n in (2, 3, 4)]
    assert sorted(driver.scaled) == [2, 3, 4]


@pytest.mark.parametrize("arguments", [{"workers": 0}, {"workers": "3"}, {"workers": True}, {"ranks": 2}, {}])
def test_arguments_that_make_no_sense_are_refused_with_what_would(tmp_path: Path, arguments: dict[str, Any]) -> None:
    driver = Driver(tmp_path)
    (answer,) = asyncio.run(driver.while_serving(request_scale(tmp_path, arguments)))
    assert isinstance(answer, ControlRefused) and "workers=N" in str(answer)
    assert driver.scaled == []


def test_the_reason_of_a_refusal_and_an_unknown_command_reach_the_asker(tmp_path: Path) -> None:
    driver = Driver(tmp_path)
    refused, unknown = asyncio.run(
        driver.while_serving(
            request_scale(tmp_path, {"workers": 9}),
            lambda: ask(tmp_path, "stop", {}, timeout_s=5, poll_s=0.01),
        )
    )
    assert isinstance(refused, ControlRefused) and str(refused) == "the Ray cluster has 0 CPU free"
    assert isinstance(unknown, ControlRefused) and "unknown command 'stop'; this run knows scale" in str(unknown)


def test_a_folder_without_a_driver_says_so_and_keeps_no_request_for_a_later_one(tmp_path: Path) -> None:
    with pytest.raises(ControlRefused, match=r"no run in .* listens"):
        ask(tmp_path, "scale", {"workers": 2}, timeout_s=0.1)
    (tmp_path / "control").mkdir()
    with pytest.raises(TimeoutError, match="is the run alive"):
        ask(tmp_path, "scale", {"workers": 2}, timeout_s=0.1, poll_s=0.01)
    assert list((tmp_path / "control").iterdir()) == []


def put(folder: Path, content: str) -> Path:
    path = folder / "control" / f"request-{'0' * 16}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)
    return path


def content(**changes: Any) -> str:
    return json.dumps({"command": "scale", "arguments": {"workers": 2}, "expires_at": time.time() + 60} | changes)


@pytest.mark.parametrize(
    "text",
    [
        "not json",
        "[]",
        content(command=7),
        content(arguments=[2]),
        json.dumps({"command": "scale", "arguments": {"workers": 2}}),
        content(expires_at=time.time() - 1),
        content(padding="x" * 70_000),
    ],
    ids=["no json", "no object", "command", "arguments", "no expiry", "expired", "huge"],
)
def test_what_is_no_valid_request_is_removed_and_changes_nothing(tmp_path: Path, text: str) -> None:
    driver = Driver(tmp_path)
    path = put(tmp_path, text)
    asyncio.run(driver.while_serving(lambda: time.sleep(0.05)))
    assert driver.scaled == []
    assert not path.exists()


def test_the_valid_twin_of_those_requests_is_obeyed(tmp_path: Path) -> None:
    driver = Driver(tmp_path)
    put(tmp_path, content())
    asyncio.run(driver.while_serving(lambda: time.sleep(0.05)))
    assert driver.scaled == [2]


def test_a_link_to_a_file_elsewhere_is_not_followed(tmp_path: Path) -> None:
    driver = Driver(tmp_path)
    elsewhere = tmp_path / "elsewhere.json"
    elsewhere.write_text(content())
    (tmp_path / "control").mkdir()
    (tmp_path / "control" / f"request-{'0' * 16}.json").symlink_to(elsewhere)
    asyncio.run(driver.while_serving(lambda: time.sleep(0.05)))
    assert driver.scaled == []
    assert elsewhere.exists()


def test_requests_of_another_user_are_not_obeyed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(tmp_path)
    put(tmp_path, content())
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    asyncio.run(driver.while_serving(lambda: time.sleep(0.05)))
    assert driver.scaled == []


def test_folder_and_files_are_for_the_owner_alone(tmp_path: Path) -> None:
    driver = Driver(tmp_path)
    modes: list[int] = []

    def look() -> None:
        folder = tmp_path / "control"
        modes.append(stat.S_IMODE(folder.stat().st_mode))
        ask_in_vain = request_scale(tmp_path, {"workers": 2}, timeout_s=0.0)
        seen: list[int] = []
        original = os.open

        def watched(path: Any, *args: Any, **kwargs: Any) -> int:
            descriptor = original(path, *args, **kwargs)
            seen.append(stat.S_IMODE(os.fstat(descriptor).st_mode))
            return descriptor

        os.open = watched  # type: ignore[assignment]
        try:
            with pytest.raises(TimeoutError):
                ask_in_vain()
        finally:
            os.open = original
        modes.append(seen[0])

    (tmp_path / "control").mkdir(mode=0o755)
    asyncio.run(driver.while_serving(lambda: time.sleep(0.02)))
    look()
    assert modes == [0o700, 0o600]


def until(holds: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_trouble_with_the_folder_stops_no_run_and_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(tmp_path)
    folder, broken = tmp_path / "control", threading.Event()
    iterdir = Path.iterdir

    def listed(path: Path) -> Any:
        if path == folder and broken.is_set():
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return iterdir(path)

    monkeypatch.setattr(Path, "iterdir", listed)

    def breaks_and_heals() -> None:
        request = folder / f"request-{'0' * 16}.json"
        request.write_text("[" * 60_000)
        until(lambda: not request.exists())
        broken.set()
        until(lambda: "Stale file handle" in caplog.text)
        broken.clear()
        shutil.rmtree(folder)
        until(folder.is_dir)

    async def asked_afterwards() -> list[Any]:
        serving = asyncio.create_task(driver.server.serve())
        await asyncio.sleep(0.05)
        await asyncio.to_thread(breaks_and_heals)
        try:
            return await asyncio.gather(asyncio.to_thread(request_scale(tmp_path, {"workers": 3})))
        finally:
            serving.cancel()

    assert asyncio.run(asked_afterwards()) == ["1 -> 3 rollout workers"]
    assert caplog.text.count("control requests cannot be served, until this is over") in (1, 2)
    assert "Stale file handle" in caplog.text
    assert f"request-{'0' * 16}.json was ignored" in caplog.text


def test_trouble_with_the_folder_that_comes_again_is_said_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(tmp_path)
    looks: list[bool] = []
    iterdir = Path.iterdir

    def listed(path: Path) -> Any:
        if path != tmp_path / "control":
            return iterdir(path)
        looks.append(len(looks) in (1, 2, 4, 5))
        if looks[-1]:
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return iterdir(path)

    monkeypatch.setattr(Path, "iterdir", listed)

    async def until_looked_seven_times() -> None:
        serving = asyncio.create_task(driver.server.serve())
        while len(looks) < 7:
            await asyncio.sleep(0.01)
        serving.cancel()

    asyncio.run(asyncio.wait_for(until_looked_seven_times(), 5))
    assert caplog.text.count("control requests cannot be served") == 2
