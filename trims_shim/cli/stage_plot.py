"""``trims stage plot``: how each stage of a measured model takes to larger batches, as a picture.

``--json`` prints what would be drawn, and needs no matplotlib.
"""

from __future__ import annotations

import argparse

from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.staged.profiles.profile_files import SavedStages, load_saved_stages
from trims_shim.cli.drawing import Drawing, Line, Panel, show
from trims_shim.cli.exits import Exit
from trims_shim.errors import ConfigError

__all__ = ["plot"]

_NS_PER_MS = 1_000_000
_NS_PER_S = 1_000_000_000


def plot(arguments: argparse.Namespace) -> Exit:
    """Draw a profile into a file, or print its data."""

    def make() -> Drawing:
        saved = load_saved_stages(arguments.profile)
        return _drawing(saved, _length(saved, arguments))

    return show(make, arguments)


def _length(saved: SavedStages, arguments: argparse.Namespace) -> int | None:
    measured = list(saved.latencies_ns)
    if arguments.length is None:
        return measured[-1]
    if arguments.length not in measured:
        known = ", ".join(map(str, saved.lengths)) or "none"
        raise ConfigError(
            f"{arguments.profile} has no items of {arguments.length}; lengths in it: {known}"
        )
    found: int = arguments.length
    return found


def _drawing(saved: SavedStages, length: int | None) -> Drawing:
    """Latency of each stage, its throughput as a share of its best, and that of the whole."""
    profiles = dict(zip(saved.latencies_ns, saved.profiles(), strict=True))
    profile = profiles[length]
    names = [f"{number} {name}".strip() for number, name in enumerate(saved.stages)]
    stages = list(zip(names, profile.stages, strict=True))
    wholes = [
        _rates("all" if each is None else f"items of {each}", found)
        for each, found in profiles.items()
    ]
    items = "" if length is None else f", items of {length}"
    return Drawing(
        f"{saved.name or 'model'}: {len(stages)} stages{items}",
        [
            Panel("batch size", "latency, ms", [_latencies(*each) for each in stages]),
            Panel(
                "batch size",
                "items per second, of its best",
                [_shares(*each) for each in stages],
                is_share=True,
            ),
            Panel("batch size", "items per second, whole model", wholes),
        ],
    )


def _latencies(name: str, profile: LatencyProfile) -> Line:
    sizes = range(1, profile.max_batch_size + 1)
    return Line(name, list(sizes), [profile.latency_ns(size) / _NS_PER_MS for size in sizes])


def _rates(name: str, profile: LatencyProfile) -> Line:
    sizes = range(1, profile.max_batch_size + 1)
    return Line(name, list(sizes), [size * _NS_PER_S / profile.latency_ns(size) for size in sizes])


def _shares(name: str, profile: LatencyProfile) -> Line:
    rates = _rates(name, profile)
    return Line(name, rates.x, [rate / max(rates.y) for rate in rates.y])
