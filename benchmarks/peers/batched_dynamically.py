"""Mixedbread's ``batched``: ``batched.dynamically`` and ``batched.aio.dynamically``.

The library has no objective and drops nothing. The thread form is awaited through its ``acall``, as
in a server. The asyncio form itself runs a blocking function in a thread.
"""

from __future__ import annotations

from typing import Any

from benchmarks.peers import LoopPeer

__all__ = ["Asyncio", "Thread"]


class Thread(LoopPeer):
    """The form with a thread of its own."""

    async def prepare(self) -> None:
        """See :class:`LoopPeer`."""
        import batched

        decorate = batched.dynamically(
            batch_size=self.max_batch_size, timeout_ms=self.settings["wait_ms"]
        )
        self._batched = decorate(self.device.run_list)

    async def answer(self, item: Any) -> Any:
        """See :class:`LoopPeer`."""
        return await self._batched.acall(item)

    def call(self, item: Any) -> Any:
        """Call it as a thread of a server does."""
        return self._batched(item)


class Asyncio(LoopPeer):
    """The form for asyncio."""

    async def prepare(self) -> None:
        """See :class:`LoopPeer`."""
        import batched

        decorate = batched.aio.dynamically(
            batch_size=self.max_batch_size, timeout_ms=self.settings["wait_ms"]
        )
        self._batched = decorate(self.device.run_list)

    async def answer(self, item: Any) -> Any:
        """See :class:`LoopPeer`."""
        return await self._batched(item)
