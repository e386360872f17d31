"""``trims batch profile``: measure how long batches of a function take, and save it.

Runs the function in this process, with items that the user names or random tensors of a shape. The
current directory is importable, as it is for ``python -m``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import inspect
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

from trims_shim.batching import Batcher
from trims_shim.batching.collating.collate import Collate, answers, collate_of, columns
from trims_shim.batching.drivers.functions import BatchFunction
from trims_shim.batching.profiles.profile import LatencyProfile, slow_sizes
from trims_shim.batching.profiles.profile_store import SavedProfile, save_profile
from trims_shim.batching.profiles.profiling import measure
from trims_shim.cli.arguments import refuse
from trims_shim.cli.exits import Exit
from trims_shim.cli.saying import say
from trims_shim.cli.targets import (
    import_from_here,
    items_of,
    measuring,
    named,
    running,
    sizes_of,
)
from trims_shim.cli.text import print_json, table
from trims_shim.errors import TrimsError

__all__ = ["profile"]

_DEFAULT_MAX_BATCH_SIZE = 32


def profile(arguments: argparse.Namespace) -> Exit:
    """Measure each size, print the table, and save it if asked to."""
    import_from_here()
    # One loop for all batches: objects that a function keeps may belong to it.
    with measuring(), contextlib.closing(asyncio.new_event_loop()) as loop:
        target = _target(arguments, loop)
        sizes = sizes_of(arguments, target.max_batch_size)
        durations_ns = _measure(target, sizes, arguments)
    measured = LatencyProfile.measured(durations_ns, pads=False)
    if arguments.output:
        save_profile(arguments.output, _saved(target, durations_ns))
    if arguments.json:
        print_json(_described(durations_ns, measured))
    else:
        print(_table(durations_ns))
        alpha_ns, beta_ns = measured.line_ns()
        print(f"\nabout {beta_ns / 1e6:.3g} + {alpha_ns / 1e6:.3g} b ms")
        if slow := slow_sizes(durations_ns):
            kept = [size for size in durations_ns if size not in slow]
            print(
                f"a larger batch is quicker than one of {', '.join(map(str, slow))}: to fill such"
            )
            print(f"batches up, batched(batch_sizes={kept})")
        if arguments.output:
            print(f"saved: batched(profile={arguments.output!r})")
    return Exit.OK


# --- what is measured -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Target:
    """A function of a batch, and how a batch is made of an item."""

    name: str
    function: Callable[..., Any]
    collate: Collate
    max_batch_size: int
    arguments: Sequence[Any]
    """Of one item: a value for each argument."""
    is_generator: bool
    """Whether it answers in pieces. Others may return an iterator, too: of one result each."""
    loop: asyncio.AbstractEventLoop

    def run(self, size: int) -> None:
        """Run a batch of copies of the item. Raises BadBatch unless it has as many results."""
        is_single = len(self.arguments) == 1
        items = [self.arguments[0] if is_single else tuple(self.arguments)] * size
        batch = self.collate.join(items)
        results = self.function(batch) if is_single else self.function(*batch)
        for each in self._finished(results):
            answers(self.collate, each, items, function=self.name)

    def _finished(self, results: Any) -> Iterator[Any]:
        """What the function returned; if it is a generator, each of its steps."""
        if inspect.isasyncgen(results):
            yield from self.loop.run_until_complete(_gathered(results))
        elif self.is_generator:
            yield from results
        elif inspect.isawaitable(results):
            yield self.loop.run_until_complete(results)
        else:
            yield results


def _target(arguments: argparse.Namespace, loop: asyncio.AbstractEventLoop) -> _Target:
    found = named(arguments.target)
    if not callable(found):
        raise TrimsError(f"{arguments.target} is {type(found).__name__}, not a function")
    if arguments.item:
        refuse(arguments, ("--device",), "with --item")
    values = items_of(arguments)
    function, collate, largest = found, collate_of("auto"), _DEFAULT_MAX_BATCH_SIZE
    if isinstance(found, Batcher):
        function, collate, largest = found.function, found.collate, found.max_batch_size
        if found._owner is not None:
            function = MethodType(function, found._owner)
    if len(values) > 1:
        own = found._engine.function if isinstance(found, Batcher) else None
        collate = columns("auto", len(values)) if own is None else own.collate_for(len(values))
    largest = arguments.max_batch_size or largest
    name = arguments.target
    kind = BatchFunction(function, collate="auto", isolate_failures=False, name=name)
    return _Target(name, function, collate, largest, values, kind.is_generator, loop)


async def _gathered(steps: AsyncIterator[Any]) -> list[Any]:
    return [step async for step in steps]


# --- measuring ------------------------------------------------------------------------------------


def _measure(
    target: _Target, sizes: Sequence[int], arguments: argparse.Namespace
) -> dict[int, int]:
    """Nanoseconds by size; a size is reported on stderr after its second run."""
    runs: Counter[int] = Counter()

    def run(size: int) -> None:
        started_ns = time.perf_counter_ns()
        with running(target.name, arguments, size):
            target.run(size)
        runs[size] += 1
        if runs[size] == 2 and not arguments.json:
            text = f"[{len(runs)}/{len(sizes)}] batch of {size}: about "
            text += f"{(time.perf_counter_ns() - started_ns) / 1e6:.3g} ms"
            say(text)

    return measure(run, sizes, repeats=arguments.repeats, clock=time.perf_counter_ns)


def _saved(target: _Target, durations_ns: dict[int, int]) -> SavedProfile:
    return SavedProfile(
        durations_ns,
        max_batch_size=max(durations_ns),
        name=target.name,
        note="made by `trims batch profile`",
    )


def _described(durations_ns: dict[int, int], measured: LatencyProfile) -> dict[str, Any]:
    alpha_ns, beta_ns = measured.line_ns()
    return {
        "latency_ns": {str(size): taken_ns for size, taken_ns in durations_ns.items()},
        "alpha_ms": alpha_ns / 1e6,
        "beta_ms": beta_ns / 1e6,
        "slow_sizes": slow_sizes(durations_ns),
    }


def _table(durations_ns: dict[int, int]) -> str:
    titles = ("BATCH", "MS", "MS/ITEM", "ITEMS/S")
    rows = [
        (
            str(size),
            f"{taken_ns / 1e6:.3f}",
            f"{taken_ns / size / 1e6:.3f}",
            f"{size * 1e9 / taken_ns:.0f}",
        )
        for size, taken_ns in durations_ns.items()
    ]
    return table(titles, rows, right=titles)
