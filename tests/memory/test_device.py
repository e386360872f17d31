"""Device memory: shared by processes, outliving its creator, read-only, and never left behind."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import emulated_cuda as emulation
import pytest
from forks import passes_in_child
from harness import PATIENCE_S, Child, open_descriptors

from trims_shim.errors import DriverFailure, MemoryFailure, NoSpace
from trims_shim.memory import device as device_module
from trims_shim.memory.device import (
    DeviceAllocation,
    DeviceMapping,
    DeviceMemory,
    DeviceSegment,
    map_allocations,
    open_handles,
    seal_outline,
    sparse_outline,
)
from trims_shim.memory.driver import Driver, driver, forget
from trims_shim.memory.libcuda import Library

GRANULE = emulation.GRANULARITY
PART = 2 * GRANULE
"""What an allocation is limited to in tests with several of them."""

PRELUDE = """\
import contextlib, ctypes, json, os, signal, socket, sys
from trims_shim.errors import DriverFailure
from trims_shim.memory.device import DeviceMemory, map_allocations, open_handles
from trims_shim.memory.driver import driver
def say(value=None):
    sys.stdout.write(json.dumps(value) + "\\n"); sys.stdout.flush()
def hear():
    return json.loads(sys.stdin.readline())
def receive():
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        text, descriptors, _, _ = socket.recv_fds(connection, 4096, 16)
    return descriptors, json.loads(text)
def send(descriptors, sizes):
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        socket.send_fds(connection, [json.dumps(sizes).encode()], descriptors)
device = driver().devices()[0].id
"""


@contextlib.contextmanager
def child(script: str) -> Iterator[tuple[Child, socket.socket]]:
    """A process that runs ``script``, and our end of a socket to it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + script, str(theirs.fileno())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        try:
            yield Child(process), ours
        finally:
            process.kill()
            process.wait(PATIENCE_S)
            for stream in (process.stdin, process.stdout, process.stderr):
                assert stream is not None
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


@pytest.fixture
def device(emulated_cuda: emulation.Emulated) -> str:
    return emulated_cuda.ids[0]


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "ALLOCATION_LIMIT_BYTES", PART)


@pytest.fixture
def fail(
    emulated_cuda: emulation.Emulated, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], None]:
    """Order failures of the driver's calls, counted from here on. Nothing may be held yet."""

    def order(calls: str) -> None:
        monkeypatch.setenv("TRIMS_TEST_CUDA_FAIL", calls)
        emulation.reset()
        forget()

    return order


def mapped() -> tuple[int, int, int]:
    held = emulation.held()
    return held.handles, held.mappings, held.reservations


def fill(mapping: DeviceMapping, content: bytes) -> None:
    ctypes.memmove(mapping.address, content, len(content))


def content_of(mapping: DeviceMapping) -> bytes:
    return ctypes.string_at(mapping.address, mapping.size_bytes)


def pattern(size: int) -> bytes:
    """Differs at every granule."""
    return b"".join(
        bytes([1 + number]) * GRANULE for number in range(-(-size // GRANULE))
    )[:size]  # fmt: skip


def map_all(allocation: DeviceAllocation, *, is_writable: bool) -> DeviceMapping:
    return map_allocations(
        allocation.device, allocation.descriptors, allocation.allocations, is_writable=is_writable
    )


# --- creating -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (1, GRANULE),
        (GRANULE, GRANULE),
        (GRANULE + 1, 2 * GRANULE),
        (5 * GRANULE - 512, 5 * GRANULE),
    ],
)
def test_memory_is_whole_granules(
    emulated_cuda: emulation.Emulated, device: str, size: int, expected: int
) -> None:
    allocation = DeviceMemory(device, "vmm").create(size)
    assert allocation.allocations == (expected,)
    assert len(allocation.descriptors) == 1
    assert (allocation.handles, allocation.address) == ((), 0)
    assert emulated_cuda.used_bytes(device) == expected
    allocation.close()
    allocation.close()
    assert emulated_cuda.used_bytes(device) == 0


@pytest.mark.parametrize("emulated_environment", [{"memory_bytes": 16 << 30}], indirect=True)
def test_large_memory_is_split_at_four_gib(emulated_cuda: emulation.Emulated, device: str) -> None:
    allocation = DeviceMemory(device, "vmm").create((9 << 30) + 1)
    assert allocation.allocations == (4 << 30, 4 << 30, (1 << 30) + GRANULE)
    assert len(allocation.descriptors) == 3
    mapping = map_all(allocation, is_writable=False)
    assert mapping.size_bytes == sum(allocation.allocations)
    assert ctypes.string_at(mapping.address + (9 << 30), 1) == b"\0"
    mapping.unmap()
    allocation.close()


def test_an_exact_multiple_has_no_empty_part(device: str, small_parts: None) -> None:
    allocation = DeviceMemory(device, "vmm").create(2 * PART)
    assert allocation.allocations == (PART, PART)
    allocation.close()


def test_the_creator_keeps_descriptors_and_nothing_else(device: str, small_parts: None) -> None:
    before = open_descriptors()
    allocation = DeviceMemory(device, "vmm").create(3 * PART)
    # A handle would keep a descriptor of the emulator's open besides.
    assert len(open_descriptors() - before) == 3
    assert mapped() == (0, 0, 0)
    assert emulation.held().contexts == 0
    assert not any(os.get_inheritable(each) for each in allocation.descriptors)
    allocation.close()
    assert open_descriptors() <= before


@pytest.mark.parametrize(
    ("calls", "expected", "match"),
    [
        ("cuMemCreate:1", NoSpace, "GPU-.*cuMemCreate"),
        ("cuMemCreate:3", NoSpace, "cuMemCreate.*OUT_OF_MEMORY"),
        ("cuMemCreate:3=801", DriverFailure, "cuMemCreate.*NOT_SUPPORTED.*TRIMS_DEVICE"),
        ("cuMemExportToShareableHandle:3=304", DriverFailure, "OPERATING_SYSTEM.*ulimit"),
    ],
)
def test_a_failed_creation_leaves_nothing(
    emulated_cuda: emulation.Emulated,
    device: str,
    small_parts: None,
    fail: Callable[[str], None],
    calls: str,
    expected: type[Exception],
    match: str,
) -> None:
    before = open_descriptors()
    fail(calls)
    with pytest.raises(expected, match=match):
        DeviceMemory(device, "vmm").create(4 * PART)
    assert mapped() == (0, 0, 0)
    assert emulated_cuda.used_bytes() == 0
    assert open_descriptors() <= before


def test_a_failed_release_leaves_no_descriptor(
    device: str, small_parts: None, fail: Callable[[str], None]
) -> None:
    fail("cuMemRelease:2")
    before = open_descriptors()
    with pytest.raises(DriverFailure, match="cuMemRelease"):
        DeviceMemory(device, "vmm").create(4 * PART)
    # What the driver does not take back cannot be given back: its one handle, which has one.
    assert emulation.held().handles == 1
    assert len(open_descriptors() - before) == 1


@pytest.mark.parametrize("emulated_environment", [{"memory_bytes": 4 * PART}], indirect=True)
def test_a_device_that_is_full_halfway_gets_everything_back(
    emulated_cuda: emulation.Emulated, device: str, small_parts: None
) -> None:
    memory = DeviceMemory(device, "vmm")
    first = memory.create(2 * PART)
    with pytest.raises(NoSpace, match=device):
        memory.create(3 * PART)
    assert emulated_cuda.used_bytes(device) == 2 * PART
    memory.create(2 * PART).close()
    first.close()


@pytest.mark.parametrize("emulated_environment", [{"vmm": 0}], indirect=True)
def test_a_device_that_cannot_share_is_refused_and_the_backend_named(device: str) -> None:
    with pytest.raises(DriverFailure, match=f"{device}.*TRIMS_DEVICE_BACKEND=ipc"):
        DeviceMemory(device, "vmm")
    assert DeviceMemory(device, "ipc").granularity_bytes == GRANULE


@pytest.mark.parametrize("emulated_environment", [{"exclusive": 1}], indirect=True)
@pytest.mark.parametrize("backend", ["vmm", "ipc"])
def test_a_device_for_one_process_is_refused(device: str, backend: str) -> None:
    with pytest.raises(DriverFailure, match=f"compute mode of {device}"):
        DeviceMemory(device, backend)


def test_an_unknown_device_is_refused(device: str) -> None:
    with pytest.raises(DriverFailure, match=f"MIG-1.*{device}"):
        DeviceMemory("MIG-1", "vmm")


@pytest.mark.parametrize("backend", ["vmm", "ipc"])
@pytest.mark.parametrize("file_bytes", [1, 1 << 20, 3 << 30])
def test_the_footprint_bounds_a_packed_file(device: str, backend: str, file_bytes: int) -> None:
    limit = DeviceMemory(device, backend).footprint_bytes(file_bytes)
    # All of the file in one tensor, or in tensors of 8 KiB and some bytes with 512 of padding each.
    for packed in (file_bytes, file_bytes + file_bytes // 16):
        assert -(-packed // GRANULE) * GRANULE <= limit
    assert limit <= file_bytes * 17 // 16 + 2 * GRANULE


# --- mapping --------------------------------------------------------------------------------------


def test_allocations_are_mapped_back_to_back(device: str, small_parts: None) -> None:
    allocation = DeviceMemory(device, "vmm").create(3 * PART - GRANULE)
    writable = map_all(allocation, is_writable=True)
    assert writable.size_bytes == sum(allocation.allocations) == 3 * PART - GRANULE
    content = pattern(writable.size_bytes)
    fill(writable, content)
    readable = map_all(allocation, is_writable=False)
    assert readable.address != writable.address
    assert content_of(readable) == content
    writable.unmap()
    assert content_of(readable) == content
    readable.unmap()
    allocation.close()


def test_the_order_is_that_of_the_descriptors(device: str, small_parts: None) -> None:
    allocation = DeviceMemory(device, "vmm").create(2 * PART)
    forwards = map_all(allocation, is_writable=True)
    content = pattern(2 * PART)
    fill(forwards, content)
    reverse = allocation.descriptors[::-1]
    backwards = map_allocations(device, reverse, allocation.allocations, is_writable=False)
    assert content_of(backwards) == content[PART:] + content[:PART]
    forwards.unmap()
    backwards.unmap()
    allocation.close()


def test_the_mapping_alone_keeps_the_memory(
    emulated_cuda: emulation.Emulated, device: str, small_parts: None
) -> None:
    allocation = DeviceMemory(device, "vmm").create(2 * PART)
    mapping = map_all(allocation, is_writable=True)
    assert mapped() == (2, 2, 1)
    fill(mapping, b"kept")
    allocation.close()
    assert emulated_cuda.used_bytes(device) == 2 * PART
    assert content_of(mapping)[:4] == b"kept"
    mapping.unmap()
    assert mapped() == (0, 0, 0)
    assert emulated_cuda.used_bytes(device) == 0
    mapping.unmap()


def test_mapping_leaves_the_descriptors_to_their_owner(device: str, small_parts: None) -> None:
    allocation = DeviceMemory(device, "vmm").create(2 * PART)
    before = open_descriptors()
    for _ in range(50):
        map_all(allocation, is_writable=False).unmap()
    assert open_descriptors() <= before
    assert mapped() == (0, 0, 0)
    for each in allocation.descriptors:
        os.fstat(each)
    allocation.close()


def test_mapping_and_unmapping_are_safe_beside_a_graph_capture(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    relaxed = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
    modes: dict[str, int] = {}

    def spy(name: str) -> None:
        original = getattr(Driver, name)

        def call(self: Driver, *arguments: Any, **named: Any) -> Any:
            mode = ctypes.c_int(relaxed)
            assert exchange(ctypes.byref(mode)) == 0
            modes[name] = mode.value
            assert exchange(ctypes.byref(mode)) == 0
            return original(self, *arguments, **named)

        monkeypatch.setattr(Driver, name, call)

    names = ("reserve", "import_descriptor", "map", "set_access", "unmap", "free_address")
    for name in names:
        spy(name)
    allocation = DeviceMemory(device, "vmm").create(GRANULE)
    map_all(allocation, is_writable=False).unmap()
    allocation.close()
    assert modes == dict.fromkeys(names, relaxed)


@pytest.mark.parametrize(
    "calls",
    [
        "cuThreadExchangeStreamCaptureMode:1=999",
        "cuDevicePrimaryCtxRetain=2",
        "cuCtxSetCurrent:1=201",
        "cuMemAddressReserve=2",
        "cuMemImportFromShareableHandle:1=1",
        "cuMemImportFromShareableHandle:3=801",
        "cuMemMap:1=1",
        "cuMemMap:2=2",
        "cuMemMap:3=1",
        "cuMemSetAccess=1",
        "cuCtxSetCurrent:2=700",
    ],
)
def test_a_failed_mapping_leaves_nothing(
    emulated_cuda: emulation.Emulated,
    device: str,
    small_parts: None,
    fail: Callable[[str], None],
    calls: str,
) -> None:
    fail(calls)
    allocation = DeviceMemory(device, "vmm").create(3 * PART)
    before = open_descriptors()
    with pytest.raises(DriverFailure, match=f"^{calls.partition(':')[0].partition('=')[0]}.*ERROR"):
        map_all(allocation, is_writable=False)
    assert mapped() == (0, 0, 0)
    assert open_descriptors() <= before
    assert emulated_cuda.used_bytes(device) == 3 * PART
    allocation.close()


@pytest.mark.parametrize(
    "call",
    [
        "cuThreadExchangeStreamCaptureMode",
        "cuMemAddressReserve",
        "cuMemImportFromShareableHandle",
        "cuMemMap",
        "cuMemSetAccess",
        "cuCtxGetCurrent",
        "cuCtxSetCurrent",
    ],
)
@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, TimeoutError])
def test_a_mapping_interrupted_right_after_a_call_leaves_nothing(
    device: str,
    small_parts: None,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    interrupt: type[BaseException],
) -> None:
    """Found: what the call had made, or mapped, stayed until the process ended."""
    allocation = DeviceMemory(device, "vmm").create(2 * PART)
    before = open_descriptors()
    with interrupted_after(call, monkeypatch, interrupt):
        map_all(allocation, is_writable=False)
    assert mapped() == (0, 0, 0)
    assert open_descriptors() <= before
    mode = ctypes.c_int(0)  # CU_STREAM_CAPTURE_MODE_GLOBAL, as it was
    assert ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)) == 0
    assert mode.value == 0
    allocation.close()


def test_an_interrupted_mapping_gives_nothing_up_twice(
    device: str, small_parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found: a handle, by whose number there may be other memory the second time."""
    allocation = DeviceMemory(device, "vmm").create(2 * PART)
    calls: list[tuple[str, int]] = []
    original, turn = Library.call, 0

    def interrupted(self: Library, name: str, *inputs: Any, **named: Any) -> Any:
        result, output = original(self, name, *inputs, **named)
        calls.append((name, result))
        if len(calls) == turn:
            raise KeyboardInterrupt
        return result, output

    mapping: DeviceMapping | None = None
    while mapping is None:
        turn += 1
        calls.clear()
        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            patch.setattr(Library, "call", interrupted)
            mapping = map_all(allocation, is_writable=False)
        assert {result for name, result in calls if name == "cuMemRelease"} <= {0}
    assert turn > 10
    mapping.unmap()
    allocation.close()


@contextlib.contextmanager
def interrupted_after(
    call: str, monkeypatch: pytest.MonkeyPatch, interrupt: type[BaseException] = KeyboardInterrupt
) -> Iterator[None]:
    """Let the first such call of the block end as if a signal handler had raised meanwhile."""
    original, left = Library.call, [call]

    def interrupted(self: Library, name: str, *inputs: Any, **named: Any) -> Any:
        result = original(self, name, *inputs, **named)
        if name in left:
            left.remove(name)
            raise interrupt
        return result

    with monkeypatch.context() as patch:
        patch.setattr(Library, "call", interrupted)
        # Of an OSError, the driver's errors stem.
        with pytest.raises((interrupt, DriverFailure)):
            yield


def test_an_unmapping_that_fails_does_all_it_can_and_says_so(
    device: str, small_parts: None, fail: Callable[[str], None]
) -> None:
    fail("cuMemUnmap:2=999")
    allocation = DeviceMemory(device, "vmm").create(3 * PART)
    mapping = map_all(allocation, is_writable=False)
    with pytest.raises(DriverFailure):
        mapping.unmap()
    assert mapped() == (0, 1, 1)
    mapping.unmap()
    driver().unmap(mapping.address + PART, PART)
    driver().free_address(mapping.address, mapping.size_bytes)
    allocation.close()


def test_what_is_no_device_memory_is_refused(device: str) -> None:
    with open(__file__) as file:
        for descriptors in ([file.fileno()], [-1], [1 << 30]):
            with pytest.raises(DriverFailure, match="cuMemImportFromShareableHandle"):
                map_allocations(device, descriptors, [GRANULE], is_writable=False)
    assert mapped() == (0, 0, 0)


@pytest.mark.parametrize("sizes", [[], [0], [-GRANULE], [GRANULE - 1], [2 * GRANULE], [1 << 63]])
def test_sizes_that_are_not_those_of_the_memory_are_refused(device: str, sizes: list[int]) -> None:
    allocation = DeviceMemory(device, "vmm").create(GRANULE)
    with pytest.raises((DriverFailure, MemoryFailure)):
        map_allocations(device, allocation.descriptors, sizes, is_writable=False)
    assert mapped() == (0, 0, 0)
    allocation.close()


# --- processes ------------------------------------------------------------------------------------

CREATE_AND_FILL = """
allocation = DeviceMemory(device, "vmm").create(hear())
writable = map_allocations(
    device, allocation.descriptors, allocation.allocations, is_writable=True
)
for start in range(0, writable.size_bytes, 2 << 20):
    ctypes.memset(writable.address + start, 1 + start // (2 << 20), 2 << 20)
driver().synchronize(0)
writable.unmap()
send(allocation.descriptors, allocation.allocations)
say(os.getpid())
hear()
"""
READ = """
descriptors, sizes = receive()
mapping = map_allocations(device, descriptors, sizes, is_writable=False)
for each in descriptors:
    os.close(each)
say([ctypes.string_at(mapping.address + at, 1)[0] for at in hear()])
"""


def test_memory_is_shared_and_survives_the_process_that_made_it(
    emulated_cuda: emulation.Emulated, device: str
) -> None:
    size = 5 * GRANULE
    offsets = [number * GRANULE + 17 for number in range(5)]
    with child(CREATE_AND_FILL) as (creator, from_creator), child(READ) as (reader, to_reader):
        creator.say(size)
        creator.hear()
        text, descriptors, _, _ = socket.recv_fds(from_creator, 4096, 16)
        os.kill(creator.pid, signal.SIGKILL)
        assert creator.process.wait(PATIENCE_S) == -signal.SIGKILL
        socket.send_fds(to_reader, [text], descriptors)
        for each in descriptors:
            os.close(each)
        reader.say(offsets)
        assert reader.hear() == [1, 2, 3, 4, 5]
    assert emulated_cuda.used_bytes(device) == 0


WRITE = """
descriptors, sizes = receive()
mapping = map_allocations(device, descriptors, sizes, is_writable=False)
say(ctypes.string_at(mapping.address, 1)[0])
hear()
ctypes.memset(mapping.address, 9, 1)
say("survived")
"""


def test_a_write_ends_the_writer_and_nobody_else(device: str) -> None:
    allocation = DeviceMemory(device, "vmm").create(GRANULE)
    ours = map_all(allocation, is_writable=True)
    fill(ours, b"\x07")
    with child(WRITE) as (writer, to_writer), child(READ) as (reader, to_reader):
        for connection in (to_writer, to_reader):
            sizes = f"[{GRANULE}]".encode()
            socket.send_fds(connection, [sizes], list(allocation.descriptors))
        assert writer.hear() == 7
        writer.say()
        assert writer.process.wait(PATIENCE_S) == -signal.SIGSEGV
        reader.say([0])
        assert reader.hear() == [7]
    assert content_of(ours)[0] == 7
    ours.unmap()
    allocation.close()


@pytest.mark.parametrize("emulated_environment", [{"devices": 2}], indirect=True)
def test_a_process_that_numbers_devices_otherwise_maps_the_same_memory(
    emulated_cuda: emulation.Emulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = emulated_cuda.ids[1]
    allocation = DeviceMemory(second, "vmm").create(GRANULE)
    ours = map_all(allocation, is_writable=True)
    fill(ours, b"\x05")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", second)
    with child(READ) as (reader, to_reader):
        socket.send_fds(to_reader, [f"[{GRANULE}]".encode()], list(allocation.descriptors))
        reader.say([0])
        assert reader.hear() == [5]
    assert emulated_cuda.used_bytes(emulated_cuda.ids[0]) == 0
    assert emulated_cuda.used_bytes(second) == GRANULE
    ours.unmap()
    allocation.close()


def test_a_forked_child_unmaps_nothing(
    emulated_cuda: emulation.Emulated, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocation = DeviceMemory(device, "vmm").create(GRANULE)
    mapping = map_all(allocation, is_writable=True)
    fill(mapping, b"here")

    def check() -> bool:
        mapping.unmap()
        allocation.close()
        return mapped() == (1, 1, 1)

    assert passes_in_child(check)
    assert content_of(mapping)[:4] == b"here"
    for each in allocation.descriptors:
        os.fstat(each)
    mapping.unmap()
    allocation.close()
    assert emulated_cuda.used_bytes(device) == 0


# --- the legacy backend ---------------------------------------------------------------------------

CREATE_LEGACY = """
allocation = DeviceMemory(device, "ipc").create(hear())
ctypes.memset(allocation.address, 3, 1)
say([allocation.handles[0].hex(), *allocation.allocations])
hear()
say(ctypes.string_at(allocation.address, 1)[0])
hear()
allocation.close()
allocation.close()
say()
hear()
"""


def test_legacy_memory_is_shared_writable_while_its_creator_lives(
    emulated_cuda: emulation.Emulated, device: str
) -> None:
    with child(CREATE_LEGACY) as (creator, _):
        creator.say(GRANULE + 1)
        handle, size = creator.hear()
        assert size == 2 * GRANULE
        mapping = open_handles(device, [bytes.fromhex(handle)], [size])
        assert content_of(mapping)[:2] == b"\x03\0"
        fill(mapping, b"\x04")
        creator.say()
        assert creator.hear() == 4
        mapping.unmap()
        mapping.unmap()
        assert emulation.held().imported == 0
        creator.say()
        creator.hear()
        assert emulated_cuda.used_bytes(device) == 0
        with pytest.raises(DriverFailure, match="cuIpcOpenMemHandle"):
            open_handles(device, [bytes.fromhex(handle)], [size])


def test_legacy_memory_of_a_dead_process_is_not_opened(device: str) -> None:
    with child(CREATE_LEGACY) as (creator, _):
        creator.say(GRANULE)
        handle, size = creator.hear()
    with pytest.raises(DriverFailure, match=r"cuIpcOpenMemHandle.*INVALID_HANDLE"):
        open_handles(device, [bytes.fromhex(handle)], [size])


def test_a_legacy_opening_that_fails_leaves_nothing(
    device: str, fail: Callable[[str], None]
) -> None:
    with child(CREATE_LEGACY) as (creator, _):
        creator.say(GRANULE)
        handle, size = creator.hear()
        fail("cuCtxSetCurrent:2=700")
        with pytest.raises(DriverFailure, match=r"cuCtxSetCurrent.*ILLEGAL_ADDRESS"):
            open_handles(device, [bytes.fromhex(handle)], [size])
        assert emulation.held().imported == 0


@pytest.mark.parametrize("call", ["cuIpcOpenMemHandle", "cuCtxSetCurrent"])
def test_a_legacy_opening_interrupted_right_after_a_call_leaves_nothing(
    device: str, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Found: the memory stayed open until the process ended."""
    with child(CREATE_LEGACY) as (creator, _):
        creator.say(GRANULE)
        handle, size = creator.hear()
        with interrupted_after(call, monkeypatch):
            open_handles(device, [bytes.fromhex(handle)], [size])
        assert emulation.held().imported == 0


@pytest.mark.parametrize("calls", ["cuMemAlloc=2", "cuIpcGetMemHandle=1"])
def test_a_failed_legacy_creation_leaves_nothing(
    emulated_cuda: emulation.Emulated, device: str, fail: Callable[[str], None], calls: str
) -> None:
    fail(calls)
    expected = NoSpace if calls.endswith("=2") else DriverFailure
    with pytest.raises(expected, match=calls.partition("=")[0]):
        DeviceMemory(device, "ipc").create(GRANULE)
    assert emulation.held().linear == 0
    assert emulated_cuda.used_bytes(device) == 0


def test_a_forked_child_frees_no_legacy_memory(
    emulated_cuda: emulation.Emulated, device: str
) -> None:
    allocation = DeviceMemory(device, "ipc").create(GRANULE)
    assert passes_in_child(lambda: allocation.close() is None and emulation.held().linear == 1)
    assert emulated_cuda.used_bytes(device) == GRANULE
    allocation.close()
    assert emulated_cuda.used_bytes(device) == 0


@pytest.mark.parametrize(
    ("handles", "sizes"), [([], []), ([b"x" * 64] * 2, [GRANULE] * 2), ([b"x" * 64], [])]
)
def test_legacy_images_have_one_handle(
    device: str, handles: Sequence[bytes], sizes: Sequence[int]
) -> None:
    with pytest.raises((DriverFailure, MemoryFailure), match="IPC handle"):
        open_handles(device, handles, sizes)


# --- outlines -------------------------------------------------------------------------------------

FILE_BYTES = 64 << 20


def blocks(descriptor: int) -> int:
    return os.fstat(descriptor).st_blocks * 512


@pytest.fixture
def outline() -> Iterator[int]:
    writable = sparse_outline(FILE_BYTES)
    os.pwrite(writable, b"head", 0)
    os.pwrite(writable, b"tail", FILE_BYTES - 4)
    readable = seal_outline(writable)
    os.close(writable)
    yield readable
    os.close(readable)


def test_an_outline_costs_what_was_written(outline: int) -> None:
    assert os.fstat(outline).st_size == FILE_BYTES
    assert blocks(outline) == 2 * mmap.PAGESIZE
    assert os.pread(outline, 5, 0) == b"head\0"
    assert os.pread(outline, 5, FILE_BYTES - 5) == b"\0tail"


def test_reading_a_hole_costs_memory_through_a_mapping_only(outline: int) -> None:
    before = blocks(outline)
    assert os.pread(outline, 1 << 20, 1 << 20) == bytes(1 << 20)
    assert blocks(outline) == before
    with mmap.mmap(outline, FILE_BYTES, mmap.MAP_PRIVATE, mmap.PROT_READ) as view:
        assert view[:4] == b"head"
        assert blocks(outline) == before
        assert view[1 << 20] == 0
    assert blocks(outline) > before


def test_a_sealed_outline_cannot_be_changed() -> None:
    writable = sparse_outline(FILE_BYTES)
    readable = seal_outline(writable)
    again = os.open(f"/proc/self/fd/{readable}", os.O_RDWR)
    try:
        assert fcntl.fcntl(readable, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        assert not os.get_inheritable(readable)
        for descriptor in (writable, again):
            attempts: list[Callable[[], object]] = [
                lambda at=descriptor: os.pwrite(at, b"x", 0),  # type: ignore[misc]
                lambda at=descriptor: os.ftruncate(at, 1),  # type: ignore[misc]
                lambda at=descriptor: os.ftruncate(at, 2 * FILE_BYTES),  # type: ignore[misc]
                lambda at=descriptor: mmap.mmap(at, FILE_BYTES, mmap.MAP_SHARED),  # type: ignore[misc]
            ]
            for attempt in attempts:
                with pytest.raises(PermissionError):
                    attempt()
    finally:
        for descriptor in (writable, readable, again):
            os.close(descriptor)


def test_an_outline_that_is_mapped_writable_is_not_sealed() -> None:
    writable = sparse_outline(FILE_BYTES)
    before = open_descriptors()
    with mmap.mmap(writable, FILE_BYTES):
        now = open_descriptors()
        with pytest.raises(MemoryFailure, match=os.strerror(errno.EBUSY)):
            seal_outline(writable)
        assert open_descriptors() <= now
    assert open_descriptors() <= before
    os.close(seal_outline(writable))
    os.close(writable)


def test_what_is_no_outline_is_not_sealed() -> None:
    before = open_descriptors()
    with open(__file__) as file, pytest.raises(MemoryFailure, match="sealed"):
        seal_outline(file.fileno())
    with pytest.raises(MemoryFailure, match="opened"):
        seal_outline(1 << 20)
    assert open_descriptors() <= before


def test_an_impossible_outline_leaves_nothing() -> None:
    before = open_descriptors()
    with pytest.raises(MemoryFailure, match="outline of -1 bytes"):
        sparse_outline(-1)
    assert open_descriptors() <= before


# --- segments -------------------------------------------------------------------------------------


def test_a_segment_gives_everything_up_once(
    emulated_cuda: emulation.Emulated, device: str, small_parts: None, outline: int
) -> None:
    before = open_descriptors()
    allocation = DeviceMemory(device, "vmm").create(3 * PART)
    segment = DeviceSegment(
        device=device,
        backend="vmm",
        allocations=allocation.allocations,
        descriptors=allocation.descriptors,
        handles=(),
        outline=os.dup(outline),
        size_bytes=FILE_BYTES,
        layout="00000000-1-1",
    )
    assert segment.resident_bytes() == 3 * PART == emulated_cuda.used_bytes(device)
    held = segment.hold()
    segment.close()
    segment.close()
    assert emulated_cuda.used_bytes(device) == 3 * PART, "a hold of its own"
    assert (held.allocations, held.layout) == (segment.allocations, segment.layout)
    held.close()
    assert emulated_cuda.used_bytes(device) == 0
    assert open_descriptors() <= before
    assert driver().devices()[0].id == device


def test_a_hold_that_fails_leaves_nothing(
    device: str, small_parts: None, outline: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocation = DeviceMemory(device, "vmm").create(2 * PART)
    segment = DeviceSegment(
        device, "vmm", allocation.allocations, allocation.descriptors, (), os.dup(outline), 1, "x"
    )
    before, dup, calls = open_descriptors(), os.dup, iter([0, 0])

    def scarce(descriptor: int) -> int:
        if next(calls, None) is None:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return dup(descriptor)

    monkeypatch.setattr(os, "dup", scarce)
    with pytest.raises(OSError, match="Too many open files"):
        segment.hold()
    assert open_descriptors() <= before
    segment.close()
