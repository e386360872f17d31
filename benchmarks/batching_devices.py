"""Devices for the batchers under test: one that sleeps, and a torch model on one processor.

A device runs one batch after another, as a GPU's stream does. A batch that comes while another runs
waits in its caller's thread. The device records every batch and its own processor time, which is
not the batcher's.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Batch", "Device", "SleepDevice", "TorchDevice", "make_device"]

MAX_BATCH_SIZE = 16
SLEEP_BETA_MS, SLEEP_ALPHA_MS = 20.0, 2.0


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch that has run, with the numbers of its requests."""

    numbers: tuple[int, ...]
    started_ns: int
    ended_ns: int


class Device(ABC):
    """Runs batches of numbered requests; the answer to a request is its number."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.processor_s = 0.0
        self._one_at_a_time = threading.Lock()

    @abstractmethod
    def item(self, number: int) -> Any:
        """The item that a client sends as request ``number``."""

    @abstractmethod
    def stacked(self, items: Sequence[Any]) -> Any:
        """Stack items to ``[batch, ...]``, for batchers that leave that to the function."""

    @abstractmethod
    def _answer(self, batch: Any) -> tuple[tuple[int, ...], Any]:
        """Return the request numbers in a stacked batch, and its results."""

    def run(self, batch: Any) -> Any:
        """Answer a stacked batch; blocks while another one runs."""
        with self._one_at_a_time:
            busy_s = time.thread_time()
            started_ns = time.monotonic_ns()
            numbers, results = self._answer(batch)
            self.batches.append(Batch(numbers, started_ns, time.monotonic_ns()))
            self.processor_s += time.thread_time() - busy_s
        return results

    def run_list(self, items: Sequence[Any]) -> list[Any]:
        """Answer a list of items with a list."""
        return list(self.run(self.stacked(items)))

    @staticmethod
    @abstractmethod
    def number_of(result: Any) -> int:
        """The number of the request that this answers."""


class SleepDevice(Device):
    """Sleeps ``beta + alpha * b`` for a batch of ``b``; uses no processor."""

    def item(self, number: int) -> int:
        """See :class:`Device`."""
        return number

    def stacked(self, items: Sequence[Any]) -> Any:
        """See :class:`Device`."""
        return items

    def _answer(self, batch: Any) -> tuple[tuple[int, ...], Any]:
        time.sleep((SLEEP_BETA_MS + SLEEP_ALPHA_MS * len(batch)) / 1e3)
        return tuple(int(number) for number in batch), batch

    @staticmethod
    def number_of(result: Any) -> int:
        """See :class:`Device`."""
        return int(result)


class TorchDevice(Device):
    """A multi-layer perceptron on one thread. At batch 1 it is memory-bound, so batching pays.

    The shape is that of a ranking model's dense part. Its first input is the number of the request,
    which the weights ignore and the answer repeats.
    """

    WIDTH, LAYERS = 2048, 8

    def __init__(self) -> None:
        import torch

        super().__init__()
        self._thread = threading.local()
        torch.manual_seed(0)
        layers: list[Any] = []
        for _ in range(self.LAYERS):
            layers += [torch.nn.Linear(self.WIDTH, self.WIDTH), torch.nn.ReLU()]
        self._model = torch.nn.Sequential(*layers).eval()
        self._template = torch.randn(self.WIDTH)

    def item(self, number: int) -> Any:
        """See :class:`Device`; float32 ``[width]``."""
        item = self._template.clone()
        item[0] = number
        return item

    def stacked(self, items: Sequence[Any]) -> Any:
        """See :class:`Device`."""
        import torch

        return torch.stack(tuple(items))

    def _answer(self, batch: Any) -> tuple[tuple[int, ...], Any]:
        import torch

        if not hasattr(self._thread, "is_set"):
            # OpenMP keeps the number per thread; in other threads torch would use all processors.
            torch.set_num_threads(1)
            self._thread.is_set = True
        numbers = batch[:, 0].clone()
        with torch.no_grad():
            results = self._model(batch)
        results[:, 0] = numbers
        return tuple(int(number) for number in numbers.tolist()), results

    @staticmethod
    def number_of(result: Any) -> int:
        """See :class:`Device`."""
        return int(result.reshape(-1)[0])


_KINDS = {"sleep": SleepDevice, "torch": TorchDevice}


def make_device(kind: str) -> Device:
    """``sleep`` or ``torch``."""
    return _KINDS[kind]()
