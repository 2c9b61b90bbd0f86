"""Where a run's metrics go: its folder, the console, and whatever ``metrics`` of the config asks for."""

from __future__ import annotations

import contextlib
import logging

from rlhf_cluster.config import Config
from rlhf_cluster.diagnosis.preflight import PreflightError
from rlhf_cluster.metrics.calibrating_recorder import CalibratingRecorder
from rlhf_cluster.metrics.calibration import FILE_NAME
from rlhf_cluster.metrics.console import ConsoleView
from rlhf_cluster.metrics.jsonl import JsonlSink
from rlhf_cluster.metrics.prometheus import PrometheusSink
from rlhf_cluster.metrics.recorder import MetricsRecorder
from rlhf_cluster.metrics.sinks import Sink
from rlhf_cluster.metrics.tensorboard import TensorBoardSink
from rlhf_cluster.protocols import Clock
from rlhf_cluster.run_folder import RunFolder

log = logging.getLogger(__name__)


def open_recorder(
    config: Config, folder: RunFolder, clock: Clock, view: ConsoleView, stack: contextlib.ExitStack
) -> MetricsRecorder:
    """A recorder with every sink of the config, closed by ``stack``.

    Raises:
        PreflightError: the exporter's address cannot be bound.
    """
    metrics = config.metrics
    sinks: list[Sink] = [JsonlSink(folder.metrics), view]
    if metrics.prometheus is not None:
        try:
            exporter = PrometheusSink(metrics.prometheus.host, metrics.prometheus.port)
        except ValueError as error:
            raise PreflightError(str(error)) from None
        sinks.append(exporter)
        (folder.path / "prometheus_url").write_text(exporter.url + "\n")
        view.message(f"metrics: {exporter.url}")
    if metrics.tensorboard:
        sinks.append(TensorBoardSink(folder.path / "tensorboard"))
    recorder = CalibratingRecorder.for_run(
        config,
        folder.path / FILE_NAME,
        clock=clock,
        sinks=sinks,
        mismatch_alarm=config.guardrails.mismatch_alarm,
    )
    stack.callback(_close, recorder)
    return recorder


def _close(recorder: MetricsRecorder) -> None:
    """What ended the run says more than a sink that cannot be closed."""
    try:
        recorder.close()
    except Exception as error:
        log.error("the metrics could not be closed: %s: %s", type(error).__name__, error)
