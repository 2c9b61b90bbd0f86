"""TensorBoard event files: every unbounded-in-time series of the rows, over learner steps. Needs no torch."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from rlhf_cluster.metrics.names import family_of
from rlhf_cluster.metrics.series import parse_series_key


class TensorBoardSink:
    """Writes into ``folder``.

    A tag is the metric name and its label values: ``rlhf_kl_behaviour/0``. Left out: histograms (cumulative, for
    Prometheus) and series by policy version, which would add tags for ever; both are in metrics.jsonl.
    """

    def __init__(self, folder: Path) -> None:
        # Loaded here: the package takes a second to import and most runs do not use it.
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(folder))

    def step(self, step: int, version: int, row: Mapping[str, float]) -> None:
        scalars = {}
        for key, value in row.items():
            name, labels = parse_series_key(key)
            if family_of(name).kind != "histogram" and "policy_version" not in labels:
                scalars["/".join((name, *labels.values()))] = value
        self._write(step, scalars)

    def live(self, values: Mapping[str, float]) -> None:
        """Nothing: live values are in the rows."""

    def evaluation(self, name: str, step: int, version: int, values: Mapping[str, float]) -> None:
        self._write(step, {f"evaluation/{name}/{key}": value for key, value in values.items()})

    def close(self) -> None:
        self._writer.close()

    def _write(self, step: int, scalars: Mapping[str, float]) -> None:
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))
        self._writer.flush()
