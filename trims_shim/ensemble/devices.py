"""The names of devices, and what this machine has."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from functools import cache

from trims_shim.children import NoAnswer, ask_child
from trims_shim.ensemble.allocation import Device
from trims_shim.errors import EnsembleError
from trims_shim.memory.limits import available_bytes

__all__ = ["cores_of", "find_devices"]

_PROBE = """\
from trims_shim.errors import DriverFailure
from trims_shim.memory import nvml
from trims_shim.memory.driver import driver
try:
    found = driver().devices()
except DriverFailure:
    found = ()
print(json.dumps([[each.total_bytes, nvml.free_bytes(each.id)] for each in found]))
"""


def find_devices(names: Collection[str | Device] | None = None) -> list[Device]:
    """The devices of these names: ``cpu``, ``cpu:CORES`` (such as ``cpu:0-3,8``), ``cuda:INDEX``.

    Without names, the GPUs that this process may use, and the processor, which is kept in reserve
    beside GPUs. Memory is what is free now. Raises ValueError for no or another name, or a core or
    GPU that is not there, TypeError for what is no list of names and :class:`Device`, EnsembleError
    if it cannot be known which GPUs there are.
    """
    if isinstance(names, str) or not isinstance(names, Collection | None):
        raise TypeError(f"devices is {names!r}; it has to be a list of names, such as ['cpu:0-3']")
    if names is not None and not len(names):  # numpy's arrays have no truth
        raise ValueError("devices is empty; name one, or give None for those of this machine")
    memory_bytes = available_bytes()
    gpus = cache(_gpus)  # asked once, if at all
    if names is None:
        return [*gpus(), Device("cpu", memory_bytes, is_reserve=bool(gpus()))]
    return [_named(each, memory_bytes, gpus) for each in names]


def _named(name: str | Device, memory_bytes: int, gpus: Callable[[], list[Device]]) -> Device:
    if isinstance(name, Device):
        return name
    if not isinstance(name, str):
        raise TypeError(f"a device is {name!r}; give its name, such as 'cpu:0-3' or 'cuda:1'")
    kind, _, index = name.partition(":")
    if kind == "cpu":
        cores_of(name)
        return Device(name, memory_bytes)
    if kind != "cuda" or not (index or "0").isdecimal():
        raise ValueError(f"{name!r} is no device; there are cpu, cpu:0-3 (cores) and cuda:0")
    if (number := int(index or "0")) >= len(gpus()):
        raise ValueError(f"there is no GPU {name!r}: this process may use {len(gpus())}")
    return gpus()[number]


def cores_of(name: str) -> set[int]:
    """The cores of ``cpu:0-3,8``; an empty set for all of them, or another kind of device.

    Raises ValueError for cores that are not there, or that this process may not use.
    """
    kind, _, text = name.partition(":")
    if kind != "cpu" or not text:
        return set()
    usable = os.sched_getaffinity(0)
    try:
        found = {core for part in text.split(",") for core in _span(part)}
    except ValueError:
        raise ValueError(f"{name!r} names no cores; write cpu:0-3,8") from None
    if not found <= usable:
        missing = ", ".join(map(str, sorted(found - usable)))
        raise ValueError(f"{name!r}: this process may not use core {missing}")
    return found


def _span(text: str) -> range:
    first, dash, last = text.partition("-")
    start, stop = int(first), int(last if dash else first) + 1
    if not 0 < stop - start <= 1 << 16:
        raise ValueError(text)
    return range(start, stop)


def _gpus() -> list[Device]:
    """In CUDA's order. Children forked after a process has asked the driver cannot use CUDA."""
    try:
        found = ask_child(_PROBE)
    except NoAnswer as error:
        raise EnsembleError(f"no process says which GPUs there are: {error}; name none") from error
    return [
        Device(f"cuda:{index}", total_bytes if free_bytes is None else free_bytes)
        for index, (total_bytes, free_bytes) in enumerate(found)
    ]
