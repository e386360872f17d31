"""Whatever a staged batcher does between stages, answers are those of unbatched execution.

For models of five kinds, random arrivals, policies and numbers of devices: in float64 bit by bit,
in float32 within 1e-4 of the largest magnitude. Once through a driver in one thread that tries
orders of events threads would hardly bring about, and once through the batcher itself.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.batching.staged.driving import StagedDriver, Wild
from tests.batching.staged.models import KINDS, Subject, make_subject
from tests.batching.waiting import LONG_S, join, start
from trims_shim.batching import Batcher
from trims_shim.batching.policies.auto import Auto
from trims_shim.batching.policies.window import Window
from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.rules import Rule
from trims_shim.batching.staged.profiles.stage_profile import StagedProfile
from trims_shim.batching.staged.scheduler import StagedBatching

LARGEST = 5
NUMBERS = 24
MS = 1_000_000


@functools.cache
def subject(kind: str, dtype: torch.dtype = torch.float64, is_exact: bool = True) -> Subject:
    return make_subject(kind, dtype=dtype, is_exact=is_exact)


@functools.cache
def expected(kind: str, dtype: torch.dtype, is_exact: bool, number: int) -> Any:
    return subject(kind, dtype, is_exact).alone(number)


def profile(stages: int) -> StagedProfile:
    """Stages that gain from batches, the later ones less."""
    return StagedProfile(
        [LatencyProfile.linear(0.2 + 0.2 * n, 2.0, max_batch_size=LARGEST) for n in range(stages)]
    )


MAKERS: dict[str, Callable[..., Rule]] = {
    "wild": Wild,
    "window": functools.partial(Window, wait_ms=3),
    "auto": Auto,
}


def batching(model_subject: Subject, maker: Callable[..., Rule], devices: int, pairs: int) -> Any:
    model = model_subject.model
    return StagedBatching(
        lambda key: maker(profile(len(model)), max_batch_size=LARGEST),
        stages=len(model),
        devices=devices,
        pairs=pairs,
        has_loop=model.loop is not None,
    )


def drive(
    kind: str,
    seed: int,
    *,
    policy: str = "wild",
    devices: int = 2,
    pairs: int = 2,
    cancels: float = 0.0,
    dtype: torch.dtype = torch.float64,
    is_exact: bool = True,
    count: int = 12,
) -> Counter[str]:
    """Random events; everything is answered as it would be alone. What was done to batches."""
    randoms = Wild.randoms = Random(seed)
    tried = subject(kind, dtype, is_exact)
    driver = StagedDriver(tried, batching(tried, MAKERS[policy], devices, pairs), randoms)
    first = randoms.randrange(NUMBERS - count)
    numbers = range(first, first + count)
    driver.run(numbers, cancels=cancels)
    assert set(driver.answers) | driver.cancelled == set(numbers)
    for number, answer in driver.answers.items():
        tried.assert_equal(answer, expected(kind, dtype, is_exact, number))
    return driver.counts


# --- in any order of events -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_answers_have_the_bits_of_unbatched_execution(kind: str) -> None:
    done = sum((drive(kind, seed) for seed in range(12)), Counter())
    # It was not for lack of entries and exits.
    assert done["stretched"] > 5
    assert done["joined"] > 5
    assert kind == "gpt" or done["split"] > 5  # loops are not split
    assert (kind == "ragged bert") == bool(done["not joinable"])


@settings(max_examples=40)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    policy=st.sampled_from(sorted(MAKERS)),
    seed=st.integers(0, 1 << 30),
    devices=st.integers(1, 3),
    pairs=st.integers(1, 3),
    cancels=st.sampled_from((0.0, 0.1)),
)
def test_whatever_the_policy_the_devices_and_the_cancellations(
    kind: str, policy: str, seed: int, devices: int, pairs: int, cancels: float
) -> None:
    drive(kind, seed, policy=policy, devices=devices, pairs=pairs, cancels=cancels)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_models_that_round_nothing_stay_within_their_tolerance(
    kind: str, dtype: torch.dtype
) -> None:
    for seed in range(3):
        drive(kind, seed, dtype=dtype, is_exact=False)


def test_where_kernels_do_not_look_at_the_batch_nothing_has_to_be_rounded() -> None:
    """Those of convolutions do not in float64; a U-Net has nothing else."""
    tried = subject("u-net", torch.float64, False)
    stages = tried.model.stages
    for size in (2, 3, 5):
        batch = torch.stack([tried.item(number) for number in range(size)])
        for stage in stages:
            batch = stage(batch)
        if not all(torch.equal(batch[n], tried.alone(n)) for n in range(size)):
            pytest.skip("this processor's kernels depend on the size of the batch")
    exact = Subject(tried.name, tried.model, tried.item, tried.collate, tolerance=0.0)
    for seed in range(3):
        driver = StagedDriver(exact, batching(exact, Wild, 2, 2), Random(seed))
        driver.run(range(10))
        for number, answer in driver.answers.items():
            exact.assert_equal(answer, tried.alone(number))


# --- through the batcher itself -------------------------------------------------------------------


class Restless(Wild):
    """Wild, but starts what there is: threads do not wait for a timer's sake."""

    def choose(self, now_ns: int) -> int:
        return self.randoms.randint(1, self.room())


BATCHER_POLICIES: dict[str, Any] = {
    "dvabatch": "dvabatch",
    "load": "load",
    "operators": "operators",
    "inputs": "inputs",
    "auto": "auto",
    "restless": Restless,
}


def ask(batcher: Batcher, tried: Subject, numbers: range, randoms: Random) -> dict[int, Any]:
    """Futures of items that come in small groups; some are given up again."""
    futures = {}
    for number in numbers:
        futures[number] = batcher.submit(tried.item(number))
        if randoms.random() < 0.4:
            time.sleep(randoms.random() * 2e-3)
        if randoms.random() < 0.1:
            futures[number].cancel()
    return futures


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", BATCHER_POLICIES)
def test_the_batcher_answers_as_if_there_were_no_batches(kind: str, policy: str) -> None:
    randoms = Random(f"{kind} {policy}")
    tried = subject(kind)
    devices = randoms.randint(1, 3)
    with Batcher(
        tried.model,
        policy=BATCHER_POLICIES[policy],
        max_batch_size=LARGEST,
        collate=tried.collate,
        devices=devices,
    ) as batcher:
        futures = ask(batcher, tried, range(NUMBERS), randoms)
        for number, future in futures.items():
            if not future.cancelled():
                answer = future.result(LONG_S)
                tried.assert_equal(answer, expected(kind, torch.float64, True, number))
    stats = batcher.stats()
    assert stats.answered + stats.cancelled == NUMBERS
    assert not stats.failed


@pytest.mark.parametrize("kind", ["bert", "u-net"])
def test_the_batcher_in_float32_is_within_the_tolerance(kind: str) -> None:
    randoms, tried = Random(kind), subject(kind, torch.float32, False)
    with Batcher(
        tried.model, policy=Restless, max_batch_size=LARGEST, collate=tried.collate, devices=2
    ) as batcher:
        futures = ask(batcher, tried, range(NUMBERS), randoms)
        for number, future in futures.items():
            if not future.cancelled():
                answer = future.result(LONG_S)
                tried.assert_equal(answer, expected(kind, torch.float32, False, number))
    assert not batcher.stats().failed


def test_streams_that_share_steps_are_what_each_would_be_alone() -> None:
    tried = subject("gpt")
    found: dict[int, list[int]] = {}
    with Batcher(
        tried.model, policy=Restless, max_batch_size=LARGEST, collate=tried.collate
    ) as batcher:

        def listen(number: int) -> None:
            found[number] = [int(token) for token in batcher.stream(tried.item(number))]

        join(*(start(functools.partial(listen, number)) for number in range(12)))
    assert found == {n: expected("gpt", torch.float64, True, n) for n in range(12)}


def test_the_batcher_does_enter_and_leave_between_stages() -> None:
    """Without this the tests above could be right because nothing happens."""
    randoms, tried = Random(0), subject("resnet")
    Restless.randoms = Random(1)
    with Batcher(
        tried.model, policy=Restless, max_batch_size=LARGEST, collate=tried.collate
    ) as batcher:
        for _ in range(5):
            for future in ask(batcher, tried, range(NUMBERS), randoms).values():
                if not future.cancelled():
                    future.result(LONG_S)
        stats = batcher.stage_stats()
    assert stats.stretches
    assert stats.splits
