"""Items of several buckets in one batch, from the caller's side."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.batching.waiting import LONG_S, wait_until
from trims_shim.batching import Batcher, Pad
from trims_shim.batching.collating.padding import Padded
from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.staged import StagedModel
from trims_shim.batching.staged.profiles.stage_profile import StagedProfile

FLAT = LatencyProfile([10e6] * 8)
"""Whatever the length, and however many: 10 ms."""


class Held:
    """Sums of rows, by the mask; each batch waits until it may go."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []
        self.may_go = threading.Event()

    def __call__(self, batch: Any) -> torch.Tensor:
        values, mask = (batch.values, batch.mask) if isinstance(batch, Padded) else (batch, 1)
        self.shapes.append(tuple(values.shape))
        assert self.may_go.wait(LONG_S)
        return (values * mask).sum(dim=1)


def served(make: Callable[[Held], Batcher]) -> list[tuple[int, ...]]:
    """What ran after a first batch, while which two short items and a long one have come."""
    held = Held()
    with make(held) as batcher:
        first = batcher.submit(torch.ones(1))
        wait_until(lambda: held.shapes, "the first batch")
        futures = [batcher.submit(torch.ones(length)) for length in (2, 9, 3)]
        wait_until(lambda: batcher.stats().queued == 3, "all of them queued")
        held.may_go.set()
        assert [each.result(LONG_S).item() for each in (first, *futures)] == [1, 2, 9, 3]
    return sorted(held.shapes[1:])


def test_short_items_go_with_a_long_one_where_that_is_quicker() -> None:
    def make(held: Held) -> Batcher:
        return Batcher(held, max_batch_size=8, collate=Pad(buckets=(4, 16)), profile=FLAT)

    assert served(make) == [(3, 16)]


@pytest.mark.parametrize(
    "options",
    [
        {"collate": Pad(buckets=(4, 16), mask=None)},
        {"collate": Pad(buckets=(4, 16)), "policy": "immediate"},
        {"collate": Pad(buckets=(4, 16)), "policy": "early_drop", "slo_ms": 60_000},
    ],
    ids=["no mask", "never waits", "early drop"],
)
def test_each_length_by_itself(options: dict[str, Any]) -> None:
    def make(held: Held) -> Batcher:
        return Batcher(held, max_batch_size=8, profile=FLAT, **options)

    assert served(make) == [(1, 16), (2, 4)]


ALONE = LatencyProfile.linear(20, 0.01, max_batch_size=8)
"""Nothing is saved by any company."""


@pytest.mark.parametrize(
    ("collate", "options", "expected"),
    [
        (Pad(), {}, [(1, 9), (2, 3)]),
        (Pad(mask=None), {}, [(3, 9)]),
        (Pad(), {"policy": "immediate"}, [(3, 9)]),
        (Pad(), {"policy": "early_drop", "slo_ms": 60_000}, [(3, 9)]),
    ],
    ids=["default", "no mask", "never waits", "early drop"],
)
def test_without_buckets_lengths_are_told_apart_where_the_policy_can_bring_them_together(
    collate: Pad, options: dict[str, Any], expected: list[tuple[int, int]]
) -> None:
    def make(held: Held) -> Batcher:
        return Batcher(held, max_batch_size=8, collate=collate, profile=ALONE, **options)

    assert served(make) == expected


def test_without_buckets_lengths_share_a_batch_where_it_pays() -> None:
    def make(held: Held) -> Batcher:
        return Batcher(held, max_batch_size=8, collate=Pad(), profile=FLAT)

    assert served(make) == [(3, 9)]


def test_also_through_stages() -> None:
    def make(held: Held) -> Batcher:
        def first_stage(batch: Padded) -> torch.Tensor:
            return held(batch)

        model = StagedModel([first_stage, lambda sums: sums + 0])
        profile = StagedProfile([FLAT, FLAT])
        return Batcher(model, max_batch_size=8, collate=Pad(buckets=(4, 16)), profile=profile)

    assert served(make) == [(3, 16)]
