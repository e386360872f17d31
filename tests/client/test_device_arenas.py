"""Device memory is mapped once, read-only, for as long as somebody uses it, and no longer.

On the emulated driver, whose addresses this process can read.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import logging
import os
import random
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import emulated_cuda as emulation
import numpy
import pytest
import safetensors.numpy
from emulated_cuda import Emulated
from forks import passes_in_child
from granting import Grantor, bytes_on_device
from harness import PATIENCE_S, open_descriptors, wait_until

from trims_shim import stats
from trims_shim.client import cache as caches
from trims_shim.client import device_arenas
from trims_shim.client.cache import Cache
from trims_shim.client.device_arenas import DeviceArena
from trims_shim.errors import DriverFailure, NoSpace, NotServed, WireError
from trims_shim.formats import read_header
from trims_shim.memory.driver import driver, forget
from trims_shim.memory.libcuda import Library
from trims_shim.wire import messages

MIB = 1 << 20


class Owner:
    """Something that uses device memory, as a storage does."""


def hold(arena: DeviceArena, owner: object) -> None:
    """As torch's storages do: the arena stays mapped at least until ``owner`` is gone."""
    weakref.finalize(owner, id, arena).atexit = False


class Client:
    """A cache on a grantor's lines, and files to open with it."""

    def __init__(self, machine: Emulated, directory: Path) -> None:
        self.machine = machine
        self.device = machine.ids[0]
        self.grantor = Grantor(self.device)
        self.cache = self.grantor.cache()
        self.directory = directory

    def file(self, seed: int = 1, size_bytes: int = 3 * MIB) -> str:
        """A safetensors file of three tensors; one of them has no bytes."""
        path = self.directory / f"{seed}.safetensors"
        generator = numpy.random.default_rng(seed)
        arrays = {
            "large": generator.integers(0, 256, size_bytes, dtype=numpy.uint8),
            "small": generator.random(301, dtype=numpy.float32),
            "none": numpy.zeros((0, 3), dtype=numpy.float16),
        }
        safetensors.numpy.save_file(arrays, path)
        return str(path)

    def open(self, path: str, cache: Cache | None = None) -> DeviceArena:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            shared = cache or self.cache
            return shared.open_device(descriptor, name=path, device=self.device)
        finally:
            os.close(descriptor)


@pytest.fixture
def client(
    emulated_cuda: Emulated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Client]:
    forget()
    # What a failed test still holds is not for the next one to find.
    monkeypatch.setattr(device_arenas, "_process", device_arenas._Process())
    client = Client(emulated_cuda, tmp_path)
    # The first use of a device takes what is kept: a context, its streams.
    with driver().context(0):
        pass
    yield client
    gc.collect()
    device_arenas.reap()
    held = emulation.held()
    assert (held.mappings, held.reservations, held.handles) == (0, 0, 0)
    assert client.grantor.leases == {}
    assert device_arenas._process.index._entries == {}
    client.grantor.close()
    assert emulated_cuda.used_bytes() == 0
    forget()


def faulty(**faults: str) -> Any:
    """Run on a machine with these faults."""
    return pytest.mark.parametrize("emulated_environment", [faults], indirect=True)


def mapping_of(address: int) -> str:
    """The access rights of what is mapped at an address; empty when nothing is."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        borders, rights, *_ = line.split()
        start, end = (int(each, 16) for each in borders.split("-"))
        if start <= address < end:
            return rights
    return ""


def is_readable(address: int) -> bool:
    return mapping_of(address).startswith("r")


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def thread_count() -> int:
    return len(os.listdir("/proc/self/task"))


class TestMapping:
    def test_tensors_are_on_the_device_and_the_rest_in_the_outline(self, client: Client) -> None:
        path = client.file()
        arena = client.open(path)
        content = Path(path).read_bytes()
        assert (arena.device, arena.index) == (client.device, 0)
        assert bytes_on_device(arena, content)
        assert len(arena.layout.placed) == 2
        assert arena.size_bytes == arena.layout.size_bytes
        outline = memoryview(arena.outline.buffer).cast("B")
        assert arena.outline.size_bytes == len(content)
        assert read_header(outline) == read_header(content)
        for each in arena.layout.placed:
            assert not any(outline[each.source.offset_bytes : each.source.end_bytes])

    def test_it_is_mapped_read_only(self, client: Client) -> None:
        arena = client.open(client.file())
        assert mapping_of(arena.address).startswith("r-")
        assert mapping_of(arena.address + arena.size_bytes - 1).startswith("r-")

    def test_one_arena_for_all_loads(self, client: Client) -> None:
        path = client.file()
        arena = client.open(path)
        used, before = client.machine.used_bytes(), open_descriptors()
        assert client.open(path) is arena
        assert client.machine.used_bytes() == used
        assert open_descriptors() <= before
        assert (client.grantor.requests, len(client.grantor.leases)) == (1, 1)

    def test_another_file_of_the_same_content(self, client: Client, tmp_path: Path) -> None:
        """Only the daemon can tell; its second lease is given back at once."""
        path = client.file()
        other = tmp_path / "other.safetensors"
        other.write_bytes(Path(path).read_bytes())
        arena = client.open(path)
        before = open_descriptors()
        assert client.open(str(other)) is arena
        assert (client.grantor.requests, client.grantor.released) == (2, [2])
        assert open_descriptors() <= before
        assert client.open(str(other)) is arena
        assert client.grantor.requests == 2

    def test_a_file_that_may_still_change_is_asked_for_again(self, client: Client) -> None:
        client.grantor.is_settled = False
        path = client.file()
        arena = client.open(path)
        assert client.open(path) is arena
        assert client.grantor.requests == 2

    def test_two_images(self, client: Client) -> None:
        first, second = client.open(client.file(1)), client.open(client.file(2))
        assert first is not second
        assert bytes_on_device(first, Path(client.file(1)).read_bytes())
        assert bytes_on_device(second, Path(client.file(2)).read_bytes())

    def test_counters(self, client: Client) -> None:
        before = stats()
        arenas = [client.open(client.file()) for _ in range(2)]
        after = stats()
        assert (after.misses - before.misses, after.hits - before.hits) == (1, 1)
        assert after.bytes_shared - before.bytes_shared == 2 * arenas[0].size_bytes

    def test_legacy_handles(self, client: Client, tmp_path: Path) -> None:
        """The memory is another process's; the mapping is given back, the memory is not ours."""
        path = client.file()
        content = Path(path).read_bytes()
        code = (
            "import ctypes, sys\n"
            "from trims_shim.formats import layout_of\n"
            "from trims_shim.memory.device import DeviceMemory\n"
            "content = open(sys.argv[1], 'rb').read()\n"
            "layout = layout_of(content)\n"
            "memory = DeviceMemory(sys.argv[2], 'ipc').create(layout.size_bytes)\n"
            "for each in layout.placed:\n"
            "    part = content[each.source.offset_bytes : each.source.end_bytes]\n"
            "    ctypes.memmove(memory.address + each.offset_bytes, part, len(part))\n"
            "print(memory.handles[0].hex(), memory.allocations[0], flush=True)\n"
            "sys.stdin.read()\n"
        )
        owner = subprocess.Popen(
            [sys.executable, "-c", code, path, client.device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert owner.stdin is not None
        assert owner.stdout is not None
        try:
            handle, size = owner.stdout.readline().split()

            def by_handle(reply: messages.OpenImageReply) -> messages.OpenImageReply:
                assert reply.device is not None
                grant = messages.DeviceGrant(
                    "ipc", reply.device.layout, (int(size),), (bytes.fromhex(handle),)
                )
                return reply._replace(device=grant)

            client.grantor.change = by_handle
            arena = client.open(path)
            assert bytes_on_device(arena, content)
            address = arena.address
            del arena
            wait_until(lambda: client.grantor.released, "released")
            assert not is_readable(address)
        finally:
            owner.stdin.close()
            owner.wait(PATIENCE_S)
            owner.stdout.close()


class TestWhatIsNotServed:
    def test_switched_off(self, client: Client) -> None:
        with pytest.raises(NotServed, match="TRIMS_DEVICE") as caught:
            client.open(client.file(), client.grantor.cache(device="0"))
        assert caught.value.reason == "device_off"
        assert client.grantor.requests == 0

    def test_small_files(self, client: Client) -> None:
        with pytest.raises(NotServed) as caught:
            client.open(client.file(), client.grantor.cache(min_bytes="1G"))
        assert caught.value.reason == "small_file"
        assert client.grantor.requests == 0

    def test_a_device_this_process_does_not_see(self, client: Client) -> None:
        client.device = "GPU-00000000-0000-0000-0000-00000000dead"
        with pytest.raises(DriverFailure, match="0000dead"):
            client.open(client.file())
        assert client.grantor.tiers == [client.device]


def with_grant(**changes: Any) -> Callable[[messages.OpenImageReply], messages.OpenImageReply]:
    def change(reply: messages.OpenImageReply) -> messages.OpenImageReply:
        assert reply.device is not None
        return reply._replace(device=reply.device._replace(**changes))

    return change


class TestTrouble:
    """Nothing is left behind: no descriptor, no mapping, no lease."""

    def fails(self, client: Client, error: type[Exception], match: str) -> None:
        path = client.file()
        client.grantor.load(path)
        gc.collect()
        before, held = open_descriptors(), emulation.held()
        with pytest.raises(error, match=match):
            client.open(path)
        gc.collect()
        assert open_descriptors() <= before
        assert emulation.held() == held
        assert client.grantor.leases == {}
        assert client.grantor.released != []

    def test_another_layout(self, client: Client) -> None:
        client.grantor.change = with_grant(layout="00000000-2-5")
        self.fails(client, WireError, "00000000-2-5.*trims stop")

    def test_too_little_memory(self, client: Client) -> None:
        client.grantor.change = with_grant(allocations=(2 * MIB,))
        self.fails(client, WireError, f"in {2 * MIB} bytes")

    def test_no_memory(self, client: Client) -> None:
        client.grantor.change = lambda reply: reply._replace(device=None)
        self.fails(client, WireError, "no device memory")

    def test_an_outline_that_is_no_model_s(
        self, client: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("granting.outline_of", lambda content, layout: _zeros(len(content)))
        self.fails(client, WireError, "outline of .* is not that of a model")

    @pytest.mark.parametrize(
        ("emulated_environment", "call"),
        [
            # The grantor's own calls come first: it has mapped the image once to fill it.
            ({"fail": "cuMemImportFromShareableHandle:2"}, "cuMemImportFromShareableHandle"),
            ({"fail": "cuMemAddressReserve:2"}, "cuMemAddressReserve"),
            ({"fail": "cuMemMap:2"}, "cuMemMap"),
            ({"fail": "cuMemSetAccess:2"}, "cuMemSetAccess"),
        ],
        indirect=["emulated_environment"],
    )
    def test_calls_of_the_driver(self, client: Client, call: str) -> None:
        self.fails(client, DriverFailure, call)

    def test_an_interrupt_before_it_is_mapped(
        self, client: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Found: the descriptors and the lease were lost."""
        path = client.file()
        client.grantor.load(path)
        before = descriptors()
        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            patch.setattr(device_arenas, "adopt", interrupted)
            client.open(path)
        gc.collect()
        assert descriptors() == before
        assert client.grantor.released == [1]

    def test_an_interrupt_while_it_is_noted(
        self, client: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Found: the descriptors and the lease were lost."""
        path = client.file()
        client.grantor.load(path)
        before, held = descriptors(), emulation.held()
        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            patch.setattr(caches, "_note", interrupted)
            client.open(path)
        gc.collect()
        assert device_arenas.reap()
        assert descriptors() == before
        assert emulation.held() == held
        assert client.grantor.leases == {}

    def test_an_interrupt_while_it_is_mapped(self, client: Client) -> None:
        """Found: the memory stayed mapped, or its handle open, until the process ended."""
        path = client.file()
        client.grantor.load(path)
        before, held = descriptors(), emulation.held()
        file = os.open(path, os.O_RDONLY)
        # In a thread of its own, where an interrupt may leave another capture mode.
        with ThreadPoolExecutor(1) as thread:
            for turn in itertools.count():
                if not thread.submit(is_interrupted_while_mapped, client, file, turn).result():
                    break
                gc.collect()
                assert device_arenas.reap()
                assert descriptors() == before + 1
                assert emulation.held() == held, turn
                assert client.grantor.leases == {}
        os.close(file)
        assert turn > 100

    def test_an_interrupt_while_it_is_noted_as_mapped(
        self, client: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Found: the lease was given up first, and an ``ipc`` daemon may then free the memory."""
        held: list[int] = []
        client.grantor.on_release = lambda: held.append(emulation.held().mappings)
        serve = device_arenas._Process.serve

        def noted(process: Any, arena: DeviceArena) -> None:
            serve(process, arena)
            raise KeyboardInterrupt

        path = client.file()
        client.grantor.load(path)
        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            patch.setattr(device_arenas._Process, "serve", noted)
            client.open(path)
        wait_until(lambda: client.grantor.leases == {}, "released")
        assert held == [0]


def is_interrupted_while_mapped(client: Client, descriptor: int, turn: int) -> bool:
    """Whether a load is interrupted at the given one of the points at which a handler may run."""
    points: Iterator[int] | None = None

    def interrupt(frame: FrameType, event: str, argument: object) -> None:
        nonlocal points
        if event == "call" and frame.f_code is device_arenas._map.__code__:
            points = itertools.count()
        # At the start of a function, and after a call of one of C; those of ctypes are not told of.
        is_after = event == "return" and frame.f_code is Library.call.__code__
        is_point = is_after or event in ("call", "c_return")
        # An interrupt there leaves the lock taken on Python 3.14 (python/cpython#148874).
        is_point = is_point and getattr(argument, "__name__", "") != "__enter__"
        # Python's own lock of logging would stay taken, and the test's main thread needs it.
        is_point = is_point and frame.f_globals is not logging.__dict__
        if points is not None and is_point and next(points) == turn:
            raise KeyboardInterrupt

    try:
        sys.setprofile(interrupt)
        arena = client.cache.open_device(descriptor, name="model", device=client.device)
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    assert arena.address
    return False


def interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def _zeros(size_bytes: int) -> int:
    descriptor = os.memfd_create("zeros")
    os.truncate(descriptor, size_bytes)
    return descriptor


class TestLife:
    def test_who_holds_it_keeps_it(self, client: Client) -> None:
        owners = [Owner() for _ in range(5)]
        arena = client.open(client.file())
        address = arena.address
        for each in owners:
            hold(arena, each)
        del arena, each
        while owners:
            device_arenas.reap()
            assert is_readable(address)
            assert client.grantor.released == []
            owners.pop()
        wait_until(lambda: client.grantor.released == [1], "the lease released")
        assert not is_readable(address)

    def test_an_arena_nobody_held(self, client: Client) -> None:
        arena = client.open(client.file())
        address = arena.address
        del arena
        wait_until(lambda: client.grantor.released == [1], "the lease released")
        assert not is_readable(address)

    def test_the_lease_goes_after_the_mapping(self, client: Client) -> None:
        """The daemon must not count memory as free that is still mapped."""
        arena = client.open(client.file())
        address = arena.address
        seen: list[bool] = []
        client.grantor.on_release = lambda: seen.append(is_readable(address))
        del arena
        wait_until(lambda: seen, "the lease released")
        assert seen == [False]

    def test_evicted_memory_stays_until_it_is_unmapped(self, client: Client) -> None:
        path = client.file()
        arena = client.open(path)
        client.grantor.leases.clear()
        client.grantor.evict()
        client.grantor.leases[1] = ""
        assert bytes_on_device(arena, Path(path).read_bytes())
        assert client.machine.used_bytes() > 0
        del arena
        wait_until(lambda: client.machine.used_bytes() == 0, "the memory freed")

    @faulty(copy_delay_ms="300")
    def test_it_waits_for_work_in_flight(self, client: Client) -> None:
        path = client.file()
        arena = client.open(path)
        address, size = arena.address, arena.size_bytes
        wanted = ctypes.string_at(address, size)
        with driver().context(0):
            target, stream = driver().allocate_pinned(size), driver().new_stream()
            began = time.monotonic()
            driver().copy_to_host(target, address, size, stream)
            del arena
            wait_until(lambda: client.grantor.released, "released", interval_s=0.001)
            assert time.monotonic() - began >= 0.3
            assert not is_readable(address)
            driver().synchronize_stream(stream)
            assert ctypes.string_at(target, size) == wanted
            driver().destroy_stream(stream)
            driver().free_pinned(target)

    @faulty(fail="cuCtxSynchronize:1=900,cuCtxSynchronize:2=900")
    def test_it_waits_for_a_capture_to_end(self, client: Client) -> None:
        path = client.file()
        arena = client.open(path)
        address = arena.address
        del arena
        wait_until(lambda: client.grantor.released, "released in the end")
        assert not is_readable(address)

    @faulty(fail="cuCtxSynchronize:1=kill")
    def test_a_capture_we_know_of_is_not_disturbed(
        self, client: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The driver is not even asked to wait, which could spoil the capture."""
        for graph in (1, 2):
            device_arenas.begin_capture(graph)
        arena = client.open(client.file())
        address = arena.address
        del arena
        assert not device_arenas.reap(0.05)
        device_arenas.end_capture(1)
        assert not device_arenas.reap(0.05)
        assert is_readable(address)
        with monkeypatch.context() as patch:
            patch.setattr(type(driver()), "synchronize", lambda self, index: None)
            device_arenas.end_capture(2)
            assert device_arenas.reap()
        assert not is_readable(address)

    def test_a_capture_that_never_ends(
        self, client: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        device_arenas.begin_capture(1)
        client.open(client.file())
        assert not device_arenas.reap(0.05)
        monkeypatch.setattr(device_arenas, "_LONGEST_CAPTURE_S", 0.0)
        assert device_arenas.reap()
        assert client.grantor.released == [1]

    @faulty(fail="cuCtxSynchronize:1+=900")
    def test_while_a_capture_goes_on_it_is_revived(self, client: Client) -> None:
        """As much as somebody loads meanwhile, one mapping serves."""
        path = client.file()
        addresses, used = set(), set()
        for _ in range(20):
            arena = client.open(path)
            assert bytes_on_device(arena, Path(path).read_bytes())
            assert device_arenas.find(arena.address, 1) == (arena, 0)
            addresses.add(arena.address)
            used.add(client.machine.used_bytes())
            del arena
            time.sleep(0.002)
        assert len(addresses) == len(used) == 1
        assert (client.grantor.requests, client.grantor.released) == (1, [])
        # Let it end: what is left would be the next test's.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(driver()), "synchronize", lambda self, index: None)
            wait_until(lambda: client.grantor.released, "released")

    @faulty(fail="cuCtxSynchronize=700")
    def test_a_lost_context_has_nothing_to_wait_for(self, client: Client) -> None:
        before = stats().events.get("device:synchronize_failed", 0)
        client.open(client.file())
        wait_until(lambda: client.grantor.released, "released")
        assert stats().events["device:synchronize_failed"] > before

    def test_what_cannot_be_unmapped(self, client: Client) -> None:
        """The lease is given up all the same, and what comes after is served."""
        before = stats().events.get("device:unmap_failed", 0)
        path = client.file()
        arena = client.open(path)

        def fail() -> None:
            raise DriverFailure("cuMemUnmap failed")

        arena.image.mapping._undo.append(fail)
        del arena
        wait_until(lambda: client.grantor.released == [1], "released")
        assert stats().events["device:unmap_failed"] == before + 1
        assert bytes_on_device(client.open(path), Path(path).read_bytes())

    def test_loading_and_dropping_in_a_loop(self, client: Client) -> None:
        paths = [client.file(seed, MIB) for seed in range(4)]

        def turn() -> None:
            for path in paths:
                owner = Owner()
                hold(client.open(path), owner)
            del owner
            device_arenas.reap()
            client.grantor.evict()

        def footprint() -> tuple[int, int, int, int]:
            gc.collect()
            lines = len(Path("/proc/self/maps").read_text().splitlines())
            return lines, descriptors(), thread_count(), client.machine.used_bytes()

        threads = thread_count()  # with one of the test before, perhaps, that is about to go
        turn()
        wait_until(lambda: thread_count() <= threads, "the thread gone")
        before = footprint()
        for _ in range(25):
            turn()

        def is_as_before() -> bool:
            lines, *others = footprint()
            # The heap may have grown a bit; what a turn leaves behind is there 25 times.
            has_grown = any(now > then for now, then in zip(others, before[1:], strict=True))
            return lines < before[0] + 25 and not has_grown

        wait_until(is_as_before, f"as before: {before}")

    def test_no_thread_waits_for_nothing(self, client: Client) -> None:
        before = thread_count()  # with one of the test before, perhaps, that is about to go
        arena = client.open(client.file())
        assert thread_count() <= before
        del arena
        wait_until(lambda: client.grantor.released, "released")
        wait_until(lambda: thread_count() <= before, "the thread gone")

    def test_nothing_runs_at_exit(self, client: Client) -> None:
        arena, owner = client.open(client.file()), Owner()
        hold(arena, owner)
        registry = weakref.finalize._registry  # type: ignore[attr-defined]
        ours = [each for each in list(registry) if each.peek()[0] in (arena, owner)]
        assert [each.atexit for each in ours] == [False, False]


class TestFind:
    def test_the_borders(self, client: Client) -> None:
        arena = client.open(client.file())
        start, size = arena.address, arena.size_bytes
        assert device_arenas.find(start, size) == (arena, 0)
        assert device_arenas.find(start + 7, size - 7) == (arena, 7)
        for address, length in ((start, size + 1), (start + size, 1), (start - 1, 2), (0, 1)):
            assert device_arenas.find(address, length) is None

    @faulty(fail="cuCtxSynchronize:1=900")
    def test_what_is_retired_is_not_found(self, client: Client) -> None:
        arena = client.open(client.file())
        address = arena.address
        del arena
        assert device_arenas.find(address, 1) is None


class TestNoSpace:
    """The model before is let go of, and its lease is what the next one needs."""

    @faulty(fail="cuCtxSynchronize:1=900")
    def test_the_one_before_is_given_up_first(self, client: Client) -> None:
        def only_one() -> None:
            if client.grantor.leases:
                raise NoSpace("full")

        client.grantor.on_request = only_one
        paths = [client.file(seed, MIB) for seed in range(10)]
        for path in paths:
            arena = client.open(path)
            assert bytes_on_device(arena, Path(path).read_bytes())
            del arena

    def test_with_nothing_to_give_up(self, client: Client) -> None:
        def refuse() -> None:
            raise NoSpace("full")

        client.grantor.on_request = refuse
        with pytest.raises(NoSpace):
            client.open(client.file())
        assert client.grantor.requests == 1


class TestThreads:
    def test_one_model_at_once(self, client: Client) -> None:
        path = client.file()
        barrier = threading.Barrier(8)
        arenas: list[DeviceArena] = []

        def load() -> None:
            barrier.wait(PATIENCE_S)
            arenas.append(client.open(path))

        threads = [threading.Thread(target=load) for _ in range(8)]
        for each in threads:
            each.start()
        for each in threads:
            each.join(PATIENCE_S)
        assert len(arenas) == 8
        assert len(set(arenas)) == 1
        assert len(client.grantor.leases) == 1
        assert emulation.held().mappings == 1

    def test_loading_dropping_and_reviving(self, client: Client) -> None:
        """Whatever the order, bytes are right as long as they are held, and nothing is left."""
        paths = [client.file(seed, 64 << 10) for seed in range(3)]
        contents = [Path(path).read_bytes() for path in paths]
        problems: list[object] = []
        stop = threading.Event()

        def churn(seed: int) -> None:
            chance = random.Random(seed)
            while not stop.is_set():
                which = chance.randrange(3)
                try:
                    owner = Owner()
                    arena = client.open(paths[which])
                    hold(arena, owner)
                    if device_arenas.find(arena.address, 1) != (arena, 0):
                        problems.append("not found")
                    del arena
                    if chance.random() < 0.3:
                        time.sleep(chance.random() * 0.003)
                    arena = client.open(paths[which])
                    if not bytes_on_device(arena, contents[which]):
                        problems.append("wrong bytes")
                    del arena, owner
                    if chance.random() < 0.05:
                        gc.collect(0)
                except Exception as error:
                    problems.append(error)

        threads = [threading.Thread(target=churn, args=(seed,)) for seed in range(4)]
        for each in threads:
            each.start()
        stop.wait(1.5)
        stop.set()
        for each in threads:
            each.join(PATIENCE_S)
        assert problems == []


class TestProcesses:
    def test_a_forked_child_only_forgets(self, client: Client) -> None:
        path = client.file()
        owner = Owner()
        arena = client.open(path)
        hold(arena, owner)
        address, digest = arena.address, arena.digest

        def check() -> None:
            nonlocal arena, owner
            assert device_arenas.find(address, 1) is None
            assert device_arenas.held(digest, client.device) is None
            del arena, owner
            gc.collect()
            device_arenas.reap()
            assert client.grantor.released == []
            assert thread_count() == 1
            with pytest.raises(DriverFailure):
                client.open(path)

        assert passes_in_child(check)
        assert device_arenas.find(address, 1) == (arena, 0)
        assert bytes_on_device(arena, Path(path).read_bytes())

    @faulty(fail="cuCtxSynchronize:1+=900")
    def test_a_fork_while_something_is_retired(self, client: Client) -> None:
        """The child has no reaper, and the parent's goes on."""
        client.open(client.file())
        assert client.grantor.released == []

        def check() -> bool:
            device_arenas.reap()
            return client.grantor.released == [] and thread_count() == 1

        assert passes_in_child(check)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(driver()), "synchronize", lambda self, index: None)
            wait_until(lambda: client.grantor.released, "released by the parent")

    def test_at_exit_nothing_is_done(self, client: Client) -> None:
        """Neither what is in use nor what is retired; any such call would kill the process."""
        code = (
            "import os, sys, time\n"
            "from granting import Grantor\n"
            "from trims_shim.client import device_arenas\n"
            "grantor = Grantor(sys.argv[1]); cache = grantor.cache()\n"
            "def load(path):\n"
            "    f = os.open(path, os.O_RDONLY)\n"
            "    return cache.open_device(f, name=path, device=sys.argv[1])\n"
            "kept, dropped = load(sys.argv[2]), load(sys.argv[3])\n"
            "del dropped\n"
            "assert not grantor.released\n"
            "print('fine', flush=True)\n"
        )
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "TRIMS_TEST_CUDA_FAIL": "cuCtxSynchronize:1+=900,cuMemUnmap:3+=kill",
        }
        done = subprocess.run(
            [sys.executable, "-c", code, client.device, client.file(1), client.file(2)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "fine\n", "")


@pytest.mark.parametrize("emulated_environment", [{"devices": 2}], indirect=True)
class TestDevices:
    def test_numbers_are_this_process_s(
        self, emulated_cuda: Emulated, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for visible, order in (("0,1", (0, 1)), ("1,0", (1, 0)), ("1", (1,))):
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
            emulation.reset()
            forget()
            seen = tuple(device_arenas.device_id(index) for index in range(len(order)))
            assert seen == tuple(emulated_cuda.ids[each] for each in order)
            with pytest.raises(DriverFailure, match=f"no CUDA device {len(order)}"):
                device_arenas.device_id(len(order))
        forget()

    def test_one_arena_for_each_device(self, client: Client) -> None:
        path = client.file()
        first = client.open(path)
        other = Grantor(client.machine.ids[1])
        client.device = client.machine.ids[1]
        second = client.open(path, other.cache())
        assert (first.digest, first.index, second.index) == (second.digest, 0, 1)
        assert first is not second
        assert bytes_on_device(second, Path(path).read_bytes())
        del second
        wait_until(lambda: other.released, "released")
        other.close()


def test_two_mappings_share_one_copy(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """As two processes have them; the sizes that the tests above compare rest on it."""
    path = client.file()
    client.grantor.load(path)
    used = client.machine.used_bytes()
    first = client.open(path)
    monkeypatch.setattr(device_arenas, "_process", device_arenas._Process())
    second = client.open(path)
    assert first.address != second.address
    assert client.machine.used_bytes() == used
