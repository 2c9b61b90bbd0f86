"""The log-prob probe: same ids everywhere, a mean over tokens, and a verdict that names both sides."""

from __future__ import annotations

import json

import numpy as np
import pytest

from rlhf_cluster.diagnosis import logprob_probe
from rlhf_cluster.diagnosis.logprob_probe import ProbeFailed

ENTRY = logprob_probe.manifest_entry([[5, 6, 7], [8, 9]], [np.array([-1.0, -2.0]), np.array([-3.0])])


def judge(*engine: list[float], tolerance: float = 0.1) -> float:
    scored = [np.array(row, np.float32) for row in engine]
    return logprob_probe.check(ENTRY, scored, worker="rollout worker 3", version=7, tolerance=tolerance)


def test_ids_depend_on_the_vocabulary_alone_and_lie_in_it() -> None:
    probed = logprob_probe.sequences(259)
    assert probed == logprob_probe.sequences(259)
    assert [len(ids) for ids in probed] == [24, 24]
    assert len({tuple(ids) for ids in probed}) == 2
    assert all(0 <= token < 259 for ids in probed for token in ids)
    assert max(max(ids) for ids in logprob_probe.sequences(49_152)) > 259


def test_the_entry_survives_json() -> None:
    assert json.loads(json.dumps(ENTRY)) == ENTRY


def test_the_mean_is_over_tokens_of_all_sequences() -> None:
    # |0.1| + |0.0| + |0.2| over three tokens.
    assert judge([-1.1, -2.0], [-2.8], tolerance=1.0) == pytest.approx(0.1, abs=1e-6)


def test_a_short_engine_is_compared_on_what_it_scored() -> None:
    assert judge([-1.0], [-3.0]) == 0.0


@pytest.mark.parametrize(
    ("engine", "mean"), [(([-1.4, -2.0], [-3.0]), "0.1333"), (([float("nan"), -2.0], [-3.0]), "nan"), (([], []), "nan")]
)
def test_a_difference_above_the_limit_or_nothing_to_compare_fails_and_names_both(
    engine: tuple[list[float], ...], mean: str
) -> None:
    with pytest.raises(ProbeFailed) as raised:
        judge(*engine)
    assert str(raised.value) == (
        f"rollout worker 3 and the learner differ by {mean} nats a token on the probe of version 7 (limit 0.1, "
        "publish.probe_tolerance_nats): the engine does not compute with the weights it was sent"
    )


def test_the_limit_goes_by_dtype_unless_it_is_set() -> None:
    assert logprob_probe.tolerance_nats("float32", None) == 0.01
    assert logprob_probe.tolerance_nats("bfloat16", None) == 0.25
    assert logprob_probe.tolerance_nats("bfloat16", 0.5) == 0.5
