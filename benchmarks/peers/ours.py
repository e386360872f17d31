"""This package's Batcher, by threads and by asyncio, told only the objective.

It learns the device's profile from its first requests, as in a user's program.
"""

from __future__ import annotations

import functools
from concurrent.futures import Future
from typing import Any

from benchmarks.peers import Done, Dropped, LoopPeer, Peer

__all__ = ["Asyncio", "Threads"]


def _batcher(peer: Peer) -> Any:
    from trims_shim.batching import Batcher
    from trims_shim.batching.policies import rule_maker

    policy = peer.settings["policy"]
    if margin_ms := peer.settings.get("margin_ms"):
        policy = functools.partial(rule_maker(policy), margin_ms=margin_ms)
    # The sleeping device's function takes a list, the model's a tensor: both as "auto" makes them.
    return Batcher(
        peer.device.run,
        slo_ms=peer.slo_ms,
        max_batch_size=peer.max_batch_size,
        policy=policy,
    )


def _is_given_up(error: BaseException | None) -> bool:
    from trims_shim.errors import QueueFull, RequestDropped

    return isinstance(error, (RequestDropped, QueueFull))


def _facts(batcher: Any) -> dict[str, Any]:
    return {"stats": repr(batcher.stats()), "profile": repr(getattr(batcher, "profile", None))}


class Threads(Peer):
    """Uses ``submit``, whose future calls back."""

    def start(self) -> None:
        """See :class:`Peer`."""
        self._batcher = _batcher(self)

    def submit(self, item: Any, done: Done) -> None:
        """See :class:`Peer`."""

        def settle(future: Future[Any]) -> None:
            error = future.exception()
            if error is None:
                done(future.result(), None)
            else:
                done(None, Dropped() if _is_given_up(error) else error)

        try:
            future = self._batcher.submit(item)
        except Exception as error:  # a refusal is an answer too
            done(None, Dropped() if _is_given_up(error) else error)
        else:
            future.add_done_callback(settle)

    def call(self, item: Any) -> Any:
        """Call it as a thread of a server does."""
        return self._batcher(item)

    def facts(self) -> dict[str, Any]:
        """Its statistics."""
        return _facts(self._batcher)


class Asyncio(LoopPeer):
    """Uses ``aio``."""

    async def prepare(self) -> None:
        """See :class:`LoopPeer`."""
        self._batcher = _batcher(self)

    async def answer(self, item: Any) -> Any:
        """See :class:`LoopPeer`."""
        try:
            return await self._batcher.aio(item)
        except Exception as error:
            if _is_given_up(error):
                raise Dropped from error
            raise

    def facts(self) -> dict[str, Any]:
        """Its statistics."""
        return _facts(self._batcher)
