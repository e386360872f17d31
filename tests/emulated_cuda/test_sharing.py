"""Memory between processes: it moves as descriptors, and what the dead held is free at once."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest

import emulated_cuda as emulation
from emulated_cuda.calls import MIB
from emulated_cuda.conftest import Child

SIZE = 4 * MIB
OWNER = f"""
start(); handle = create({SIZE}); descriptor = export(handle)
address = mapped(handle, {SIZE}); poke(address + 5, b"weights"); unmapped(address, {SIZE})
say("made", descriptor); hear()
"""
READER = f"""
start(); _, (descriptor,) = hear(); handle = import_descriptor(descriptor); os.close(descriptor)
address = mapped(handle, {SIZE}, "READ"); call("cuMemRelease", handle)
say(peek(address + 5, 7).decode())
"""
AGAIN = "hear(); say(peek(address + 5, 7).decode())\n"


def give(descriptors: list[int], *readers: Child) -> None:
    """Send descriptors on and close them here."""
    for reader in readers:
        reader.say("take", *descriptors)
    for descriptor in descriptors:
        os.close(descriptor)


@pytest.fixture
def owner(spawn: Callable[..., Child]) -> Child:
    """A process that has made an image of SIZE bytes, and keeps handle and descriptor."""
    return spawn(OWNER)


class TestSharing:
    def test_two_readers_and_one_copy(
        self, owner: Child, spawn: Callable[..., Child], machine: emulation.Emulated
    ) -> None:
        readers = [spawn(READER + AGAIN) for _ in range(2)]
        give(owner.hear()[1], *readers)
        assert [reader.hear()[0] for reader in readers] == ["weights"] * 2
        assert machine.used_bytes() == SIZE
        owner.say()
        assert owner.wait() == 0
        for reader in readers:
            reader.say()
            assert reader.hear()[0] == "weights"
        assert machine.used_bytes() == SIZE
        for reader in readers:
            assert reader.wait() == 0
        assert machine.used_bytes() == 0

    def test_a_daemon_needs_no_context(
        self, spawn: Callable[..., Child], machine: emulation.Emulated
    ) -> None:
        daemon = spawn(
            f"call('cuInit', 0); handle = create({SIZE}); say('made', export(handle)); hear()\n"
            "say(str(call('cuDevicePrimaryCtxGetState', 0)))"
        )
        uploader = spawn(
            f"start(); handle = import_descriptor(hear()[1][0]); address = mapped(handle, {SIZE})\n"
            "call('cuMemcpyHtoD', address + 5, b'weights', 7); call('cuCtxSynchronize')\n"
            f"unmapped(address, {SIZE}); say('done')"
        )
        reader = spawn(READER)
        _, descriptors = daemon.hear()
        uploader.say("fill", *descriptors)
        assert uploader.hear()[0] == "done"
        assert uploader.wait() == 0
        give(descriptors, reader)
        assert reader.hear()[0] == "weights"
        daemon.say()
        assert daemon.hear()[0] == "[0, 0]"

    @pytest.mark.parametrize("emulated_environment", [{"devices": 2}], indirect=True)
    def test_a_device_has_different_numbers(
        self, spawn: Callable[..., Child], machine: emulation.Emulated
    ) -> None:
        owner = spawn(OWNER, CUDA_VISIBLE_DEVICES="1")
        same = spawn(READER, CUDA_VISIBLE_DEVICES=machine.ids[1])
        other = spawn(
            "start(); print(failure('cuMemImportFromShareableHandle', hear()[1][0],\n"
            "api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),\n"
            "file=sys.stderr)",
            CUDA_VISIBLE_DEVICES="0",
        )
        give(owner.hear()[1], same, other)
        assert same.hear()[0] == "weights"
        assert other.wait() == 0
        assert other.errors.strip() == "INVALID_DEVICE"
        assert [machine.used_bytes(0), machine.used_bytes(1)] == [0, SIZE]

    def test_a_process_without_a_machine_of_its_own(
        self, owner: Child, make_emulated_environment: Callable[..., dict[str, str]]
    ) -> None:
        """Names mean nothing: a descriptor is enough, as between containers."""
        child = Child(READER, make_emulated_environment())
        try:
            give(owner.hear()[1], child)
            assert child.hear()[0] == "weights"
        finally:
            child.close()


class TestDeath:
    def test_killed_processes_hold_nothing(
        self, spawn: Callable[..., Child], machine: emulation.Emulated
    ) -> None:
        child = spawn(
            f"start(); handles = [create({SIZE}) for _ in range(3)]; export(handles[0])\n"
            f"mapped(handles[1], {SIZE}); call('cuMemAlloc', {SIZE}); pinned(4096); say(); hear()"
        )
        child.hear()
        assert machine.used_bytes() == 4 * SIZE
        assert machine.processes() == [child.process.pid]
        child.kill()
        assert machine.used_bytes() == 0
        machine.assert_empty(timeout_s=0)
        assert list((machine.directory / "allocations").iterdir()) == []

    def test_readers_survive_a_killed_owner(
        self, owner: Child, spawn: Callable[..., Child], machine: emulation.Emulated
    ) -> None:
        reader = spawn(READER + AGAIN)
        give(owner.hear()[1], reader)
        assert reader.hear()[0] == "weights"
        owner.kill()
        reader.say()
        assert reader.hear()[0] == "weights"
        assert machine.used_bytes() == SIZE
        reader.kill()
        assert machine.used_bytes() == 0

    def test_a_descriptor_in_flight_holds_memory(
        self, owner: Child, spawn: Callable[..., Child], machine: emulation.Emulated
    ) -> None:
        reader = spawn("hear(); hear()\n" + READER)
        give(owner.hear()[1], reader)
        owner.kill()
        assert machine.used_bytes() == SIZE
        reader.kill()
        assert machine.used_bytes() == 0

    def test_a_write_kills_the_writer_alone(
        self, owner: Child, spawn: Callable[..., Child], machine: emulation.Emulated
    ) -> None:
        writer, reader = spawn(READER + "hear(); poke(address, b'!')"), spawn(READER + AGAIN)
        give(owner.hear()[1], writer, reader)
        assert [each.hear()[0] for each in (writer, reader)] == ["weights"] * 2
        writer.say()
        assert writer.wait() == -11
        reader.say()
        assert reader.hear()[0] == "weights"
        owner.say()
        assert (owner.wait(), reader.wait()) == (0, 0)

    def test_memory_is_free_for_the_next(
        self, spawn: Callable[..., Child], machine: emulation.Emulated
    ) -> None:
        script = (
            f"start(); handles = [create({64 * MIB}) for _ in range(16)]\n"
            f"say(failure('cuMemCreate', {2 * MIB}, properties(), 0)); hear()"
        )
        for _ in range(2):
            child = spawn(script)
            assert child.hear()[0] == "OUT_OF_MEMORY"
            child.kill()

    def test_a_fork_inherits_no_mapping(
        self, spawn: Callable[..., Child], machine: emulation.Emulated
    ) -> None:
        """As the real driver's memory, it is not there in a forked child."""
        child = spawn(
            "start(); address = mapped(create()); poke(address, b'x')\n"
            "pid = os.fork()\n"
            "if pid == 0: peek(address)\n"
            "say(str(os.waitpid(pid, 0)[1] & 127)); hear()"
        )
        assert child.hear()[0] == "11"


class TestMachine:
    def test_left_memory_is_reported(self, owner: Child, machine: emulation.Emulated) -> None:
        descriptors = owner.hear()[1]
        with pytest.raises(AssertionError, match="still run"):
            machine.assert_empty(timeout_s=0.05)
        owner.kill()
        with pytest.raises(AssertionError, match="was left behind"):
            machine.assert_empty(timeout_s=0.05)
        assert [each.creator for each in machine.allocations()] == [owner.process.pid]
        for descriptor in descriptors:
            os.close(descriptor)
        machine.assert_empty()

    def test_two_machines_know_nothing_of_each_other(
        self, make_emulated_environment: Callable[..., dict[str, str]]
    ) -> None:
        variables = [make_emulated_environment(memory_bytes=SIZE) for _ in range(2)]
        children = [Child(OWNER, each) for each in variables]
        try:
            for child, each in zip(children, variables, strict=True):
                for descriptor in child.hear()[1]:
                    os.close(descriptor)
                assert emulation.Emulated.of(each).used_bytes() == SIZE
        finally:
            for child in children:
                child.close()

    def test_calls_can_hang(self, spawn: Callable[..., Child]) -> None:
        child = spawn(
            "start(); say('before'); create(); say('after')",
            TRIMS_TEST_CUDA_FAIL="cuMemCreate=hang",
        )
        assert child.hear()[0] == "before"
        time.sleep(0.2)
        assert child.process.poll() is None
        child.kill()
