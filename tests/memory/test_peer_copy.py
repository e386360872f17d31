"""Copies between places in device memory: every byte, nothing beside, nothing runs afterwards."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator

import emulated_cuda as emulation
import pytest

from trims_shim.errors import DriverFailure
from trims_shim.memory import peer_copy
from trims_shim.memory.device import (
    DeviceAllocation,
    DeviceMapping,
    DeviceMemory,
    map_allocations,
)

MIB = 1 << 20
STEP = 4 * MIB
two = pytest.mark.parametrize("emulated_environment", [{"devices": 2}], indirect=True)


@pytest.fixture(autouse=True)
def short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_copy, "STEP_BYTES", STEP)


class Sides:
    """An image on the second device, and memory for it on the first."""

    def __init__(self, machine: emulation.Emulated, size_bytes: int) -> None:
        self.ids = machine.ids
        self.source = DeviceMemory(machine.ids[1], "vmm").create(size_bytes)
        self.target = DeviceMemory(machine.ids[0], "vmm").create(size_bytes)
        self.content = os.urandom(sum(self.source.allocations))
        os.pwrite(self.source.descriptors[0], self.content, 0)

    def addresses(self, stack: list[DeviceMapping]) -> tuple[int, int]:
        found = []
        for memory, is_writable in ((self.source, False), (self.target, True)):
            mapping = map_allocations(
                self.ids[0], memory.descriptors, memory.allocations, is_writable=is_writable
            )
            stack.append(mapping)
            found.append(mapping.address)
        return found[0], found[1]


@pytest.fixture
def sides(emulated_cuda: emulation.Emulated) -> Iterator[Sides]:
    made = Sides(emulated_cuda, 9 * MIB)
    yield made
    for memory in (made.source, made.target):
        memory.close()
    assert emulation.held().streams == 0


def read(memory: DeviceAllocation) -> bytes:
    return os.pread(memory.descriptors[0], sum(memory.allocations), 0)


@two
def test_from_another_device(sides: Sides) -> None:
    mappings: list[DeviceMapping] = []
    source, target = sides.addresses(mappings)
    progress: list[int] = []
    size = len(sides.content)
    peer_copy.copy(source, target, size, device_index=0, on_progress=progress.append)
    assert progress == [STEP, 2 * STEP, size]
    assert read(sides.target) == sides.content
    assert emulation.held().contexts == 1, "none on the other device"
    unmap(mappings)


@two
def test_only_as_much_as_was_asked_for(sides: Sides) -> None:
    mappings: list[DeviceMapping] = []
    source, target = sides.addresses(mappings)
    peer_copy.copy(source, target, STEP + 5, device_index=0, on_progress=lambda done: None)
    assert read(sides.target) == sides.content[: STEP + 5].ljust(len(sides.content), b"\0")
    unmap(mappings)


@two
def test_an_error_of_the_caller_ends_it(sides: Sides) -> None:
    mappings: list[DeviceMapping] = []
    source, target = sides.addresses(mappings)

    def stop(done: int) -> None:
        raise KeyError(done)

    with pytest.raises(KeyError):
        peer_copy.copy(source, target, 2 * STEP, device_index=0, on_progress=stop)
    assert ctypes.string_at(target, STEP) == sides.content[:STEP]
    assert ctypes.string_at(target + STEP, 8) == bytes(8)
    unmap(mappings)


@pytest.mark.parametrize("emulated_environment", [{"devices": 2, "peer": 0}], indirect=True)
def test_devices_that_are_no_peers(sides: Sides) -> None:
    with pytest.raises(DriverFailure, match="cuMemSetAccess"):
        sides.addresses([])
    assert emulation.held().reservations == 0


@pytest.mark.parametrize(
    "emulated_environment", [{"devices": 2, "fail": "cuMemcpyDtoDAsync:2"}], indirect=True
)
def test_a_driver_that_fails(sides: Sides) -> None:
    mappings: list[DeviceMapping] = []
    source, target = sides.addresses(mappings)
    with pytest.raises(DriverFailure, match="cuMemcpyDtoDAsync"):
        peer_copy.copy(source, target, 2 * STEP, device_index=0, on_progress=lambda done: None)
    unmap(mappings)


def unmap(mappings: list[DeviceMapping]) -> None:
    for each in mappings:
        each.unmap()
