"""Run something with companions: the first of them that ends, ends all."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def run_beside(main: Coroutine[Any, Any, T], *companions: Coroutine[Any, Any, Any]) -> T:
    """What ``main`` returns; the companions are cancelled then.

    A companion that raises cancels ``main``, which is waited for, and its error is raised; being cancelled cancels all.
    """
    task = asyncio.ensure_future(main)
    others = [asyncio.ensure_future(companion) for companion in companions]
    try:
        await asyncio.wait([task, *others], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for other in others:
            other.cancel()
        if not task.done():
            task.cancel()
        await asyncio.wait([task, *others])
    for other in others:
        # When both ended at once, what main says comes first.
        if not task.cancelled():
            break
        if not other.cancelled():
            other.result()
    return task.result()
