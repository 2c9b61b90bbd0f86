"""Weight publication to a real vLLM engine: speed, time with generation paused, and tokens lost.

SmolLM2-135M in bfloat16, tied head. The learner's ``WeightPublisher`` writes each version into shared memory and a
``RolloutWorker`` takes it, with its engine in a process of its own, as in a run. Held against each other, in one run:

- bytes a second of a publication (write, checksums, load, repacking) and of a plain copy of as many bytes in memory;
- seconds with generation paused, idle and under load, and of vLLM's own ``load_weights`` plus repacking of the same
  tensors inside the engine process, which lie in its memory already;
- tokens generated in windows with and without a publication in the middle, as a share of those of 30 s, when running
  answers keep their KV cache (the default) and when they recompute it (on CPUs a prefill of everything that runs).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rlhf_cluster.config import EngineConfig, LearnerConfig, ModelConfig, PublishConfig
from rlhf_cluster.protocols import RolloutRequest, WeightSnapshot
from rlhf_cluster.types import Prompt, Sampling

MODEL = Path("models/smollm2-135m-instruct")
FOLDER = Path(f"/dev/shm/rlhf-benchmark-{os.getpid()}")
PROMPT_TOKENS, ANSWER_TOKENS = 50, 64
SECONDS_BETWEEN_PUBLICATIONS = 30.0
PAUSE_LIMIT, LOSS_LIMIT = 1.5, 0.03


def receiver_extension() -> type:
    from actors.weight_receiver import WeightReceiverExtension

    return WeightReceiverExtension


def __getattr__(name: str) -> Any:
    if name != "TimedReceiver":
        raise AttributeError(name)

    class TimedReceiver(receiver_extension()):  # type: ignore[misc]
        def time_reload(self, path: str, entries: dict[str, Any], rounds: int) -> list[float]:
            """Seconds of vLLM's own reload, tied head included, of tensors that lie in this process's memory."""
            import torch
            from vllm.config import set_current_vllm_config
            from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

            from actors.snapshot_file import map_snapshot
            from actors.weight_receiver import repack_tied_head

            worker: Any = self
            model = worker.weight_transfer_engine.model
            tensors = {name: tensor.clone() for name, tensor in map_snapshot(path, entries).items()}
            seconds = []
            with set_current_vllm_config(worker.vllm_config), torch.no_grad():
                for _ in range(rounds):
                    started = time.perf_counter()
                    initialize_layerwise_reload(model)
                    model.load_weights(iter(tensors.items()))
                    finalize_layerwise_reload(model, worker.model_config)
                    repack_tied_head(model)
                    seconds.append(time.perf_counter() - started)
            return seconds

    return TimedReceiver


class Publisher:
    """The learner's publisher over a plain model: every publication brings the next version."""

    def __init__(self) -> None:
        from learner.models import load_policy
        from learner.weight_publisher import WeightPublisher

        policy = load_policy(
            str(MODEL), ModelConfig(policy=str(MODEL), dtype="bfloat16"), LearnerConfig(), temperature=1.0
        )

        class Engine(SimpleNamespace):
            def __call__(self, *args: Any, **options: Any) -> Any:
                return policy(*args, **options)

        engine: Any = Engine(name="policy", zero_stage=0, accumulating=False, module=policy)
        self._publisher = WeightPublisher(engine, FOLDER, rank=0)
        self.version = 0
        self.bytes = sum(weight.numel() * weight.element_size() for weight in policy.parameters())

    def next(self) -> WeightSnapshot:
        self.version += 1
        snapshot = self._publisher.write(self.version)
        assert snapshot is not None
        return snapshot

    def close(self) -> None:
        self._publisher.close()


class Load:
    """Keeps ``sequences`` answers running and counts tokens."""

    def __init__(self, worker: Any, sequences: int) -> None:
        self._worker = worker
        self._finished = 0
        self._tasks = [asyncio.ensure_future(self._keep_busy(number)) for number in range(sequences)]

    async def _keep_busy(self, number: int) -> None:
        prompt = Prompt("p", tuple(range(1000 + number, 1000 + number + PROMPT_TOKENS)), "")
        seed = number
        while True:
            request = RolloutRequest(f"{number}-{seed}", 1, prompt, (Sampling(1.0, ANSWER_TOKENS, seed),))
            (rollout,) = await self._worker.generate(request)
            self._finished += rollout.n_tokens
            seed += 1000

    @property
    def tokens(self) -> int:
        running = self._worker._engine.output_processor.request_states.values()
        return self._finished + sum(state.detokenizer.num_output_tokens() for state in running if state.detokenizer)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def copy_seconds(size: int) -> float:
    """Best of ten plain copies of ``size`` bytes between two buffers that are in memory already."""
    import torch

    source, target = torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)
    best = float("inf")
    for _ in range(10):
        started = time.perf_counter()
        target.copy_(source)
        best = min(best, time.perf_counter() - started)
    return best


async def measure(options: argparse.Namespace) -> bool:
    from actors.rollout_worker import RolloutWorker

    worker = RolloutWorker(
        index=0,
        model=str(MODEL),
        dtype="bfloat16",
        engine=EngineConfig(max_num_seqs=options.sequences, cpu_threads=options.threads),
        max_model_len=PROMPT_TOKENS + ANSWER_TOKENS,
        seed=0,
        device="cpu",
        # What verifying everything held costs is measured apart, as one publication in ``verify_every`` pays it.
        publish=PublishConfig(verify_every=10_000),
    )
    worker._arguments["worker_extension_cls"] = "benchmarks.weight_sync.TimedReceiver"
    publisher = Publisher()
    try:
        await worker.start()
        return await report(worker, publisher, options)
    finally:
        await worker.close()
        publisher.close()


async def report(worker: Any, publisher: Publisher, options: argparse.Namespace) -> bool:
    mib = publisher.bytes / 2**20
    verified = await worker.update_weights(publisher.next())
    print(f"SmolLM2-135M, {mib:.0f} MiB, {options.threads} threads, {options.sequences} sequences")

    written, idle, whole = [], [], []
    for _ in range(options.rounds):
        started = time.perf_counter()
        snapshot = await asyncio.to_thread(publisher.next)
        written.append(time.perf_counter() - started)
        timing = await worker.update_weights(snapshot)
        idle.append(timing.paused_s)
        whole.append(time.perf_counter() - started)
    own = (
        await worker._engine.collective_rpc(
            "time_reload", args=(str(snapshot.path), dict(snapshot.manifest["tensors"]), options.rounds)
        )
    )[0]
    load_s, copy_s, publication_s = statistics.median(own), copy_seconds(publisher.bytes), statistics.median(whole)
    print(f"plain copy in memory         {copy_s:7.3f} s  {mib / copy_s:8.0f} MiB/s")
    print(
        f"publication, engine idle     {publication_s:7.3f} s  {mib / publication_s:8.0f} MiB/s"
        f"  (written in {statistics.median(written):.3f} s)"
    )
    print(f"vLLM's own load and repack   {load_s:7.3f} s")

    load = Load(worker, options.sequences)
    await asyncio.sleep(3)
    rates: dict[str, list[float]] = {"none": [], "keep": [], "recompute": []}
    paused: list[float] = []
    for _ in range(options.windows):
        for mode, found in rates.items():
            before, started = load.tokens, time.perf_counter()
            if mode != "none":
                worker._weights.publish = worker._weights.publish.model_copy(update={"kv_cache": mode})
                await asyncio.sleep(options.window_s / 4)
                timing = await worker.update_weights(await asyncio.to_thread(publisher.next))
                paused.append(timing.paused_s)
            await asyncio.sleep(max(0.0, options.window_s - (time.perf_counter() - started)))
            found.append((load.tokens - before) / (time.perf_counter() - started))
    await load.stop()

    pause_idle, pause_loaded = statistics.median(idle) / load_s, statistics.median(paused) / load_s
    print(f"generation paused, idle      {statistics.median(idle):7.3f} s")
    print(f"generation paused, under load{statistics.median(paused):7.3f} s")
    print(f"first update, verified       {verified.paused_s:7.3f} s  (probe {verified.probe_nats:.4f} nats)")
    every = PublishConfig().verify_every
    verifying = (verified.paused_s - statistics.median(idle)) / (every * SECONDS_BETWEEN_PUBLICATIONS)
    print(f"share of time for verifying every {every}th publication:  {verifying:.4f}")
    print(f"generation                   {statistics.mean(rates['none']):7.0f} tokens/s")
    print(f"ratio of bytes/s, plain copy over publication:      {publication_s / copy_s:.1f}")
    print(f"ratio of pause to vLLM's own load, idle:            {pause_idle:.2f}")
    print(f"ratio of pause to vLLM's own load, under load:      {pause_loaded:.2f}  (asked: at most {PAUSE_LIMIT})")
    for mode in ("keep", "recompute"):
        lost, error = lost_share(rates["none"], rates[mode], options.window_s)
        print(
            f"tokens lost at a publication every 30 s, {mode + ':':11}{lost:.4f} +- {error:.4f}"
            f"  (asked: under {LOSS_LIMIT})"
        )
    default = PublishConfig().kv_cache
    return pause_loaded <= PAUSE_LIMIT and lost_share(rates["none"], rates[default], options.window_s)[0] < LOSS_LIMIT


def lost_share(plain: list[float], published: list[float], window_s: float) -> tuple[float, float]:
    """Tokens that a publication costs as a share of those of 30 s, and its standard error. Rates in tokens/s."""
    whole = statistics.mean(plain) * SECONDS_BETWEEN_PUBLICATIONS
    lost = (statistics.mean(plain) - statistics.mean(published)) * window_s
    error = ((statistics.variance(plain) + statistics.variance(published)) / len(plain)) ** 0.5 * window_s
    return lost / whole, error / whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--windows", type=int, default=6)
    parser.add_argument("--window-s", type=float, default=6.0)
    options = parser.parse_args()
    if options.windows < 2:
        parser.error("--windows: a standard error needs at least 2")
    from rlhf_cluster.demo.model import unpack

    unpack(MODEL)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    raise SystemExit(0 if asyncio.run(measure(options)) else 1)


if __name__ == "__main__":
    main()
