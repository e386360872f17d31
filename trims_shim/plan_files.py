"""The problems of plans: TOML or JSON files, read and checked.

Content is not trusted: whatever is wrong with it is a FormatError that names the entry.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.profiles.profile_json import LARGEST_SIZE
from trims_shim.batching.profiles.profile_store import load_profile
from trims_shim.config import load_toml
from trims_shim.errors import FormatError
from trims_shim.naming import naming
from trims_shim.planner import HostedModel, Option, Problem, Stream
from trims_shim.printable import printable
from trims_shim.suggestions import did_you_mean

__all__ = ["Cluster", "Herd", "read_cluster", "read_herd"]

_NS_PER_MS = 1_000_000
_DEFAULT_MAX_BATCH_SIZE = 32
_MOST_DEVICES = 10_000
_LINE = frozenset({"alpha", "beta", "max_batch_size"})
_LIMIT = 1e15
"""Numbers beyond it are no milliseconds, gigabytes or rates, and solvers do not bear them."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """A problem of ``trims plan proteus``, and the objectives of its families."""

    problem: Problem
    slo_ms: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Herd:
    """A problem of ``trims plan herd``."""

    streams: Mapping[str, Stream]
    models: Mapping[str, HostedModel]
    devices: int
    memory_bytes: int
    groups: int
    largest: int | None


def read_cluster(path: str) -> Cluster:
    """Raises OSError and FormatError, also of a profile that it names."""
    whole = _Table(path, "", _parsed(path))
    whole.check("devices", "families", "slo_ms")
    kinds = whole.table("devices")
    devices = {kind: kinds.count(kind) for kind, _ in kinds.items()}
    default_ms = whole.number("slo_ms") if "slo_ms" in whole.content else None
    options: list[Option] = []
    demand_qps: dict[str, float] = {}
    slo_ms: dict[str, float] = {}
    for family, entry in whole.table("families").tables():
        entry.check("demand_qps", "slo_ms", "variants")
        demand_qps[family] = entry.number("demand_qps")
        slo_ms[family] = entry.number("slo_ms", default=default_ms)
        for variant, inner in entry.table("variants").tables():
            inner.check("accuracy", "latency_ms")
            accuracy = inner.number("accuracy")
            for device, profile in _profiles(inner.table("latency_ms"), os.path.dirname(path)):
                option = Option(family, variant, device, accuracy, profile)
                fitting = option.within(slo_ms[family])
                if fitting is not None:
                    options.append(fitting)
    try:
        return Cluster(Problem(devices, options, demand_qps), slo_ms)
    except ValueError as error:
        raise FormatError(f"{path}: {error}") from None


def read_herd(path: str) -> Herd:
    """Raises OSError and FormatError."""
    whole = _Table(path, "", _parsed(path))
    whole.check("devices", "groups", "largest", "memory_gb", "models", "streams")
    models = {}
    for name, entry in whole.table("models").tables():
        entry.check("affinity", "memory_gb", "throughput_qps")
        models[name] = HostedModel(
            throughput_qps=entry.number("throughput_qps"),
            memory_bytes=_bytes(entry),
            affinity=entry.text("affinity", default=""),
        )
    streams = {}
    for name, entry in whole.table("streams").tables():
        entry.check("model", "rate_qps")
        streams[name] = Stream(entry.text("model"), entry.number("rate_qps"))
        if streams[name].model not in models:
            raise FormatError(
                f"{path}: streams.{name}.model is {streams[name].model!r}; there is no such model"
            )
    return Herd(
        streams,
        models,
        devices=whole.count("devices"),
        memory_bytes=_bytes(whole),
        groups=whole.count("groups"),
        largest=whole.count("largest") if "largest" in whole.content else None,
    )


def _bytes(entry: _Table) -> int:
    return round(entry.number("memory_gb") * 1e9)


def _profiles(entry: _Table, directory: str) -> Iterator[tuple[str, LatencyProfile]]:
    """Yield the kinds of devices and profiles of a ``latency_ms``."""
    for device, value in entry.items():
        try:
            if value == "":
                raise ValueError("this names no file of a profile")
            if isinstance(value, str):
                yield device, load_profile(os.path.join(directory, value))
                continue
            inner = _Table(entry.path, entry.name(device), value)
            is_line = not _LINE.isdisjoint(inner.content)
            yield device, _line(inner) if is_line else _measured(inner)
        except ValueError as error:
            raise FormatError(f"{entry.path}: {entry.name(device)}: {error}") from None
        except OSError as error:
            what = f"{entry.name(device)}: {error.filename}: {error.strerror}"
            raise FormatError(f"{entry.path}: {what}") from error


def _line(entry: _Table) -> LatencyProfile:
    entry.check(*_LINE)
    largest = _DEFAULT_MAX_BATCH_SIZE
    if "max_batch_size" in entry.content:
        largest = entry.count("max_batch_size", most=LARGEST_SIZE)
    if not largest:
        raise ValueError("max_batch_size is 0; it has to be 1 or more")
    return LatencyProfile.linear(
        entry.number("alpha"), entry.number("beta", default=0.0), max_batch_size=largest
    )


def _measured(entry: _Table) -> LatencyProfile:
    latencies_ns: dict[int, float] = {}
    for size, latency_ms in entry.numbers():
        if not size.isascii() or not size.isdigit() or not 1 <= int(size) <= LARGEST_SIZE:
            raise ValueError(f"{size!r} is no batch size")
        latencies_ns[int(size)] = latency_ms * _NS_PER_MS
    return LatencyProfile.measured(latencies_ns, pads=False)


def _parsed(path: str) -> Any:
    kind, load = ("JSON", _load_json) if path.endswith(".json") else ("TOML", load_toml)
    with naming(path), open(path, "rb") as file:
        try:
            return load(file)
        except (ValueError, RecursionError) as error:
            raise FormatError(f"{path} is not {kind}: {error}") from None


def _load_json(file: BinaryIO) -> Any:
    return json.load(file, object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Raises ValueError for a name that is there twice, as TOML does."""
    unique: dict[str, Any] = {}
    for name, value in pairs:
        if name in unique:
            raise ValueError(f"{printable(name)} is there twice")
        unique[name] = value
    return unique


class _Table:
    """A table of a file, which names its entries in errors."""

    def __init__(self, path: str, where: str, content: Any) -> None:
        self.path = path
        self.where = where
        """Its name in the file; empty for the whole."""
        if not isinstance(content, dict):
            raise FormatError(f"{path}: {where or 'the whole'} is not a table")
        self.content: dict[str, Any] = content

    def check(self, *known: str) -> None:
        """Raise FormatError for other entries; first, as one that is missing may be misspelt."""
        for key in self.content:
            if key not in known:
                raise FormatError(
                    f"{self.path}: {self.name(key)} is not known" + did_you_mean(key, known)
                )

    def name(self, key: str) -> str:
        key = printable(key)  # messages have one line
        return f"{self.where}.{key}" if self.where else key

    def items(self) -> Iterator[tuple[str, Any]]:
        return iter(self.content.items())

    def table(self, key: str) -> _Table:
        return _Table(self.path, self.name(key), self._value(key))

    def tables(self) -> Iterator[tuple[str, _Table]]:
        for key, value in self.items():
            yield key, _Table(self.path, self.name(key), value)

    def numbers(self) -> Iterator[tuple[str, float]]:
        for key, _ in self.items():
            yield key, self.number(key)

    def count(self, key: str, *, most: int = _MOST_DEVICES) -> int:
        """A whole number from 0 to ``most``; it has to be there."""
        value = self._value(key)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
            raise FormatError(
                f"{self.path}: {self.name(key)} is {_shown(value)}; it has to be a whole number "
                f"from 0 to {most}"
            )
        return value

    def number(self, key: str, *, default: float | None = None) -> float:
        """A number from 0 on; without a default it has to be there."""
        if default is not None and key not in self.content:
            return default
        value = self._value(key)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= value < _LIMIT:
            raise FormatError(
                f"{self.path}: {self.name(key)} is {_shown(value)}; it has to be a number "
                f"from 0 on, below {_LIMIT:g}"
            )
        return float(value)

    def text(self, key: str, *, default: str | None = None) -> str:
        """A text; without a default it has to be there."""
        if default is not None and key not in self.content:
            return default
        value = self._value(key)
        if not isinstance(value, str):
            raise FormatError(
                f"{self.path}: {self.name(key)} is {_shown(value)}; it has to be a text"
            )
        return value

    def _value(self, key: str) -> Any:
        if key not in self.content:
            raise FormatError(f"{self.path}: {self.name(key)} is missing")
        return self.content[key]


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # of a whole number with thousands of digits
        return "a number too long to show"
    return text if len(text) <= 40 else f"{text[:40]}..."
