"""The queue against brute force: random histories, each decision compared with a search over all schedules."""

import asyncio
import random
from itertools import combinations

import pytest

from rlhf_cluster.experience_queue import PutResult
from tests.unit.builders import ManualClock, async_test, make_group, make_prompt, make_queue


def feasible(dues, first_open, batch):
    """Whether groups with these dues can fill slots of ``batch`` from ``first_open`` on, none after its due."""
    return all(due >= first_open + i // batch for i, due in enumerate(sorted(dues)))


def possible_batches(ready, unready, version, batch):
    """Every choice of ready groups that leaves a feasible rest for the next version, as sets of group ids."""
    dues = ready | unready
    return [
        set(chosen)
        for chosen in combinations(ready, batch)
        if feasible([due for name, due in dues.items() if name not in chosen], version + 1, batch)
    ]


@async_test
async def history(seed, batch, staleness):
    rng = random.Random(seed)
    queue = make_queue(groups_per_batch=batch, max_staleness=staleness, clock=ManualClock())
    ready, unready, attempts, training = {}, {}, {}, []
    trained = issued = 0
    for _ in range(250):
        version, first_open = queue.learner_version, queue.learner_version + bool(training)
        event = rng.choice(["admit", "admit", "admit", "put", "put", "retire", "batch", "batch", "close", "close"])
        if event == "admit":
            start = version - rng.choice([-1, 0, 0, 0, 1, staleness, staleness + 1])
            due = start + staleness
            dues = [*ready.values(), *unready.values(), due]
            allowed = 0 <= start <= version and feasible(dues, first_open, batch)
            assert queue.can_admit(start) == allowed
            if allowed:
                attempt = queue.admit(make_prompt(f"p{issued}"), start)
                issued += 1
                unready[attempt.group_id], attempts[attempt.group_id] = due, attempt
        elif event == "put" and unready:
            name = rng.choice(sorted(unready))
            start = rng.randint(attempts[name].start_version, version)
            assert queue.put(make_group(attempts[name], versions=[start, version])) is PutResult.QUEUED
            del unready[name]
            ready[name] = start + staleness
        elif event == "retire" and attempts and rng.random() < 0.3:
            name = rng.choice(sorted(ready | unready) or ["none"])
            assert queue.retire(name, 0, "failed") == (name != "none")
            ready.pop(name, None)
            unready.pop(name, None)
        elif event == "batch" and not training:
            possible = possible_batches(ready, unready, version, batch)
            waiting = asyncio.ensure_future(queue.next_batch())
            await ManualClock.run_ready()
            assert waiting.done() == bool(possible)
            if not possible:
                waiting.cancel()
                continue
            groups = waiting.result()
            training = [group.group_id for group in groups]
            assert set(training) in possible
            assert sorted(training, key=lambda name: int(name[1:])) == training
            assert max(ready[name] for name in training) <= min(
                [due for name, due in ready.items() if name not in training], default=10**9
            )
            for group in groups:
                assert 0 <= version - group.max_version <= version - group.min_version <= staleness
                del ready[group.group_id]
        elif event == "close" and training:
            skipped = rng.random() < 0.2
            retired = queue.advance(version + (not skipped))
            assert [attempt.group_id for attempt in retired] == (training if skipped else [])
            trained += 0 if skipped else len(training)
            training = []
        assert queue.outstanding == len(ready) + len(unready) <= (staleness + 1) * batch
        assert queue.queued == len(ready)
        assert [attempt.group_id for attempt in queue.dispatched()] == list(unready)
        assert queue.ledger.admitted == issued
        assert queue.ledger.counts["trained"].groups == trained + len(training)
        queue.ledger.check()
    assert trained >= 5 * batch, "a history that trains little proves little"


@pytest.mark.parametrize(("batch", "staleness"), [(1, 0), (2, 0), (1, 1), (2, 1), (3, 1), (2, 2), (1, 3), (3, 2)])
def test_every_decision_agrees_with_a_search_over_all_schedules(batch, staleness):
    for seed in range(6):
        history(seed, batch, staleness)


@pytest.mark.parametrize("batch", [1, 3])
def test_k0_trains_the_batches_of_a_plain_synchronous_loop(batch):
    @async_test
    async def run(seed):
        rng = random.Random(seed)
        queue = make_queue(groups_per_batch=batch, max_staleness=0)
        names = [f"p{i}" for i in range(6 * batch)]
        prompts = iter(names)
        for version in range(6):
            attempts = []
            while queue.can_admit(version):
                attempts.append(queue.admit(make_prompt(next(prompts)), version))
            for attempt in rng.sample(attempts, len(attempts)):
                assert queue.put(make_group(attempt)) is PutResult.QUEUED
            groups = await queue.next_batch()
            assert [group.group_id for group in groups] == names[version * batch : (version + 1) * batch]
            queue.advance(version + 1)

    for seed in range(5):
        run(seed)
