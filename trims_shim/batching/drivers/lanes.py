"""How work reaches a device, and when it is known to be done there.

On a CPU a stage is done when its call returns. On a GPU the call only queues kernels: a processor
that runs ahead would pass all exit points before the first stage has begun, and a batch that is
given up would still run. So a CUDA lane lets the processor be one stage ahead and no more: at the
end of a stage it waits for the one before. The device never idles between stages, and a batch that
is given up keeps it for at most two of them.

A lane waits for the default stream before a batch, and marks results as used on it: items come from
there and answers go there. Code that uses another stream has to make it wait, as ever in torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Protocol

__all__ = ["CpuLane", "CudaLane", "Lane", "lane_of"]


class Lane(Protocol):
    """One device, or one share of it; used by one batch at a time, maybe from several threads."""

    def enter(self) -> Any:
        """A context manager in which stages are called."""

    def stage_done(self) -> None:
        """A stage was called. May wait for the one before."""

    def finish(self, results: Any = None) -> None:
        """Wait until everything that was called is done; ``results`` leave the lane."""


class CpuLane:
    """A processor: nothing to wait for."""

    def enter(self) -> Any:
        """See :class:`Lane`."""
        return _NOTHING

    def stage_done(self) -> None:
        """See :class:`Lane`."""

    def finish(self, results: Any = None) -> None:
        """See :class:`Lane`."""


_NOTHING = contextlib.nullcontext()


class CudaLane:
    """A stream of its own on one GPU. ``torch`` is the module, for tests."""

    def __init__(self, device: str, torch: Any) -> None:
        self._torch = torch
        try:
            self._stream = torch.cuda.Stream(device=torch.device(device))
        except (RuntimeError, AssertionError) as error:  # no such GPU, or a torch without CUDA
            raise RuntimeError(f"{device} cannot be used: {error}") from error
        # With its number: which device "cuda" is, torch.cuda.set_device says for each thread alone.
        self._device = self._stream.device
        self._last: Any = None

    def enter(self) -> Any:
        """See :class:`Lane`. Items may still be on their way to the device."""
        torch = self._torch
        self._stream.wait_stream(torch.cuda.default_stream(self._device))
        self._last = None
        return torch.cuda.stream(self._stream)

    def stage_done(self) -> None:
        """See :class:`Lane`."""
        # Blocking: the wait sleeps, and leaves the processor to threads that queue requests.
        event = self._torch.cuda.Event(blocking=True)
        event.record(self._stream)
        before, self._last = self._last, event
        if before is not None:
            before.synchronize()

    def finish(self, results: Any = None) -> None:
        """See :class:`Lane`.

        torch gives memory of the lane's stream out again as soon as it is freed, even if another
        stream still reads it. So the allocator is told that the default stream uses the results.
        """
        self._last = None
        self._stream.synchronize()
        for tensor in _tensors(results):
            tensor.record_stream(self._torch.cuda.default_stream(self._device))


def _tensors(results: Any) -> Iterator[Any]:
    """The tensors on a GPU in the results of a model."""
    if getattr(results, "is_cuda", False):
        yield results
    elif isinstance(results, Mapping):
        for each in results.values():
            yield from _tensors(each)
    elif isinstance(results, list | tuple):
        for each in results:
            yield from _tensors(each)
    elif is_dataclass(results) and not isinstance(results, type):
        for field in fields(results):
            yield from _tensors(getattr(results, field.name))


def lane_of(device: str) -> Lane:
    """The lane of ``"cpu"``, ``"cuda"`` or ``"cuda:1"``. Raises ValueError for other names, and
    what torch raises where there is no such GPU."""
    kind = device.partition(":")[0]
    if kind == "cpu":
        return CpuLane()
    if kind != "cuda":
        raise ValueError(f"device {device!r}; a device is 'cpu', 'cuda' or 'cuda:NUMBER'")
    import torch

    return CudaLane(device, torch)
