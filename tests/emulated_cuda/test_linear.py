"""cuMemAlloc, legacy IPC, pinned host memory and what the driver knows of an address."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from typing import Any

import pytest

import emulated_cuda as emulation
from emulated_cuda.calls import (
    MIB,
    api,
    call,
    create,
    failure,
    mapped,
    peek,
    pinned,
    poke,
    unmapped,
)
from emulated_cuda.conftest import Child

OPEN = 1
"""CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS."""

OWNER = """
start(); address = int(call("cuMemAlloc", 3 * MIB)); poke(address + MIB, b"legacy")
handle = call("cuIpcGetMemHandle", address)
"""
IMPORT = """
start()
def opened():
    return int(call("cuIpcOpenMemHandle", handle, 1))
handle = handle_of(bytes.fromhex(hear()[0]))
"""


def attribute(name: str, address: int) -> Any:
    """What the driver says of an address."""
    return call(
        "cuPointerGetAttribute",
        getattr(api.CUpointer_attribute, f"CU_POINTER_ATTRIBUTE_{name}"),
        address,
    )


class TestLinear:
    def test_memory_is_counted_in_whole_pages(self, cuda: emulation.Emulated) -> None:
        address = int(call("cuMemAlloc", 3 * MIB))
        poke(address + 3 * MIB - 1, b"x")
        assert [(each.kind, each.size_bytes) for each in cuda.allocations()] == [
            ("linear", 4 * MIB)
        ]
        call("cuMemFree", address)
        assert cuda.used_bytes(0) == 0

    def test_only_what_was_allocated_is_freed(self, cuda: emulation.Emulated) -> None:
        address = int(call("cuMemAlloc", MIB))
        handle = create()
        shared = mapped(handle)
        assert failure("cuMemFree", address + 256) == "INVALID_VALUE"
        assert failure("cuMemFree", shared) == "INVALID_VALUE"
        assert failure("cuMemUnmap", address, 2 * MIB) == "INVALID_VALUE"
        call("cuMemFree", address)
        assert failure("cuMemFree", address) == "INVALID_VALUE"
        assert failure("cuMemAlloc", 0) == "INVALID_VALUE"
        unmapped(shared)
        call("cuMemRelease", handle)

    def test_addresses_are_known(self, cuda: emulation.Emulated) -> None:
        linear = int(call("cuMemAlloc", MIB))
        handle = create()
        shared = mapped(handle)
        host = pinned(4096)
        assert [attribute("IS_LEGACY_CUDA_IPC_CAPABLE", each) for each in (linear, shared)] == [
            1,
            0,
        ]
        assert int(attribute("DEVICE_ORDINAL", shared)) == 0
        kinds = api.CUmemorytype
        assert attribute("MEMORY_TYPE", shared + 4096) == kinds.CU_MEMORYTYPE_DEVICE
        assert attribute("MEMORY_TYPE", host + 1) == kinds.CU_MEMORYTYPE_HOST
        assert int(attribute("RANGE_START_ADDR", shared + 4096)) == shared
        assert int(attribute("RANGE_SIZE", shared)) == 2 * MIB
        memory_type = api.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
        assert failure("cuPointerGetAttribute", memory_type, 4096) == "INVALID_VALUE"
        call("cuMemFreeHost", host)
        call("cuMemFree", linear)
        unmapped(shared)
        call("cuMemRelease", handle)


class TestLegacyIpc:
    def test_memory_is_shared_while_the_owner_lives(
        self, spawn: Callable[..., Child], machine: emulation.Emulated
    ) -> None:
        owner = spawn(OWNER + "say(handle_bytes(handle).hex()); hear(); say(peek(address).hex())")
        handle = owner.hear()[0]
        reader = spawn(
            IMPORT + "address = opened(); assert address == opened()\n"
            "say(peek(address + MIB, 6).decode()); poke(address, b'w')\n"
            "call('cuIpcCloseMemHandle', address); say(peek(address + MIB, 6).decode())\n"
            "call('cuIpcCloseMemHandle', address)\n"
            "say(failure('cuIpcCloseMemHandle', address))"
        )
        reader.say(handle)
        assert [reader.hear()[0] for _ in range(3)] == ["legacy", "legacy", "INVALID_VALUE"]
        assert reader.wait() == 0
        assert machine.used_bytes() == 4 * MIB
        owner.say()
        assert owner.hear()[0] == b"w".hex()
        assert owner.wait() == 0
        assert machine.used_bytes() == 0

    def test_a_dead_owner_shares_nothing(self, spawn: Callable[..., Child]) -> None:
        owner = spawn(OWNER + "say(handle_bytes(handle).hex()); hear()")
        handle = owner.hear()[0]
        late = spawn(IMPORT + "say(failure('cuIpcOpenMemHandle', handle, 1))")
        holder = spawn(IMPORT + "address = opened(); say(peek(address + MIB, 6).decode()); hear()")
        holder.say(handle)
        assert holder.hear()[0] == "legacy"
        owner.kill()
        late.say(handle)
        assert late.hear()[0] == "INVALID_HANDLE"

    @pytest.mark.parametrize(
        "emulated_environment", [{"devices": 2, "peer": 0}], indirect=True, ids=["no peers"]
    )
    def test_only_on_a_device_that_reaches_it(self, spawn: Callable[..., Child]) -> None:
        owner = spawn(OWNER + "say(handle_bytes(handle).hex()); hear()")
        handle = owner.hear()[0]
        reader = spawn(
            IMPORT + "call('cuCtxSetCurrent', call('cuDevicePrimaryCtxRetain', 1))\n"
            "say(failure('cuIpcOpenMemHandle', handle, 1)); start(0); opened(); say('opened')"
        )
        reader.say(handle)
        assert [reader.hear()[0] for _ in range(2)] == ["PEER_ACCESS_UNSUPPORTED", "opened"]

    def test_not_in_the_same_process(self, cuda: emulation.Emulated) -> None:
        address = call("cuMemAlloc", MIB)
        handle = call("cuIpcGetMemHandle", address)
        assert failure("cuIpcOpenMemHandle", handle, OPEN) == "INVALID_CONTEXT"
        assert failure("cuIpcOpenMemHandle", handle, 0) == "INVALID_VALUE"
        assert failure("cuIpcOpenMemHandle", api.CUipcMemHandle(), OPEN) == "INVALID_VALUE"
        assert failure("cuIpcCloseMemHandle", address) == "INVALID_VALUE"

    def test_not_of_virtual_memory_or_a_part(self, cuda: emulation.Emulated) -> None:
        handle = create()
        shared = mapped(handle)
        linear = int(call("cuMemAlloc", MIB))
        assert failure("cuIpcGetMemHandle", shared) == "INVALID_VALUE"
        assert failure("cuIpcGetMemHandle", linear + 512) == "INVALID_VALUE"
        unmapped(shared)
        call("cuMemRelease", handle)


class TestHostMemory:
    def test_pinned_memory_is_ordinary_memory(self, cuda: emulation.Emulated) -> None:
        one, other = pinned(4096), int(call("cuMemAllocHost", 8192))
        poke(one, b"x")
        assert emulation.held().pinned == 2
        call("cuMemFreeHost", one)
        call("cuMemFreeHost", other)
        assert failure("cuMemFreeHost", one) == "INVALID_VALUE"
        assert failure("cuMemHostAlloc", 4096, 8) == "INVALID_VALUE"

    def test_registered_once(self, cuda: emulation.Emulated) -> None:
        with mmap.mmap(-1, 16384) as memory:
            view = ctypes.c_char.from_buffer(memory)
            address = ctypes.addressof(view)
            call("cuMemHostRegister", address, 8192, 0)
            again = ("cuMemHostRegister", address + 4096, 8192, 0)
            assert failure(*again) == "HOST_MEMORY_ALREADY_REGISTERED"
            assert failure("cuMemFreeHost", address) == "INVALID_VALUE"
            call("cuMemHostUnregister", address)
            assert failure("cuMemHostUnregister", address) == "HOST_MEMORY_NOT_REGISTERED"
            del view

    def test_read_only_memory_wants_the_flag(self, cuda: emulation.Emulated) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        descriptor = os.memfd_create("weights")
        os.truncate(descriptor, 8192)
        arguments = (ctypes.c_size_t(8192), mmap.PROT_READ, mmap.MAP_SHARED, descriptor)
        address = libc.mmap(None, *arguments, ctypes.c_long(0))
        assert failure("cuMemHostRegister", address, 8192, 0) == "INVALID_VALUE"
        assert failure("cuMemHostRegister", address, 1 << 40, 8) == "INVALID_VALUE"
        call("cuMemHostRegister", address, 8192, 8)
        call("cuMemHostUnregister", address)
        libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(8192))
        os.close(descriptor)
        assert failure("cuMemHostRegister", address, 8192, 8) == "INVALID_VALUE"

    def test_peeking_needs_no_call(self, cuda: emulation.Emulated) -> None:
        address = pinned(4096)
        assert peek(address, 4096) == bytes(4096)
        call("cuMemFreeHost", address)
