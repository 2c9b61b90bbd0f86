"""Composition root: the only module that imports ``actors`` and ``learner``. It builds a run out of parts and ends it.

    checks -> Ray -> workers, scorers and learner side by side -> resume or baseline evaluation -> self-check
           -> Controller.run -> last checkpoint -> evaluation -> everything closed, whatever happened
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

from rlhf_cluster import run_state
from rlhf_cluster.clock import SystemClock
from rlhf_cluster.config import Config
from rlhf_cluster.config_io import ConfigError
from rlhf_cluster.controller import Controller, ControllerSettings
from rlhf_cluster.data.chat import ChatRenderer, ChatTemplateError
from rlhf_cluster.data.cursor import PromptCursor
from rlhf_cluster.data.jsonl import DataError
from rlhf_cluster.data.prompts import check_overlap, load_prompts
from rlhf_cluster.diagnosis import self_check
from rlhf_cluster.diagnosis.preflight import PreflightError, check_model_folders
from rlhf_cluster.evaluation import Evaluation, evaluate
from rlhf_cluster.experience_queue import ExperienceQueue
from rlhf_cluster.metrics.console import ConsoleView
from rlhf_cluster.metrics.jsonl import JsonlSink
from rlhf_cluster.metrics.prometheus import PrometheusSink
from rlhf_cluster.metrics.recorder import MetricsRecorder
from rlhf_cluster.metrics.samples import SampleSink
from rlhf_cluster.metrics.sinks import Sink
from rlhf_cluster.metrics.tensorboard import TensorBoardSink
from rlhf_cluster.protocols import RolloutRequest
from rlhf_cluster.run_folder import RunFolder
from rlhf_cluster.seeds import derive_seed
from rlhf_cluster.types import Prompt, Rollout, Sampling

log = logging.getLogger(__name__)

REFUSED = (ConfigError, DataError, ChatTemplateError, PreflightError)
_SELF_CHECK_PROMPTS = 4
_SELF_CHECK_TOKENS = 24


class Stopped(Exception):
    """A signal ended the run; ``code`` is the exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def guard(action: Callable[[], None]) -> int:
    """Run ``action`` and turn how it ends into an exit code and one readable message."""
    try:
        action()
    except REFUSED as error:
        print(f"error: {error}", flush=True)
        return 2
    except Stopped as stop:
        return stop.code
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        log.debug("failed", exc_info=True)
        cause = first_cause(error)
        print(f"failed: {type(cause).__name__}: {cause}", flush=True)
        return 1
    return 0


def first_cause(error: BaseException) -> BaseException:
    """The exception that came first: inside groups, and what Ray wrapped."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
