"""What a configuration comes to, and what about it is probably not meant."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rlhf_cluster.config import Config


def derived_table(config: Config) -> Mapping[str, int]:
    """What the configuration comes to, for ``--dry-run`` and the run's first log lines.

    ``micro_batches_a_rank`` is the upper bound a minibatch reaches when every sample has the longest length.
    """
    samples = config.queue.groups_per_batch * config.rollout.samples_per_prompt
    rows_per_micro_batch = max(1, config.learner.micro_batch_tokens // config.max_model_len)
    rows_per_rank = math.ceil(samples / config.learner.minibatches / config.learner.ranks)
    steps_a_batch = config.learner.epochs * config.learner.minibatches
    return {
        "groups_a_batch": config.queue.groups_per_batch,
        "samples_a_batch": samples,
        "minibatches": config.learner.minibatches,
        "samples_a_minibatch": math.ceil(samples / config.learner.minibatches),
        "micro_batches_a_rank": math.ceil(rows_per_rank / rows_per_micro_batch),
        "optimizer_steps_a_batch": steps_a_batch,
        "optimizer_steps": steps_a_batch * config.run.steps,
        "outstanding_groups_bound": (config.queue.max_staleness + 1) * config.queue.groups_per_batch,
        "longest_sequence_tokens": config.max_model_len,
    }


def config_warnings(config: Config) -> list[str]:
    """What is allowed but probably not meant, for the run's first log lines."""
    warnings = []
    algorithm = config.algorithm
    if algorithm.proximal == "recomputed" and config.learner.updates_a_batch == 1:
        warnings.append(
            "one optimizer step a batch (learner.epochs 1, learner.minibatches 1): every ratio is 1, so "
            "algorithm.clip_low, clip_high and dual_clip never act; raise learner.minibatches to use them"
        )
    if algorithm.reduction == "sequence_mean":
        warnings.append(
            "algorithm.reduction: sequence_mean weighs a token of a long answer less: long wrong answers are punished "
            "less (length bias, docs/numerics.md)"
        )
    return warnings
