"""``trims plan ensemble``: measure members, choose an allocation, and print it."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from random import Random
from typing import Any

from trims_shim.batching.profiles.profile_json import LARGEST_SIZE
from trims_shim.cli.arguments import refuse
from trims_shim.cli.exits import Exit
from trims_shim.cli.saying import say
from trims_shim.cli.targets import (
    import_from_here,
    items_of,
    made,
    measuring,
    named,
)
from trims_shim.cli.text import print_json, table
from trims_shim.ensemble import (
    Allocation,
    Member,
    Problem,
    load_problem,
    measure,
    optimise,
    save_problem,
    throughput,
    worst_fit_decreasing,
)
from trims_shim.ensemble.allocation import DEFAULT_BATCH_SIZES
from trims_shim.errors import ConfigError, TrimsError

__all__ = ["ensemble"]

_REPEATS = 3
_MEASURING = (
    *("--item", "--shape", "--dtype", "--device"),
    *("--devices", "--batch-sizes", "--repeats"),
)


def ensemble(arguments: argparse.Namespace) -> Exit:
    """Print the matrix: a row for each device, a column for each member."""
    with measuring():
        problem = _problem(arguments)
    if arguments.output:
        save_problem(arguments.output, problem)
    first = worst_fit_decreasing(problem)
    best = optimise(problem, random=Random(1), tries=arguments.tries)
    if arguments.json:
        print_json(_fields(problem, best) | {"first": _fields(problem, first)})
    else:
        print(_matrix(problem, best))
        print(f"\n{_rates(problem, first, best)}")
    return Exit.OK


def _problem(arguments: argparse.Namespace) -> Problem:
    if arguments.members.endswith(".json"):
        refuse(arguments, _MEASURING, f"with {arguments.members}, which was measured")
        return load_problem(arguments.members)
    if ":" not in arguments.members:
        raise ConfigError(
            f"{arguments.members!r} is neither MODULE:NAME, such as app:members, nor a .json file"
        )
    if not arguments.item and not arguments.shape:
        raise ConfigError("members are measured with samples: give --shape or --item")
    sizes = arguments.batch_sizes or DEFAULT_BATCH_SIZES
    if max(sizes) > LARGEST_SIZE:
        raise ConfigError(f"--batch-sizes has {max(sizes)}, which is more than {LARGEST_SIZE}")
    import_from_here()
    members = _members(arguments.members)
    try:
        return measure(
            members,
            _samples(arguments),
            devices=_devices(arguments.devices),
            batch_sizes=sizes,
            repeats=arguments.repeats or _REPEATS,
            progress=lambda line: say(f"measuring {line}"),
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _members(name: str) -> Sequence[Member]:
    found = made(named(name), name)
    if not isinstance(found, list | tuple) or not all(isinstance(each, Member) for each in found):
        raise TrimsError(f"{name} is no list of trims_shim.ensemble.Member")
    return found


def _samples(arguments: argparse.Namespace) -> Any:
    if arguments.item:
        refuse(arguments, ("--device",), "with --item")
    parts = [_row(part) for part in items_of(arguments)]
    return parts[0] if len(parts) == 1 else tuple(parts)


def _row(part: Any) -> Any:
    """One row with what is on the command line, an item."""
    return part[None] if hasattr(part, "shape") else [part]


def _devices(text: str | None) -> list[str] | None:
    """``cpu:0,1,cuda:0`` has two: a comma before a number belongs to a list of cores."""
    return None if text is None else re.split(r",?\s+|,(?=[a-z])", text.strip())


def _fields(problem: Problem, allocation: Allocation) -> dict[str, Any]:
    return {
        "devices": [device.name for device in problem.devices],
        "members": list(problem.members),
        "batch_sizes": [list(row) for row in allocation.batch_sizes],
        "samples_per_s": throughput(problem, allocation),
    }


def _matrix(problem: Problem, allocation: Allocation) -> str:
    room = problem.room_bytes(allocation)
    titles = ("DEVICE", *problem.members, "FREE")
    rows = [
        (
            device.name,
            *(str(size or "-") for size in sizes),
            f"{room[device.pool] / 1e9:.3g} GB",
        )
        for device, sizes in zip(problem.devices, allocation.batch_sizes, strict=True)
    ]
    return table(titles, rows, right=titles[1:])


def _rates(problem: Problem, first: Allocation, best: Allocation) -> str:
    rate, before = throughput(problem, best), throughput(problem, first)
    return (
        f"batch size of each worker; about {rate:.4g} samples/s, {rate / before:.2f} times as many "
        f"as with\none worker for each member and batches of {problem.batch_sizes[0]}"
    )
