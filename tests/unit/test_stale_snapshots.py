"""What a killed driver left in shared memory goes; what belongs to anybody else stays."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from rlhf_cluster.stale_snapshots import remove_stale_snapshots


@pytest.mark.parametrize(
    ("own", "stale", "others"),
    [
        ("rlhf-run-1f.b", ["rlhf-run-1f.a"], ["rlhf-walk-1f.a"]),
        # Another run, whose name goes on where this one ends.
        ("rlhf-run.b", ["rlhf-run.a"], ["rlhf-run2.a", "rlhf-run-2.a", "rlhf-run"]),
        # A name with a dot: the driver is what follows the last one.
        ("rlhf-v1.2-1f.b", ["rlhf-v1.2-1f.a"], ["rlhf-v1.3-1f.a", "rlhf-v1.a"]),
        # A name is no pattern.
        ("rlhf-run[12].b", ["rlhf-run[12].a"], ["rlhf-run1.a", "rlhf-run2.a"]),
        ("rlhf-*.b", ["rlhf-*.a"], ["rlhf-run.a"]),
        # Without a suffix nobody else is known to be an earlier driver of the same run.
        ("snapshots", [], ["snapshots.a", "snapshots.old"]),
    ],
)
def test_only_folders_of_earlier_drivers_of_the_same_run_go(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, own: str, stale: list[str], others: list[str]
) -> None:
    for name in (own, *stale, *others):
        (tmp_path / name).mkdir()
        (tmp_path / name / "v7.safetensors").write_bytes(b"weights")
    with caplog.at_level(logging.WARNING):
        remove_stale_snapshots(tmp_path / own)
    assert {path.name for path in tmp_path.iterdir()} == {own, *others}
    assert (tmp_path / own / "v7.safetensors").exists()
    assert caplog.messages == [f"removing {tmp_path / name}: a driver that was killed left it" for name in stale]
