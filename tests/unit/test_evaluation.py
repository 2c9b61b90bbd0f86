"""Held-out evaluation: the same seeds each time, one version, and means over the right population."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rlhf_cluster.clock import SystemClock
from rlhf_cluster.config import RolloutConfig
from rlhf_cluster.evaluation import Evaluation, Sampler, evaluate
from rlhf_cluster.protocols import WeightSnapshot, WorkerFailed
from rlhf_cluster.types import Prompt
from tests.fakes import FakeScorer, FakeWorkers

ROLLOUT = RolloutConfig(max_new_tokens=8, timeout_s=5.0)
PROMPTS = [Prompt(f"p{index}", (1, index), f"question {index}") for index in range(6)]


def run(workers: FakeWorkers, scorer: FakeScorer) -> Evaluation:
    sampler = Sampler(workers, SystemClock(), ROLLOUT, seed=3)
    return asyncio.run(evaluate(PROMPTS, sampler=sampler, scorer=scorer, samples_per_prompt=2))


def test_every_prompt_is_answered_with_the_same_seeds_every_time() -> None:
    first, second = FakeWorkers(capacity=2), FakeWorkers(workers=2)
    run(first, FakeScorer())
    run(second, FakeScorer())
    seeds = [{r.prompt.prompt_id: [s.seed for s in r.sampling] for r in w.requests} for w in (first, second)]
    assert seeds[0] == seeds[1]
    assert len({seed for group in seeds[0].values() for seed in group}) == 12


def test_the_summary_counts_answers_and_tokens() -> None:
    result = run(FakeWorkers(), FakeScorer(lambda prompt: float(prompt.prompt_id[1:])))
    summary = result.summary()
    assert summary["score"] == pytest.approx(2.5)
    assert summary["score_std_over_prompts"] == pytest.approx((35 / 12) ** 0.5)
    assert summary["response_length"] == 6
    # The fakes put behaviour at -1.0 and the reference at -1.1 on every token.
    assert summary["kl_reference_k1"] == pytest.approx(0.1, abs=1e-6)
    assert summary["kl_reference_k3"] == pytest.approx(2.718281828**-0.1 - 1 + 0.1, abs=1e-6)
    assert summary["component_model"] == pytest.approx(2.5)


def test_an_unscorable_answer_is_counted_and_left_out_of_the_mean() -> None:
    scorer = FakeScorer(lambda prompt: float("nan") if prompt.prompt_id == "p5" else 1.0)
    summary = run(FakeWorkers(), scorer).summary()
    assert summary["score"] == 1.0
    assert summary["unscorable"] == 2


def test_weights_that_change_meanwhile_fail_the_evaluation() -> None:
    workers = FakeWorkers(seconds=lambda request: 0.02)

    async def change() -> None:
        sampler = Sampler(workers, SystemClock(), ROLLOUT, seed=3)
        running = asyncio.create_task(evaluate(PROMPTS, sampler=sampler, scorer=FakeScorer(), samples_per_prompt=1))
        await asyncio.sleep(0.01)
        await workers.publish(WeightSnapshot(1, Path("x"), {}))
        await running

    with pytest.raises(RuntimeError, match=r"versions \[0, 1\]"):
        asyncio.run(change())


def test_the_record_holds_prompt_and_answer_in_clear() -> None:
    record = run(FakeWorkers(), FakeScorer()).record(lambda ids: f"{len(ids)} ids")
    assert record["answers"][0]["prompt"] == "question 0"
    assert record["answers"][0]["answer"] == "6 ids"
    assert len(record["answers"]) == 12


def test_a_worker_that_dies_over_an_answer_costs_time_and_changes_nothing() -> None:
    deaths = iter([WorkerFailed("rollout worker 0 died")] * 2)
    workers = FakeWorkers(fault=lambda request: next(deaths, None))
    result = run(workers, FakeScorer())
    assert len(workers.requests) == len(PROMPTS) + 2
    plain = run(FakeWorkers(), FakeScorer())
    assert [[answer.rollout.token_ids.tolist() for answer in group] for group in result.samples] == [
        [answer.rollout.token_ids.tolist() for answer in group] for group in plain.samples
    ]


def test_the_third_death_over_one_answer_ends_the_evaluation() -> None:
    workers = FakeWorkers(
        fault=lambda request: WorkerFailed("rollout worker 0 died") if "p3" in request.group_id else None
    )
    with pytest.raises(WorkerFailed, match="rollout worker 0 died"):
        run(workers, FakeScorer())
    assert sum("p3" in request.group_id for request in workers.requests) == 3


def test_the_wait_for_a_free_worker_has_a_deadline_that_names_the_workers() -> None:
    sampler = Sampler(FakeWorkers(capacity=0), SystemClock(), RolloutConfig(timeout_s=0.1), seed=3)
    with pytest.raises(TimeoutError, match=r"no rollout worker came free within 0.1 s \(worker 0 busy\)"):
        asyncio.run(sampler.sample(PROMPTS[0], 1, label="x"))


def test_a_probe_may_be_shorter_than_an_answer_but_never_longer() -> None:
    for limit, expected in ((None, 8), (3, 3), (100, 8)):
        workers = FakeWorkers()
        sampler = Sampler(workers, SystemClock(), ROLLOUT, seed=3, max_new_tokens=limit)
        asyncio.run(sampler.sample(PROMPTS[0], 2, label="probe"))
        assert {sampling.max_new_tokens for sampling in workers.requests[0].sampling} == {expected}
