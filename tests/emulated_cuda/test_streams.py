"""Streams, events and copies: in flight until someone waits, and in order where promised."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

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
    properties,
    rights,
    start,
    unmapped,
)
from emulated_cuda.conftest import Child

NON_BLOCKING = 1
DELAY_MS = 100
slow = pytest.mark.parametrize(
    "emulated_environment", [{"copy_delay_ms": DELAY_MS, "devices": 2}], indirect=True
)


@pytest.fixture
def device(cuda: emulation.Emulated) -> int:
    """The address of 4 MiB of device memory, which go with the context."""
    return int(call("cuMemAlloc", 4 * MIB))


@pytest.fixture
def host(cuda: emulation.Emulated) -> Iterator[int]:
    """The address of 64 KiB of pinned memory."""
    address = pinned(65536)
    yield address
    call("cuMemFreeHost", address)


class TestAsynchrony:
    def test_a_copy_from_pinned_memory_is_in_flight(
        self, cuda: emulation.Emulated, device: int, host: int
    ) -> None:
        stream = call("cuStreamCreate", NON_BLOCKING)
        poke(host, b"first")
        with cuda.copies_held():
            call("cuMemcpyHtoDAsync", device, host, 5, stream)
            assert failure("cuStreamQuery", stream) == "NOT_READY"
            assert peek(device, 5) == bytes(5)
            # Too early: this is what a missing synchronisation does.
            poke(host, b"later")
        call("cuStreamSynchronize", stream)
        assert peek(device, 5) == b"later"
        call("cuStreamQuery", stream)
        call("cuStreamDestroy", stream)

    def test_a_copy_from_pageable_memory_has_taken_its_bytes(
        self, cuda: emulation.Emulated, device: int
    ) -> None:
        stream = call("cuStreamCreate", NON_BLOCKING)
        source = bytearray(b"first")
        with cuda.copies_held():
            call("cuMemcpyHtoDAsync", device, bytes(source), 5, stream)
            assert peek(device, 5) == bytes(5)
        call("cuStreamSynchronize", stream)
        assert peek(device, 5) == b"first"
        call("cuStreamDestroy", stream)

    @slow
    def test_a_copy_to_pageable_memory_is_complete(
        self, cuda: emulation.Emulated, device: int, host: int
    ) -> None:
        poke(device, b"weights")
        stream = call("cuStreamCreate", NON_BLOCKING)
        target = bytearray(7)
        call("cuMemcpyDtoHAsync", target, device, 7, stream)
        assert target == b"weights"
        with cuda.copies_held():
            call("cuMemcpyDtoHAsync", host, device, 7, stream)
            assert peek(host, 7) == bytes(7)
        call("cuStreamSynchronize", stream)
        assert peek(host, 7) == b"weights"
        call("cuStreamDestroy", stream)

    def test_copies_in_all_directions(self, device: int, host: int) -> None:
        call("cuMemcpyHtoD", device, b"abcd", 4)
        call("cuMemcpyDtoD", device + MIB, device, 4)
        call("cuMemsetD8", device + MIB + 1, ord("X"), 2)
        call("cuMemcpyDtoH", host, device + MIB, 4)
        assert peek(host, 4) == b"aXXd"

    @slow
    def test_synchronising_waits_for_all_streams(self, device: int, host: int) -> None:
        streams = [call("cuStreamCreate", NON_BLOCKING) for _ in range(3)]
        poke(host, b"abc")
        for number, stream in enumerate(streams):
            call("cuMemcpyHtoDAsync", device + number, host + number, 1, stream)
        call("cuCtxSynchronize")
        assert peek(device, 3) == b"abc"
        for stream in streams:
            call("cuStreamDestroy", stream)

    @slow
    def test_a_destroyed_stream_finishes(self, device: int, host: int) -> None:
        stream = call("cuStreamCreate", NON_BLOCKING)
        poke(host, b"x")
        call("cuMemcpyHtoDAsync", device, host, 1, stream)
        call("cuStreamDestroy", stream)
        assert failure("cuStreamDestroy", stream) == "INVALID_HANDLE"
        assert failure("cuStreamSynchronize", stream) == "INVALID_HANDLE"
        assert peek(device) == b"\0"
        call("cuCtxSynchronize")
        assert peek(device) == b"x"

    @slow
    def test_freeing_waits(self, device: int, host: int) -> None:
        stream = call("cuStreamCreate", NON_BLOCKING)
        before = time.monotonic()
        call("cuMemcpyHtoDAsync", device, host, 1, stream)
        call("cuMemFree", device)
        assert time.monotonic() - before >= DELAY_MS / 1000
        call("cuCtxSynchronize")
        call("cuStreamDestroy", stream)


class TestOrder:
    @slow
    def test_the_default_stream_waits_for_blocking_ones(self, device: int, host: int) -> None:
        stream = call("cuStreamCreate", 0)
        poke(host, b"xa")
        # Two copies: alone, the default stream would be the first to come to its one.
        call("cuMemcpyHtoDAsync", device, host, 1, stream)
        call("cuMemcpyHtoDAsync", device, host + 1, 1, stream)
        call("cuMemcpyDtoD", device + 1, device, 1)
        call("cuStreamSynchronize", 0)
        assert peek(device, 2) == b"aa"
        call("cuStreamDestroy", stream)

    @slow
    def test_blocking_streams_wait_for_the_default_one(self, device: int, host: int) -> None:
        stream = call("cuStreamCreate", 0)
        poke(device, b"xa")
        call("cuMemcpyDtoD", device + 2, device, 1)
        call("cuMemcpyDtoD", device + 2, device + 1, 1)
        call("cuMemcpyDtoHAsync", host, device + 2, 1, stream)
        call("cuStreamSynchronize", stream)
        assert peek(host) == b"a"
        call("cuStreamDestroy", stream)

    @slow
    def test_the_default_stream_does_not_wait_for_others(self, device: int, host: int) -> None:
        stream = call("cuStreamCreate", NON_BLOCKING)
        for _ in range(3):
            call("cuMemcpyHtoDAsync", device, host, 1, stream)
        call("cuMemcpyHtoD", device + 1, b"b", 1)
        assert failure("cuStreamQuery", stream) == "NOT_READY"
        call("cuStreamSynchronize", stream)
        call("cuStreamDestroy", stream)

    @slow
    def test_an_event_orders_two_streams(self, device: int, host: int) -> None:
        one, other = (call("cuStreamCreate", NON_BLOCKING) for _ in range(2))
        event = call("cuEventCreate", 0)
        call("cuEventQuery", event)
        poke(host, b"xe")
        call("cuMemcpyHtoDAsync", device, host, 1, one)
        call("cuMemcpyHtoDAsync", device, host + 1, 1, one)
        call("cuEventRecord", event, one)
        assert failure("cuEventQuery", event) == "NOT_READY"
        call("cuStreamWaitEvent", other, event, 0)
        call("cuMemcpyDtoDAsync", device + 1, device, 1, other)
        call("cuStreamSynchronize", other)
        assert peek(device, 2) == b"ee"
        call("cuEventSynchronize", event)
        call("cuEventDestroy", event)
        assert failure("cuEventDestroy", event) == "INVALID_HANDLE"
        call("cuStreamDestroy", one)
        call("cuStreamDestroy", other)

    @slow
    def test_a_ring_of_buffers(self, device: int, host: int) -> None:
        """The pattern of an upload: a buffer is filled again once its event has come."""
        stream = call("cuStreamCreate", NON_BLOCKING)
        events = [call("cuEventCreate", 2) for _ in range(2)]
        for number in range(6):
            call("cuEventSynchronize", events[number % 2])
            poke(host + number % 2, bytes([65 + number]))
            call("cuMemcpyHtoDAsync", device + number, host + number % 2, 1, stream)
            call("cuEventRecord", events[number % 2], stream)
        call("cuStreamSynchronize", stream)
        assert peek(device, 6) == b"ABCDEF"
        for event in events:
            call("cuEventDestroy", event)
        call("cuStreamDestroy", stream)

    @slow
    def test_between_devices(self, device: int, host: int) -> None:
        first = call("cuCtxGetCurrent")
        second = start(1)
        other = int(call("cuMemAlloc", MIB))
        call("cuMemcpyHtoD", other, b"peer", 4)
        stream = call("cuStreamCreate", NON_BLOCKING)
        call("cuMemcpyPeerAsync", device, first, other, second, 4, stream)
        assert peek(device, 4) == bytes(4)
        call("cuStreamSynchronize", stream)
        assert peek(device, 4) == b"peer"
        call("cuCtxSetCurrent", first)
        assert failure("cuMemcpyDtoHAsync", host, device, 4, stream) == "INVALID_HANDLE"
        call("cuCtxSetCurrent", second)
        call("cuStreamDestroy", stream)

    @pytest.mark.parametrize("emulated_environment", [{"devices": 2, "peer": 2}], indirect=True)
    def test_a_link_that_loses_what_it_copies(self, device: int) -> None:
        """As where an IOMMU is in the way: no error, and other bytes."""
        first = call("cuCtxGetCurrent")
        second = start(1)
        other = int(call("cuMemAlloc", MIB))
        call("cuMemcpyHtoD", other, b"peer", 4)
        call("cuMemcpyPeerAsync", device, first, other, second, 4, 0)
        call("cuMemcpyDtoD", other + 8, other, 4)
        call("cuCtxSynchronize")
        assert peek(device, 4) == b"\xff" * 4
        assert peek(other + 8, 4) == b"peer", "within a device all is well"


class TestMistakes:
    def test_unmapped_addresses_are_refused(self, device: int, host: int) -> None:
        reserved = int(call("cuMemAddressReserve", 2 * MIB, 0, 0, 0))
        for address in (reserved, host, device + 4 * MIB - 2):
            assert failure("cuMemcpyHtoD", address, b"data", 4) == "INVALID_VALUE"
        assert failure("cuMemcpyDtoD", device, reserved, 4) == "INVALID_VALUE"
        assert failure("cuMemsetD8", reserved, 0, 4) == "INVALID_VALUE"
        assert failure("cuMemcpyDtoH", host, reserved, 4) == "INVALID_VALUE"
        call("cuMemAddressFree", reserved, 2 * MIB)

    @pytest.mark.parametrize(
        ("flags", "copy"),
        [
            ("READ", ("cuMemcpyHtoD", "shared", b"data", 4)),
            ("READ", ("cuMemcpyDtoD", "shared", "device", 4)),
            ("READ", ("cuMemsetD8", "shared", 0, 4)),
            ("NONE", ("cuMemcpyDtoH", "host", "shared", 4)),
        ],
    )
    def test_a_copy_without_the_right_ends_the_context(
        self, device: int, host: int, flags: str, copy: tuple[object, ...]
    ) -> None:
        handle = create()
        shared = mapped(handle, flags=flags)
        addresses = {"shared": shared, "device": device, "host": host}
        api_call, *arguments = (addresses.get(each, each) for each in copy)  # type: ignore[call-overload]
        # The call itself may come back before the fault; no later one does.
        getattr(api, str(api_call))(*arguments)
        for _ in range(2):
            assert failure("cuCtxSynchronize") == "ILLEGAL_ADDRESS"
            assert failure("cuMemcpyHtoD", device, b"data", 4) == "ILLEGAL_ADDRESS"
        assert failure("cuMemFreeHost", host) == "ILLEGAL_ADDRESS"
        unmapped(shared)
        call("cuMemRelease", handle)
        call("cuDevicePrimaryCtxReset", 0)
        start()

    def test_a_copy_runs_over_neighbouring_mappings(self, device: int) -> None:
        handles = [create(), create()]
        address = int(call("cuMemAddressReserve", 4 * MIB, 0, 0, 0))
        for number, handle in enumerate(handles):
            call("cuMemMap", address + number * 2 * MIB, 2 * MIB, 0, handle, 0)
            call("cuMemRelease", handle)
        call("cuMemSetAccess", address, 4 * MIB, [rights("READWRITE")], 1)
        call("cuMemcpyHtoD", address + 2 * MIB - 2, b"over", 4)
        assert peek(address + 2 * MIB - 2, 4) == b"over"
        for number in range(2):
            call("cuMemUnmap", address + number * 2 * MIB, 2 * MIB)
        call("cuMemAddressFree", address, 4 * MIB)

    @slow
    def test_unmapping_under_a_copy_is_noticed(self, device: int, host: int) -> None:
        handle = create()
        address = mapped(handle)
        stream = call("cuStreamCreate", NON_BLOCKING)
        call("cuMemcpyHtoDAsync", address, host, 4, stream)
        unmapped(address)
        assert failure("cuStreamSynchronize", stream) == "ILLEGAL_ADDRESS"
        call("cuMemRelease", handle)
        call("cuDevicePrimaryCtxReset", 0)
        start()

    def test_streams_have_few_flags(self, cuda: emulation.Emulated) -> None:
        assert failure("cuStreamCreate", 2) == "INVALID_VALUE"
        assert failure("cuEventCreate", 8) == "INVALID_VALUE"

    def test_capture_mode_is_exchanged(self, cuda: emulation.Emulated) -> None:
        modes = api.CUstreamCaptureMode
        relaxed = modes.CU_STREAM_CAPTURE_MODE_RELAXED
        before = call("cuThreadExchangeStreamCaptureMode", relaxed)
        assert before == modes.CU_STREAM_CAPTURE_MODE_GLOBAL
        assert call("cuThreadExchangeStreamCaptureMode", before) == relaxed


class TestThreads:
    def test_each_thread_has_its_context(self, cuda: emulation.Emulated) -> None:
        found: list[str] = []
        thread = threading.Thread(target=lambda: found.append(failure("cuCtxSynchronize")))
        thread.start()
        thread.join()
        assert found == ["INVALID_CONTEXT"]
        call("cuCtxSynchronize")

    def test_many_threads_allocate_at_once(self, cuda: emulation.Emulated) -> None:
        def work() -> None:
            try:
                for _ in range(20):
                    handle = create()
                    address = mapped(handle)
                    poke(address, b"x")
                    unmapped(address)
                    call("cuMemRelease", handle)
            except BaseException as error:
                errors.append(error)

        errors: list[BaseException] = []
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        assert cuda.used_bytes() == 0

    def test_a_process_ends_with_work_in_flight(self, spawn: Callable[..., Child]) -> None:
        child = spawn(
            "start(); stream = call('cuStreamCreate', 1); host = pinned(4096)\n"
            "address = call('cuMemAlloc', 4096)\n"
            "for _ in range(50): call('cuMemcpyHtoDAsync', address, host, 4096, stream)\n",
            TRIMS_TEST_CUDA_COPY_DELAY_MS="200",
        )
        assert child.wait() == 0, child.errors

    def test_properties_are_not_kept(self, cuda: emulation.Emulated) -> None:
        handle = create()
        found = call("cuMemGetAllocationPropertiesFromHandle", handle)
        assert (found.type, found.location.id) == (properties().type, 0)
        call("cuMemRelease", handle)
