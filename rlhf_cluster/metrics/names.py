"""The one table of metric names: type, labels, unit and meaning of everything the run exports.

Prometheus, ``metrics.jsonl``, TensorBoard and the console all take their names from here, and ``docs/metrics.md``
is checked against it. Labels are bounded: ``lag`` (0..K), ``worker`` (slot index), closed sets, and
``policy_version`` over the newest ``VERSION_WINDOW`` versions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from rlhf_cluster.ledger import DUPLICATE, RETIRE_REASONS
from rlhf_cluster.types import FINISH_REASONS

Kind = Literal["gauge", "counter", "histogram"]

VERSION_WINDOW: Final = 8
"""Versions that keep their own series; older ones are removed."""

STAGE_SECONDS_BOUNDS: Final = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
"""Upper bucket bounds of ``rlhf_stage_seconds``, in seconds."""

TOKEN_STAGES: Final = ("generated", "scored", "trained")
TIMED_STAGES: Final = ("rollout", "score", "wait", "train", "publish")
MODELS: Final = ("policy", "critic")
RESTART_KINDS: Final = ("rollout_worker", "reward_scorer", "reference_scorer", "learner")
SUPERVISED_KINDS: Final = ("rollout_worker", "reward_scorer", "reference_scorer")
SUPERVISION_EVENTS: Final = ("down", "heartbeat_missed", "fenced", "exhausted")
"""Of ``supervision.EventKind`` those that are trouble; a restart has a counter of its own."""
UNSCORABLE_REASONS: Final = (
    *("too_long", "unrenderable", "function_error", "not_finite"),  # what the reward scorer says
    "scorer_died",  # what the scorer pool says when repeats are used up
    "scorer_error",  # scorers raised over the prompt twice
    "scorer_timeout",  # scorers missed their deadline over the prompt twice
    *("score", "ref_logprobs", "behaviour_logprobs", "other"),  # what the controller finds
)
EXCLUSION_KINDS: Final = ("score", "ref_logprobs", "behaviour_logprobs", "proximal_logprobs", "values", "group")
"""What of a rollout was not finite when the learner left it out; ``group``: nothing of its own, but it went with its
group."""
KL_ESTIMATORS: Final = ("k1", "k2", "k3", "full")
MISMATCH_BOUNDS: Final = (0.001, 0.01, 0.1, 1.0)
"""Nats between engine and learner on one token; the mean alone hides a few broken tokens."""
RATIO_QUANTILES: Final = {"0.01": "ratio_q01", "0.5": "ratio_q50", "0.99": "ratio_q99"}
"""Quantile -> the learner's own name of it."""
ATTEMPT_STATES: Final = (
    ("dispatched", "none"),
    ("trained", "none"),
    *(("retired", reason) for reason in (*RETIRE_REASONS, DUPLICATE)),
)
"""(state, reason) of ``rlhf_attempts_total``; ``dispatched`` counts every attempt ever admitted."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One family of series.

    ``live`` gauges describe the present and reach Prometheus and the console at once, the others with their row.
    ``closed`` lists all label value tuples of a family known beforehand; its counters start at 0.
    """

    name: str
    kind: Kind
    unit: str
    help: str
    labels: tuple[str, ...] = ()
    live: bool = False
    closed: tuple[tuple[str, ...], ...] = ()


def _each(values: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    return tuple((value,) for value in values)


_TABLE: Final = (
    # Progress
    Metric("rlhf_step", "gauge", "steps", "Learner steps closed so far."),
    Metric("rlhf_planned_steps", "gauge", "steps", "Learner steps this run plans in all.", live=True),
    Metric("rlhf_steps_total", "counter", "steps", "Learner steps that changed the policy."),
    Metric("rlhf_steps_skipped_total", "counter", "steps", "Learner steps that changed nothing and made no version."),
    Metric("rlhf_elapsed_seconds", "gauge", "seconds", "Run time, start-up included, summed over resumes."),
    Metric("rlhf_step_seconds", "gauge", "seconds", "From the end of the last step to the end of this one."),
    Metric("rlhf_time_left_seconds", "gauge", "seconds", "Planned steps left times the mean of the last ten steps."),
    # Versions
    Metric("rlhf_policy_version", "gauge", "versions", "Version the learner holds.", live=True),
    Metric("rlhf_worker_policy_version", "gauge", "versions", "Version the worker serves.", ("worker",), live=True),
    Metric("rlhf_worker_up", "gauge", "0 or 1", "Whether the worker takes requests.", ("worker",), live=True),
    Metric(
        "rlhf_restarts_total",
        "counter",
        "restarts",
        "Actors and learner groups started again.",
        ("kind",),
        closed=_each(RESTART_KINDS),
    ),
    Metric(
        "rlhf_supervision_events_total",
        "counter",
        "events",
        "Workers and scorers that went down, missed a heartbeat, were fenced, or stay down for good.",
        ("kind", "event"),
        closed=tuple((kind, event) for kind in SUPERVISED_KINDS for event in SUPERVISION_EVENTS),
    ),
    Metric(
        "rlhf_no_progress_seconds",
        "gauge",
        "seconds",
        "How long nothing has moved, as the watchdog last saw it; at guardrails.no_progress_s it ends the run.",
        live=True,
    ),
    Metric("rlhf_publications_total", "counter", "publications", "Versions published to the workers."),
    Metric("rlhf_publish_failures_total", "counter", "updates", "Worker updates that failed and fenced the worker."),
    Metric("rlhf_publish_seconds", "gauge", "seconds", "The last publication, start to verified.", live=True),
    Metric("rlhf_publish_paused_seconds", "gauge", "seconds", "How long it held generation still.", live=True),
    Metric(
        "rlhf_checkpoints_total",
        "counter",
        "saves",
        "Saves that ended, with a durable set or without one.",
        ("outcome",),
        closed=(("saved",), ("failed",)),
    ),
    Metric("rlhf_checkpoint_blocked_seconds", "gauge", "seconds", "How long training waited for the last save to end."),
    # Staleness
    Metric(
        "rlhf_staleness_versions",
        "histogram",
        "versions",
        "Lag of every token at consumption: learner version minus token version; one count a token.",
    ),
    Metric(
        "rlhf_version_staleness_mean",
        "gauge",
        "versions",
        "Mean lag of the consumed tokens that this version sampled.",
        ("policy_version",),
    ),
    Metric(
        "rlhf_version_staleness_max",
        "gauge",
        "versions",
        "Largest lag of a consumed token that this version sampled.",
        ("policy_version",),
    ),
    Metric("rlhf_batch_mean_lag", "gauge", "versions", "Mean lag of the tokens of this step's batch."),
    Metric("rlhf_batch_max_lag", "gauge", "versions", "Largest lag of a token of this step's batch; never above K."),
    Metric("rlhf_batch_rollouts", "gauge", "rollouts", "Rollouts of this step's batch."),
    Metric("rlhf_batch_tokens", "gauge", "tokens", "Generated tokens of this step's batch."),
    Metric(
        "rlhf_batch_overlapping_rollouts",
        "gauge",
        "rollouts",
        "Rollouts of this step's batch whose generation overlapped a learner update.",
    ),
    Metric("rlhf_overlapping_rollout_fraction", "gauge", "of rollouts", "The same over the rollouts of the batch."),
    # KL
    Metric(
        "rlhf_version_kl_reference",
        "gauge",
        "nats per token",
        "KL to the reference of the consumed tokens that this version sampled, from the engine's log-probs.",
        ("policy_version", "estimator"),
    ),
    Metric(
        "rlhf_kl_reference",
        "gauge",
        "nats per token",
        "KL to the reference over the batch, from the learner's log-probs.",
        ("estimator",),
    ),
    Metric(
        "rlhf_kl_behaviour",
        "gauge",
        "nats per token",
        "KL of the engine at sampling to the learner before its step, by lag of the token.",
        ("lag",),
    ),
    Metric("rlhf_kl_behaviour_mean", "gauge", "nats per token", "The same over all tokens of the batch."),
    Metric(
        "rlhf_engine_mismatch_fraction",
        "gauge",
        "of tokens",
        "Tokens on which engine and learner differ by more than so many nats, before the step.",
        ("above",),
    ),
    Metric("rlhf_approx_kl", "gauge", "nats per token", "KL of the policy before the step to the one trained."),
    Metric("rlhf_kl_coef", "gauge", "score per nat", "Coefficient of the KL penalty."),
    # Queue and ledger
    Metric("rlhf_queue_groups", "gauge", "groups", "Groups scored and waiting to be trained.", live=True),
    Metric("rlhf_outstanding_groups", "gauge", "groups", "Groups admitted, not trained or retired.", live=True),
    Metric("rlhf_queue_oldest_lag", "gauge", "versions", "Lag of the oldest queued token.", live=True),
    Metric(
        "rlhf_attempts_total",
        "counter",
        "groups",
        "Attempts by outcome; dispatched counts all, duplicate counts late replies beside the sum.",
        ("state", "reason"),
        closed=ATTEMPT_STATES,
    ),
    Metric(
        "rlhf_attempt_tokens_total",
        "counter",
        "tokens",
        "Generated tokens of the attempts by outcome; dispatched counts all that were delivered.",
        ("state", "reason"),
        closed=ATTEMPT_STATES,
    ),
    # Throughput
    Metric(
        "rlhf_tokens_total",
        "counter",
        "tokens",
        "Generated tokens by stage passed; trained leaves out skipped steps.",
        ("stage",),
        closed=_each(TOKEN_STAGES),
    ),
    Metric("rlhf_tokens_per_second", "gauge", "tokens per second", "Over the last step only.", ("stage",)),
    Metric(
        "rlhf_stage_seconds",
        "histogram",
        "seconds",
        "Time of one call: a group's rollout, its scoring, the wait for a batch, a learner step, a publication.",
        ("stage",),
        closed=_each(TIMED_STAGES),
    ),
    Metric(
        "rlhf_rollouts_total",
        "counter",
        "rollouts",
        "Rollouts by finish reason.",
        ("reason",),
        closed=_each(FINISH_REASONS),
    ),
    # Scores
    Metric("rlhf_score_mean", "gauge", "score", "Mean score of all rollouts scored since the last step."),
    Metric("rlhf_score_component_mean", "gauge", "score", "Mean of one part of that score.", ("component",)),
    Metric("rlhf_scored_rollouts_total", "counter", "rollouts", "Rollouts with a finite score."),
    Metric(
        "rlhf_unscorable_total",
        "counter",
        "rollouts",
        "Rollouts that no score could be given, in no mean.",
        ("reason",),
        closed=_each(UNSCORABLE_REASONS),
    ),
    Metric("rlhf_unscorable_fraction", "gauge", "of rollouts", "Unscorable over all that came to scoring."),
    Metric("rlhf_trained_score_mean", "gauge", "score", "Mean score of the trained rollouts."),
    Metric("rlhf_normalised_score_mean", "gauge", "score", "The same after normalising and clipping."),
    # Learner
    Metric("rlhf_policy_loss", "gauge", "score per token", "Clipped surrogate loss of the policy."),
    Metric("rlhf_value_loss", "gauge", "squared score", "Loss of the critic, a token."),
    Metric("rlhf_value_clip_fraction", "gauge", "of tokens", "Tokens whose value was clipped."),
    Metric("rlhf_clip_fraction", "gauge", "of tokens", "Tokens whose ratio was clipped."),
    Metric("rlhf_dual_clip_fraction", "gauge", "of tokens", "Tokens whose loss the dual clip held."),
    Metric("rlhf_ratio_mean", "gauge", "ratio", "Current over proximal probability."),
    Metric(
        "rlhf_ratio_quantile",
        "gauge",
        "ratio",
        "The same when each token was last trained, at a quantile over tokens.",
        ("quantile",),
    ),
    Metric("rlhf_kl_loss", "gauge", "nats per token", "KL term of the policy loss, before its coef.", ("estimator",)),
    Metric("rlhf_entropy_bonus", "gauge", "nats per token", "Entropy that the bonus is paid for, before its coef."),
    Metric("rlhf_ptx_nll", "gauge", "nats per token", "Negative log-likelihood of the text mixed in, temperature 1."),
    Metric(
        "rlhf_target_kl_left_out_fraction", "gauge", "of steps", "Policy steps left out because of learner.target_kl."
    ),
    Metric("rlhf_critic_pretrain_loss", "gauge", "squared score", "Critic loss of the last pass of its pre-training."),
    Metric("rlhf_critic_pretrain_steps", "gauge", "steps", "Critic optimizer steps of its pre-training."),
    Metric(
        "rlhf_excluded_rollouts_total",
        "counter",
        "rollouts",
        "Rollouts the learner left out because a number was not finite, by what it was.",
        ("kind",),
        closed=_each(EXCLUSION_KINDS),
    ),
    Metric("rlhf_importance_weight_mean", "gauge", "ratio", "Proximal over behaviour probability, after the cap."),
    Metric("rlhf_importance_cap_fraction", "gauge", "of tokens", "Tokens whose importance weight met the cap."),
    Metric("rlhf_entropy", "gauge", "nats per token", "Entropy of the policy at the sampled positions."),
    Metric("rlhf_perplexity", "gauge", "per token", "exp of the mean negative log-likelihood of the sampled tokens."),
    Metric("rlhf_explained_variance", "gauge", "fraction", "Variance of the returns that the critic explains."),
    Metric("rlhf_response_length", "gauge", "tokens", "Mean generated tokens of a trained rollout."),
    Metric("rlhf_truncated_fraction", "gauge", "of rollouts", "Trained rollouts ended by the length limit."),
    Metric("rlhf_grad_norm", "gauge", "norm", "Global gradient norm before clipping.", ("model",)),
    Metric("rlhf_learning_rate", "gauge", "rate", "Mean learning rate over the optimizer steps.", ("model",)),
    Metric(
        "rlhf_optimizer_steps_total", "counter", "steps", "Optimizer steps taken.", ("model",), closed=_each(MODELS)
    ),
    Metric(
        "rlhf_optimizer_steps_skipped_total",
        "counter",
        "steps",
        "Optimizer steps left out because a gradient was not finite.",
        ("model",),
        closed=_each(MODELS),
    ),
    Metric("rlhf_padding_share", "gauge", "of slots", "Padding in the micro-batches.", ("model",)),
    Metric("rlhf_train_compute_seconds", "gauge", "seconds", "A learner step as the ranks measured it."),
)

METRICS: Final = {metric.name: metric for metric in _TABLE}

LEARNER_PREFIX: Final = "rlhf_learner_"
"""A learner metric this table does not know is exported as a gauge under this prefix, so that nothing is lost."""

LEARNER_GAUGES: Final[dict[str, tuple[str, dict[str, str]]]] = {
    **{f"kl_reference_{kind}": ("rlhf_kl_reference", {"estimator": kind}) for kind in KL_ESTIMATORS},
    **{f"kl_loss_{kind}": ("rlhf_kl_loss", {"estimator": kind}) for kind in KL_ESTIMATORS},
    **{name: ("rlhf_ratio_quantile", {"quantile": quantile}) for quantile, name in RATIO_QUANTILES.items()},
    **{f"padding_{model}": ("rlhf_padding_share", {"model": model}) for model in MODELS},
    **{
        f"kl_behaviour_above_{bound:g}": ("rlhf_engine_mismatch_fraction", {"above": f"{bound:g}"})
        for bound in MISMATCH_BOUNDS
    },
    "target_kl_left_out": ("rlhf_target_kl_left_out_fraction", {}),
    "kl_behaviour": ("rlhf_kl_behaviour_mean", {}),
    "nll": ("rlhf_perplexity", {}),
    "score_mean": ("rlhf_trained_score_mean", {}),
    "train_seconds": ("rlhf_train_compute_seconds", {}),
    **{
        name: (f"rlhf_{name}", {})
        for name in (
            "policy_loss",
            "value_loss",
            "value_clip_fraction",
            "clip_fraction",
            "approx_kl",
            "ratio_mean",
            "importance_weight_mean",
            "importance_cap_fraction",
            "entropy",
            "explained_variance",
            "normalised_score_mean",
            "response_length",
            "truncated_fraction",
            "kl_coef",
            "dual_clip_fraction",
            "entropy_bonus",
            "ptx_nll",
            "critic_pretrain_loss",
            "critic_pretrain_steps",
        )
    },
    **{f"grad_norm_{model}": ("rlhf_grad_norm", {"model": model}) for model in MODELS},
    **{f"lr_{model}": ("rlhf_learning_rate", {"model": model}) for model in MODELS},
}
"""The learner's own name of a mean -> metric and labels.

``nll`` is exported as its exp; ``kl_behaviour_lag{n}`` is not listed, its lag becomes the label.
"""

LEARNER_COUNTERS: Final[dict[str, tuple[str, dict[str, str]]]] = {
    **{f"optimizer_steps_{model}": ("rlhf_optimizer_steps_total", {"model": model}) for model in MODELS},
    **{
        f"optimizer_steps_skipped_{model}": ("rlhf_optimizer_steps_skipped_total", {"model": model}) for model in MODELS
    },
    **{f"excluded_{kind}": ("rlhf_excluded_rollouts_total", {"kind": kind}) for kind in EXCLUSION_KINDS},
}
"""The learner's own name of a count -> metric and labels; the Ratio's ``total`` is added."""


def family_of(series_name: str) -> Metric:
    """The table entry a series name belongs to: itself, or the histogram of a ``_bucket``, ``_sum``, ``_count``.

    Raises:
        KeyError: the table has no such name.
    """
    if series_name in METRICS:
        return METRICS[series_name]
    for suffix in ("_bucket", "_sum", "_count"):
        family = METRICS.get(series_name.removesuffix(suffix))
        if series_name.endswith(suffix) and family is not None and family.kind == "histogram":
            return family
    if series_name.startswith(LEARNER_PREFIX):
        return Metric(series_name, "gauge", "as the learner has it", "A learner metric outside the table of names.")
    raise KeyError(f"metric {series_name} is not in rlhf_cluster/metrics/names.py")
