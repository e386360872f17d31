"""Flex on streams of a device, in a process of its own: a task for benchmarks.forking.

In each round batches of a long model have begun when many requests of a short one come that cannot
wait for them. So one is given up with its kernels under way, and runs again. Time stands still for
the policy, as in tests/batching/flex. All numbers are whole, in float64: sums are exact in any
order, so a device has to give the very bits that a processor gives.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.forking import serve
from trims_shim.batching import FlexBatcher, LatencyProfile, exit_point

__all__ = ["answers"]

_ANSWER_DEADLINE_S = 60.0
_PRODUCTS = 32
"""In each stage of the long model."""
_SHORT = 8
"""Requests of the short model in a round."""
_PROFILES = {
    "long": LatencyProfile.linear(10, 1000, max_batch_size=32),
    "short": LatencyProfile.linear(1, 10, max_batch_size=32),
}
_SLOS_MS = {"long": 10_000, "short": 700}


class _Models:
    """Both models on a device; batches of the long one stop in its first stage until they may."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self.has_begun = threading.Semaphore(0)
        self.may_go_on = threading.Event()

    def product(self, x: Tensor) -> Tensor:
        """``[batch, width]`` of whole numbers -> the same."""
        return (x @ self.weight) % 8

    def first(self, x: Tensor) -> Tensor:
        """The long model's first stage."""
        self.has_begun.release()
        assert self.may_go_on.wait(_ANSWER_DEADLINE_S)
        return self.stage(x)

    def stage(self, x: Tensor) -> Tensor:
        """Another one."""
        for _ in range(_PRODUCTS):
            x = self.product(x)
        exit_point()
        return x + 1

    def whole(self, x: Tensor) -> Tensor:
        """All stages of the long model."""
        return self.stage(self.stage(self.stage(x)))


def answers(*, device: str, lanes: Sequence[str], rounds: int, width: int) -> Any:
    """How many answers were wrong, and batches given up. ``lanes``: by their devices."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    weight = torch.randint(-4, 5, (width, width)).double()
    here, there = _Models(weight), _Models(weight.to(device))
    items = torch.randint(8, (rounds, _SHORT, width)).double()
    longs = len(lanes)
    expected = torch.cat([here.whole(items[:, :longs]), here.product(items)], 1)
    wrong = preemptions = 0
    for asked, right in zip(items, expected, strict=True):
        # A new one each time: by its clock batches take no time, which it would learn.
        with FlexBatcher(
            {"long": [there.first, there.stage, there.stage], "short": [there.product]},
            slo_ms=_SLOS_MS,
            profiles=_PROFILES,
            devices=list(lanes),
            clock_ns=lambda: 0,
        ) as batcher:
            found = _round(batcher, there, asked.to(device), longs=longs)
            batcher.drain(_ANSWER_DEADLINE_S)
            preemptions += batcher.preemption_stats().preemptions
        wrong += sum(
            not torch.equal(answer.cpu(), each) for answer, each in zip(found, right, strict=True)
        )
    return {"wrong": wrong, "preemptions": preemptions}


def _round(batcher: FlexBatcher, models: _Models, items: Tensor, *, longs: int) -> list[Tensor]:
    """The answers of the long model to the first ``longs`` items, and of the short one to all."""
    models.may_go_on.clear()
    models.has_begun = threading.Semaphore(0)
    waiting = []
    for item in items[:longs]:
        waiting.append(batcher.submit("long", item))
        assert models.has_begun.acquire(timeout=_ANSWER_DEADLINE_S)
    waiting += [batcher.submit("short", item) for item in items]
    models.may_go_on.set()
    return [each.result(_ANSWER_DEADLINE_S) for each in waiting]


if __name__ == "__main__":
    serve({"answers": answers}, int(sys.argv[3]))
