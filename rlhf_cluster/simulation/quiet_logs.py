"""Keeps the control loop's warnings out of the log while it runs against a model."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from rlhf_cluster import controller


@contextlib.contextmanager
def quiet_controller() -> Iterator[None]:
    """The loop warns of every group it issues again. In a cluster that is only described, or broken on purpose, that is
    thousands of lines; the trace or the share of evicted work has them."""
    logger = logging.getLogger(controller.__name__)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
