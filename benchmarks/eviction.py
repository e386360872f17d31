"""What eviction policies are worth: time spent on loading, in virtual time.

``python -m benchmarks.eviction`` lets clients open models through the daemon's own store, with each
policy in turn on the same requests, and writes ``docs/results/eviction.json`` and ``eviction.png``.
Nothing depends on the machine. A hundred models of 20 MB to 15 GB (log-normal, median 400 MB) load
in 20 ms and 1.5 GB/s, a quarter more or less from model to model and half as much again from load
to load. A client keeps a model for a minute on average. Which models are popular:

``stationary``  by Zipf's law, for three days
``drifting``    the same, but popularities change places, all of them within two days
``shifting``    all change every eight hours
``pools``       four processes open the same model within a minute
``scanned``     every night something opens all models once
``looping``     one model after the other, over and over
"""

from __future__ import annotations

import heapq
import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

from benchmarks.harness import argument_parser, write_json
from benchmarks.rendering import pyplot, save_picture
from trims_shim.config import EVICTIONS
from trims_shim.daemon.eviction import eviction_policy
from trims_shim.daemon.store import Store
from trims_shim.daemon.values import (
    Action,
    GrantLease,
    Ingested,
    Opening,
    RefuseRequest,
    StartIngest,
)
from trims_shim.specs import Identity

__all__ = ["main"]

_KINDS = ("stationary", "drifting", "shifting", "pools", "scanned", "looping")
_EXPONENTS = (0.7, 1.2)
"""Of Zipf's law: the most popular tenth of the models gets 36 and 83 % of the requests."""
_SHARES = (0.1, 0.3, 0.6)
"""Of all models' bytes that fit."""
_MODELS = 100
_HOURS, _OPENS_PER_HOUR = 72, 60
_HOLD_S = 60.0
_FIXED_S, _BYTES_PER_S = 0.02, 1.5e9
_SPREAD_OF_MODELS, _SPREAD_OF_LOADS = 0.25, 0.5
_NS = 1_000_000_000
_REFERENCE = "lru"


@dataclass(frozen=True, slots=True)
class Cell:
    """One trace on one tier."""

    kind: str
    exponent: float
    share: float
    seed: int


@dataclass(slots=True)
class Outcome:
    """What the clients of one cell got. ``waited_s`` is all the time that they spent on loading."""

    waited_s: float = 0.0
    opens: int = 0
    hits: int = 0
    refused: int = 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate all cells."""
    parser = argument_parser("eviction", __doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args(arguments)
    cells = [
        Cell(kind, exponent, share, seed)
        for kind in _KINDS
        for exponent in (_EXPONENTS if kind != "looping" else _EXPONENTS[:1])
        for share in _SHARES
        for seed in range(options.seeds)
    ]
    rows = []
    with ProcessPoolExecutor(options.jobs) as pool:
        for cell, found in zip(cells, pool.map(run, cells), strict=True):
            rows.append(asdict(cell) | {name: asdict(each) for name, each in found.items()})
            ratios = {name: _ratio(found, name) for name in EVICTIONS}
            print(cell, {name: f"{ratio:.2f}" for name, ratio in ratios.items()}, flush=True)
    summary = _summary(rows)
    print(f"\nloading time / {_REFERENCE}'s", *EVICTIONS, sep="\t")
    for kind, ratios in summary.items():
        print(kind, *(f"{ratio:.2f}" for ratio in ratios.values()), sep="\t")
    write_json(options.output / "eviction.json", {"summary": summary, "cells": rows})
    _plot(summary, options.output / "eviction.png")
    return 0


def run(cell: Cell) -> dict[str, Outcome]:
    """The outcome of each policy on the same requests."""
    random = Random(cell.seed)
    sizes = [_size(random) for _ in range(_MODELS)]
    opens = sorted(_opens(cell.kind, cell.exponent, random))
    budget_bytes = int(sum(sizes) * cell.share)
    return {name: _Machine(sizes, budget_bytes, name, cell.seed).run(opens) for name in EVICTIONS}


def _size(random: Random) -> int:
    return int(min(15e9, max(20e6, random.lognormvariate(math.log(400e6), 1.4))))


def _opens(kind: str, exponent: float, random: Random) -> Iterator[tuple[float, int]]:
    """Pairs of a moment in seconds and a model."""
    end_s = _HOURS * 3600.0
    gap_s = 3600.0 / _OPENS_PER_HOUR
    if kind == "looping":
        for number in range(_HOURS * _OPENS_PER_HOUR):
            yield number * gap_s, number % _MODELS
        return
    if kind == "scanned":
        for night in range(3):
            for model in range(_MODELS):
                yield (night * 24 + 3) * 3600 + model * 20, model
    by_rank = list(range(_MODELS))
    random.shuffle(by_rank)
    weights = [1 / rank**exponent for rank in range(1, _MODELS + 1)]
    change_s = {"drifting": 2 * 24 * 3600 / _MODELS, "shifting": 8 * 3600.0}.get(kind, math.inf)
    next_change_s = change_s
    now_s = random.expovariate(1 / gap_s)
    while now_s < end_s:
        while now_s >= next_change_s:
            next_change_s += change_s
            if kind == "shifting":
                random.shuffle(by_rank)
            else:
                one, other = random.sample(range(_MODELS), 2)
                by_rank[one], by_rank[other] = by_rank[other], by_rank[one]
        model = by_rank[random.choices(range(_MODELS), weights)[0]]
        for _ in range(4 if kind == "pools" else 1):
            yield now_s + (random.random() * 60 if kind == "pools" else 0.0), model
        now_s += random.expovariate(1 / gap_s)


class _Machine:
    """A store and the clients around it."""

    def __init__(self, sizes: Sequence[int], budget_bytes: int, policy: str, seed: int) -> None:
        self._sizes = sizes
        self._store = Store(budget_bytes, policy=eviction_policy(policy, budget_bytes))
        self._random = Random(seed + 1000)
        self._load_s = [
            (_FIXED_S + size / _BYTES_PER_S) * self._random.lognormvariate(0, _SPREAD_OF_MODELS)
            for size in sizes
        ]
        self._events: list[tuple[int, int, object]] = []
        self._numbers = itertools.count()
        self._asked: dict[int, int] = {}
        self._outcome = Outcome()

    def run(self, opens: Sequence[tuple[float, int]]) -> Outcome:
        """Serve all requests."""
        for at_s, model in opens:
            self._at(int(at_s * _NS), model)
        while self._events:
            now, number, event = heapq.heappop(self._events)
            if isinstance(event, GrantLease):
                self._store.release(event.opening.session, event.lease, now)
            elif isinstance(event, StartIngest):
                self._execute(now, self._store.ingest_done(event.ingest, self._loaded(event), now))
            else:
                assert isinstance(event, int)
                self._asked[number] = now
                identity = Identity(1, event, self._sizes[event], 1, 1)
                opening = Opening(number, number, 0, identity, str(event))
                self._outcome.opens += 1
                self._execute(now, self._store.open(opening, now))
        return self._outcome

    def _execute(self, now: int, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, StartIngest):
                self._at(now + self._takes(action.opening), action)
            elif isinstance(action, GrantLease):
                self._outcome.waited_s += (now - self._asked[action.opening.request]) / _NS
                self._outcome.hits += action.outcome == "hit"
                self._at(now + int(self._random.expovariate(1 / _HOLD_S) * _NS), action)
            elif isinstance(action, RefuseRequest):
                self._outcome.refused += 1
                self._outcome.waited_s += self._takes(action.opening) / _NS

    def _at(self, moment: int, event: object) -> None:
        heapq.heappush(self._events, (moment, next(self._numbers), event))

    def _takes(self, opening: Opening) -> int:
        noise = Random(opening.request).lognormvariate(0, _SPREAD_OF_LOADS)
        return int(self._load_s[opening.identity.inode] * noise * _NS)

    def _loaded(self, action: StartIngest) -> Ingested:
        opening = action.opening
        digest = f"{opening.identity.inode:064x}"
        return Ingested(digest, opening.identity.size_bytes, True, self._takes(opening))


def _ratio(found: dict[str, Outcome], name: str) -> float:
    return found[name].waited_s / found[_REFERENCE].waited_s


def _summary(rows: Sequence[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Loading time against the reference's, as geometric means for each kind, and the worst."""

    def ratios(name: str, kind: str = "") -> list[float]:
        return [
            row[name]["waited_s"] / row[_REFERENCE]["waited_s"]
            for row in rows
            if kind in ("", row["kind"])
        ]

    found = {
        kind: {name: statistics.geometric_mean(ratios(name, kind)) for name in EVICTIONS}
        for kind in _KINDS
    }
    found["all"] = {name: statistics.geometric_mean(ratios(name)) for name in EVICTIONS}
    found["worst"] = {name: max(ratios(name)) for name in EVICTIONS}
    return found


def _plot(summary: dict[str, dict[str, float]], path: Path) -> None:
    figure, axes = pyplot().subplots(figsize=(9, 3.5), layout="constrained")
    kinds = [*_KINDS, "all"]
    names = [name for name in EVICTIONS if name not in (_REFERENCE, "never")]
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        places = [place + (index - (len(names) - 1) / 2) * width for place in range(len(kinds))]
        axes.bar(places, [summary[kind][name] for kind in kinds], width, label=name)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_ylim(0, 1.35)
    axes.set_xticks(range(len(kinds)), kinds)
    axes.set_ylabel(f"loading time / {_REFERENCE}'s")
    axes.legend(ncols=len(names))
    save_picture(figure, path)


if __name__ == "__main__":
    raise SystemExit(main())
