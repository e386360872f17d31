"""How wide a device is: what two batches at once gain over one after the other.

A second lane that gains little is worse than none: both batches take longer, and each is smaller
than a single batch of all waiting requests would be. So the gain is measured, as the ``width`` of a
:class:`~trims_shim.batching.staged.profiles.stage_profile.StagedProfile`, and rules decide by it.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from trims_shim.batching.drivers.lanes import Lane
from trims_shim.batching.profiles.profiling import measure
from trims_shim.batching.staged.model import Stage
from trims_shim.batching.staged.profiles.profiling import MakeBatch, StagePasses
from trims_shim.batching.torch_settings import adopt_torch_threads

__all__ = ["measure_width", "width_of"]

_LEAST_ROOM = 0.2
"""The least share of the device that counts: a gain from less cannot be told from noise."""
_FREE = 0.52
"""Two batches in this share of the time of one after the other, half plus noise, do not slow each
other down: they give only a lower bound of the width."""


def width_of(alone_ns: Mapping[int, float], both_ns: Mapping[int, float]) -> float:
    """Return the width, from 0 to 1, see :class:`.StagedProfile`.

    By batch size, the durations of one batch alone, and of two at once until both end. Two take
    ``2 x load`` times as long as one, where ``load``, at least a half, is the share of the device
    that each keeps busy; with a width of 1, its share of the best throughput. The mean over sizes,
    weighted with the room that they leave; 0 if none leaves any.
    """
    best_ns = min(taken_ns / size for size, taken_ns in alone_ns.items())
    widths: list[tuple[float, float]] = []
    at_least = 0.0
    for size, taken_ns in alone_ns.items():
        room = 1 - size * best_ns / taken_ns
        if room < _LEAST_ROOM:
            continue
        load = min(1.0, both_ns[size] / (2 * taken_ns))
        if load <= _FREE:
            at_least = max(at_least, min(1.0, (1 - load) / room))
        else:
            widths.append((min(1.0, (1 - load) / room), room))
    if not widths:
        return at_least
    return max(at_least, sum(w * room for w, room in widths) / sum(room for _, room in widths))


def measure_width(
    stages: Iterable[Stage],
    make_batch: MakeBatch,
    sizes: Sequence[int],
    *,
    lanes: Sequence[Lane],
    clock: Callable[[], int],
    repeats: int = 5,
    limit_ns: int | None = None,
) -> float:
    """Run batches through all stages, alternately one alone and two at once on two ``lanes``.

    ``sizes``, ``repeats`` and ``limit_ns`` as in
    :func:`~trims_shim.batching.profiles.profiling.measure`. The fastest run of each counts, as
    noise makes none faster. Uses two threads. Raises what the stages raise.
    """
    found = list(stages)
    passes = [StagePasses(found, make_batch, clock=clock, lane=lane) for lane in lanes[:2]]
    alone_ns: dict[int, int] = {}
    both_ns: dict[int, int] = {}

    def run(size: int) -> None:
        for taken_ns, together in ((alone_ns, passes[:1]), (both_ns, passes)):
            started_ns = clock()
            _at_once([functools.partial(each.run, size) for each in together])
            duration_ns = max(1, clock() - started_ns)
            taken_ns[size] = min(duration_ns, taken_ns.get(size, duration_ns))

    measure(run, sizes, repeats=repeats, clock=clock, limit_ns=limit_ns)
    return width_of(alone_ns, both_ns)


def _at_once(calls: Sequence[Callable[[], Any]]) -> None:
    """Run one call in this thread and the others in new ones; raise the first error."""
    errors: list[BaseException] = []

    def run(call: Callable[[], Any]) -> None:
        try:
            adopt_torch_threads()
            call()
        except BaseException as error:
            errors.append(error)

    others = [threading.Thread(target=run, args=(call,), daemon=True) for call in calls[1:]]
    for thread in others:
        thread.start()
    try:
        run(calls[0])
    finally:
        for thread in others:
            thread.join()
    if errors:
        raise errors[0]
