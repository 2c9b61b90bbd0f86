"""The table of metric names, its documentation and the keys of series."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlhf_cluster.metrics.names import LEARNER_COUNTERS, LEARNER_GAUGES, METRICS, family_of
from rlhf_cluster.metrics.series import parse_series_key, series_key

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_every_metric_is_documented_as_the_table_has_it_and_nothing_else_is() -> None:
    documented = [line for line in DOCS.read_text().splitlines() if re.match(r"\| `rlhf_", line)]
    table = [
        f"| `{m.name}` | {m.kind}{', live' if m.live else ''} | {', '.join(m.labels)} | {m.unit} | {m.help} |"
        for m in METRICS.values()
    ]
    assert documented == table


def test_names_follow_the_prometheus_conventions_for_their_type() -> None:
    for metric in METRICS.values():
        assert re.fullmatch(r"rlhf_[a-z0-9_]+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert not metric.name.startswith("rlhf_learner_"), "reserved for learner metrics outside the table"


def test_every_learner_metric_maps_to_a_series_the_table_has_with_its_labels() -> None:
    for kind, mapping in (("gauge", LEARNER_GAUGES), ("counter", LEARNER_COUNTERS)):
        for name, labels in mapping.values():
            assert METRICS[name].kind == kind
            assert tuple(labels) == METRICS[name].labels


def test_a_series_key_reads_back_as_it_was_written() -> None:
    labels = {"state": "retired", "reason": "stale"}
    key = series_key("rlhf_attempts_total", labels)
    assert key == 'rlhf_attempts_total{state="retired",reason="stale"}'
    assert parse_series_key(key) == ("rlhf_attempts_total", labels)
    assert parse_series_key("rlhf_step") == ("rlhf_step", {})


def test_a_label_value_that_would_break_the_key_is_refused() -> None:
    with pytest.raises(ValueError, match="label component may hold no quote"):
        series_key("rlhf_score_component_mean", {"component": 'a"b'})


def test_a_name_outside_the_table_is_no_family_unless_it_is_a_learner_metric_or_a_histogram_sample() -> None:
    assert family_of("rlhf_stage_seconds_bucket").name == "rlhf_stage_seconds"
    assert family_of("rlhf_learner_new_thing").kind == "gauge"
    with pytest.raises(KeyError):
        family_of("rlhf_step_bucket")
    with pytest.raises(KeyError):
        family_of("rlhf_nothing")
