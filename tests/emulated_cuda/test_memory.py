"""Memory in one process: what the real driver allows, what it refuses, and when memory is free."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
from harness import World

import emulated_cuda as emulation
from emulated_cuda.calls import (
    MIB,
    api,
    call,
    create,
    export,
    failure,
    import_descriptor,
    mapped,
    peek,
    poke,
    properties,
    rights,
    unmapped,
)
from emulated_cuda.conftest import Child

SIZE = 4 * MIB


class TestAllocations:
    def test_granularity(self, cuda: emulation.Emulated) -> None:
        flags = api.CUmemAllocationGranularity_flags
        for flag in (
            flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM,
            flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED,
        ):
            assert call("cuMemGetAllocationGranularity", properties(), flag) == 2 * MIB
        assert emulation.GRANULARITY == 2 * MIB

    @pytest.mark.parametrize("size", [0, 1, MIB, 3 * MIB, 2 * MIB + 4096])
    def test_sizes_are_multiples_of_it(self, cuda: emulation.Emulated, size: int) -> None:
        assert failure("cuMemCreate", size, properties(), 0) == "INVALID_VALUE"

    def test_only_shareable_pinned_device_memory(self, cuda: emulation.Emulated) -> None:
        handles = api.CUmemAllocationHandleType
        wrong = properties()
        wrong.requestedHandleTypes = handles.CU_MEM_HANDLE_TYPE_FABRIC
        assert failure("cuMemCreate", SIZE, wrong, 0) == "INVALID_VALUE"
        wrong = properties()
        wrong.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_HOST
        assert failure("cuMemCreate", SIZE, wrong, 0) == "INVALID_VALUE"
        wrong = properties()
        wrong.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_INVALID
        assert failure("cuMemCreate", SIZE, wrong, 0) == "INVALID_VALUE"
        assert failure("cuMemCreate", SIZE, properties(), 1) == "INVALID_VALUE"

    @pytest.mark.parametrize("emulated_environment", [{"vmm": 0}], indirect=True)
    def test_a_driver_without_shareable_handles(self, cuda: emulation.Emulated) -> None:
        shareable = (
            api.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
        )
        assert call("cuDeviceGetAttribute", shareable, 0) == 0
        assert failure("cuMemCreate", SIZE, properties(), 0) == "NOT_SUPPORTED"

    @pytest.mark.parametrize("emulated_environment", [{"memory_bytes": 3 * SIZE}], indirect=True)
    def test_a_device_is_full_when_it_is_full(self, cuda: emulation.Emulated) -> None:
        handles = [create(SIZE) for _ in range(3)]
        assert failure("cuMemCreate", 2 * MIB, properties(), 0) == "OUT_OF_MEMORY"
        assert failure("cuMemAlloc", 1) == "OUT_OF_MEMORY"
        assert call("cuMemGetInfo") == [0, 3 * SIZE]
        call("cuMemRelease", handles.pop())
        assert call("cuMemGetInfo") == [SIZE, 3 * SIZE]
        handles.append(create(SIZE))
        for handle in handles:
            call("cuMemRelease", handle)

    @pytest.mark.parametrize(
        "emulated_environment", [{"devices": 2, "memory_bytes": (SIZE, 8 * SIZE)}], indirect=True
    )
    def test_each_device_has_its_own_memory(self, cuda: emulation.Emulated) -> None:
        handles = [create(SIZE, 0), create(2 * SIZE, 1)]
        assert failure("cuMemCreate", SIZE, properties(0), 0) == "OUT_OF_MEMORY"
        assert [cuda.used_bytes(0), cuda.used_bytes(1), cuda.used_bytes()] == [
            SIZE,
            2 * SIZE,
            3 * SIZE,
        ]
        assert cuda.used_bytes(cuda.ids[1]) == 2 * SIZE
        for handle in handles:
            call("cuMemRelease", handle)

    def test_a_handle_is_released_once(self, cuda: emulation.Emulated) -> None:
        handle = create()
        call("cuMemRelease", handle)
        assert failure("cuMemRelease", handle) == "INVALID_VALUE"
        assert failure("cuMemRelease", 0) == "INVALID_VALUE"
        assert create() != handle
        call("cuMemRelease", handle + 1)

    def test_new_memory_is_zero(self, cuda: emulation.Emulated) -> None:
        handle = create()
        address = mapped(handle)
        assert peek(address, 4096) == bytes(4096)
        unmapped(address)
        call("cuMemRelease", handle)


class TestMappings:
    def test_memory_lives_as_long_as_a_mapping(self, cuda: emulation.Emulated) -> None:
        handle = create()
        address = mapped(handle)
        call("cuMemRelease", handle)
        poke(address, b"alive")
        assert peek(address, 5) == b"alive"
        assert failure("cuMemMap", address, 2 * MIB, 0, handle, 0) == "INVALID_VALUE"
        assert cuda.used_bytes(0) == 2 * MIB
        unmapped(address)
        assert cuda.used_bytes(0) == 0

    def test_two_mappings_show_the_same_memory(self, cuda: emulation.Emulated) -> None:
        handle = create()
        one, other = mapped(handle), mapped(handle, flags="READ")
        poke(one + 100, b"shared")
        assert peek(other + 100, 6) == b"shared"
        assert cuda.used_bytes(0) == 2 * MIB
        unmapped(one)
        assert peek(other + 100, 6) == b"shared"
        unmapped(other)
        call("cuMemRelease", handle)

    def test_a_handle_comes_back_from_an_address(self, cuda: emulation.Emulated) -> None:
        handle = create()
        address = mapped(handle)
        call("cuMemRelease", handle)
        assert int(call("cuMemRetainAllocationHandle", address + 4096)) == handle
        descriptor = export(handle)
        os.close(descriptor)
        unmapped(address)
        assert cuda.used_bytes(0) == 2 * MIB
        call("cuMemRelease", handle)
        assert cuda.used_bytes(0) == 0

    def test_reservations_are_aligned_and_freed_whole(self, cuda: emulation.Emulated) -> None:
        address = int(call("cuMemAddressReserve", SIZE, 64 * MIB, 0, 0))
        assert address % (64 * MIB) == 0
        assert failure("cuMemAddressFree", address, 2 * MIB) == "INVALID_VALUE"
        assert failure("cuMemAddressFree", address + 2 * MIB, 2 * MIB) == "INVALID_VALUE"
        call("cuMemAddressFree", address, SIZE)
        assert failure("cuMemAddressFree", address, SIZE) == "INVALID_VALUE"
        assert failure("cuMemAddressReserve", SIZE, 3 * MIB, 0, 0) == "INVALID_VALUE"
        assert failure("cuMemAddressReserve", 0, 0, 0, 0) == "INVALID_VALUE"

    def test_a_reservation_with_mappings_is_not_freed(self, cuda: emulation.Emulated) -> None:
        handle = create()
        address = mapped(handle)
        assert failure("cuMemAddressFree", address, 2 * MIB) == "INVALID_VALUE"
        unmapped(address)
        call("cuMemRelease", handle)

    def test_mappings_lie_in_free_reserved_space(self, cuda: emulation.Emulated) -> None:
        handle = create(SIZE)
        address = int(call("cuMemAddressReserve", SIZE, 0, 0, 0))
        assert failure("cuMemMap", address + SIZE, SIZE, 0, handle, 0) == "INVALID_VALUE"
        assert failure("cuMemMap", address, SIZE + 2 * MIB, 0, handle, 0) == "INVALID_VALUE"
        assert failure("cuMemMap", address + 2 * MIB, SIZE, 0, handle, 0) == "INVALID_VALUE"
        assert failure("cuMemMap", address, MIB, 0, handle, 0) == "INVALID_VALUE"
        assert failure("cuMemMap", address, SIZE - 2 * MIB, 0, handle, 0) == "INVALID_VALUE"
        assert failure("cuMemMap", address, SIZE, 2 * MIB, handle, 0) == "INVALID_VALUE"
        call("cuMemMap", address, SIZE, 0, handle, 0)
        assert failure("cuMemMap", address, SIZE, 0, handle, 0) == "INVALID_VALUE"
        unmapped(address, SIZE)
        call("cuMemRelease", handle)

    def test_a_mapping_is_unmapped_whole_and_alone(self, cuda: emulation.Emulated) -> None:
        handles = [create(SIZE), create(SIZE)]
        address = int(call("cuMemAddressReserve", 2 * SIZE, 0, 0, 0))
        for number, handle in enumerate(handles):
            call("cuMemMap", address + number * SIZE, SIZE, 0, handle, 0)
            call("cuMemRelease", handle)
        for wrong in (
            (address, 2 * MIB),
            (address + 2 * MIB, 2 * MIB),
            (address, 2 * SIZE),
            (address + 2 * SIZE, SIZE),
        ):
            assert failure("cuMemUnmap", *wrong) == "INVALID_VALUE"
        call("cuMemUnmap", address, SIZE)
        assert failure("cuMemUnmap", address, SIZE) == "INVALID_VALUE"
        call("cuMemUnmap", address + SIZE, SIZE)
        call("cuMemAddressFree", address, 2 * SIZE)


class TestRights:
    def test_they_are_set_for_whole_mappings(self, cuda: emulation.Emulated) -> None:
        handles = [create(SIZE), create(SIZE)]
        address = int(call("cuMemAddressReserve", 3 * SIZE, 0, 0, 0))
        for number, handle in enumerate(handles):
            call("cuMemMap", address + number * SIZE, SIZE, 0, handle, 0)
            call("cuMemRelease", handle)
        readable = [rights("READ")]
        for start, size in (
            (address, 2 * MIB),
            (address + 2 * MIB, 2 * MIB),
            (address, SIZE + 2 * MIB),
            (address, 3 * SIZE),
            (address + 2 * SIZE, SIZE),
        ):
            assert failure("cuMemSetAccess", start, size, readable, 1) == "INVALID_VALUE"
        call("cuMemSetAccess", address, 2 * SIZE, readable, 1)
        assert peek(address + 2 * SIZE - 1) == b"\0"
        for number in range(2):
            call("cuMemUnmap", address + number * SIZE, SIZE)
        call("cuMemAddressFree", address, 3 * SIZE)

    def test_they_can_be_asked_for(self, cuda: emulation.Emulated) -> None:
        handle = create()
        address = int(call("cuMemAddressReserve", 2 * MIB, 0, 0, 0))
        call("cuMemMap", address, 2 * MIB, 0, handle, 0)
        owner = properties()  # cuda-bindings before 13.5 does not keep it for its location
        location = owner.location
        assert call("cuMemGetAccess", location, address) == 0
        for flags, number in (("READ", 1), ("READWRITE", 3), ("NONE", 0)):
            call("cuMemSetAccess", address, 2 * MIB, [rights(flags)], 1)
            assert call("cuMemGetAccess", location, address + 4096) == number
        unmapped(address)
        assert failure("cuMemGetAccess", location, address) == "INVALID_VALUE"
        call("cuMemRelease", handle)

    @pytest.mark.parametrize(
        ("emulated_environment", "is_allowed"),
        [({"devices": 2}, True), ({"devices": 2, "peer": 0}, False)],
        indirect=["emulated_environment"],
    )
    def test_another_device_needs_peer_access(
        self, cuda: emulation.Emulated, is_allowed: bool
    ) -> None:
        handle = create()
        address = mapped(handle)
        peer = (address, 2 * MIB, [rights("READ", 1)], 1)
        if is_allowed:
            call("cuMemSetAccess", *peer)
        else:
            assert failure("cuMemSetAccess", *peer) == "INVALID_DEVICE"
        assert failure("cuMemSetAccess", address, 2 * MIB, [rights("READ", 2)], 1) == (
            "INVALID_DEVICE"
        )
        unmapped(address)
        call("cuMemRelease", handle)

    @pytest.mark.parametrize(
        ("flags", "is_allowed"), [("NONE", False), ("READ", True)], ids=["no right", "read"]
    )
    @pytest.mark.parametrize("emulated_environment", [{"devices": 2}], indirect=True)
    def test_a_copy_needs_the_right_of_the_device_that_does_it(
        self, cuda: emulation.Emulated, flags: str, is_allowed: bool
    ) -> None:
        """That the memory's own device may read does not help another one."""
        other = create(ordinal=1)
        source = mapped(other, flags="NONE")
        call("cuMemSetAccess", source, 2 * MIB, [rights("READWRITE", 1)], 1)
        call("cuMemSetAccess", source, 2 * MIB, [rights(flags, 0)], 1)
        poke(source, b"peer")
        ours = create()
        target = mapped(ours)
        call("cuMemcpyDtoD", target, source, 4)
        if is_allowed:
            call("cuCtxSynchronize")
            assert peek(target, 4) == b"peer"
        else:
            assert failure("cuCtxSynchronize") == "ILLEGAL_ADDRESS"
        unmapped(source)
        unmapped(target)
        call("cuMemRelease", other)
        call("cuMemRelease", ours)

    @pytest.mark.parametrize(
        ("flags", "touch", "status"),
        [
            ("READ", "peek(address)", 0),
            ("READWRITE", "poke(address, b'x')", 0),
            ("READ", "poke(address, b'x')", -11),
            (None, "peek(address)", -11),
            (None, "poke(address, b'x')", -11),
            ("NONE", "peek(address)", -11),
        ],
    )
    def test_a_touch_without_the_right_is_fatal(
        self, spawn: Callable[..., Child], flags: str | None, touch: str, status: int
    ) -> None:
        child = spawn(
            "start(); handle = create()\n"
            "address = call('cuMemAddressReserve', 2 * MIB, 0, 0, 0)\n"
            "call('cuMemMap', address, 2 * MIB, 0, handle, 0); address = int(address)\n"
            f"flags = {flags!r}\n"
            "flags and call('cuMemSetAccess', address, 2 * MIB, [rights(flags)], 1)\n"
            f"{touch}\n"
        )
        assert child.wait() == status, child.errors

    def test_unmapped_space_is_touched_in_vain(self, spawn: Callable[..., Child]) -> None:
        child = spawn(
            "start(); address = mapped(create()); poke(address, b'x')\n"
            "call('cuMemUnmap', address, 2 * MIB); say('unmapped'); peek(address)\n"
        )
        assert child.hear()[0] == "unmapped"
        assert child.wait() == -11


class TestDescriptors:
    def test_a_descriptor_holds_memory(self, cuda: emulation.Emulated) -> None:
        handle = create(SIZE)
        descriptor = export(handle)
        call("cuMemRelease", handle)
        assert cuda.used_bytes(0) == SIZE
        handle = import_descriptor(descriptor)
        os.close(descriptor)
        address = mapped(handle, SIZE)
        unmapped(address, SIZE)
        assert cuda.used_bytes(0) == SIZE
        call("cuMemRelease", handle)
        assert cuda.used_bytes(0) == 0

    def test_each_import_is_released(self, cuda: emulation.Emulated) -> None:
        handle = create()
        descriptor = export(handle)
        imported = [import_descriptor(descriptor) for _ in range(2)]
        os.close(descriptor)
        call("cuMemRelease", handle)
        for each in imported:
            assert cuda.used_bytes(0) == 2 * MIB
            call("cuMemRelease", each)
        assert cuda.used_bytes(0) == 0

    def test_other_descriptors_are_refused(self, cuda: emulation.Emulated) -> None:
        kind = api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        memory = os.memfd_create("not-cuda")
        os.truncate(memory, 4 * MIB)
        reading, writing = os.pipe()
        for descriptor in (memory, reading, 9999):
            assert failure("cuMemImportFromShareableHandle", descriptor, kind) == "INVALID_VALUE"
        for descriptor in (memory, reading, writing):
            os.close(descriptor)

    def test_no_descriptor_is_left_open(self, cuda: emulation.Emulated) -> None:
        def round_trip() -> None:
            handle = create()
            descriptor = export(handle)
            imported = import_descriptor(descriptor)
            address = mapped(imported)
            os.close(descriptor)
            call("cuMemRelease", handle)
            call("cuMemRelease", imported)
            unmapped(address)

        round_trip()
        before = World.descriptors(os.getpid()).items()
        round_trip()
        assert World.descriptors(os.getpid()).items() <= before

    def test_nothing_is_inherited_by_exec(self, cuda: emulation.Emulated) -> None:
        handle = create()
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        try:
            call("cuMemRelease", handle)
            assert cuda.used_bytes(0) == 0
        finally:
            child.communicate(b"\n", timeout=120)
