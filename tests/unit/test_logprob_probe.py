"""The log-prob probe: same ids everywhere, a mean over tokens, and a verdict that names both sides."""

from __future__ import annotations

import json

import numpy as np
import pytest

from rlhf_cluster.diagnosis import logprob_probe
from rlhf_cluster.diagnosis.logprob_probe import ProbeFailed

# float32, as the learner's are.
ENTRY = logprob_probe.manifest_entry(
    [[5, 6, 7], [8, 9]], [np.array([-1.0, -2.0], np.float32), np.array([-3.0], np.float32)]
)


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
    # With two ids, one that is not in the vocabulary would be drawn.
    assert {token for ids in logprob_probe.sequences(2) for token in ids} == {0, 1}


def test_the_entry_survives_json_to_the_bit() -> None:
    value = np.float32(-15.062517)
    entry = logprob_probe.manifest_entry([[5, 6]], [np.array([value])])
    assert json.loads(json.dumps(entry)) == entry == {"sequences": [[5, 6]], "logprobs": [[float(value)]]}


def test_the_mean_is_over_tokens_of_all_sequences() -> None:
    # |-0.1| + |0.2| + |0.3| over three tokens: nothing cancels, and no sequence counts more than its tokens.
    assert judge([-1.1, -1.8], [-2.7], tolerance=1.0) == pytest.approx(0.2, abs=1e-6)


def test_a_short_engine_is_compared_on_what_it_scored() -> None:
    assert judge([-1.0], [-3.0]) == 0.0
    # |-0.5| + |-0.5| over the two tokens that it scored.
    assert judge([-1.5], [-3.5], tolerance=1.0) == 0.5


def test_the_limit_itself_is_still_allowed() -> None:
    assert judge([-1.5, -2.5], [-3.5], tolerance=0.5) == 0.5


def test_an_engine_that_answers_for_one_sequence_only_is_not_compared() -> None:
    with pytest.raises(ValueError, match="longer"):
        judge([-1.0, -2.0])


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
