"""Weights in shared memory that a driver which was killed could not remove."""

from __future__ import annotations

import glob
import logging
import shutil
from pathlib import Path

log = logging.getLogger(__name__)


def remove_stale_snapshots(folder: Path) -> None:
    """Remove the folders beside ``folder`` that earlier drivers of the same run left on this node.

    Their names are the same up to the first suffix (``rlhf-NAME-RUN.DRIVER``), and a run has one driver at a time. A
    folder without a suffix has no such neighbours.
    """
    if not folder.suffix:
        return
    for stale in folder.parent.glob(f"{glob.escape(folder.stem)}.*"):
        if stale != folder:
            log.warning("removing %s: a driver that was killed left it", stale)
            shutil.rmtree(stale, ignore_errors=True)
