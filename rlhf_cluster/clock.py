"""The wall clock of a real run. Simulations inject their own ``protocols.Clock``."""

from __future__ import annotations

import asyncio
import time


class SystemClock:
    """Monotonic seconds of this process; the zero point is arbitrary."""

    def now(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
