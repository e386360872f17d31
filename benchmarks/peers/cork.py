"""BentoML's ``CorkDispatcher``: learns ``a * n + b`` and drops requests that it expects late.

The class is private. It trains on its first requests, one, two and three at a time, which the
warm-up sends, and then fits its line anew every five seconds. The first line, through three sizes,
is so poor that the dispatcher drops 10 % of a moderate load until the next fit. A long run would
not show that, so the adapter makes it fit once more after the warm-up. A function that is no
coroutine runs in starlette's thread pool. A dropped request ends with the fallback value.
"""

from __future__ import annotations

from typing import Any

from benchmarks.peers import Dropped, LoopPeer

__all__ = ["Cork"]

_GIVEN_UP = object()


class Cork(LoopPeer):
    """``max_latency`` is ``latency_share`` of the objective."""

    async def prepare(self) -> None:
        """See :class:`LoopPeer`."""
        from bentoml._internal.marshal.dispatcher import CorkDispatcher

        self._dispatcher = CorkDispatcher(
            max_latency_in_ms=self.slo_ms * self.settings["latency_share"],
            max_batch_size=self.max_batch_size,
            fallback=lambda: _GIVEN_UP,
            get_batch_size=lambda item: 1,
        )
        self._call = self._dispatcher(self._run)

    def _run(self, items: tuple[Any, ...]) -> list[Any]:
        return self.device.run_list(items)

    def end_warm_up(self) -> None:
        """Fit the line through all measurements so far."""
        self.loop.call_soon_threadsafe(self._dispatcher.optimizer.trigger_refresh)

    async def answer(self, item: Any) -> Any:
        """See :class:`LoopPeer`."""
        result = await self._call(item)
        if result is _GIVEN_UP:
            raise Dropped
        return result

    def facts(self) -> dict[str, Any]:
        """The line that it has learned."""
        learned = self._dispatcher.optimizer
        return {"a_ms": learned.o_a * 1e3, "b_ms": learned.o_b * 1e3, "wait_ms": learned.wait * 1e3}
