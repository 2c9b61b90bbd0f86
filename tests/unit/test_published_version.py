"""The highest version ever published, on disk before any worker hears of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_cluster import published_version
from rlhf_cluster.published_version import PublishedVersion


def test_a_version_is_on_disk_once_it_is_noted_and_never_goes_back(tmp_path: Path) -> None:
    path = tmp_path / "published_version"
    published = PublishedVersion(path)
    assert published.highest == 0
    published.note(3)
    published.note(2)
    assert path.read_text() == "3\n"
    assert PublishedVersion(path).highest == 3


def test_a_note_that_the_disk_refuses_leaves_the_number_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError("no space left on device")

    published = PublishedVersion(tmp_path / "published_version")
    published.note(3)
    monkeypatch.setattr(published_version.os, "fsync", refuse)
    with pytest.raises(OSError, match="no space left"):
        published.note(4)
    assert published.highest == PublishedVersion(tmp_path / "published_version").highest == 3


def test_restored_weights_go_on_above_everything_published_and_keep_their_version_when_nothing_was(
    tmp_path: Path,
) -> None:
    published = PublishedVersion(tmp_path / "published_version")
    published.note(7)
    assert published.above(5) == 8
    assert published.above(7) == 7


def test_a_file_without_a_number_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "published_version").write_text("seven")
    with pytest.raises(ValueError, match="published_version should hold the highest version"):
        PublishedVersion(tmp_path / "published_version")


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", None], ids=["empty", "binary", "folder"])
def test_a_file_that_cannot_be_read_is_refused_by_name_and_nothing_to_a_fresh_run(
    tmp_path: Path, content: bytes | None
) -> None:
    path = tmp_path / "published_version"
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    with pytest.raises(ValueError, match="published_version"):
        PublishedVersion(path)
    assert PublishedVersion(path, fresh=True).highest == 0
