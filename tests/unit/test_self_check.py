"""Engine against learner: agreement passes, a stale head and a NaN do not."""

from __future__ import annotations

import numpy as np
import pytest

from rlhf_cluster.diagnosis.self_check import SelfCheckFailed, check, mean_disagreement
from tests.unit.builders import make_rollout


def test_the_mean_is_over_tokens_not_over_rollouts() -> None:
    long, short = make_rollout(versions=[0] * 3), make_rollout(versions=[0])
    theirs = [long.behaviour_logprobs + np.float32(0.1), short.behaviour_logprobs - np.float32(0.5)]
    ratio = mean_disagreement([long, short], theirs)
    assert ratio.count == 4
    assert ratio.value == pytest.approx((3 * 0.1 + 0.5) / 4, abs=1e-6)


@pytest.mark.parametrize(("dtype", "off"), [("float32", 0.02), ("bfloat16", 0.167)])
def test_a_disagreement_above_the_tolerance_of_the_dtype_fails_naming_the_number(dtype: str, off: float) -> None:
    rollout = make_rollout(versions=[0] * 4)
    with pytest.raises(SelfCheckFailed, match=rf"version 3.*{off:.4f} nats a token"):
        check([rollout], [rollout.behaviour_logprobs + np.float32(off)], version=3, dtype=dtype, tolerance=None)


@pytest.mark.parametrize(("dtype", "off"), [("float32", 0.0004), ("bfloat16", 0.04)])
def test_what_healthy_engines_show_passes(dtype: str, off: float) -> None:
    rollout = make_rollout(versions=[0] * 4)
    mean = check([rollout], [rollout.behaviour_logprobs - np.float32(off)], version=0, dtype=dtype, tolerance=None)
    assert mean == pytest.approx(off, abs=1e-6)


def test_a_given_tolerance_replaces_that_of_the_dtype() -> None:
    rollout = make_rollout(versions=[0] * 4)
    theirs = [rollout.behaviour_logprobs + np.float32(0.05)]
    check([rollout], theirs, version=0, dtype="bfloat16", tolerance=0.06)
    with pytest.raises(SelfCheckFailed):
        check([rollout], theirs, version=0, dtype="bfloat16", tolerance=0.04)


def test_nan_and_nothing_to_compare_both_fail() -> None:
    rollout = make_rollout(versions=[0] * 2)
    with pytest.raises(SelfCheckFailed):
        check([rollout], [np.full(2, np.nan, np.float32)], version=0, dtype="float32", tolerance=None)
    with pytest.raises(SelfCheckFailed):
        check([], [], version=0, dtype="float32", tolerance=None)
