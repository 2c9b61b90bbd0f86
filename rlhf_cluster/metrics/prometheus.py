"""The Prometheus exporter on the driver: /metrics shows the last closed row, with the newest live gauges over it.

Families are built from the row at every scrape. So the values are those of ``metrics.jsonl``, and a series that
left the row (an old policy version) is gone from /metrics too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from rlhf_cluster.metrics import names
from rlhf_cluster.metrics.series import parse_series_key


class PrometheusSink:
    """Serves /metrics on ``host``:``port`` in a thread of its own until ``close``; port 0 picks a free one.

    Raises:
        ValueError: the address cannot be bound; names the config field and what to do.
    """

    def __init__(self, host: str, port: int) -> None:
        self._rows = _RowCollector()
        registry = CollectorRegistry()
        registry.register(self._rows)
        try:
            server, self._thread = start_http_server(port, addr=host, registry=registry)
        except OSError as error:
            raise ValueError(
                f"metrics.prometheus: cannot listen on host {host!r}, port {port}: {error.strerror or error}; choose "
                "another metrics.prometheus.port (0 picks a free one) or host, or set metrics.prometheus to null"
            ) from error
        self._server: WSGIServer | None = server
        self.address: tuple[str, int] = (str(server.server_address[0]), int(server.server_address[1]))
        """Host and port that were bound."""

    @property
    def url(self) -> str:
        host, port = self.address
        return f"http://[{host}]:{port}/metrics" if ":" in host else f"http://{host}:{port}/metrics"

    def step(self, step: int, version: int, row: Mapping[str, float]) -> None:
        self._rows.row = dict(row)

    def live(self, values: Mapping[str, float]) -> None:
        self._rows.live = dict(values)

    def evaluation(self, name: str, step: int, version: int, values: Mapping[str, float]) -> None:
        """Nothing: an evaluation is an event, not a series; it is in metrics.jsonl."""

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join(timeout=5)
            self._server = None


class _RowCollector(Collector):
    """The scraping thread reads two references that the event loop replaces whole, so no lock is needed."""

    def __init__(self) -> None:
        self.row: Mapping[str, float] = {}
        self.live: Mapping[str, float] = {}

    def describe(self) -> list[Metric]:
        """Nothing: the families change from row to row."""
        return []

    def collect(self) -> Iterator[Metric]:
        row = {key: value for key, value in self.row.items() if not names.family_of(parse_series_key(key)[0]).live}
        families: dict[str, dict[str, float]] = {}
        for key, value in {**row, **self.live}.items():
            family = names.family_of(parse_series_key(key)[0])
            families.setdefault(family.name, {})[key] = value
        for name, values in families.items():
            yield _family(names.family_of(name), values)


def _family(metric: names.Metric, values: Mapping[str, float]) -> Metric:
    documentation = f"{metric.help} Unit: {metric.unit}."
    if metric.kind == "histogram":
        return _histogram(metric, documentation, values)
    labels = list(metric.labels)
    family: CounterMetricFamily | GaugeMetricFamily
    if metric.kind == "counter":
        family = CounterMetricFamily(metric.name, documentation, labels=labels)
    else:
        family = GaugeMetricFamily(metric.name, documentation, labels=labels)
    for key, value in values.items():
        _, own = parse_series_key(key)
        family.add_metric([own[label] for label in labels], value)
    return family


def _histogram(metric: names.Metric, documentation: str, values: Mapping[str, float]) -> HistogramMetricFamily:
    family = HistogramMetricFamily(metric.name, documentation, labels=list(metric.labels))
    buckets: dict[tuple[str, ...], list[tuple[str, float]]] = {}
    sums: dict[tuple[str, ...], float] = {}
    for key, value in values.items():
        name, labels = parse_series_key(key)
        owner = tuple(labels[label] for label in metric.labels)
        if name.endswith("_bucket"):
            buckets.setdefault(owner, []).append((labels["le"], value))
        elif name.endswith("_sum"):
            sums[owner] = value
    for owner, pairs in buckets.items():
        family.add_metric(list(owner), pairs, sums[owner])
    return family
