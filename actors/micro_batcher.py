"""An asyncio front for a batched computation: gathers what arrives together and runs it by length in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

from rlhf_cluster.batching import forward_plan

Item = TypeVar("Item")
Result = TypeVar("Result")


class MicroBatcher(Generic[Item, Result]):
    """Batches items of concurrent callers under a token budget.

    Args:
        run: items -> one result each, same order; called in one worker thread, one batch at a time.
        length: tokens of an item, at least 1.
        batch_tokens: bound of items * longest item in a batch; a longer item runs alone.
        window_s: seconds the first item waits for company.
    """

    def __init__(
        self,
        run: Callable[[list[Item]], Sequence[Result]],
        *,
        length: Callable[[Item], int],
        batch_tokens: int,
        window_s: float,
    ) -> None:
        self._run = run
        self._length = length
        self._batch_tokens = batch_tokens
        self._window_s = window_s
        self._waiting: list[tuple[Item, asyncio.Future[Result]]] = []
        self._drain: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="micro-batcher")

    async def submit(self, items: Sequence[Item]) -> list[Result]:
        """The results of ``items``, in their order. An error of ``run`` reaches the callers in that batch only, any
        other error everyone who waited with it."""
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[Result]] = [loop.create_future() for _ in items]
        self._waiting.extend(zip(items, futures, strict=True))
        if self._waiting and (self._drain is None or self._drain.done()):
            self._drain = asyncio.create_task(self._run_waiting())
        return list(await asyncio.gather(*futures))

    async def _run_waiting(self) -> None:
        while self._waiting:
            await asyncio.sleep(self._window_s)
            waiting, self._waiting = self._waiting, []
            try:
                lengths = [self._length(item) for item, _ in waiting]
                plan = forward_plan(lengths, ranks=1, micro_batch_tokens=self._batch_tokens, padding_share=1.0)
            except Exception as error:  # no batch is to blame: it belongs to every caller of this round
                _fail(waiting, error)
                continue
            for indices in plan.ranks[0]:
                await self._run_batch([waiting[i] for i in indices])

    async def _run_batch(self, batch: list[tuple[Item, asyncio.Future[Result]]]) -> None:
        # A caller that gave up (deadline, cancellation) has cancelled its futures; nobody reads those results.
        wanted = [(item, future) for item, future in batch if not future.done()]
        if not wanted:
            return
        try:
            results = await asyncio.get_running_loop().run_in_executor(
                self._thread, self._run, [item for item, _ in wanted]
            )
            if len(results) != len(wanted):
                raise RuntimeError(f"{len(wanted)} items went into a batch and {len(results)} results came out")
        except Exception as error:  # whatever it is, it belongs to the callers of this batch
            _fail(wanted, error)
            return
        for (_, future), result in zip(wanted, results, strict=True):
            if not future.done():
                future.set_result(result)


def _fail(waiting: Sequence[tuple[Item, asyncio.Future[Result]]], error: Exception) -> None:
    for _, future in waiting:
        if not future.done():
            future.set_exception(error)
