"""The driver: what it sees, that every failure names its call, and that no fork is survived."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import emulated_cuda as emulation
import pytest
from forks import passes_in_child

from trims_shim.errors import DriverFailure
from trims_shim.memory import driver as driver_module
from trims_shim.memory import libcuda
from trims_shim.memory.driver import IPC_HANDLE_BYTES, Driver, driver, forget
from trims_shim.memory.libcuda import Library

GRANULE = emulation.GRANULARITY
TIMEOUT_S = 60.0
GLOBAL, LOCAL, RELAXED = 0, 1, 2  # CU_STREAM_CAPTURE_MODE_


@pytest.fixture
def opened(emulated_cuda: emulation.Emulated) -> Driver:
    return driver()


def current_context() -> int:
    context = ctypes.c_uint64()
    assert ctypes.CDLL("libcuda.so.1").cuCtxGetCurrent(ctypes.byref(context)) == 0
    return context.value


def exchange_capture_mode(mode: int) -> int:
    """The one before."""
    exchanged = ctypes.c_int(mode)
    exchange = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    assert exchange(ctypes.byref(exchanged)) == 0
    return exchanged.value


@contextlib.contextmanager
def machine(monkeypatch: pytest.MonkeyPatch, **variables: str) -> Iterator[Driver]:
    """The driver after the environment has changed."""
    try:
        with monkeypatch.context() as patched:
            for name, value in variables.items():
                patched.setenv(name, value)
            emulation.reset()
            forget()
            yield driver()
    finally:
        emulation.reset()
        forget()


def failing(monkeypatch: pytest.MonkeyPatch, calls: str) -> Any:
    return machine(monkeypatch, TRIMS_TEST_CUDA_FAIL=calls)


def run(script: str, environment: dict[str, str]) -> str:
    """What a new process prints."""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# --- devices --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "emulated_environment",
    [{"devices": 2, "memory_bytes": (64 << 20, 32 << 20), "names": "Large,Small"}],
    indirect=True,
)
def test_devices_are_named_by_the_drivers_ids(emulated_cuda: emulation.Emulated) -> None:
    large, small = driver().devices()
    assert (large.index, large.id, large.name) == (0, emulated_cuda.ids[0], "Large")
    assert (small.index, small.id, small.name) == (1, emulated_cuda.ids[1], "Small")
    assert (large.total_bytes, small.total_bytes) == (64 << 20, 32 << 20)
    assert large.can_share
    assert large.id.startswith("GPU-")
    assert len(large.id) == 40
    assert [driver().index_of(each) for each in emulated_cuda.ids] == [0, 1]


@pytest.mark.parametrize("emulated_environment", [{"devices": 3}], indirect=True)
def test_peers_with_the_rank_of_their_links(
    emulated_cuda: emulation.Emulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = emulated_cuda.ids
    assert driver().peers(0) == {second: 0, third: 1}
    assert driver().peers(1) == {first: 0, third: 0}
    with machine(monkeypatch, CUDA_VISIBLE_DEVICES="2,0") as opened:
        assert opened.peers(0) == {first: 1}
    assert emulation.held().contexts == 0


@pytest.mark.parametrize(
    "emulated_environment", [{"devices": 2, "peer": 0}, {"devices": 2, "mig": 2}], indirect=True
)
def test_devices_without_peers(emulated_cuda: emulation.Emulated) -> None:
    assert driver().peers(0) == {}


@pytest.mark.parametrize("emulated_environment", [{"devices": 4}], indirect=True)
@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("3", [3]),
        ("2,0", [2, 0]),
        ("1,9,2", [1]),
        ("{3},{1}", [3, 1]),
        ("{2}", [2]),
    ],
)
def test_ids_do_not_depend_on_what_is_visible_and_indices_do(
    emulated_cuda: emulation.Emulated,
    monkeypatch: pytest.MonkeyPatch,
    visible: str,
    expected: list[int],
) -> None:
    ids = emulated_cuda.ids
    with machine(monkeypatch, CUDA_VISIBLE_DEVICES=visible.format(*ids)) as opened:
        assert [each.id for each in opened.devices()] == [ids[number] for number in expected]
        assert [each.index for each in opened.devices()] == list(range(len(expected)))
        for index, number in enumerate(expected):
            assert opened.index_of(ids[number]) == index
        for number in set(range(4)) - set(expected):
            with pytest.raises(DriverFailure, match=f"{ids[number]}.*CUDA_VISIBLE_DEVICES"):
                opened.index_of(ids[number])


@pytest.mark.parametrize("visible", ["", "-1", "GPU-00000000"])
def test_no_visible_device_is_no_driver(
    emulated_cuda: emulation.Emulated, monkeypatch: pytest.MonkeyPatch, visible: str
) -> None:
    with (
        pytest.raises(DriverFailure, match=r"CUDA_ERROR_NO_DEVICE; .*CUDA_VISIBLE_DEVICES"),
        machine(monkeypatch, CUDA_VISIBLE_DEVICES=visible),
    ):
        pass


@pytest.mark.parametrize("emulated_environment", [{"devices": 2, "mig": 3}], indirect=True)
def test_a_mig_instance_is_named_by_its_own_id(
    emulated_cuda: emulation.Emulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [each.id for each in driver().devices()] == [emulated_cuda.ids[0]]
    assert emulated_cuda.ids[0].startswith("MIG-")
    with machine(monkeypatch, CUDA_VISIBLE_DEVICES=emulated_cuda.ids[4]) as opened:
        (device,) = opened.devices()
        assert device.id == emulated_cuda.ids[4]
        assert opened.index_of(device.id) == 0


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "MIG"),
        ("NVIDIA H100 80GB HBM3 MIG 1c.3g.40gb", "MIG"),
        ("NVIDIA H200", "GPU"),
        ("NVIDIA GeForce RTX 4090", "GPU"),
    ],
)
def test_only_the_name_tells_what_a_uuid_belongs_to(name: str, kind: str) -> None:
    raw = bytes(range(16))
    expected = f"{kind}-00010203-0405-0607-0809-0a0b0c0d0e0f"
    assert driver_module._device_id(name, raw) == expected


@pytest.mark.parametrize("emulated_environment", [{"vmm": 0}], indirect=True)
def test_a_device_without_shareable_memory_says_so(opened: Driver) -> None:
    assert [each.can_share for each in opened.devices()] == [False]


@pytest.mark.parametrize(
    ("emulated_environment", "is_exclusive"),
    [
        ({}, False),
        ({"exclusive": 1}, True),
        ({"exclusive": 1, "mps": 1}, False),
        pytest.param(
            {"exclusive": 1, "mps": 1, "fail": "cuDeviceGetAttribute:4=1"}, True, id="old driver"
        ),
    ],
    indirect=["emulated_environment"],
)
def test_whether_one_process_at_a_time_may_use_a_device(opened: Driver, is_exclusive: bool) -> None:
    assert [each.is_exclusive for each in opened.devices()] == [is_exclusive]


def test_neither_devices_nor_allocations_take_a_context(opened: Driver) -> None:
    opened.devices()
    handle = opened.create(0, opened.granularity(0))
    descriptor = opened.export(handle)
    again = opened.import_descriptor(descriptor)
    assert emulation.held().contexts == 0
    opened.release(again)
    opened.release(handle)
    os.close(descriptor)


# --- failures -------------------------------------------------------------------------------------

DEAD_HANDLE = 7
CALLS: dict[str, Callable[[Driver], object]] = {
    "cuDeviceGetCount": lambda it: it.devices(),
    "cuDeviceGet": lambda it: it.devices(),
    "cuDeviceGetName": lambda it: it.devices(),
    "cuDeviceTotalMem": lambda it: it.devices(),
    "cuDeviceGetAttribute": lambda it: it.devices(),
    "cuMemGetAllocationGranularity": lambda it: it.granularity(0),
    "cuMemCreate": lambda it: it.create(0, GRANULE),
    "cuMemExportToShareableHandle": lambda it: it.export(DEAD_HANDLE),
    "cuMemImportFromShareableHandle": lambda it: it.import_descriptor(0),
    "cuMemRelease": lambda it: it.release(DEAD_HANDLE),
    "cuMemAddressReserve": lambda it: it.reserve(GRANULE),
    "cuMemAddressFree": lambda it: it.free_address(GRANULE, GRANULE),
    "cuMemMap": lambda it: it.map(GRANULE, GRANULE, DEAD_HANDLE),
    "cuMemUnmap": lambda it: it.unmap(GRANULE, GRANULE),
    "cuMemSetAccess": lambda it: it.set_access(GRANULE, GRANULE, 0, is_writable=True),
    "cuDevicePrimaryCtxRetain": lambda it: it.synchronize(0),
    "cuCtxGetCurrent": lambda it: it.synchronize(0),
    "cuCtxSetCurrent": lambda it: it.synchronize(0),
    "cuCtxSynchronize": lambda it: it.synchronize(0),
    "cuThreadExchangeStreamCaptureMode": lambda it: it.synchronize(0),
    "cuStreamCreate": lambda it: it.new_stream(),
    "cuStreamDestroy": lambda it: it.destroy_stream(DEAD_HANDLE),
    "cuStreamSynchronize": lambda it: it.synchronize_stream(DEAD_HANDLE),
    "cuMemcpyHtoDAsync": lambda it: it.copy_to_device(GRANULE, GRANULE, 1, 0),
    "cuMemcpyDtoHAsync": lambda it: it.copy_to_host(GRANULE, GRANULE, 1, 0),
    "cuMemHostAlloc": lambda it: it.allocate_pinned(1),
    "cuMemFreeHost": lambda it: it.free_pinned(GRANULE),
    "cuMemAlloc": lambda it: it.allocate(1),
    "cuMemFree": lambda it: it.free(GRANULE),
    "cuIpcGetMemHandle": lambda it: it.ipc_handle(GRANULE),
    "cuIpcOpenMemHandle": lambda it: it.ipc_open(bytes(IPC_HANDLE_BYTES)),
    "cuIpcCloseMemHandle": lambda it: it.ipc_close(GRANULE),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_failure_names_the_call_the_result_and_what_to_do(
    emulated_cuda: emulation.Emulated, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    with failing(monkeypatch, f"{call}=999") as opened:
        with pytest.raises(DriverFailure, match=f"^{call}.* failed: CUDA_ERROR_UNKNOWN; ") as info:
            CALLS[call](opened)
        assert info.value.result == "CUDA_ERROR_UNKNOWN"
        assert "nvidia-smi" in str(info.value)


@pytest.mark.parametrize(
    ("code", "name", "advice"),
    [
        (3, "CUDA_ERROR_NOT_INITIALIZED", "spawn"),
        (700, "CUDA_ERROR_ILLEGAL_ADDRESS", "restart"),
        (900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "CUDA graph"),
    ],
)
def test_a_wait_that_fails_says_why_and_leaves_the_thread_as_it_was(
    emulated_cuda: emulation.Emulated,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    name: str,
    advice: str,
) -> None:
    with failing(monkeypatch, f"cuCtxSynchronize={code}") as opened:
        with pytest.raises(DriverFailure, match=f"{name}; .*{advice}") as info:
            opened.synchronize(0)
        assert info.value.result == name
        assert current_context() == 0
        assert exchange_capture_mode(GLOBAL) == GLOBAL


def test_a_full_device_is_told_from_other_failures(opened: Driver) -> None:
    whole = opened.devices()[0].total_bytes
    handle = opened.create(0, whole)
    with pytest.raises(DriverFailure, match=f"cuMemCreate of {GRANULE} bytes on device 0") as info:
        opened.create(0, GRANULE)
    assert info.value.result == "CUDA_ERROR_OUT_OF_MEMORY"
    assert "TRIMS_DEVICE_BYTES" in str(info.value)
    opened.release(handle)


@pytest.mark.parametrize("size", [-1, 1 << 64, 1.0, "1", None])
def test_numbers_the_driver_cannot_take_are_a_failure_too(opened: Driver, size: Any) -> None:
    message = f"^cuMemAddressReserve cannot be asked for {size} bytes: "
    with pytest.raises(DriverFailure, match=message):
        opened.reserve(size)


@pytest.mark.parametrize("index", [-1, 1, 1 << 31, 1 << 32])
@pytest.mark.parametrize(
    "ask",
    [
        lambda it, index: it.granularity(index),
        lambda it, index: it.create(index, GRANULE),
        lambda it, index: it.set_access(GRANULE, GRANULE, index, is_writable=False),
        lambda it, index: it.peers(index),
        lambda it, index: it.synchronize(index),
    ],
)
def test_there_is_no_other_device(
    opened: Driver, ask: Callable[[Driver, int], object], index: int
) -> None:
    with pytest.raises(DriverFailure):
        ask(opened, index)


def test_a_result_the_driver_has_no_name_for_is_a_number(
    emulated_cuda: emulation.Emulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = "cuMemAlloc of 1 bytes failed: CUresult 12345; "
    with (
        failing(monkeypatch, "cuMemAlloc=12345") as opened,
        pytest.raises(DriverFailure, match=message),
    ):
        opened.allocate(1)


@pytest.mark.parametrize("size", [0, 63, 65])
def test_an_ipc_handle_has_its_size(opened: Driver, size: int) -> None:
    with pytest.raises(DriverFailure, match=f"64 bytes, not {size}"):
        opened.ipc_open(bytes(size))


def test_a_driver_that_cannot_start_is_tried_again(
    emulated_cuda: emulation.Emulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.delenv("TRIMS_TEST_CUDA_DIR")
        emulation.reset()
        for _ in range(2):
            with pytest.raises(DriverFailure, match=r"cuInit failed: CUDA_ERROR_NO_DEVICE; .*smi"):
                driver()
    emulation.reset()
    assert len(driver().devices()) == 1


def test_without_a_driver_the_message_says_so() -> None:
    with contextlib.suppress(OSError):
        ctypes.CDLL("libcuda.so.1")
        if not emulated_is_loaded():
            pytest.skip("this machine has a driver")
    script = """
from trims_shim.errors import DriverFailure
from trims_shim.memory.driver import driver
for _ in range(2):
    try:
        driver()
    except DriverFailure as error:
        print(error)
"""
    first, second = run(script, {"LD_LIBRARY_PATH": ""}).splitlines()
    assert first == second
    assert first.startswith("cuInit cannot be called: ")
    assert "install NVIDIA's driver" in first


def emulated_is_loaded() -> bool:
    with open("/proc/self/maps") as lines:
        paths = {line.split()[-1] for line in lines if "/libcuda.so" in line}
    return all("trims-emulated-cuda" in path for path in paths)


def test_a_missing_function_is_a_failure(opened: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    newer = libcuda.FUNCTIONS["cuMemAlloc"]._replace(symbol="cuMemAlloc_v9")
    monkeypatch.setitem(libcuda.FUNCTIONS, "cuMemAlloc", newer)
    message = r"^cuMemAlloc cannot be called: .*cuMemAlloc_v9; install a newer driver"
    with pytest.raises(DriverFailure, match=message):
        opened.allocate(1)


# --- processes and threads ------------------------------------------------------------------------


def test_importing_it_loads_nothing_of_nvidias() -> None:
    script = """
import sys, trims_shim.memory.driver, trims_shim.memory.device, trims_shim.memory.nvml
print(*[name for name in sys.modules if name.startswith(("cuda", "pynvml"))])
with open("/proc/self/maps") as lines:
    print(*[line for line in lines if "libcuda" in line])
"""
    assert run(script, {}) == ""


def test_there_is_one_driver(opened: Driver) -> None:
    assert driver() is opened


def test_many_threads_get_the_same_driver(emulated_cuda: emulation.Emulated) -> None:
    found: list[Driver] = []
    start = threading.Barrier(8)

    def ask() -> None:
        start.wait(TIMEOUT_S)
        found.append(driver())

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(TIMEOUT_S)
    assert len(found) == 8
    assert len(set(map(id, found))) == 1


def test_a_forked_child_never_calls_the_driver(
    opened: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []

    def refuses(ask: Callable[[], object]) -> bool:
        try:
            ask()
        except DriverFailure as error:
            return "spawn" in str(error)
        return False

    def check() -> bool:
        monkeypatch.setattr(libcuda.Library, "call", lambda *_: called.append("x"))
        grandchild = passes_in_child(lambda: refuses(driver))
        return (
            refuses(driver)
            and refuses(opened.devices)
            and refuses(lambda: opened.release(1))
            and grandchild
            and not called
        )

    with opened.context(0):
        assert passes_in_child(check)
    assert len(opened.devices()) == 1


def test_a_child_that_goes_on_in_the_middle_is_refused(opened: Driver) -> None:
    """Found: for a child of a signal handler there was neither a driver nor an error."""
    children: list[int] = []

    def fork(frame: FrameType, event: str, arg: object) -> Callable[..., Any] | None:
        if frame.f_code is not driver.__code__:
            return None
        if event == "line":
            children.append(os.fork())
            if not children[-1]:
                sys.settrace(None)
        return fork

    before = sys.gettrace()
    sys.settrace(fork)
    try:
        driver().devices()
    except DriverFailure as error:
        os._exit("spawn" not in str(error))
    finally:
        sys.settrace(before)
        if not all(children):
            os._exit(1)
    assert len(children) > 1
    assert [os.waitpid(each, 0)[1] for each in children] == [0] * len(children)


def test_a_child_that_is_forked_in_a_block_may_exit(opened: Driver) -> None:
    """Found: it got an error in place of its exit, and loaded from the file instead of ending."""
    child = -1
    try:
        with opened.relaxed_capture(), opened.context(0):
            child = os.fork()
            if not child:
                sys.exit(7)
    except SystemExit as end:
        os._exit(end.code)  # type: ignore[arg-type]
    finally:
        if not child:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_a_child_forked_before_the_first_use_may_use_it(
    emulated_environment: dict[str, str],
) -> None:
    script = """
import os, sys
from trims_shim.memory.driver import driver
child = os.fork()
if child == 0:
    print(len(driver().devices()), flush=True)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print(len(driver().devices()))
"""
    assert run(script, emulated_environment).split() == ["1", "1"]


def test_a_child_forked_after_a_vain_try_may_try_too(emulated_environment: dict[str, str]) -> None:
    script = """
import os
from trims_shim.errors import DriverFailure
from trims_shim.memory import driver
try:
    driver.driver()
except DriverFailure:
    print("none", flush=True)  # or the child has it to print, too
child = os.fork()
if child == 0:
    try:
        driver.driver()
    except DriverFailure as error:
        print("cuInit" in str(error), flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""
    environment = emulated_environment | {"TRIMS_TEST_CUDA_FAIL": "cuInit=100"}
    assert run(script, environment).split() == ["none", "True"]


@pytest.mark.parametrize("emulated_environment", [{"devices": 2}], indirect=True)
def test_contexts_belong_to_the_thread_and_are_retained_once(opened: Driver) -> None:
    seen: dict[int, set[int]] = {0: set(), 1: set()}
    outside: set[int] = set()
    start = threading.Barrier(4)

    def work(index: int) -> None:
        start.wait(TIMEOUT_S)
        for _ in range(50):
            with opened.context(index):
                seen[index].add(current_context())
                with opened.context(1 - index):
                    seen[1 - index].add(current_context())
                seen[index].add(current_context())
            outside.add(current_context())

    threads = [threading.Thread(target=work, args=(number % 2,)) for number in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(TIMEOUT_S)
    assert len(seen[0]) == len(seen[1]) == 1
    assert seen[0] != seen[1]
    assert outside == {0}
    for index in (0, 1):
        assert ctypes.CDLL("libcuda.so.1").cuDevicePrimaryCtxRelease_v2(index) == 0
    assert emulation.held().contexts == 0, "a context was retained more than once"
    forget()


def test_an_error_in_the_block_leaves_the_context(opened: Driver) -> None:
    with pytest.raises(KeyError), opened.context(0):
        raise KeyError
    assert current_context() == 0


@pytest.mark.parametrize("emulated_environment", [{"devices": 2}], indirect=True)
@pytest.mark.parametrize("is_nested", [False, True])
def test_an_interrupt_right_after_a_call_leaves_the_context(
    opened: Driver, monkeypatch: pytest.MonkeyPatch, is_nested: bool
) -> None:
    """Found: the device's context stayed the thread's current one."""
    with opened.context(1) if is_nested else contextlib.nullcontext():
        before = current_context()
        for turn in itertools.count():
            with monkeypatch.context() as patch:
                interrupt_after(turn, patch)
                try:
                    with opened.context(0):
                        break
                except KeyboardInterrupt:
                    assert current_context() == before
        assert turn > 1
    assert current_context() == 0


def interrupt_after(turn: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let one of all calls of the driver end as if a signal handler had raised meanwhile."""
    original, calls = Library.call, itertools.count()

    def interrupted(self: Library, name: str, *inputs: Any, **named: Any) -> Any:
        result = original(self, name, *inputs, **named)
        if next(calls) == turn:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(Library, "call", interrupted)


def test_capture_mode_is_relaxed_inside_the_block_only(opened: Driver) -> None:
    assert exchange_capture_mode(LOCAL) == GLOBAL
    with contextlib.suppress(KeyError), opened.relaxed_capture():
        assert exchange_capture_mode(RELAXED) == RELAXED
        raise KeyError
    assert exchange_capture_mode(GLOBAL) == LOCAL


# --- memory ---------------------------------------------------------------------------------------


def test_descriptors_are_not_inherited_by_programs(opened: Driver) -> None:
    handle = opened.create(0, GRANULE)
    descriptor = opened.export(handle)
    assert not os.get_inheritable(descriptor)
    opened.release(handle)
    os.close(descriptor)


def test_a_descriptor_alone_keeps_the_memory(
    opened: Driver, emulated_cuda: emulation.Emulated
) -> None:
    handle = opened.create(0, 3 * GRANULE)
    descriptor = opened.export(handle)
    opened.release(handle)
    assert emulated_cuda.used_bytes(0) == 3 * GRANULE
    os.close(descriptor)
    assert emulated_cuda.used_bytes(0) == 0


def test_access_is_what_was_asked_for(opened: Driver) -> None:
    handle = opened.create(0, GRANULE)
    address = opened.reserve(GRANULE)
    assert address % GRANULE == 0
    opened.map(address, GRANULE, handle)
    for is_writable, expected in ((True, "rw-"), (False, "r--"), (True, "rw-")):
        opened.set_access(address, GRANULE, 0, is_writable=is_writable)
        assert rights(address).startswith(expected)
    opened.unmap(address, GRANULE)
    opened.free_address(address, GRANULE)
    opened.release(handle)
    held = emulation.held()
    assert (held.handles, held.mappings, held.reservations) == (0, 0, 0)


def rights(address: int) -> str:
    with open("/proc/self/maps") as lines:
        return next(line.split()[1] for line in lines if line.startswith(f"{address:x}-"))


@pytest.mark.parametrize("emulated_environment", [{"copy_delay_ms": 100}], indirect=True)
def test_copies_are_over_when_the_stream_or_the_device_was_waited_for(opened: Driver) -> None:
    size = GRANULE
    content = bytes(range(256)) * (size // 256)
    with opened.context(0):
        stream = opened.new_stream()
        address = opened.allocate(size)
        pinned, back = opened.allocate_pinned(size), opened.allocate_pinned(size)
        ctypes.memmove(pinned, content, size)
        opened.copy_to_device(address, pinned, size, stream)
        assert ctypes.string_at(address, size) == bytes(size)
        opened.synchronize_stream(stream)
        assert ctypes.string_at(address, size) == content
        opened.copy_to_host(back, address, size, stream)
    opened.synchronize(0)
    assert ctypes.string_at(back, size) == content
    with opened.context(0):
        opened.free_pinned(pinned)
        opened.free_pinned(back)
        opened.destroy_stream(stream)
        opened.free(address)
    held = emulation.held()
    assert (held.linear, held.pinned, held.streams) == (0, 0, 0)


def test_memory_is_shared_by_ipc_handles(opened: Driver) -> None:
    script = """
import ctypes, sys
from trims_shim.memory.driver import driver
with driver().context(0):
    address = driver().ipc_open(bytes.fromhex(sys.stdin.readline()))
    print(ctypes.string_at(address, 4))
    ctypes.memset(address, ord("y"), 2)
    assert driver().ipc_open(bytes.fromhex(sys.stdin.readline())) == address
    driver().ipc_close(address)
    print(ctypes.string_at(address, 4))
    driver().ipc_close(address)
"""
    with opened.context(0):
        address = opened.allocate(GRANULE)
        ctypes.memset(address, ord("x"), GRANULE)
        handle = opened.ipc_handle(address)
        assert len(handle) == IPC_HANDLE_BYTES
        done = subprocess.run(
            [sys.executable, "-c", script],
            input=f"{handle.hex()}\n" * 2,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == ["b'xxxx'", "b'yyxx'"]
        assert ctypes.string_at(address, 4) == b"yyxx"
        opened.free(address)
