"""The tiers together: when a device's is made, what of it may be used, and what holds for all."""

from __future__ import annotations

import itertools
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import emulated_cuda as emulation
import pytest
from device_images import MIB, safetensors
from emulated_cuda import Emulated
from harness import PATIENCE_S, wait_until

from trims_shim import config as configuration
from trims_shim import testing
from trims_shim.client import cache as caches
from trims_shim.config import ShareOrSize
from trims_shim.daemon import tiers as tiers_module
from trims_shim.daemon.device.uploading import Job, Uploader
from trims_shim.daemon.eviction import LeastRecentlyUsed
from trims_shim.daemon.loader import Loader
from trims_shim.daemon.sessions import Limits
from trims_shim.daemon.store import Store
from trims_shim.daemon.tiers import DeviceSettings, DeviceTier, HostTier, Tier, Tiers
from trims_shim.daemon.values import (
    Action,
    DropImage,
    GrantLease,
    Ingested,
    Opening,
    RefuseRequest,
    StartIngest,
)
from trims_shim.errors import (
    DriverFailure,
    TooManyRequests,
    TrimsError,
    UnknownDevice,
    UnknownImage,
)
from trims_shim.memory import nvml
from trims_shim.memory.device import DeviceAllocation, DeviceMemory
from trims_shim.memory.host import MemfdMemory
from trims_shim.specs import Identity, SegmentKind
from trims_shim.wire import admin

GIB = 1 << 30
GPU, GPU2 = emulation.device_ids(2)
A, B = "a" * 64, "b" * 64
_TENTH = ShareOrSize(share=0.1)


class Harness:
    """Tiers, and the loop that takes their jobs."""

    def __init__(self, **settings: str) -> None:
        config = configuration.load({}, device_headroom_bytes="64M", **settings)
        self.woken: queue.SimpleQueue[None] = queue.SimpleQueue()
        numbers = itertools.count(1)
        host = HostTier(
            Store(GIB, policy=LeastRecentlyUsed(), numbers=numbers),
            Loader(MemfdMemory(SegmentKind.MEMFD), threads=1, wake=self.wake),
        )
        self.tiers = Tiers(host, DeviceSettings.of(config), numbers=numbers, wake=self.wake)

    def wake(self) -> None:
        self.woken.put(None)

    def ask(self, name: str) -> list[Tier | TrimsError]:
        """What ``ready`` is told; filled by and by."""
        answers: list[Tier | TrimsError] = []
        self.tiers.when_ready(name, answers.append)
        return answers

    def turn(self) -> None:
        """Wait for a job, and finish it."""
        self.woken.get(timeout=PATIENCE_S)
        for tier in self.tiers:
            for finish in tier.loader.take_jobs():
                finish()

    def device(self, name: str = GPU) -> DeviceTier:
        answers = self.ask(name)
        while not answers:
            self.turn()
        (tier,) = answers
        assert isinstance(tier, DeviceTier), tier
        return tier


@pytest.fixture
def make(make_emulated_environment: object) -> Iterator[Callable[..., Harness]]:
    """After the emulated machine, so that uploaders end before it does."""
    made: list[Harness] = []

    def make(**settings: str) -> Harness:
        made.append(Harness(**settings))
        return made[-1]

    yield make
    for each in made:
        each.tiers.close()


def no_driver() -> Any:
    raise AssertionError("the driver is not to be touched")


class TestMaking:
    def test_nothing_touches_the_driver_before_somebody_asks(
        self, make: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tiers_module, "driver", no_driver)
        harness = make()
        assert harness.ask("host") == [harness.tiers.host]
        assert [tier.name for tier in harness.tiers] == ["host"]
        harness.tiers.tend()
        assert not harness.tiers.is_needed()

    def test_loads_that_are_stuck_are_not_waited_for(
        self, make: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tiers = make().tiers
        identity = Identity(device=1, inode=1, size_bytes=1, mtime_ns=0, ctime_ns=0)
        tiers.host.store.open(Opening(1, 1, 0, identity, "/model"), 1)
        assert tiers.is_needed()
        assert tiers.descriptor_count() == tiers.ingest_count() == 1
        monkeypatch.setattr(tiers.host.loader, "stuck_count", lambda: 1)
        assert not tiers.is_needed()

    def test_it_is_made_once_and_in_a_thread(
        self,
        make: Callable[..., Harness],
        emulated_cuda: Emulated,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        threads: list[threading.Thread] = []
        driver = tiers_module.driver

        def watched() -> Any:
            threads.append(threading.current_thread())
            return driver()

        monkeypatch.setattr(tiers_module, "driver", watched)
        harness = make()
        first, second = harness.ask(GPU), harness.ask(GPU)
        assert (first, second) == ([], [])
        assert harness.tiers.is_making()
        assert harness.tiers.is_needed()
        harness.turn()
        assert first == second == harness.ask(GPU) == harness.tiers.devices
        assert not harness.tiers.is_making()
        assert threads
        assert threading.current_thread() not in threads

    @pytest.mark.parametrize("threads", range(9))
    def test_no_thread_is_left_if_there_are_too_few(
        self,
        make: Callable[..., Harness],
        emulated_cuda: Emulated,
        monkeypatch: pytest.MonkeyPatch,
        threads: int,
    ) -> None:
        """Found: every try took some of the last ones, for good."""
        harness = make()
        started: list[threading.Thread] = []
        start = threading.Thread.start

        def start_some(thread: threading.Thread) -> None:
            if len(started) == threads:
                raise RuntimeError("can't start new thread")
            started.append(thread)
            start(thread)

        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start_some)
            answers = harness.ask(GPU)
            while not answers:
                harness.turn()
        assert [type(each) for each in answers] == [UnknownDevice]
        assert len(started) == threads
        # But the one that tries, which is for all devices.
        wait_until(lambda: not any(each.is_alive() for each in started[1:]))

    def test_a_driver_that_hangs_is_not_waited_for(
        self,
        make: Callable[..., Harness],
        emulated_cuda: Emulated,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """Found: the daemon could not end, and checks of images waited behind the driver."""
        hangs, driver = threading.Event(), tiers_module.driver

        def slow_driver() -> Any:
            hangs.wait(PATIENCE_S)
            return driver()

        monkeypatch.setattr(tiers_module, "driver", slow_driver)
        harness = make()
        answers = harness.ask(GPU)
        try:
            done: list[int] = []
            harness.tiers.host.loader.run(lambda: 1, done.append)
            harness.turn()
            assert done == [1], "other work goes on"
            harness.tiers.tend()
            assert (answers, harness.tiers.is_making()) == ([], True)
            now = time.monotonic()
            with monkeypatch.context() as later:
                later.setattr(time, "monotonic", lambda: now + 21)
                for _ in range(2):
                    harness.tiers.tend()
            answers += harness.ask(GPU)
            assert [type(each) for each in answers] == [UnknownDevice] * 2
            assert all("has not answered" in str(each) for each in answers)
            assert len(caplog.records) == 1
            assert not harness.tiers.is_needed()
        finally:
            hangs.set()
        harness.turn()
        assert harness.ask(GPU) == harness.tiers.devices != []

    def test_it_ends_while_the_driver_hangs(
        self, emulated_cuda: Emulated, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked, hangs = threading.Event(), threading.Event()

        def no_driver() -> Any:
            asked.set()
            hangs.wait(PATIENCE_S)
            raise DriverFailure("it has come back")

        monkeypatch.setattr(tiers_module, "driver", no_driver)
        harness = Harness()
        harness.ask(GPU)
        assert asked.wait(PATIENCE_S)
        begin_s = time.monotonic()
        harness.tiers.close()
        assert time.monotonic() - begin_s < PATIENCE_S / 2
        hangs.set()
        harness.woken.get(timeout=PATIENCE_S)  # Its thread is done, and the uploader has ended.

    def test_the_uploader_starts_meanwhile(
        self, make: Callable[..., Harness], emulated_cuda: Emulated, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The first load would wait for the driver twice; made-up devices start one process."""
        started: list[str] = []
        with monkeypatch.context() as patch:
            patch.setattr(Uploader, "start", lambda self: started.append(self.device))
            harness = make()
            for number in range(3):
                harness.ask(f"GPU-00000000-0000-4000-8000-{number:012x}")
                harness.turn()
        assert len(started) == 1
        assert make().device().loader.uploader.pid is not None

    def test_off(self, make: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tiers_module, "driver", no_driver)
        (error,) = make(device_backend="off").ask(GPU)
        assert isinstance(error, UnknownDevice)
        assert "TRIMS_DEVICE_BACKEND=off" in str(error)

    def test_without_the_package_that_says_what_others_need(
        self, make: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tiers_module, "driver", no_driver)
        monkeypatch.setattr(tiers_module.nvml, "is_installed", lambda: False)
        harness = make()
        answers = harness.ask(GPU)
        harness.turn()
        (error,) = answers
        assert isinstance(error, UnknownDevice)
        assert "pip install" in str(error)

    @pytest.mark.parametrize("name", ["", "cuda:0", "GPU-1", "0", GPU + "\n", "TPU" + GPU[3:]])
    def test_what_is_no_id(
        self, make: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        monkeypatch.setattr(tiers_module, "driver", no_driver)
        (error,) = make().ask(name)
        assert isinstance(error, UnknownDevice)

    def test_instances_of_mig_are_looked_for(
        self, make: Callable[..., Harness], emulated_cuda: Emulated
    ) -> None:
        harness = make()
        assert harness.ask("MIG" + GPU[3:]) == []
        harness.turn()

    def test_a_reason_is_kept_for_a_while(
        self,
        make: Callable[..., Harness],
        emulated_cuda: Emulated,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        harness = make()
        answers = harness.ask(GPU2)
        harness.turn()
        (error,) = answers
        assert isinstance(error, UnknownDevice)
        assert GPU2 in str(error)
        assert [str(each) for each in harness.ask(GPU2)] == [str(error)]
        now = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now + 31)
        assert harness.ask(GPU2) == []
        harness.turn()
        assert [record.levelname for record in caplog.records] == ["WARNING"], "one per cause"

    def test_reasons_do_not_pile_up(
        self,
        make: Callable[..., Harness],
        emulated_cuda: Emulated,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        harness = make()
        for number in range(70):
            harness.ask(f"GPU-00000000-0000-4000-8000-{number:012x}")
            harness.turn()
        assert len(harness.tiers._unavailable) == 64
        assert len(caplog.records) == 64, "the log would grow as long as somebody asks"


class TestRoom:
    @pytest.mark.parametrize(
        ("size", "machine", "budget"),
        [("25%", {}, GIB // 4), ("100M", {}, 100 * MIB), ("50%", {"nvml": 0}, GIB // 2)],
    )
    def test_the_budget(
        self, make: Callable[..., Harness], request: Any, size: str, machine: Any, budget: int
    ) -> None:
        variables = request.getfixturevalue("make_emulated_environment")(**machine)
        monkeypatch = request.getfixturevalue("monkeypatch")
        _show(variables, monkeypatch)
        tier = make(device_bytes=size).device()
        assert tier.store.totals().budget_bytes == budget
        assert tier.free_bytes() == (-1 if machine else GIB)
        assert tier.withheld_bytes(MIB) == 0
        if machine:
            assert tier.missing_bytes() == 0, "nothing is evicted for what nobody knows"

    def test_what_fits_and_what_goes_is_as_set(
        self, make: Callable[..., Harness], emulated_cuda: Emulated
    ) -> None:
        store = make(device_bytes="16M", eviction="never").device().store
        padded = Opening(1, 3, 0, Identity(1, 3, 15 * MIB, 0, 0), "/3")
        assert isinstance(store.open(padded, 1)[0], RefuseRequest)
        first, second = (Identity(1, number, 9 * MIB, 0, 0) for number in (1, 2))
        (start,) = store.open(Opening(1, 1, 0, first, "/1"), 1)
        assert isinstance(start, StartIngest)
        store.ingest_done(start.ingest, Ingested(A, 9 * MIB, True, 1), 1)
        store.close_session(1, 1)
        (refusal,) = store.open(Opening(2, 2, 0, second, "/2"), 1)
        assert isinstance(refusal, RefuseRequest)
        assert "TRIMS_DEVICE_BYTES" in str(refusal.error)

    def test_a_share_is_of_the_most_that_others_left(
        self, make: Callable[..., Harness], emulated_cuda: Emulated
    ) -> None:
        """Found: a device that was full at first was used by nobody ever after."""
        taken = DeviceMemory(GPU, "vmm").create(GIB)
        try:
            harness = make(device_bytes="50%")
            tier = harness.device()
            assert tier.store.totals().budget_bytes == 0
        finally:
            taken.close()
        tier.measure()
        harness.tiers.tend()
        assert tier.store.totals().budget_bytes == GIB // 2
        taken = DeviceMemory(GPU, "vmm").create(GIB // 2)
        try:
            tier.measure()
            harness.tiers.tend()
            assert tier.store.totals().budget_bytes == GIB // 2, "the head-room keeps them apart"
        finally:
            taken.close()

    def test_a_load_that_begins_while_it_is_measured_leaves_no_more(
        self,
        make: Callable[..., Harness],
        emulated_cuda: Emulated,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Found: its memory, in the account before it is made, counted as ours and as free."""
        harness = make(device_bytes="50%")
        tier = harness.device()
        create = tier.loader.memory.create

        def measured(device_bytes: int) -> DeviceAllocation:
            tier.measure()
            return create(device_bytes)

        monkeypatch.setattr(tier.loader.memory, "create", measured)
        with tier.loader._memory_for(GIB // 4) as memory:
            harness.tiers.tend()
            assert memory is not None
            memory.close()
        assert tier.store.totals().budget_bytes == GIB // 2

    def test_a_size_is_what_was_asked_for(
        self, make: Callable[..., Harness], emulated_cuda: Emulated
    ) -> None:
        harness = make(device_bytes=str(64 * MIB))
        tier = harness.device()
        harness.tiers.tend()
        assert tier.store.totals().budget_bytes == 64 * MIB

    def test_what_others_take_is_withheld(
        self, make: Callable[..., Harness], emulated_cuda: Emulated
    ) -> None:
        tier = make(device_bytes=str(GIB)).device()
        assert tier.withheld_bytes(MIB) == 64 * MIB, "the head-room"
        assert tier.missing_bytes() < 0
        taken = DeviceMemory(GPU, "vmm").create(GIB - 32 * MIB)
        try:
            tier.measure()
            assert tier.free_bytes() == 32 * MIB
            assert tier.withheld_bytes(MIB) == GIB + 32 * MIB
            assert tier.missing_bytes() == 32 * MIB
        finally:
            taken.close()
        tier.measure()
        assert tier.withheld_bytes(MIB) == 64 * MIB

    def test_our_own_images_are_not_withheld(
        self, make: Callable[..., Harness], emulated_cuda: Emulated
    ) -> None:
        """Nor need it be measured again when one of them comes or goes."""
        tier = make(device_bytes=str(GIB)).device()
        memory = tier.loader.memory.create(100 * MIB)
        tier.loader._account.add(100 * MIB)
        assert tier.free_bytes() == GIB - 100 * MIB
        assert tier.withheld_bytes(MIB) == 64 * MIB
        tier.measure()
        assert tier.free_bytes() == GIB - 100 * MIB
        assert tier.withheld_bytes(MIB) == 64 * MIB
        memory.close()
        tier.loader._account.add(-100 * MIB)
        assert tier.free_bytes() == GIB
        tier.loader._account.add(2 * GIB)
        assert tier.free_bytes() == 0, "less is no number, or means that NVML does not say"
        tier.loader._account.add(-2 * GIB)

    @pytest.mark.parametrize("backend", ["vmm", "ipc"])
    def test_a_look_while_an_image_is_made_evicts_nothing(
        self,
        emulated_cuda: Emulated,
        make: Callable[..., Harness],
        make_file: Callable[..., str],
        monkeypatch: pytest.MonkeyPatch,
        backend: str,
    ) -> None:
        """What is measured then is believed until the next second, when the image is there."""
        harness = make(device_backend=backend)
        tier = harness.device()
        path = make_file(safetensors((8 * MIB,)))

        def measured(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **settings: Any) -> Any:
                made = function(*arguments, **settings)
                tier.measure()
                return made

            return call

        if backend == "vmm":
            monkeypatch.setattr(DeviceMemory, "create", measured(DeviceMemory.create))
        else:
            monkeypatch.setattr(Job, "upload", measured(Job.upload))
        descriptor = os.open(path, os.O_RDONLY)
        opening = Opening(1, 1, 0, Identity.from_stat(os.fstat(descriptor)), "/model")
        tier.loader.start(StartIngest(1, opening, False), descriptor)
        harness.woken.get(timeout=PATIENCE_S)
        (finished,) = tier.loader.take_finished()
        assert finished.error is None
        try:
            assert tier.loader.allocated_bytes() == finished.segment.resident_bytes()
            assert tier.free_bytes() >= GIB - emulated_cuda.used_bytes(GPU)
        finally:
            tier.loader.discard(1)
        assert tier.loader.allocated_bytes() == 0

    def test_the_end_does_not_wait_for_nvml(
        self, emulated_cuda: Emulated, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        harness = Harness()
        tier = harness.device()
        asked, released = threading.Event(), threading.Event()

        def hang(device: str) -> int:
            asked.set()
            released.wait()
            return 0

        monkeypatch.setattr(nvml, "free_bytes", hang)
        harness.tiers.tend()
        harness.tiers.tend()
        assert asked.wait(PATIENCE_S)
        end = threading.Thread(target=harness.tiers.close, daemon=True)
        end.start()
        end.join(PATIENCE_S)
        has_ended, free_bytes = not end.is_alive(), tier.free_bytes()
        released.set()
        assert has_ended
        assert free_bytes == GIB, "as it was measured before"

    def test_an_image_that_comes_during_a_look_is_not_taken_twice(
        self,
        make: Callable[..., Harness],
        emulated_cuda: Emulated,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        tier = make(device_bytes=str(GIB)).device()
        looks: list[str] = []

        def free_bytes(device: str) -> int:
            looks.append(device)
            if len(looks) == 1:
                tier.loader._account.add(100 * MIB)
            return GIB - 100 * MIB

        with monkeypatch.context() as patch:
            patch.setattr(nvml, "free_bytes", free_bytes)
            tier.measure()
        assert tier.free_bytes() == GIB - 100 * MIB
        assert tier.withheld_bytes(MIB) == 64 * MIB
        tier.loader._account.add(-100 * MIB)

    def test_looks_do_not_pile_up_while_nvml_hangs(
        self,
        make: Callable[..., Harness],
        emulated_cuda: Emulated,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        harness = make()
        harness.device()
        looks: queue.SimpleQueue[str] = queue.SimpleQueue()
        released = threading.Event()

        def hang(device: str) -> int:
            looks.put(device)
            released.wait(PATIENCE_S)
            return GIB

        monkeypatch.setattr(nvml, "free_bytes", hang)
        for _ in range(5):
            harness.tiers.tend()
        assert looks.get(timeout=PATIENCE_S) == GPU
        released.set()
        (tier,) = harness.tiers.devices
        tier._measurer.shutdown(wait=True)
        assert looks.empty()

    def test_no_thread_is_left_at_the_end(self, emulated_cuda: Emulated) -> None:
        before = set(threading.enumerate())
        harness = Harness()
        harness.device()
        harness.tiers.tend()
        harness.tiers.close()
        wait_until(lambda: set(threading.enumerate()) <= before)

    def test_what_leaves_need_not_be_evicted_again(
        self, make: Callable[..., Harness], emulated_cuda: Emulated
    ) -> None:
        tier = make(device_bytes=str(GIB)).device()
        memory = tier.loader.memory.create(GIB - 32 * MIB)
        tier.loader._account.add(GIB - 32 * MIB)
        tier.measure()
        assert tier.missing_bytes() == 32 * MIB
        tier.loader._account.begin_leaving(30 * MIB)
        assert tier.missing_bytes() == 2 * MIB
        tier.loader._account.end_leaving(30 * MIB)
        tier.loader._account.add(-(GIB - 32 * MIB))
        memory.close()

    @staticmethod
    def load(host: HostTier, number: int, size: int, *, begins: bool) -> list[Action]:
        """A load of the host tier, of which a thread has made the segment, or not yet."""
        identity = Identity(device=1, inode=number, size_bytes=size, mtime_ns=0, ctime_ns=0)
        opening = Opening(1, number, 0, identity, f"/{number}")
        actions = host.store.open(opening, 1, withheld_bytes=host.withheld_bytes(size))
        if begins:
            host.loader._pending[number] = host.loader.memory.create(size).seal()
        return actions

    def test_a_load_that_has_not_begun_hides_nothing_that_lingers(
        self, make: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Of 1 GiB, 400 MiB are mapped by somebody, and a load waits for its turn."""
        host = make().tiers.host
        monkeypatch.setattr(tiers_module, "available_bytes", lambda: 1 << 50)
        memory = host.loader.memory
        monkeypatch.setattr(memory, "used_bytes", lambda: 400 * MIB + memory.held_bytes())
        assert host.lingering_bytes() == 400 * MIB
        assert isinstance(self.load(host, 1, 400 * MIB, begins=False)[0], StartIngest)
        assert host.lingering_bytes() == 400 * MIB
        assert isinstance(self.load(host, 2, 400 * MIB, begins=False)[0], RefuseRequest)

    def test_memory_of_loads_under_way_is_not_taken_twice(
        self, make: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What they have reserved is what the machine has less, and room for others is left."""
        host = make().tiers.host
        memory = host.loader.memory
        host._leaves_room_for_a_copy = False
        machine = host._margin_bytes() + 60 * MIB
        monkeypatch.setattr(tiers_module, "available_bytes", lambda: machine - memory.held_bytes())
        assert isinstance(self.load(host, 1, 30 * MIB, begins=True)[0], StartIngest)
        assert isinstance(self.load(host, 2, 31 * MIB, begins=False)[0], RefuseRequest)
        assert isinstance(self.load(host, 3, 20 * MIB, begins=False)[0], StartIngest)
        assert isinstance(self.load(host, 4, 11 * MIB, begins=False)[0], RefuseRequest)
        assert isinstance(self.load(host, 5, 10 * MIB, begins=True)[0], StartIngest)

    @pytest.mark.parametrize(
        ("headroom", "largest"),
        [(None, 50 * MIB), (ShareOrSize(size_bytes=0), 100 * MIB), (_TENTH, 90 * MIB)],
    )
    def test_a_load_leaves_room_for_a_copy(
        self, monkeypatch: pytest.MonkeyPatch, headroom: ShareOrSize | None, largest: int
    ) -> None:
        """Found: where a model just fitted, programs that wrote all of it were killed."""
        monkeypatch.setattr(tiers_module, "memory_limit_bytes", lambda: 100 * MIB)
        monkeypatch.setattr(tiers_module, "_MARGIN_FRACTION", 1 << 30)
        store = Store(GIB, policy=LeastRecentlyUsed())
        loader = Loader(MemfdMemory(SegmentKind.MEMFD), threads=1, wake=lambda: None)
        host = HostTier(store, loader, headroom)
        monkeypatch.setattr(
            tiers_module, "available_bytes", lambda: 100 * MIB - loader.memory.held_bytes()
        )
        refusal = self.load(host, 1, largest + 1, begins=False)[0]
        assert isinstance(refusal, RefuseRequest)
        assert "lower TRIMS_HOST_HEADROOM_BYTES" in str(refusal.error)
        assert isinstance(self.load(host, 2, largest, begins=True)[0], StartIngest)
        host.close()

    def test_an_unused_image_makes_no_more_room_than_it_takes(
        self, make: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """40 MiB are unused and 1 MiB is free: not enough for an image of 30 MiB and a copy."""
        host = make().tiers.host
        monkeypatch.setattr(host, "_margin_bytes", lambda: 0)
        memory = host.loader.memory
        (start,) = self.load(host, 1, 40 * MIB, begins=True)
        assert isinstance(start, StartIngest)
        host.store.ingest_done(start.ingest, Ingested(A, 40 * MIB, True, 1), 1)
        host.store.close_session(1, 1)
        monkeypatch.setattr(tiers_module, "available_bytes", lambda: 41 * MIB - memory.held_bytes())
        assert isinstance(self.load(host, 2, 30 * MIB, begins=False)[0], RefuseRequest)
        drop, *_, start = self.load(host, 3, 20 * MIB, begins=False)
        assert isinstance(drop, DropImage)
        assert isinstance(start, StartIngest)

    def test_memory_that_others_need_is_given_back(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tiers_module, "memory_limit_bytes", lambda: 320 * MIB)
        monkeypatch.setattr(tiers_module, "available_bytes", lambda: 7 * MIB)
        for headroom, missing in ((None, 3 * MIB), (_TENTH, 25 * MIB)):
            store = Store(GIB, policy=LeastRecentlyUsed())
            loader = Loader(MemfdMemory(SegmentKind.MEMFD), threads=1, wake=lambda: None)
            host = HostTier(store, loader, headroom)
            assert host.missing_bytes() == missing
            host.close()

    def test_what_is_left_to_others_follows_a_limit_that_is_lowered(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Found: of a cgroup made much smaller, all was left, and nothing was kept any more."""
        limit = 3200 * MIB
        monkeypatch.setattr(tiers_module, "memory_limit_bytes", lambda: limit)
        monkeypatch.setattr(tiers_module, "available_bytes", lambda: limit // 2)
        store = Store(GIB, policy=LeastRecentlyUsed())
        loader = Loader(MemfdMemory(SegmentKind.MEMFD), threads=1, wake=lambda: None)
        host = HostTier(store, loader)
        limit = 160 * MIB
        assert host.missing_bytes() < 0
        assert isinstance(self.load(host, 1, 30 * MIB, begins=False)[0], StartIngest)
        host.close()

    @pytest.mark.parametrize(
        ("used_bytes", "lingering_bytes"), [(None, -1), (-1, 0), (0, 0), (5, 5)], ids=str
    )
    def test_what_lingers(
        self,
        make: Callable[..., Harness],
        monkeypatch: pytest.MonkeyPatch,
        used_bytes: int | None,
        lingering_bytes: int,
    ) -> None:
        """A segment that is being filled takes less than it will."""
        host = make().tiers.host
        held = host.loader.memory.held_bytes()
        used = None if used_bytes is None else held + used_bytes
        monkeypatch.setattr(host.loader.memory, "used_bytes", lambda: used)
        assert host.lingering_bytes() == lingering_bytes

    def test_outlines_are_withheld_from_the_host(self, make: Callable[..., Harness]) -> None:
        host = make().tiers.host
        before = host.withheld_bytes(MIB)
        host.outline_bytes = lambda: before + 5
        assert host.withheld_bytes(MIB) == before + 5

    def test_outlines_are_those_of_all_devices(
        self, make: Callable[..., Harness], emulated_cuda: Emulated, make_file: Callable[..., str]
    ) -> None:
        harness = make()
        tier, host = harness.device(), harness.tiers.host
        assert host.outline_bytes() == 0
        descriptor = os.open(make_file(safetensors((MIB,))), os.O_RDONLY)
        opening = Opening(1, 1, 0, Identity.from_stat(os.fstat(descriptor)), "/model")
        tier.loader.start(StartIngest(1, opening, False), descriptor)
        harness.woken.get(timeout=PATIENCE_S)
        (finished,) = tier.loader.take_finished()
        assert finished.error is None
        tier.loader.adopt(1, A)
        assert host.outline_bytes() > 0
        tier.loader.drop(A)
        assert host.outline_bytes() == 0


def _show(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulated machine, for this process."""
    from trims_shim.memory import driver, nvml

    emulation.load()
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    emulation.reset()
    driver.forget()
    nvml.forget()


class TestPeers:
    THIRD = emulation.device_ids(3)[2]

    @staticmethod
    def put(tiers: Tiers, tier: Tier, digest: str, identity: Identity, *, user: int = 1) -> None:
        opening = Opening(1, next(tiers._numbers), user, identity, "/a")
        (start,) = tier.store.open(opening, 1)
        tier.store.ingest_done(start.ingest, Ingested(digest, 10, True, 1), 1)  # type: ignore[union-attr]

    @pytest.mark.parametrize("emulated_environment", [{"devices": 3}], indirect=True)
    def test_the_nearest_device_with_an_image(
        self, make: Callable[..., Harness], emulated_cuda: Emulated
    ) -> None:
        harness = make()
        first, second, third = (harness.device(each) for each in (GPU, GPU2, self.THIRD))
        tiers, identity = harness.tiers, Identity(1, 1, 10, 0, 0)
        assert third.rank_of(second) == 0
        assert third.rank_of(first) == 1
        assert tiers.trusted_digest(1, identity) is tiers.peer_with(A, third) is None
        self.put(tiers, first, A, identity)
        assert tiers.peer_with(A, third) is first
        self.put(tiers, second, A, identity)
        assert tiers.peer_with(A, third) is second
        assert tiers.peer_with(A, second) is first, "not itself"
        assert tiers.trusted_digest(1, identity) == A
        assert tiers.trusted_digest(2, identity) is None, "another user has proved nothing"
        assert third.loader.peers is not None
        third.loader.peers._avoided_until_s[GPU2] = time.monotonic() + 60
        assert tiers.peer_with(A, third) is first

    @pytest.mark.parametrize(
        ("emulated_environment", "settings"),
        [
            ({"devices": 2, "peer": 0}, {}),
            ({"devices": 2, "fail": "cuDeviceGetP2PAttribute"}, {}),
            ({"devices": 2}, {"device_peers": "0"}),
            ({"devices": 2}, {"device_backend": "ipc"}),
        ],
        indirect=["emulated_environment"],
        ids=["no peers", "an old driver", "off", "ipc"],
    )
    def test_devices_that_do_not_copy(
        self, make: Callable[..., Harness], emulated_cuda: Emulated, settings: dict[str, str]
    ) -> None:
        harness = make(**settings)
        first, second = harness.device(GPU), harness.device(GPU2)
        assert first.loader.peers is second.loader.peers is None
        self.put(harness.tiers, first, A, Identity(1, 1, 10, 0, 0))
        assert harness.tiers.peer_with(A, second) is None


class _Machine:
    """Tiers with images, by the stores' word alone."""

    def __init__(self, harness: Harness) -> None:
        self.tiers = harness.tiers
        self.device = harness.device()
        self.requests = itertools.count(1)

    def put(self, tier: Tier, digest: str, name: str, *, user: int = 1, session: int = 1) -> int:
        identity = Identity(1, next(self.requests), 10, 0, 0)
        opening = Opening(session, next(self.requests), user, identity, name)
        (start,) = tier.store.open(opening, 1)
        result = Ingested(digest, 10, True, 1)
        actions = tier.store.ingest_done(start.ingest, result, 1)  # type: ignore[union-attr]
        (grant,) = (each for each in actions if isinstance(each, GrantLease))
        return grant.lease


@pytest.fixture
def machine(make: Callable[..., Harness], emulated_cuda: Emulated) -> _Machine:
    return _Machine(make())


class TestAll:
    def test_leases_are_counted_and_released_everywhere(self, machine: _Machine) -> None:
        tiers = machine.tiers
        leases = [
            machine.put(tiers.host, A, "/a"),
            machine.put(machine.device, A, "/a"),
            machine.put(machine.device, B, "/b", session=2),
        ]
        assert len(set(leases)) == 3
        assert (tiers.lease_count(), tiers.lease_count(1)) == (3, 2)
        for lease in leases[:2]:
            tiers.release(2, lease, 2)
        assert tiers.lease_count() == 3, "not his"
        tiers.release(1, leases[1], 2)
        assert [tier.store.lease_count() for tier in tiers] == [1, 1]
        tiers.close_session(1, 3)
        assert tiers.is_needed(), "at a device"
        tiers.close_session(2, 3)
        assert not tiers.is_needed()

    def test_find(self, machine: _Machine) -> None:
        tiers = machine.tiers
        machine.put(tiers.host, A, "/a")
        machine.put(machine.device, A, "/a")
        machine.put(machine.device, "a" * 10 + "c" * 54, "/c")
        machine.put(machine.device, B, "/b", user=2)
        find = lambda text, **more: tiers.find(  # noqa: E731
            text, **{"user": 1, "may_see_all": True, **more}
        )
        assert find("/a") == find("a" * 11) == A
        assert find("/b") == B
        with pytest.raises(UnknownImage, match="more digits"):
            find("a" * 8)
        with pytest.raises(UnknownImage, match="of a digest, 6 digits or more"):
            find("a" * 5)
        with pytest.raises(UnknownImage, match="'000000'; "):
            find("0" * 6)
        with pytest.raises(UnknownImage):
            find("/b", may_see_all=False)
        with pytest.raises(UnknownImage):
            find("/b", tier="host")
        assert find("a" * 8, tier="host") == A
        with pytest.raises(UnknownDevice, match="trims status"):
            find("/a", tier=GPU2)
        assert [tier.name for tier in tiers.holding(A)] == ["host", GPU]
        assert tiers.holding(A, tier=GPU) == [machine.device]
        assert tiers.holding("0" * 64) == []

    def test_find_pinned_ones_first_only_where_that_is_asked(self, machine: _Machine) -> None:
        tiers = machine.tiers
        for digest in (A, B):
            machine.put(machine.device, digest, "/a")
        machine.device.store.pin(A, 1)
        for prefers_pinned, expected in ((False, B), (True, A)):
            found = tiers.find("/a", user=1, may_see_all=False, prefers_pinned=prefers_pinned)
            assert found == expected

    def test_status(self, machine: _Machine) -> None:
        machine.put(machine.device, A, "/a")
        status = machine.device.status()
        assert status == admin.DeviceStatus(
            device=GPU,
            name="Emulated GPU",
            backend="vmm",
            total_bytes=GIB,
            free_bytes=GIB,
            budget_bytes=int(GIB * 0.8),
            headroom_bytes=64 * MIB,
            resident_bytes=10,
            reserved_bytes=0,
            lingering_bytes=-1,
        )


def test_limits_count_all_tiers(emulated_cuda: Emulated, make_file: Callable[..., str]) -> None:
    path = make_file(safetensors((MIB, 5)))
    with testing.FakeDaemon(device_headroom_bytes="64M", device_bytes="100M") as daemon:
        server = daemon._server
        assert server is not None
        server.sessions.limits = Limits(leases=2)
        descriptor = os.open(path, os.O_RDONLY)
        line = caches.cache()._pool._connect(may_start=False, is_heard=False)
        granted = [line.open_image(descriptor, path, tier=tier) for tier in ("host", GPU)]
        for tier in ("host", GPU):
            with pytest.raises(TooManyRequests, match="2 leases"):
                line.open_image(descriptor, path, tier=tier)
        line.release(granted[0].reply.lease)
        granted.append(line.open_image(descriptor, path, tier=GPU))
        for each in granted:
            for one in (each.descriptor, *each.allocations):
                os.close(one)
        os.close(descriptor)
        line.close()


def test_the_fake_daemon_has_them_too(
    emulated_cuda: Emulated, make_file: Callable[..., str]
) -> None:
    content = safetensors((MIB, 5))
    path = make_file(content)
    with testing.FakeDaemon(device_headroom_bytes="64M", device_bytes="100M") as daemon:
        descriptor = os.open(path, os.O_RDONLY)
        line = caches.cache()._pool._connect(may_start=False, is_heard=False)
        for outcome in ("miss", "hit"):
            granted = line.open_image(descriptor, path, tier=GPU)
            assert granted.reply.outcome == outcome
            assert granted.reply.device is not None
            for each in (granted.descriptor, *granted.allocations):
                os.close(each)
        assert daemon.reads(path) == 1
        assert [image.resident_bytes for image in daemon.images] == [2 * MIB]
        assert daemon.leases == 2
        with pytest.raises(UnknownDevice):
            line.open_image(descriptor, path, tier=GPU2)
        status = line.request(admin.GetStatusRequest())
        assert [image.tier for image in status.images] == [GPU]
        verified = line.request(admin.VerifyImageRequest(path))
        assert verified.computed == verified.digest
        os.close(descriptor)
        line.close()


@pytest.mark.parametrize(
    "emulated_environment", [{"memory_bytes": 16 * MIB, "nvml": 0}], indirect=True, ids=["16 MiB"]
)
def test_the_fake_daemon_makes_room(emulated_cuda: Emulated, make_file: Callable[..., str]) -> None:
    """Its one thread cannot wait for images that are copied away: they go at once."""
    paths = [make_file(safetensors((5 * MIB,), seed=seed), f"{seed}.bin") for seed in (1, 2)]
    others = DeviceMemory(GPU, "vmm").create(6 * MIB)
    with testing.FakeDaemon(device_headroom_bytes="0", device_bytes="100%") as daemon:
        line = caches.cache()._pool._connect(may_start=False, is_heard=False)
        for path in paths:
            descriptor = os.open(path, os.O_RDONLY)
            granted = line.open_image(descriptor, path, tier=GPU)
            for each in (descriptor, granted.descriptor, *granted.allocations):
                os.close(each)
            line.release(granted.reply.lease)
        assert [names[0][1] for names in (image.names for image in daemon.images)] == [paths[1]]
        assert daemon.counters["evicted_under_pressure"] == 1
        line.close()
    others.close()
