"""Models of the learner tests. A module writes checkpoints beside them, so each has its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_models import build_tiny_policy, build_tiny_reward_model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("learner")
    build_tiny_policy(folder / "policy")
    build_tiny_reward_model(folder / "reward")
    return folder
