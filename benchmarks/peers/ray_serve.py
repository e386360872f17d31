"""Ray's ``@serve.batch``, outside of Ray.

Its queue asks the replica it runs in for a limit, so that function is replaced, and nothing else.
``calls`` is "executor", where the function blocks a thread, or "blocking", where it blocks the
event loop. Then no batch is closed while another one runs, which helps under load. Its metrics are
recorded here, but go nowhere.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

from benchmarks.peers import LoopPeer

__all__ = ["ServeBatch"]

_MAX_ONGOING_REQUESTS = 1_000_000


class ServeBatch(LoopPeer):
    """One batch at a time, which is its default."""

    async def prepare(self) -> None:
        """See :class:`LoopPeer`."""
        from ray import serve

        limits = SimpleNamespace(max_ongoing_requests=_MAX_ONGOING_REQUESTS)
        serve.get_replica_context = lambda: SimpleNamespace(_deployment_config=limits)
        loop, executor, device = asyncio.get_running_loop(), ThreadPoolExecutor(1), self.device

        async def in_thread(items: list[Any]) -> list[Any]:
            return await loop.run_in_executor(executor, device.run_list, items)

        async def in_loop(items: list[Any]) -> list[Any]:
            return device.run_list(items)

        decorate = serve.batch(
            max_batch_size=self.max_batch_size,
            batch_wait_timeout_s=self.settings["wait_ms"] / 1e3,
        )
        self._call = decorate(in_thread if self.settings["calls"] == "executor" else in_loop)

    async def answer(self, item: Any) -> Any:
        """See :class:`LoopPeer`."""
        return await self._call(item)
