"""Sessions take their weights from shared device memory, in place, and let it go with themselves.

On the emulated driver, whose memory this process can read: sessions are of the CPU provider, and
the memory is described to onnxruntime as the host's. Where it is described as what it is, a CPU
session must refuse it, and be right all the same.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import emulated_cuda as emulation
import onnxruntime
import pytest
from emulated_cuda import Emulated
from granting import Grantor, bytes_on_device
from harness import World, wait_until
from onnx_models import Sample, perceptron, transformer
from onnx_on_host import CPU, HostRuntime, HostSessions, prepare
from preparations import Line, Preparations, patched

from trims_shim import patches, stats
from trims_shim.client import cache as caches
from trims_shim.client import device_arenas
from trims_shim.daemon.preparer import cuda as preparer_cuda
from trims_shim.errors import NoSpace, NotServed
from trims_shim.formats import layout_of
from trims_shim.formats.onnx_directory import read_directory
from trims_shim.memory import device as device_memory
from trims_shim.memory import dlpack
from trims_shim.memory.driver import driver, forget
from trims_shim.patches import onnxruntime_cuda, onnxruntime_recipe, onnxruntime_session
from trims_shim.patches.onnxruntime_cuda import creating, describe, is_served
from trims_shim.wire import admin

TESTS = str(Path(__file__).resolve().parents[1])
PROVIDERS = ((CPU,),)
LEVEL = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL


def event(name: str) -> int:
    return stats().events.get(name, 0)


class Bench:
    """A prepared model, a device, and sessions as the patch makes them."""

    def __init__(self, machine: Emulated, directory: Path) -> None:
        self.machine = machine
        self.device = machine.ids[0]
        self.grantor = Grantor(self.device)
        self.sample: Sample = perceptron()
        self.model = prepare(self.sample, directory)
        self.weights = Path(self.model).with_name("weights.bin")
        self.listed = read_directory(self.weights.read_bytes())
        self.before: dict[str, int] = {}

    def options(self) -> Any:
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = LEVEL
        return options

    def plain(self) -> Any:
        return onnxruntime.InferenceSession(self.model, self.options(), providers=[CPU])

    def session(self, providers: tuple[tuple[str, ...], ...] = PROVIDERS) -> Any:
        """Created as the patch of InferenceSession does: attributes first, then the original."""
        options = self.options()
        session = onnxruntime.InferenceSession.__new__(onnxruntime.InferenceSession)
        with creating(session, options, self.model, providers):
            session.__init__(self.model, options, providers=[CPU])
        return session

    def outputs(self, session: Any) -> list[bytes]:
        return [session.run(None, feeds)[0].tobytes() for feeds in self.sample.feeds]

    def counted(self, name: str) -> int:
        return event(name) - self.before.get(name, 0)

    def arena(self) -> Any:
        return next(iter(device_arenas._process.arenas.values()), None)


@pytest.fixture
def bench(
    emulated_cuda: Emulated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Bench]:
    forget()
    monkeypatch.setattr(device_arenas, "_process", device_arenas._Process())
    bench = Bench(emulated_cuda, tmp_path)
    monkeypatch.setattr(onnxruntime_cuda, "runtime", HostRuntime(bench.device))
    monkeypatch.setattr(onnxruntime_cuda._skip, "warned", set())
    # Only the part that this file is about.
    monkeypatch.setattr(patches, "_is_enabled", False)
    with driver().context(0):
        pass
    bench.before = dict(stats().events)
    cache = caches.exchange(bench.grantor.cache(ort_cuda="1"))
    offered = dlpack.offered()
    yield bench
    gc.collect()
    device_arenas.reap()
    caches.exchange(cache)
    assert dlpack.offered() == offered
    held = emulation.held()
    assert (held.mappings, held.reservations, held.handles) == (0, 0, 0)
    assert bench.grantor.leases == {}
    bench.grantor.close()
    assert emulated_cuda.used_bytes() == 0
    forget()


class TestInPlace:
    def test_outputs_are_those_of_the_file(self, bench: Bench) -> None:
        session = bench.session()
        assert bench.outputs(session) == bench.outputs(bench.plain())
        assert bench.counted("initializers:in_place") == len(bench.listed) > 0
        assert bench.counted("initializers:not_in_place") == 0
        assert bench.grantor.tiers == [bench.device]
        assert bytes_on_device(bench.arena(), bench.weights.read_bytes())

    def test_the_device_is_where_they_come_from(self, bench: Bench) -> None:
        """Through another, writable mapping: what it writes is what a session computes with."""
        session = bench.session()
        expected = bench.outputs(session)
        stored = next(iter(bench.grantor.images.values()))
        mapping = device_memory.map_allocations(
            bench.device, stored.memory.descriptors, stored.memory.allocations, is_writable=True
        )
        ctypes.memset(mapping.address, 0, stored.layout.size_bytes)
        mapping.unmap()
        assert bench.outputs(session) != expected
        assert bench.outputs(bench.plain()) == expected

    def test_memory_stays_as_long_as_the_session(self, bench: Bench) -> None:
        session = bench.session()
        address = bench.arena().address
        gc.collect()
        device_arenas.reap(0.1)
        assert device_arenas.find(address, 1) is not None
        assert bench.grantor.released == []
        bench.outputs(session)
        del session
        gc.collect()
        assert device_arenas.reap()
        assert device_arenas.find(address, 1) is None
        assert bench.grantor.released == [1]
        assert bench.machine.used_bytes() == sum(
            sum(each.memory.allocations) for each in bench.grantor.images.values()
        )

    def test_the_inner_session_is_enough(self, bench: Bench) -> None:
        inner = bench.session()._sess
        gc.collect()
        device_arenas.reap(0.1)
        assert bench.grantor.released == []
        output = inner.run(["y"], bench.sample.feeds[0], None)[0].tobytes()
        assert output == bench.outputs(bench.plain())[0]

    def test_sessions_share_one_mapping(self, bench: Bench) -> None:
        sessions = [bench.session()]
        descriptors = World.descriptors(os.getpid()).items()
        sessions += [bench.session() for _ in range(2)]
        assert World.descriptors(os.getpid()).items() <= descriptors
        assert len(bench.grantor.leases) == 1
        expected = bench.outputs(bench.plain())
        while sessions:
            assert bench.outputs(sessions[-1]) == expected
            sessions.pop()
            gc.collect()

    def test_threads_create_at_once(self, bench: Bench) -> None:
        expected = bench.outputs(bench.plain())
        with ThreadPoolExecutor(4) as pool:
            sessions = list(pool.map(lambda _: bench.session(), range(8)))
        assert [bench.outputs(each) for each in sessions] == [expected] * 8
        assert bench.counted("initializers:in_place") == 8 * len(bench.listed)
        assert len(bench.grantor.leases) == 1

    def test_what_is_not_listed_comes_from_the_file(self, bench: Bench) -> None:
        """MatMul's packed weight is no tensor of the device image."""
        layout = layout_of(bench.weights.read_bytes())
        assert len(layout.placed) == len(bench.listed)
        assert layout.size_bytes < bench.weights.stat().st_size
        assert bench.outputs(bench.session()) == bench.outputs(bench.plain())

    def test_a_larger_graph(self, bench: Bench, tmp_path: Path) -> None:
        bench.sample = transformer()
        bench.model = prepare(bench.sample, tmp_path / "other", prepack="off")
        options = bench.options()
        options.add_session_config_entry("session.disable_prepacking", "1")
        plain = onnxruntime.InferenceSession(bench.model, options, providers=[CPU])
        bench.options = lambda: options  # type: ignore[method-assign]
        session = bench.session()
        assert bench.counted("initializers:in_place") > 5
        assert bench.outputs(session) == bench.outputs(plain)


class TestOtherwise:
    def test_memory_of_another_kind_is_refused_and_the_file_used(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        """As onnxruntime does where it has planned an initializer for the host."""
        monkeypatch.setattr(onnxruntime_cuda.runtime, "device_type", dlpack.DeviceType.CUDA)
        session = bench.session()
        assert capfd.readouterr().err.count("Cannot use user supplied") == len(bench.listed)
        assert bench.counted("initializers:not_in_place") == len(bench.listed)
        assert bench.counted("initializers:in_place") == 0
        gc.collect()
        assert device_arenas.reap()
        assert bench.grantor.released == [1]
        assert bench.outputs(session) == bench.outputs(bench.plain())

    def test_no_room_on_the_device(self, bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
        def refuse() -> None:
            raise NoSpace("the device is full")

        bench.grantor.on_request = refuse
        session, other = bench.session(), bench.session()
        assert bench.outputs(session) == bench.outputs(other) == bench.outputs(bench.plain())
        assert bench.counted("not_on_device:no_space") == 2
        assert bench.counted("initializers:in_place") == 0
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "the device is full" in caplog.text

    def test_strict_says_so(self, bench: Bench) -> None:
        def refuse() -> None:
            raise NoSpace("the device is full")

        bench.grantor.on_request = refuse
        caches.exchange(bench.grantor.cache(ort_cuda="1", strict="1"))
        with pytest.raises(NoSpace, match="full"):
            bench.session()

    def test_a_small_model_is_not_worth_it(
        self, bench: Bench, caplog: pytest.LogCaptureFixture
    ) -> None:
        caches.exchange(bench.grantor.cache(ort_cuda="1", min_bytes="1GiB"))
        assert bench.outputs(bench.session()) == bench.outputs(bench.plain())
        assert bench.counted("not_on_device:small_file") == 1
        assert (bench.grantor.requests, caplog.records) == (0, [])

    @pytest.mark.parametrize("damage", ["directory", "gone"])
    def test_weights_that_cannot_be_served(self, bench: Bench, damage: str) -> None:
        weights = bench.weights
        if damage == "directory":
            content = weights.read_bytes()
            weights.chmod(0o600)
            weights.write_bytes(content[:-1] + b"!")
            assert bench.outputs(bench.session()) == bench.outputs(bench.plain())
            assert sum(bench.counted(each) for each in stats().events if "not_on" in each) == 1
        else:
            weights.unlink()
            with pytest.raises(Exception, match=r"weights\.bin"):
                bench.session()
        assert bench.counted("initializers:in_place") == 0

    def test_a_session_that_cannot_be_made(self, bench: Bench) -> None:
        Path(bench.model).write_bytes(b"no model")
        with pytest.raises(Exception, match=r"[Pp]rotobuf"):
            bench.session()
        gc.collect()
        assert device_arenas.reap()
        assert bench.grantor.released == [1]

    def test_a_session_without_the_device_is_not_the_one(self, bench: Bench) -> None:
        class Session:
            def get_providers(self) -> list[str]:
                return ["OtherExecutionProvider"]

        with (
            pytest.raises(NotServed, match="OtherExecutionProvider") as refused,
            creating(Session(), bench.options(), bench.model, PROVIDERS),
        ):
            pass
        assert refused.value.reason == "no_cuda"

    def test_other_providers_are_left_alone(self, bench: Bench) -> None:
        session = bench.session((("OtherExecutionProvider", "a", "b"),))
        assert bench.outputs(session) == bench.outputs(bench.plain())
        assert (bench.grantor.requests, bench.arena()) == (0, None)


class TestRecipe:
    @pytest.fixture
    def real(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Bench:
        monkeypatch.setattr(onnxruntime_cuda, "runtime", onnxruntime_cuda.Runtime())
        return bench

    @pytest.mark.parametrize(
        ("names", "is_ours"),
        [
            (("CUDAExecutionProvider",), True),
            (("CUDAExecutionProvider", CPU), True),
            (("CUDAExecutionProvider", "AzureExecutionProvider", CPU), True),
            ((CPU, "CUDAExecutionProvider"), False),
            (("TensorrtExecutionProvider", "CUDAExecutionProvider"), False),
            (("CUDAExecutionProvider", "OpenVINOExecutionProvider"), False),
            ((CPU,), False),
            ((), False),
        ],
    )
    def test_which_sessions(self, real: Bench, names: tuple[str, ...], is_ours: bool) -> None:
        assert is_served(names) == is_ours

    @pytest.mark.parametrize("settings", [{}, {"ort_cuda": "0"}, {"ort_cuda": "1", "device": "0"}])
    def test_only_where_it_was_asked_for(self, real: Bench, settings: dict[str, str]) -> None:
        caches.exchange(real.grantor.cache(**settings))
        assert not is_served(("CUDAExecutionProvider", CPU))

    def test_the_recipe_of_a_session(self, real: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        names = ["CUDAExecutionProvider", "AzureExecutionProvider", CPU]
        binding = onnxruntime_recipe.binding
        monkeypatch.setattr(binding, "get_available_providers", lambda: names)
        asked = [("CUDAExecutionProvider", {"use_tf32": 0, "user_compute_stream": "1"}), CPU]
        settings = onnxruntime_recipe.read_settings(None, asked, None, None)
        cuda = ("CUDAExecutionProvider", "device_id", real.device, "use_tf32", "0")
        assert settings.providers == (cuda, (CPU,))
        caches.exchange(real.grantor.cache())
        with pytest.raises(NotServed) as refused:
            onnxruntime_recipe.read_settings(None, asked, None, None)
        assert refused.value.reason == "provider"

    def test_a_device_is_named_by_its_id(self, real: Bench) -> None:
        assert describe({}) == {"device_id": real.device}
        options = {"device_id": 0, "use_tf32": False, "prefer_nhwc": "1", "enable_cuda_graph": "0"}
        assert describe(options) == {
            "device_id": real.device,
            "use_tf32": "False",
            "prefer_nhwc": "1",
            "enable_cuda_graph": "0",
        }

    def test_addresses_of_the_process_are_left_out(self, real: Bench) -> None:
        options = {
            "user_compute_stream": "140230",
            "has_user_compute_stream": "1",
            "gpu_external_alloc": "1",
            "gpu_external_free": "2",
            "gpu_external_empty_cache": "3",
            "gpu_mem_limit": "1000",
        }
        assert describe(options) == {"device_id": real.device, "gpu_mem_limit": "1000"}

    @pytest.mark.parametrize("number", ["1", "-1", "one", ""])
    def test_a_device_that_is_not_there(self, real: Bench, number: str) -> None:
        with pytest.raises(NotServed) as refused:
            describe({"device_id": number})
        assert refused.value.reason == "no_cuda"


class TestWholePath:
    """InferenceSession as programs call it; the real preparer and patches, in this process."""

    PATHS = 1000
    """Leases of images are told from those of prepared models by their numbers."""

    @pytest.fixture
    def whole(
        self, bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[Preparations]:
        grantor, release = bench.grantor, Line.release
        grantor.change = lambda reply: reply._replace(lease=reply.lease + self.PATHS)

        def open_image(
            line: Any, descriptor: int, name: str, *, tier: str, is_numbers: bool
        ) -> Any:
            grantor.tiers.append(tier)
            return grantor.granted(descriptor)

        def give_back(line: Any, lease: int) -> None:
            if lease > self.PATHS:
                grantor.release(lease - self.PATHS)
            else:
                release(line, lease)

        monkeypatch.setattr(Line, "open_image", open_image)
        monkeypatch.setattr(Line, "release", give_back)
        monkeypatch.setattr(preparer_cuda, "sessions_of", HostSessions)
        monkeypatch.setattr(onnxruntime_session, "_CPU", "no provider is only the host's here")
        yield from patched(tmp_path, monkeypatch, ort_cuda="1", strict="0")

    @pytest.fixture
    def path(self, bench: Bench, tmp_path: Path) -> str:
        path = tmp_path / "program.onnx"
        path.write_bytes(bench.sample.content)
        return str(path)

    def new(self, path: str) -> Any:
        return onnxruntime.InferenceSession(path, providers=[CPU])

    def test_a_second_session_runs_on_shared_memory(
        self, whole: Preparations, bench: Bench, path: str
    ) -> None:
        shared = stats().bytes_shared
        first, second = self.new(path), self.new(path)
        assert stats().events["served:onnxruntime"] == 1
        assert stats().events["initializers:in_place"] > 0
        assert "initializers:not_in_place" not in {k for k, v in stats().events.items() if v}
        assert bench.grantor.tiers == [bench.device]
        assert stats().bytes_shared - shared == bench.arena().size_bytes > 0
        assert bench.outputs(second) == bench.outputs(first)
        assert second._model_path == path
        assert (len(whole.leases), len(bench.grantor.leases)) == (1, 1)
        del second
        gc.collect()
        device_arenas.reap()
        assert (len(whole.leases), len(bench.grantor.leases)) == (0, 0)

    def test_options_of_a_session_are_good_for_another(
        self, whole: Preparations, bench: Bench, path: str
    ) -> None:
        """Those that were given initializers point to values that are gone."""
        self.new(path)
        session = self.new(path)
        options = session.get_session_options()
        expected = bench.outputs(session)
        del session
        gc.collect()
        other = onnxruntime.InferenceSession(path, options, providers=[CPU])
        assert bench.outputs(other) == expected
        other.set_providers([CPU])
        assert bench.outputs(other) == expected

    def test_without_the_device_it_is_the_originals_session(
        self, whole: Preparations, bench: Bench, path: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        expected = bench.outputs(self.new(path))
        monkeypatch.setattr(
            onnxruntime.InferenceSession, "get_providers", lambda self: ["OtherExecutionProvider"]
        )
        session = self.new(path)
        assert stats().fallbacks["no_cuda"] == 1
        assert bench.outputs(session) == expected
        assert (session._model_path, whole.leases) == (path, set())
        gc.collect()
        device_arenas.reap()
        assert bench.grantor.leases == {}

    def test_a_full_device_still_serves_the_prepared_model(
        self, whole: Preparations, bench: Bench, path: str
    ) -> None:
        def refuse() -> None:
            raise NoSpace("the device is full")

        bench.grantor.on_request = refuse
        expected = bench.outputs(self.new(path))
        shared = stats().bytes_shared
        assert bench.outputs(self.new(path)) == expected
        assert stats().events["served:onnxruntime"] == 1
        assert stats().bytes_shared == shared
        assert stats().events["not_on_device:no_space"] == 1

    def test_the_preparer_verifies_what_a_hit_gets(
        self, whole: Preparations, bench: Bench, path: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A device that gives other bytes back is noticed before anything is published."""

        class Damaging(HostSessions):
            def put(self, data: memoryview) -> tuple[int, object]:
                address, array = super().put(data)
                ctypes.memset(address, 0, 4)
                return address, array

        monkeypatch.setattr(preparer_cuda, "sessions_of", Damaging)
        self.new(path)
        assert [each.reason for each in whole.refused.values()] == ["outputs_differ"]


# --- with a daemon --------------------------------------------------------------------------------

MIB = 1 << 20
PROGRAM = f"""\
sys.path.insert(0, {TESTS!r})
import gc
import onnxruntime
from onnx_models import perceptron
from onnx_on_host import CPU, HostRuntime
from trims_shim import stats
from trims_shim.client import device_arenas
from trims_shim.patches import onnxruntime_cuda
sample = perceptron(width=2048)
def create():
    onnxruntime_cuda.runtime = HostRuntime(device_arenas.device_id(0))
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    # A forked child has no pool of threads, and waits for it for ever with glibc 2.42.
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession.__new__(onnxruntime.InferenceSession)
    with onnxruntime_cuda.creating(session, options, MODEL, ((CPU,),)):
        session.__init__(MODEL, options, providers=[CPU])
    return session
def outputs(session):
    return [session.run(None, feeds)[0].tobytes().hex() for feeds in sample.feeds]
def shared():
    return stats().events.get("initializers:in_place", 0)
"""


@pytest.fixture
def world(emulated_environment: dict[str, str]) -> Iterator[World]:
    world = World(
        device_headroom_bytes="0", enabled="0", min_bytes="1", uploader_idle="1", ort_cuda="1"
    )
    world.variables = dict(emulated_environment)
    yield world
    world.close()


@pytest.fixture
def program(world: World) -> str:
    model = prepare(perceptron(width=2048), f"{world.root}/prepared")
    return f"MODEL = {model!r}\n{PROGRAM}"


def plain_outputs(world: World) -> list[str]:
    sample = perceptron(width=2048)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = LEVEL
    path = f"{world.root}/prepared/model.onnx"
    session = onnxruntime.InferenceSession(path, options, providers=[CPU])
    return [session.run(None, feeds)[0].tobytes().hex() for feeds in sample.feeds]


def test_processes_share_one_copy(
    world: World, emulated_environment: dict[str, str], program: str
) -> None:
    machine = Emulated.of(emulated_environment)
    world.start()
    script = (
        program
        + "session = create()\nsay([shared() > 0, outputs(session)])\nhear()\n"
        + "say(outputs(session))\nhear()\n"
        + "del session\ngc.collect()\nsay(device_arenas.reap())\nhear()\n"
    )
    children = [world.spawn(script) for _ in range(3)]
    expected = plain_outputs(world)
    assert [child.hear(60) for child in children] == [[True, expected]] * 3
    content = Path(f"{world.root}/prepared/weights.bin").read_bytes()
    size = layout_of(content).size_bytes
    assert size > 2 * MIB
    images = [image for image in world.status().images if image.tier != "host"]
    assert [image.leases for image in images] == [3]
    # Without a device that a process maps: its context.
    assert size <= sum(a.size_bytes for a in machine.allocations() if a.kind == "vmm") < 2 * size
    world.kill_daemon()
    for child in children:
        child.say()
        assert child.hear(60) == expected
    for child in children:
        child.say()
        assert child.hear(60) is True
    wait_until(
        lambda: not [each for each in machine.allocations() if each.kind == "vmm"], "memory back"
    )
    for child in children:
        child.say()
        assert child.wait() == 0


def test_a_lease_ends_with_the_session(world: World, program: str) -> None:
    world.start()
    child = world.spawn(
        program + "session = create()\nsay()\nhear()\n"
        "del session\ngc.collect()\ndevice_arenas.reap()\nsay()\nhear()\n"
    )
    child.hear(60)

    def leases() -> int:
        return sum(image.leases for image in world.status().images if image.tier != "host")

    assert leases() == 1
    child.say()
    child.hear(60)
    wait_until(lambda: leases() == 0, "the lease has been given up")


def test_what_leaves_the_device_comes_back_whole(
    make_emulated_environment: Callable[..., dict[str, str]],
) -> None:
    """By way of the host tier, which knows no layout; `trims verify` hashes it, too."""
    world = World(
        device_headroom_bytes="0",
        device_bytes=str(12 * MIB),
        enabled="0",
        min_bytes="1",
        uploader_idle="1",
        ort_cuda="1",
    )
    world.variables = make_emulated_environment()
    try:
        scripts = []
        for seed in (1, 2):
            model = prepare(perceptron(seed, width=2048), f"{world.root}/prepared-{seed}")
            scripts.append(
                f"MODEL = {model!r}\n{PROGRAM}"
                f"sample = perceptron({seed}, width=2048)\n"
                "session = create()\nsay([shared() > 0, outputs(session)])\n"
            )
        world.start()
        first, second = world.run(scripts[0]), world.run(scripts[1])
        wait_until(lambda: len(world.status().images) == 2, "the first one is in the host tier")
        assert [image.tier for image in world.status().images].count("host") == 1
        for image in world.status().images:
            reply = world.cache().request(admin.VerifyImageRequest(image.digest))
            assert reply.computed == image.digest
        assert first[0] is second[0] is True
        assert first[1] != second[1]
        assert [world.run(script) for script in scripts] == [first, second]
    finally:
        world.close()


@pytest.mark.parametrize(
    "ending",
    [
        pytest.param("", id="end"),
        pytest.param("sys.exit(3)", id="exit"),
        pytest.param("os.kill(os.getpid(), signal.SIGTERM)", id="kill"),
        pytest.param("cycle = [session]; cycle.append(cycle)", id="cycle"),
    ],
)
def test_a_process_ends_with_its_session(world: World, program: str, ending: str) -> None:
    world.start()
    child = world.spawn(program + "session = create()\noutputs(session)\nsay(shared())\n" + ending)
    assert child.hear(60) > 0
    expected = {"sys.exit(3)": 3, "os.kill(os.getpid(), signal.SIGTERM)": -signal.SIGTERM}
    assert child.wait() == expected.get(ending, 0)
    assert child.errors() == ""


def test_a_forked_child_leaves_the_parents_memory_alone(world: World, program: str) -> None:
    world.start()
    script = (
        program
        + "session = create()\nbefore = outputs(session)\n"
        + "child = os.fork()\n"
        + "if not child:\n"
        + "    del session; gc.collect(); device_arenas.reap(); os._exit(7)\n"
        + "status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])\n"
        + "say([status, outputs(session) == before, shared() > 0])\n"
    )
    assert world.run(script) == [7, True, True]
