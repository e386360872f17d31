"""Microsoft's ``batch-inference``: ``aio.ModelHost`` with one worker.

Its batcher concatenates arrays, so each item gets a batch axis. It waits for ``wait_n`` requests, a
full batch here, and at most ``wait_ms``. It has no objective and drops nothing. Its queue holds two
batches; further callers wait.
"""

from __future__ import annotations

from typing import Any

from benchmarks.peers import LoopPeer

__all__ = ["Host"]


class Host(LoopPeer):
    """The asyncio form; the threaded form may lose the wake-up of a caller."""

    async def prepare(self) -> None:
        """See :class:`LoopPeer`."""
        import numpy as np
        from batch_inference.aio import ModelHost
        from batch_inference.batcher import ConcatBatcher

        device, is_number = self.device, isinstance(self.device.item(0), int)

        class Model:
            def predict_batch(self, batch: Any) -> Any:
                return device.run(batch)

        self._wrap = np.atleast_1d if is_number else _with_batch_axis
        self._host = ModelHost(
            model_obj=Model(),
            batcher=ConcatBatcher(tensor="np" if is_number else "pt"),
            max_batch_size=self.max_batch_size,
            wait_n=self.max_batch_size,
            wait_ms=self.settings["wait_ms"],
        )
        await self._host.start()

    async def answer(self, item: Any) -> Any:
        """See :class:`LoopPeer`."""
        return (await self._host.predict(self._wrap(item)))[0]


def _with_batch_axis(item: Any) -> Any:
    return item[None]
