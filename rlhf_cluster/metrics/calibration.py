"""``calibration.json`` in a run folder: the speeds and lengths that a run measured, for ``rlhf simulate`` and ``plan``.

Every section but ``measured`` is a part of ``simulation.cluster_model.ClusterModel`` and replaces what is assumed
there; ``measured`` is what they were made of, for people and for checks of a prediction.

    rlhf simulate CONFIG --cluster runs/demo/ppo/calibration.json
    rlhf plan CONFIG --calibration runs/demo/ppo/calibration.json
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rlhf_cluster.config_yaml import ConfigError, read_sections, read_text
from rlhf_cluster.simulation.lengths import Empirical

FILE_NAME = "calibration.json"

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
PositiveInt = Annotated[int, Field(ge=1)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


class EngineSpeed(_Part):
    """n sequences get tokens_per_s * n / (n + tokens_per_s / tokens_per_s_alone - 1) together."""

    tokens_per_s: Positive = Field(description="Generated tokens a second of one engine with very many sequences.")
    tokens_per_s_alone: Positive = Field(description="Generated tokens a second of one engine with one sequence.")


class ScorerSpeed(_Part):
    tokens_per_s: Positive = Field(description="Tokens a second of one replica, prompts included, queueing left out.")
    overhead_s: NonNegative = Field(0.0, description="Seconds a group costs whatever its length.")


class LearnerSpeed(_Part):
    tokens_per_s: Positive = Field(description="Tokens a second of the whole learner, prompts and all epochs included.")
    fixed_s: NonNegative = Field(description="Seconds a learner step costs whatever its length.")


class WeightsSpeed(_Part):
    gib: Positive = Field(description="Size of the policy's weights in engine dtype, GiB.")
    snapshot_gib_per_s: Positive = Field(description="Learner gathering and writing them.")
    transfer_gib_per_s: Positive = Field(description="On their way to all workers, which generate meanwhile.")
    load_gib_per_s: Positive = Field(description="An engine loading them, which stands still; its pause included.")
    pause_s: NonNegative = Field(description="Seconds of standing still that do not grow with the weights.")


class PromptLength(_Part):
    prompt_tokens: PositiveInt = Field(description="Mean length of a prompt in tokens.")


class Concurrency(_Part):
    sequences: Positive = Field(description="Mean sequences at once on one engine.")
    tokens_per_s: Positive = Field(description="Tokens a second of that engine, all its sequences together.")
    groups: PositiveInt = Field(description="Groups this was seen on.")


class Lengths(_Part):
    count: PositiveInt = Field(description="Seen.")
    mean: NonNegative = Field(description="Tokens.")
    bounds: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        description="Edges of the bins in tokens, one more than counts; a bin holds its lower edge, the last both."
    )
    counts: tuple[Annotated[int, Field(ge=0)], ...] = Field(description="Seen a bin.")


class Measured(_Part):
    """What the run did, from its first dispatch on; the newest groups and steps when there were many."""

    steps: PositiveInt = Field(description="Learner steps closed.")
    seconds: Positive = Field(description="From the first dispatch to the end of the last step.")
    steps_per_hour: Positive
    groups: PositiveInt = Field(description="Groups generated.")
    rollout_seconds: NonNegative = Field(description="Mean of a group, dispatch to reply.")
    rollout: tuple[Concurrency, ...] = Field(description="Speed of an engine by how many sequences it decoded at once.")
    score_seconds: NonNegative = Field(description="Mean of a group, both scorers, queueing included.")
    wait_seconds: NonNegative = Field(description="Mean time the learner waited for a batch.")
    train_seconds: NonNegative = Field(description="Mean of a learner step, pre-training of the critic left out.")
    train_tokens: NonNegative = Field(description="Mean of a learner step, prompts included.")
    train_stages: dict[str, NonNegative] = Field(description="Mean seconds of a learner step, by stage.")
    snapshot_seconds: NonNegative = Field(description="Mean of gathering and writing the weights.")
    publish_seconds: NonNegative = Field(description="Mean of a publication, start to verified.")
    publish_paused_seconds: NonNegative = Field(description="Mean time it held generation still.")
    publish_bytes: PositiveInt = Field(description="Of one publication.")
    answers: Lengths
    prompts: Lengths


class Calibration(_Part):
    rollout: EngineSpeed
    reward: ScorerSpeed | None = Field(None, description="null: no reward model.")
    reference: ScorerSpeed
    learner: LearnerSpeed
    weights: WeightsSpeed
    batch: PromptLength
    lengths: Empirical
    measured: Measured

    def overlay(self) -> dict[str, Any]:
        """The parts of a ``ClusterModel`` that were measured."""
        return self.model_dump(mode="json", exclude={"measured"}, exclude_none=True)

    def write(self, path: Path) -> None:
        """Replace the file at ``path`` as a whole."""
        partial = path.with_name(path.name + ".partial")
        partial.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")
        os.replace(partial, path)


def read_calibration(path: Path) -> dict[str, Any]:
    """The measured parts of a ``ClusterModel`` in a ``calibration.json``, or any parts in a file written by hand.

    Raises:
        ConfigError: it cannot be read, or is a calibration that does not follow the schema.
    """
    sections = read_sections(read_text(path, "cluster file"), str(path))
    if "measured" not in sections:
        return sections
    try:
        return Calibration.model_validate(sections).overlay()
    except ValidationError as error:
        lines = [
            f"{path}: {'.'.join(map(str, item['loc']))}: {item['msg']}"
            for item in error.errors(include_url=False, include_context=False)
        ]
        raise ConfigError("\n".join(lines)) from None
