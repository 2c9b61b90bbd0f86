"""Whitening over real gloo ranks, one of them without a token (N08)."""

import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from rlhf_cluster.algorithms.advantages import whiten

WHITE = [-0.948683, -0.632456, -0.316228, 0.0, 1.897367]  # of 1, 2, 3, 4, 10: mean 4, variance 10
SHARDINGS = {
    "one empty rank": [[1.0, 2.0, 3.0, 4.0], [10.0], []],
    "tokens moved": [[1.0], [2.0, 3.0], [4.0, 10.0]],
    "two empty ranks": [[], [1.0, 2.0, 3.0, 4.0, 10.0], []],
}


def _rank(rank: int, folder: str) -> None:
    """Whiten every sharding, then equal values, then nothing, and leave what came out as a file."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 3)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=timedelta(seconds=30))
    out = {}
    for name, shards in SHARDINGS.items():
        valid = torch.tensor(shards[rank])
        x = torch.cat([valid, torch.full((2,), torch.nan)])[None]  # padding that must not matter
        began = time.monotonic()
        white = whiten(x, torch.arange(x.shape[1])[None] < len(valid), process_group=dist.group.WORLD)
        out[name] = (white[0].tolist(), time.monotonic() - began)
    equal = torch.full((1, rank + 1), 0.1, dtype=torch.float64)  # six of them sum to 0.6000000000000001
    out["equal"] = whiten(equal, torch.ones(1, rank + 1), process_group=dist.group.WORLD).tolist()
    one_nan = torch.tensor([[torch.nan if rank == 0 else 1.0]])
    out["nan"] = whiten(one_nan, torch.ones(1, 1), process_group=dist.group.WORLD).isnan().all().item()
    try:
        whiten(torch.ones(1, 2), torch.zeros(1, 2), process_group=dist.group.WORLD)
    except ValueError as error:
        out["nothing"] = str(error)
    torch.save(out, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory):
    folder: Path = tmp_path_factory.mktemp("whiten")
    context = mp.start_processes(_rank, args=(str(folder),), nprocs=3, join=False, start_method="spawn")
    deadline = time.monotonic() + 90
    try:
        while not context.join(timeout=1):
            assert time.monotonic() < deadline, "the three gloo ranks did not finish whitening within 90 s"
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(3)]


@pytest.mark.parametrize("name", SHARDINGS)
def test_every_sharding_of_the_tokens_is_whitened_alike_in_under_five_seconds(ranks, name):
    white = []
    for rank, shard in zip(ranks, SHARDINGS[name], strict=True):
        values, seconds = rank[name]
        assert values[len(shard) :] == [0.0, 0.0]
        assert seconds < 5
        white += values[: len(shard)]
    assert white == pytest.approx(WHITE, abs=1e-6)


def test_equal_values_on_all_ranks_are_exact_zeros(ranks):
    assert [rank["equal"] for rank in ranks] == [[[0.0]], [[0.0] * 2], [[0.0] * 3]]


def test_nan_token_of_one_rank_is_visible_on_all(ranks):
    assert [rank["nan"] for rank in ranks] == [True, True, True]


def test_every_rank_raises_the_same_error_when_no_rank_has_a_token(ranks):
    messages = {rank["nothing"] for rank in ranks}
    assert len(messages) == 1 and "none of the 3 ranks has a token" in messages.pop()
