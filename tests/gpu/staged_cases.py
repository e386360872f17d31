"""Staged batching on streams of a device, in a process of its own: a task for benchmarks.forking.

The models are those of tests/batching/staged, in float64 and with weights and activations on a
grid: sums are exact in any order, so a device has to give the very bits that a processor gives.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from random import Random
from typing import Any

import torch

from benchmarks.forking import serve
from tests.batching.staged.driving import Wild
from tests.batching.staged.models import KINDS, make_subject
from trims_shim.batching import Batcher

__all__ = ["answers"]

_ANSWER_DEADLINE_S = 60.0


class _Restless(Wild):
    """Starts what there is, stretches and splits at random."""

    def choose(self, now_ns: int) -> int:
        return self.randoms.randint(1, self.room())


def answers(*, kind: str, policy: str, device: str, lanes: Sequence[str], count: int) -> Any:
    """Numbers of wrong answers, and what was done between stages. ``lanes``: by their devices."""
    torch.set_num_threads(1)
    here, there = make_subject(kind), make_subject(kind, device=device)
    randoms = Wild.randoms = Random(kind)
    with Batcher(
        there.model,
        policy=_Restless if policy == "restless" else policy,
        max_batch_size=5,
        collate=there.collate,
        devices=list(lanes),
    ) as batcher:
        futures = []
        for number in range(count):
            futures.append(batcher.submit(there.item(number)))
            if randoms.random() < 0.3:
                time.sleep(randoms.random() * 2e-3)
        found = [_on_cpu(future.result(_ANSWER_DEADLINE_S)) for future in futures]
        stats = batcher.stage_stats()
    return {
        "wrong": [n for n, each in enumerate(found) if not _is_equal(each, here.alone(n))],
        "stretches": stats.stretches,
        "splits": stats.splits,
        "failures": stats.failures,
    }


def _on_cpu(answer: Any) -> Any:
    if isinstance(answer, dict):
        return {name: _on_cpu(each) for name, each in answer.items()}
    return answer.cpu() if isinstance(answer, torch.Tensor) else answer


def _is_equal(found: Any, expected: Any) -> bool:
    if isinstance(expected, dict):
        return all(_is_equal(found[name], each) for name, each in expected.items())
    if isinstance(expected, torch.Tensor):
        return torch.equal(found, expected)
    return bool(found == expected)


if __name__ == "__main__":
    assert KINDS
    serve({"answers": answers}, int(sys.argv[3]))
