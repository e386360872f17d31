"""``async-batcher``: a sub-class of ``AsyncBatcher`` whose ``process_batch`` is no coroutine.

Such a function runs in the given executor. The library has no objective and drops nothing.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.peers import LoopPeer

__all__ = ["Batcher"]


class Batcher(LoopPeer):
    """One batch at a time, one thread."""

    async def prepare(self) -> None:
        """See :class:`LoopPeer`."""
        from async_batcher.batcher import AsyncBatcher

        device = self.device

        class OnDevice(AsyncBatcher):  # type: ignore[misc]
            def process_batch(self, batch: list[Any]) -> list[Any]:
                return device.run_list(batch)

        self._batcher = OnDevice(
            max_batch_size=self.max_batch_size,
            max_queue_time=self.settings["wait_ms"] / 1e3,
            executor=ThreadPoolExecutor(1),
        )

    async def answer(self, item: Any) -> Any:
        """See :class:`LoopPeer`."""
        return await self._batcher.process(item)
