"""Small instances for property tests: requests, a profile, and the best that could be done."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from batching.checking import Checked, History, Observer, drive, ms
from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.protocol import Event, Request
from trims_shim.batching.rules import RuleMaker
from trims_shim.batching.single import Batching

__all__ = ["Instance", "instances", "offline_optimum", "run"]


@dataclass(frozen=True)
class Instance:
    """Requests in the order of their arrival, and how long batches take."""

    requests: tuple[Request, ...]
    profile: LatencyProfile
    devices: int = 1
    max_weight: int | None = None

    @property
    def max_batch_size(self) -> int:
        return self.profile.max_batch_size


@st.composite
def profiles(draw: st.DrawFn, most: int = 6, *, dips: bool = True) -> LatencyProfile:
    """A line, or any table; with ``dips``, larger sizes may take less than smaller ones."""
    largest = draw(st.integers(1, most))
    if draw(st.booleans()):
        table = [ms(draw(st.integers(1, 60))) for _ in range(largest)]
        return LatencyProfile(table if dips else sorted(table))
    return LatencyProfile.linear(
        draw(st.integers(1, 6)), draw(st.integers(0, 30)), max_batch_size=largest
    )


@st.composite
def instances(
    draw: st.DrawFn,
    *,
    most: int = 25,
    devices: int = 1,
    keys: Sequence[Hashable] = "a",
    priorities: int = 1,
    weights: int = 1,
    dips: bool = True,
    slack: Callable[[LatencyProfile], st.SearchStrategy[int]] | None = None,
) -> Instance:
    """``slack`` is the milliseconds from an arrival to its deadline."""
    profile = draw(profiles(dips=dips))
    slack_ms = st.integers(0, 150) if slack is None else slack(profile)
    time_ms, requests = 0, []
    for number in range(draw(st.integers(1, most))):
        time_ms += draw(st.sampled_from((0, 0, 1, 2, 5, 11, 23, 50)))
        requests.append(
            Request(
                number,
                ms(time_ms),
                ms(time_ms + draw(slack_ms)),
                priority=draw(st.integers(1, priorities)),
                key=draw(st.sampled_from(keys)),
                weight=draw(st.integers(1, weights)),
            )
        )
    max_weight = None if weights == 1 else draw(st.integers(1, 3 * weights))
    return Instance(tuple(requests), profile, draw(st.integers(1, devices)), max_weight)


def run(
    maker: RuleMaker,
    instance: Instance,
    *extra: tuple[int, Event],
    jitter: random.Random | None = None,
    observe: Observer | None = None,
) -> History:
    """Of an instance; every request is settled.

    Without ``jitter``, batches take exactly what the profile says, and timers come in time.
    """

    def service_ns(batch: Sequence[Request]) -> int:
        factor = 1 if jitter is None else jitter.uniform(0.5, 2)
        return int(factor * instance.profile.latency_ns(len(batch)))

    policy = Batching(
        lambda key: maker(instance.profile, max_batch_size=instance.max_batch_size),
        devices=instance.devices,
        max_weight=instance.max_weight,
    )
    checked = Checked(
        policy,
        max_batch_size=instance.max_batch_size,
        devices=instance.devices,
        max_weight=instance.max_weight,
    )
    script = [(each.arrival_ns, each) for each in instance.requests]
    history = drive(
        checked,
        sorted([*script, *extra], key=lambda row: row[0]),
        service_ns=service_ns,
        late_ns=lambda: 0 if jitter is None else jitter.randrange(ms(20)),
        observe=observe,
    )
    ends = [*history.answered, *history.dropped, *history.cancelled]
    assert sorted(ends) == [each.number for each in instance.requests]
    return history


def offline_optimum(instance: Instance) -> int:
    """The most requests that one device could answer in time, had it known all of them before.

    Over all sets of requests: the earliest time by which exactly these can have been answered, in
    time all of them. A later start of the last batch never helps, so it starts as soon as the
    device is free and the last of its requests has arrived. Where a profile dips, this may be less
    than the optimum: a late request can fill a batch up to a size that is quicker.
    """
    bounds = [_bounds(instance, members) for members in range(1 << len(instance.requests))]
    earliest_ns: list[float] = [0]
    for members in range(1, len(bounds)):
        best, last = float("inf"), members
        while last:
            arrival_ns, deadline_ns, latency_ns = bounds[last]
            end_ns = max(earliest_ns[members & ~last], arrival_ns) + latency_ns
            if end_ns <= deadline_ns:
                best = min(best, end_ns)
            last = (last - 1) & members
        earliest_ns.append(best)
    return max(each.bit_count() for each, end in enumerate(earliest_ns) if end < float("inf"))


def _bounds(instance: Instance, members: int) -> tuple[float, float, float]:
    """Of a batch of these: the last arrival, the first deadline, and how long it takes."""
    batch = [each for index, each in enumerate(instance.requests) if members >> index & 1]
    if not 1 <= len(batch) <= instance.max_batch_size:
        return 0, 0, float("inf")
    return (
        max(each.arrival_ns for each in batch),
        min(each.deadline_ns for each in batch),
        instance.profile.latency_ns(len(batch)),
    )
