"""One fixed batch gives one loss, one gradient and one set of weights, however it is cut over ranks, micro-batches,
ZeRO stages and layouts. Real DeepSpeed under gloo; the split of one rank, one micro-batch, stage 0, padded is the
reference."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.learner_ranks import make_batch, make_spec, spawn_ranks

STAGES = (0, 1, 2, 3)
MICRO_BATCHES = (1, 2, 4)
LAYOUTS = {"padded": False, "packed": True}
PTX = {"coef": 0.3, "block_tokens": 20, "blocks_per_step": 3}
METHODS: dict[str, dict[str, Any]] = {
    "ppo": {"lam": 0.9, "kl": {"estimator": "full", "coef": 0.1}, "ptx": PTX},
    "grpo": {
        "name": "grpo",
        "reduction": "sequence_mean",
        "kl": {"place": "loss", "estimator": "full", "coef": 0.2},
        "entropy": {"coef": 0.01},
    },
}
SPLITS = list(itertools.product(METHODS, STAGES, MICRO_BATCHES, LAYOUTS))
REFERENCE_SPLIT = (0, 1, "padded")
MINIBATCHES = 2


def _budget(ranks: int, micro_batches: int, packed: bool) -> int:
    """A ``micro_batch_tokens`` that cuts the first minibatch of the first batch into so many micro-batches."""
    from learner.batch_tensors import BatchTensors
    from rlhf_cluster.batching import plan_minibatches
    from rlhf_cluster.seeds import derive_seed

    lengths = BatchTensors.from_batch(_batches()[0], 1).lengths
    for tokens in range(400, 1, -1):
        plan = plan_minibatches(
            lengths,
            ranks=ranks,
            minibatches=MINIBATCHES,
            micro_batch_tokens=tokens,
            seed=derive_seed(3, "minibatches", 0),
            epoch=0,
            packed=packed,
        )
        if plan[0].micro_batches == micro_batches:
            return tokens
    raise AssertionError(f"no budget cuts the batch into {micro_batches} micro-batches on {ranks} ranks")


def _batches() -> list[Any]:
    """Many rows, one of them empty; then two rows in two minibatches: of two ranks one has none."""
    return [make_batch(0, rollouts=20, empty=1), make_batch(1, rollouts=2)]


def _run(folder: Path, rank: int, world_size: int, split: tuple[str, int, int, str]) -> dict[str, Any]:
    from deepspeed.utils import safe_get_full_grad

    from learner.learner import LearnerRank
    from learner.weight_publisher import iterate_weights

    method, stage, micro_batches, layout = split
    algorithm = METHODS[method]
    if "ptx" in algorithm:
        text = folder / "text"
        text.write_text("Whatever is said here is said often. " * 20)
        algorithm = {**algorithm, "ptx": {**PTX, "file": str(text)}}
    spec = make_spec(
        folder,
        folder / "none",
        algorithm=algorithm,
        zero_stage=stage,
        minibatches=MINIBATCHES,
        packing=LAYOUTS[layout],
        micro_batch_tokens=_budget(world_size, micro_batches, LAYOUTS[layout]),
    )
    learner = LearnerRank(spec, rank=rank, world_size=world_size)
    engines = {"policy": learner.policy, **({"critic": learner.critic} if method == "ppo" else {})}
    gradients: dict[str, torch.Tensor] = {}
    forwards: dict[str, int] = {}
    for name, engine in engines.items():

        def keep_gradients(name: str = name, engine: Any = engine, step: Any = engine.step) -> Any:
            if name not in gradients:
                model = engine.module.model
                gradients[name] = torch.cat([safe_get_full_grad(p).flatten().double() for p in model.parameters()])
            return step()

        def count(loss: Any, *, last: bool, name: str = name, accumulate: Any = engine.accumulate) -> None:
            # Text comes in micro-batches of its own.
            if name not in gradients and "rows" in loss.keywords:
                forwards[name] = forwards.get(name, 0) + 1
            accumulate(loss, last=last)

        engine.step, engine.accumulate = keep_gradients, count
    starts = {name: {key: w.clone() for key, w in iterate_weights(engine)} for name, engine in engines.items()}
    results = [learner.train(batch) for batch in _batches()]
    out = {
        "stepped": [result.stepped for result in results],
        "forwards": forwards,
        "metrics": {
            f"{name}/{index}": (ratio.total, ratio.count)
            for index, result in enumerate(results)
            for name, ratio in result.metrics.items()
            if not name.endswith("_seconds") and not name.startswith("padding_")
        },
        "gradients": gradients,
        "weights": {
            name: torch.cat([weight.flatten().clone() for _, weight in iterate_weights(engine)])
            for name, engine in engines.items()
        },
    }
    out["unmoved"] = [
        f"{name} {key}"
        for name, engine in engines.items()
        for key, weight in iterate_weights(engine)
        if torch.equal(weight, starts[name][key])
    ]
    learner.close()
    return out


def _every_split(rank: int, folder: Path) -> dict[Any, Any]:
    import torch.distributed as dist

    from rlhf_cluster import batching

    # Else the rule against padding, not the budget, says into how many padded micro-batches a few rows are cut.
    batching.PADDING_SHARE = 1.0
    return {split: _run(folder, rank, dist.get_world_size(), split) for split in SPLITS}


@pytest.fixture(scope="module")
def runs(models: Path) -> dict[int, list[dict[Any, Any]]]:
    """By number of ranks, what each rank found."""
    return {ranks: spawn_ranks(_every_split, ranks, models, 240) for ranks in (1, 2)}


@pytest.mark.timeout(500)
@pytest.mark.parametrize("split", SPLITS, ids=lambda split: "-".join(map(str, split)))
@pytest.mark.parametrize("ranks", [1, 2])
def test_loss_gradients_and_weights_do_not_depend_on_the_split(
    runs: dict[int, list[dict[Any, Any]]], ranks: int, split: tuple[str, int, int, str]
) -> None:
    reference = runs[1][0][(split[0], *REFERENCE_SPLIT)]
    for rank in runs[ranks]:
        run = rank[split]
        assert run["stepped"] == [True, True]
        assert run["unmoved"] == []
        assert run["forwards"]["policy"] == split[2], "this split would not be the one it is named after"
        assert run["metrics"].keys() == reference["metrics"].keys()
        for name, (total, count) in run["metrics"].items():
            assert (total, count) == pytest.approx(reference["metrics"][name], rel=2e-5, abs=2e-5), name
        for kind in ("gradients", "weights"):
            assert run[kind].keys() == reference[kind].keys()
            for model, values in run[kind].items():
                torch.testing.assert_close(values, reference[kind][model], atol=1e-5, rtol=0, msg=f"{kind} of {model}")


@pytest.mark.parametrize("method", METHODS)
def test_the_reference_split_has_gradients_to_compare(
    runs: dict[int, list[dict[Any, Any]]], method: str, models: Path
) -> None:
    reference = runs[1][0][(method, *REFERENCE_SPLIT)]
    for values in reference["gradients"].values():
        assert values.abs().max() > 1e-3
