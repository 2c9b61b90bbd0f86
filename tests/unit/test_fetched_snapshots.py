"""Weights of another node come to this one once, and nothing of them stays."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.fetched_snapshots import FetchedSnapshots
from rlhf_cluster.protocols import WeightSnapshot


def snapshot(folder: Path, version: int, content: bytes | None) -> WeightSnapshot:
    transport: dict[str, Any] = {} if content is None else {"object": content, "node_id": "the learner's"}
    return WeightSnapshot(version, folder / f"v{version}.safetensors", {}, transport)


def fetcher(calls: list[Any], *, node: str = "another") -> FetchedSnapshots:
    def fetch(reference: Any) -> np.ndarray:
        calls.append(reference)
        return np.frombuffer(reference, dtype=np.uint8)

    return FetchedSnapshots(fetch, node_id=lambda: node)


def shared(folder: Path) -> list[str]:
    """Names that any worker of the node can take."""
    return sorted(path.name for path in (folder / "fetched").glob("v*.safetensors"))


def test_two_workers_of_a_node_fetch_once_and_older_versions_go(tmp_path: Path) -> None:
    folder, calls = tmp_path / "rlhf-run.driver", []
    one, other = fetcher(calls), fetcher(calls)
    assert one.path(snapshot(folder, 1, b"first")).read_bytes() == b"first"
    assert other.path(snapshot(folder, 1, b"first")).read_bytes() == b"first"
    assert other.path(snapshot(folder, 2, b"second")).read_bytes() == b"second"
    assert calls == [b"first", b"second"]
    assert shared(folder) == ["v1.safetensors", "v2.safetensors"]
    one.path(snapshot(folder, 2, b"second"))
    assert shared(folder) == ["v2.safetensors"]
    assert len(list((folder / "fetched").iterdir())) == 3


def test_a_neighbour_that_is_scaled_away_takes_no_file_that_another_worker_is_about_to_map(tmp_path: Path) -> None:
    one, other = fetcher([]), fetcher([])
    one.path(snapshot(tmp_path, 1, b"first"))
    about_to_be_mapped = other.path(snapshot(tmp_path, 1, b"first"))
    one.close()
    assert about_to_be_mapped.read_bytes() == b"first"


def test_a_slow_fetch_of_an_older_version_leaves_the_newer_one_of_a_neighbour(tmp_path: Path) -> None:
    one, newer = fetcher([]), []

    def slow(reference: Any) -> np.ndarray:
        newer.append(one.path(snapshot(tmp_path, 2, b"second")))
        return np.frombuffer(reference, dtype=np.uint8)

    older = FetchedSnapshots(slow, node_id=lambda: "another").path(snapshot(tmp_path, 1, b"first"))
    assert (older.read_bytes(), newer[0].read_bytes()) == (b"first", b"second")
    assert shared(tmp_path) == ["v1.safetensors", "v2.safetensors"]


def test_two_workers_that_fetch_at_once_both_get_the_weights(tmp_path: Path) -> None:
    one, first = fetcher([]), []

    def slow(reference: Any) -> np.ndarray:
        first.append(one.path(snapshot(tmp_path, 1, b"first")))
        return np.frombuffer(reference, dtype=np.uint8)

    second = FetchedSnapshots(slow, node_id=lambda: "another").path(snapshot(tmp_path, 1, b"first"))
    assert (first[0].read_bytes(), second.read_bytes()) == (b"first", b"first")
    assert shared(tmp_path) == ["v1.safetensors"]


def test_a_version_that_is_asked_for_again_is_still_there(tmp_path: Path) -> None:
    calls: list[Any] = []
    away = fetcher(calls)
    held = away.path(snapshot(tmp_path, 1, b"first"))
    assert away.path(snapshot(tmp_path, 1, b"first")) == held
    assert (held.read_bytes(), calls) == (b"first", [b"first"])


def test_what_a_dead_process_of_the_same_number_left_is_not_taken_for_the_weights(tmp_path: Path) -> None:
    neighbour, away = fetcher([]), fetcher([])
    neighbour.path(snapshot(tmp_path, 1, b"first"))
    (tmp_path / f"fetched/v1.safetensors.{id(away):x}.{os.getpid()}").write_bytes(b"fir")
    assert away.path(snapshot(tmp_path, 1, b"first")).read_bytes() == b"first"


def test_on_the_learners_node_a_version_that_is_gone_is_not_fetched_into_its_folder(tmp_path: Path) -> None:
    (tmp_path / "v3.safetensors").write_bytes(b"learner")
    on_its_node = fetcher([], node="the learner's")
    with pytest.raises(FileNotFoundError, match=r"v1\.safetensors is no longer on the learner's node, which this is"):
        on_its_node.path(snapshot(tmp_path, 1, b"first"))
    assert on_its_node.path(snapshot(tmp_path, 3, b"third")).read_bytes() == b"learner"
    on_its_node.close()
    assert [path.name for path in tmp_path.iterdir()] == ["v3.safetensors"]


def test_closing_leaves_what_the_learner_is_writing_in_the_same_folder(tmp_path: Path) -> None:
    away = fetcher([])
    away.path(snapshot(tmp_path, 1, b"first"))
    writing = tmp_path / "v8.partial"
    writing.write_bytes(b"half")
    away.close()
    assert list(tmp_path.iterdir()) == [writing]


def test_a_snapshot_that_is_gone_and_carries_nothing_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"v1\.safetensors is not on this node and carries no object"):
        FetchedSnapshots().path(snapshot(tmp_path, 1, None))


def test_what_dead_drivers_and_dead_workers_left_goes_with_the_first_fetch(tmp_path: Path) -> None:
    folder, dead_driver, other_run = (tmp_path / name for name in ("rlhf-run.b", "rlhf-run.a", "rlhf-walk.a"))
    for left in (folder, dead_driver, other_run):
        (left / "fetched").mkdir(parents=True)
        (left / "fetched/v7.safetensors").write_bytes(b"old")
    ended = subprocess.Popen(["true"])
    ended.wait()
    os.link(folder / "fetched/v7.safetensors", folder / f"fetched/v7.safetensors.a.{ended.pid}")
    writing = folder / f"fetched/v8.safetensors.b.{os.getppid()}"
    writing.write_bytes(b"in progress")
    new = fetcher([]).path(snapshot(folder, 8, b"new"))
    assert set((folder / "fetched").iterdir()) == {writing, new, folder / "fetched/v8.safetensors"}
    assert not dead_driver.exists()
    assert other_run.exists()


class DiskFull(np.ndarray):
    """Bytes of which the disk takes the first only."""

    def tofile(self, path: Any, *_: Any) -> None:
        Path(path).write_bytes(self.tobytes()[:1])
        raise OSError("no space left on device")


def test_a_write_that_breaks_off_leaves_nothing_that_a_neighbour_would_take_for_the_weights(tmp_path: Path) -> None:
    folder, calls = tmp_path / "rlhf-run.driver", []
    broken = FetchedSnapshots(
        lambda reference: np.frombuffer(reference, dtype=np.uint8).view(DiskFull), lambda: "another"
    )
    with pytest.raises(OSError, match="no space left"):
        broken.path(snapshot(folder, 1, b"first"))
    assert list((folder / "fetched").iterdir()) == []
    assert fetcher(calls).path(snapshot(folder, 1, b"first")).read_bytes() == b"first"
    assert calls == [b"first"]


def test_closing_removes_what_was_fetched_and_leaves_the_learners_own(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "v1.safetensors").write_bytes(b"learner")
    on_its_node = fetcher([])
    on_its_node.path(snapshot(own, 1, b"learner"))
    on_its_node.close()
    assert (own / "v1.safetensors").exists()
    away = fetcher([])
    away.path(snapshot(tmp_path / "away", 1, b"learner"))
    away.close()
    assert not (tmp_path / "away").exists()
