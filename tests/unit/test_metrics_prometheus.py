"""/metrics over HTTP against metrics.jsonl."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rlhf_cluster.metrics.jsonl import JsonlSink
from rlhf_cluster.metrics.prometheus import PrometheusSink
from rlhf_cluster.protocols import PublishReport
from tests.unit.metrics_run import record_step, recorder


@pytest.fixture
def exporter() -> Iterator[PrometheusSink]:
    sink = PrometheusSink("127.0.0.1", 0)
    yield sink
    sink.close()


def scrape(sink: PrometheusSink) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    with urllib.request.urlopen(sink.url, timeout=5) as response:
        text = response.read().decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def as_scraped(row: dict[str, float]) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Read series keys with Prometheus' own parser, as a reader of metrics.jsonl may."""
    found = {}
    for key, value in row.items():
        (family,) = text_string_to_metric_families(f"{key} 0\n")
        (sample,) = family.samples
        found[sample.name, frozenset(sample.labels.items())] = value
    return found


def test_a_scrape_shows_exactly_the_values_of_the_last_line_of_metrics_jsonl(
    exporter: PrometheusSink, tmp_path: Path
) -> None:
    metrics = recorder(exporter, JsonlSink(tmp_path / "metrics.jsonl"))
    record_step(metrics, 0, [0, 0], [0.2, 0.4])
    record_step(metrics, 1, [0, 1], [0.6, -0.1])
    line = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    row = {key: value for key, value in line.items() if key.startswith("rlhf_")}
    scraped = scrape(exporter)
    assert scraped == as_scraped(row)
    kl = ("rlhf_version_kl_reference", frozenset({("policy_version", "0"), ("estimator", "k1")}))
    assert scraped[kl] == pytest.approx(0.4, abs=1e-6)
    staleness = ("rlhf_version_staleness_mean", frozenset({("policy_version", "0")}))
    assert scraped[staleness] == pytest.approx(1 / 3)


def test_series_of_versions_outside_the_window_are_gone_from_the_exporter(exporter: PrometheusSink) -> None:
    metrics = recorder(exporter)
    for version in range(10):
        record_step(metrics, version, [version])
    versions = {value for _, labels in scrape(exporter) for label, value in labels if label == "policy_version"}
    assert versions == {str(version) for version in range(2, 10)}


def test_live_gauges_show_before_the_first_step_and_over_an_older_row(exporter: PrometheusSink) -> None:
    metrics = recorder(exporter, total_steps=7)
    planned, published = ("rlhf_planned_steps", frozenset()), ("rlhf_publish_seconds", frozenset())
    assert scrape(exporter) == {planned: 7}
    metrics.weights_published(PublishReport(1, (0,), {}, paused_s=0.1, total_s=0.5))
    metrics.close_step(1, 1)
    metrics.weights_published(PublishReport(2, (0,), {}, paused_s=0.1, total_s=0.8))
    assert scrape(exporter)[published] == 0.8


def test_every_family_says_its_type_and_meaning(exporter: PrometheusSink) -> None:
    record_step(recorder(exporter), 0, [0])
    with urllib.request.urlopen(exporter.url, timeout=5) as response:
        text = response.read().decode()
    assert "# TYPE rlhf_staleness_versions histogram" in text
    assert "# TYPE rlhf_attempts_total counter" in text
    assert "# TYPE rlhf_version_kl_reference gauge" in text
    assert "# HELP rlhf_entropy" not in text, "a metric without a value is not announced"
    assert all("Unit:" in line for line in text.splitlines() if line.startswith("# HELP"))


def test_a_busy_port_is_an_error_that_names_the_field_and_the_fix() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ValueError, match=rf"metrics\.prometheus: .*port {port}.*in use.*0 picks a free one"):
            PrometheusSink("127.0.0.1", port)


def test_closing_frees_the_port_and_may_be_repeated() -> None:
    sink = PrometheusSink("127.0.0.1", 0)
    host, port = sink.address
    assert host == "127.0.0.1" and port > 0
    sink.close()
    sink.close()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(sink.url, timeout=5)
    PrometheusSink(host, port).close()
