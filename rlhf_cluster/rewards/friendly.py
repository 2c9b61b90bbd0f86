"""The demo's rule with known truth: an answer should be friendly in tone and end by itself.

Tone is the compound score of the VADER lexicon (Hutto and Gilbert 2014, "VADER: A Parsimonious Rule-based Model for
Sentiment Analysis of Social Media Text"), a number in [-1, 1] that grows with every warm word. Importing this module
needs the extra ``demo``.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from rlhf_cluster.types import FinishReason, Prompt

try:
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer
except ImportError as error:
    raise ImportError(f"{error}; the VADER lexicon is in the extra `demo`: pip install 'rlhf-cluster[demo]'") from error


def friendly_and_complete(prompt: Prompt, answer: str, finish_reason: FinishReason) -> float:
    """Compound tone in [-1, 1], plus 1 when the answer ended by itself: a number in [-1, 2].

    The prompt plays no part. An empty answer has tone 0.
    """
    return tone(answer) + (1.0 if finish_reason == "stop" else 0.0)


def tone(answer: str) -> float:
    """VADER compound of the answer, in [-1, 1]."""
    return float(_analyzer().polarity_scores(answer)["compound"])


@cache
def _analyzer() -> Any:
    return SentimentIntensityAnalyzer()
