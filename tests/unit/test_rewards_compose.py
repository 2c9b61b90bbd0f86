"""Function rewards and how components become one score (cases F12 and R03: unscorable is never 0)."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest

from rlhf_cluster.config import RewardComponent
from rlhf_cluster.rewards.compose import compose
from rlhf_cluster.rewards.friendly import friendly_and_complete, tone
from rlhf_cluster.rewards.functions import Answer, component_function, length, load_function, repetition
from tests.unit.builders import make_prompt

NOT_A_FUNCTION = 3


def shout(prompt, answer, finish_reason):
    return answer.count("!") + (0.5 if finish_reason == "stop" else 0.0)


def takes_too_little(prompt):
    return 0.0


def component(name, weight=1.0, kind="length", function=None):
    return RewardComponent(name=name, kind=kind, weight=weight, function=function)


COMPONENTS = (component("model", 1.0, "model"), component("length", -0.5), component("repetition", 0.0, "repetition"))


def test_score_is_the_weighted_sum_and_every_component_is_kept_in_config_order():
    score, components = compose(COMPONENTS, {"repetition": 7.0, "length": 0.5, "model": 2.0})
    assert score == 1.75  # 1 * 2 - 0.5 * 0.5 + 0 * 7
    assert list(components.items()) == [("model", 2.0), ("length", 0.5), ("repetition", 7.0)]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_component_that_is_not_finite_makes_the_score_nan_and_stays_visible(bad):
    score, components = compose(COMPONENTS, {"model": bad, "length": 0.5, "repetition": 0.0})
    assert math.isnan(score)
    assert components["model"] is bad and components["length"] == 0.5


def test_a_component_of_weight_zero_never_touches_the_score():
    assert compose(COMPONENTS, {"model": 2.0, "length": 0.0, "repetition": math.nan}).score == 2.0


def test_a_missing_or_unknown_component_is_refused_by_name():
    with pytest.raises(ValueError, match="repetition"):
        compose(COMPONENTS, {"model": 1.0, "length": 1.0})
    with pytest.raises(ValueError, match="surprise"):
        compose(COMPONENTS, {"model": 1.0, "length": 1.0, "repetition": 1.0, "surprise": 1.0})


def test_repetition_is_the_share_of_trigrams_seen_before():
    assert repetition([1, 2, 3, 1, 2, 3]) == 0.25  # 123 231 312 123: one of four
    assert repetition([5] * 12) == pytest.approx(0.9)  # ten 3-grams, nine of them repeated
    assert repetition([1, 2, 3, 4]) == 0.0
    assert repetition([1, 1]) == 0.0 and repetition([]) == 0.0


def test_length_is_the_share_of_the_allowed_tokens():
    assert length(16, 64) == 0.25
    answer = Answer("text", [1, 2, 3, 4], "length", 8)
    assert component_function(component("length"))(make_prompt(), answer) == 0.5


def test_a_named_function_gets_text_and_finish_reason():
    function = component_function(component("shout", kind="function", function=f"{__name__}:shout"))
    assert function(make_prompt(), Answer("Hi!!", [1, 2], "stop", 8)) == 2.5
    assert function(make_prompt(), Answer("Hi!!", [1, 2], "length", 8)) == 2.0


@pytest.mark.parametrize(
    ("reference", "says"),
    [
        ("no_such_module_here:f", "cannot import 'no_such_module_here'"),
        (f"{__name__}:no_such_name", "has no 'no_such_name'"),
        (f"{__name__}:NOT_A_FUNCTION", "not a function"),
        (f"{__name__}:takes_too_little", r"must take \(prompt, answer, finish_reason\)"),
    ],
)
def test_a_function_that_cannot_be_used_is_refused_before_the_run(reference, says):
    with pytest.raises(ValueError, match=says):
        load_function(reference)


def test_friendly_rule_orders_tone_and_adds_one_for_an_answer_that_ended():
    prompt = make_prompt()
    warm, cold = "I'd be delighted to help, what a wonderful idea!", "That is a terrible, stupid question. I hate it."
    assert tone(warm) > 0.5 > -0.5 > tone(cold)
    assert friendly_and_complete(prompt, warm, "stop") == pytest.approx(tone(warm) + 1)
    assert friendly_and_complete(prompt, warm, "length") == tone(warm)
    assert friendly_and_complete(prompt, "", "stop") == 1.0


def test_without_vader_the_message_names_the_extra():
    code = (
        "import sys; sys.modules['vaderSentiment'] = None\n"
        "from rlhf_cluster.rewards.functions import load_function\n"
        "load_function('rlhf_cluster.rewards.friendly:friendly_and_complete')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and "ValueError" in done.stderr
    assert "rlhf-cluster[demo]" in done.stderr.strip().splitlines()[-1]
