"""The public functions, over the fake daemon."""

from __future__ import annotations

import asyncio
import copy
import ctypes
import gc
import importlib
import inspect
import json
import math
import os
import pickle
import subprocess
import sys
import types
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, get_type_hints

import numpy
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from emulated_cuda import Emulated
from granting import Grantor
from harness import PATIENCE_S, wait_until
from torch._subclasses.fake_tensor import FakeTensorMode

import trims_shim
from trims_shim import api
from trims_shim.client import cache as caches
from trims_shim.client import device_arenas
from trims_shim.errors import DriverFailure, FormatError, UnsupportedFormat
from trims_shim.memory.driver import forget
from trims_shim.patches import torch_device
from trims_shim.testing import FakeDaemon

ARRAYS = {
    "weight": numpy.arange(12, dtype=numpy.float32).reshape(3, 4),
    "count": numpy.array(7, dtype=numpy.int64),
    "empty": numpy.zeros((0, 5), dtype=numpy.float16),
}


@pytest.fixture
def daemon() -> Iterator[FakeDaemon]:
    with FakeDaemon(strict="1") as daemon:
        yield daemon


@pytest.fixture
def tensors(tmp_path: Path) -> str:
    path = str(tmp_path / "model.safetensors")
    safetensors.numpy.save_file(ARRAYS, path)
    return path


class TestHandle:
    @pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
    def test_is_not_copied(
        self, daemon: FakeDaemon, tensors: str, copied: Callable[[Any], Any]
    ) -> None:
        with trims_shim.open(tensors) as handle:
            # A copy's views of device memory would outlive it.
            with pytest.raises(TypeError, match=r"neither copied nor pickled: open the file"):
                copied(handle)
            assert handle.torch("count") == 7
        assert trims_shim.DeviceHandle.__reduce__ is trims_shim.Handle.__reduce__

    def test_describes_its_file(self, daemon: FakeDaemon, tensors: str) -> None:
        with trims_shim.open(tensors) as handle:
            assert handle.name == tensors
            assert handle.size_bytes == os.path.getsize(tensors)
            assert handle.digest == daemon.images[0].digest
            assert tensors in repr(handle)
            assert set(handle.records) == set(ARRAYS)
            assert handle.records is handle.records
            with pytest.raises(TypeError):
                handle.records["w"] = None  # type: ignore[index]
            assert bytes(handle.buffer()) == Path(tensors).read_bytes()
            assert "closed" not in repr(handle)
        assert repr(handle).endswith(", closed>")

    @pytest.mark.parametrize("name", ARRAYS)
    def test_arrays_and_tensors(self, daemon: FakeDaemon, tensors: str, name: str) -> None:
        with trims_shim.open(tensors) as handle:
            array, tensor = handle.numpy(name), handle.torch(name)
        assert array.dtype == ARRAYS[name].dtype
        assert array.shape == ARRAYS[name].shape == tuple(tensor.shape)
        assert numpy.array_equal(array, ARRAYS[name])
        assert numpy.array_equal(tensor.numpy(), ARRAYS[name])

    def test_tensors_under_another_default_device(self, daemon: FakeDaemon, tensors: str) -> None:
        with trims_shim.open(tensors) as handle, torch.device("meta"):
            tensor = handle.torch("weight")
        assert tensor.is_cpu
        assert numpy.array_equal(tensor.numpy(), ARRAYS["weight"])

    def test_tensors_under_a_mode(self, daemon: FakeDaemon, tensors: str) -> None:
        """Found: a mode of tensors without memory refused our storage."""
        with trims_shim.open(tensors) as handle, FakeTensorMode():
            tensor = handle.torch("weight")
        assert type(tensor) is torch.Tensor
        assert numpy.array_equal(tensor.numpy(), ARRAYS["weight"])

    def test_writes_are_private(self, daemon: FakeDaemon, tensors: str) -> None:
        with trims_shim.open(tensors) as handle, trims_shim.open(tensors) as other:
            handle.numpy("weight")[0, 0] = 99
            assert handle.torch("weight")[0, 0] == 99
            assert other.numpy("weight")[0, 0] == 0
        with trims_shim.open(tensors) as again:
            assert again.numpy("weight")[0, 0] == 0

    def test_views_outlive_it(self, daemon: FakeDaemon, tensors: str) -> None:
        handle = trims_shim.open(tensors)
        array, tensor = handle.numpy("weight"), handle.torch("weight")
        handle.close()
        for use in (handle.buffer, lambda: handle.numpy("weight"), lambda: handle.torch("weight")):
            with pytest.raises(ValueError, match="is closed"):
                use()
        assert daemon.leases == 1
        del array
        assert tensor[2, 3] == 11
        del tensor
        assert daemon.leases == 0

    def test_an_unknown_record(self, daemon: FakeDaemon, tensors: str) -> None:
        with trims_shim.open(tensors) as handle:
            for view in (handle.numpy, handle.torch):
                with pytest.raises(KeyError, match=r"has no record 'nothing'; \.records"):
                    view("nothing")

    def test_a_dtype_numpy_does_not_have(self, daemon: FakeDaemon, tmp_path: Path) -> None:
        path = str(tmp_path / "b.safetensors")
        safetensors.torch.save_file({"x": torch.ones(4, dtype=torch.bfloat16)}, path)
        with trims_shim.open(path) as handle:
            assert handle.torch("x").dtype == torch.bfloat16
            with pytest.raises(UnsupportedFormat, match=r"torch\(\)"):
                handle.numpy("x")

    @pytest.mark.parametrize(
        ("name", "dtype"),
        [("F8_E4M3FNUZ", torch.float8_e4m3fnuz), ("F8_E5M2FNUZ", torch.float8_e5m2fnuz)],
    )
    def test_eight_bit_floats_without_a_negative_zero(
        self, name: str, dtype: torch.dtype, daemon: FakeDaemon, tmp_path: Path
    ) -> None:
        header = b'{"x":{"dtype":"%b","shape":[2,2],"data_offsets":[0,4]}}' % name.encode()
        path = tmp_path / "fnuz.safetensors"
        path.write_bytes(len(header).to_bytes(8, "little") + header + b"\x38\x40\x01\x80")
        with trims_shim.open(str(path)) as handle:
            tensor = handle.torch("x")
        assert tensor.dtype == dtype
        assert tensor.view(torch.uint8).tolist() == [[0x38, 0x40], [0x01, 0x80]]

    def test_floats_of_four_bits_are_pairs_as_safetensors_gives_them(
        self, daemon: FakeDaemon, tmp_path: Path
    ) -> None:
        pairs = torch.arange(64, dtype=torch.uint8).view(4, 16).view(torch.float4_e2m1fn_x2)
        path = str(tmp_path / "f4.safetensors")
        safetensors.torch.save_file({"x": pairs}, path)
        with trims_shim.open(path) as handle:
            assert handle.records["x"].shape == (4, 32)
            tensor = handle.torch("x")
        assert (tensor.dtype, tensor.shape) == (pairs.dtype, pairs.shape)
        assert torch.equal(tensor.view(torch.uint8), pairs.view(torch.uint8))

    def test_a_torch_archive_has_records_of_bytes(self, daemon: FakeDaemon, tmp_path: Path) -> None:
        path = str(tmp_path / "m.pt")
        values = torch.arange(6, dtype=torch.int32)
        torch.save({"x": values}, path)
        with trims_shim.open(path) as handle:
            assert "data.pkl" in handle.records
            assert handle.numpy("data/0").tobytes() == values.numpy().tobytes()
            assert handle.torch("data/0").view(torch.int32).tolist() == values.tolist()

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"PK\x03\x04", "zip"),
            (b"\xff" * 100, "no zip archive of torch, and read as safetensors"),
            (b"x", "no zip archive of torch, and read as safetensors"),
        ],
    )
    def test_a_file_of_neither_format(
        self, daemon: FakeDaemon, make_file: Callable[..., str], content: bytes, message: str
    ) -> None:
        with trims_shim.open(make_file(content)) as handle:
            assert bytes(handle.buffer()) == content
            with pytest.raises(FormatError, match=message):
                _ = handle.records

    def test_paths_of_every_kind(self, daemon: FakeDaemon, tmp_path: Path) -> None:
        odd = os.path.join(os.fsencode(tmp_path), b"m\xff\xfe.bin")
        with open(odd, "wb") as file:
            file.write(b"content")
        for path in (odd, os.fsdecode(odd), Path(os.fsdecode(odd))):
            with trims_shim.open(path) as handle:  # type: ignore[arg-type]
                assert bytes(handle.buffer()) == b"content"
        assert daemon.images[0].names[0][1].endswith(r"m\udcff\udcfe.bin")

    def test_a_missing_file(self, daemon: FakeDaemon) -> None:
        with pytest.raises(FileNotFoundError):
            trims_shim.open("/no/such/file")
        assert daemon.counters == {}

    @pytest.mark.parametrize("query", ["", "?sig=secret", f"?sig=secret&{'x' * 300}"])
    @pytest.mark.parametrize("name", ["a.pt", "a.onnx"])
    def test_a_url(self, name: str, query: str, daemon: FakeDaemon) -> None:
        """Found: signed ones are longer than a file's name may be, which was the error."""
        if name.endswith(".onnx"):
            pytest.importorskip("onnxruntime")
        url = f"https://models.example/{name}"
        for function in (trims_shim.open, trims_shim.warm):
            with pytest.raises(FileNotFoundError, match=r"trims_shim\.fetch") as raised:
                function(url + query)
            assert raised.value.filename == url
        assert daemon.counters == {}


class EmulatedRuntime(torch_device.CudaRuntime):
    """Emulated device memory, which torch takes for the CPU's."""

    def ready(self, index: int) -> None: ...

    def storage(self, address: int, size_bytes: int, index: int) -> torch.UntypedStorage:
        return torch_device._storage_over(address, torch.device("cpu"), size_bytes)


class FakeCupy(types.ModuleType):
    """CuPy's way to memory that is not its own, over addresses the CPU can read."""

    def __init__(self) -> None:
        super().__init__("cupy")
        self.cuda = self

    class UnownedMemory:
        def __init__(self, ptr: int, size: int, owner: object, device_id: int = -1) -> None:
            self.ptr, self.size, self.owner, self.device_id = ptr, size, owner, device_id

    class MemoryPointer:
        def __init__(self, memory: FakeCupy.UnownedMemory, offset: int) -> None:
            self.memory, self.offset = memory, offset

    class ndarray:
        def __init__(
            self, shape: tuple[int, ...], dtype: numpy.dtype[Any], memptr: FakeCupy.MemoryPointer
        ) -> None:
            self.memory = memptr.memory
            self.is_copy = False
            assert memptr.offset == 0
            assert self.memory.size == dtype.itemsize * math.prod(shape)
            content = ctypes.string_at(self.memory.ptr, self.memory.size)
            self.values = numpy.frombuffer(content, dtype).reshape(shape)

        def copy(self) -> FakeCupy.ndarray:
            other: FakeCupy.ndarray = object.__new__(type(self))
            other.values, other.is_copy = self.values, True
            return other


class TestDeviceHandle:
    """Over the emulated driver, with images that the test puts there."""

    @pytest.fixture
    def grantor(
        self, emulated_cuda: Emulated, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[Grantor]:
        forget()
        monkeypatch.setattr(device_arenas, "_process", device_arenas._Process())
        monkeypatch.setattr(torch_device, "runtime", EmulatedRuntime())
        grantor = Grantor(emulated_cuda.ids[0])
        before = caches.exchange(grantor.cache())
        yield grantor
        caches.exchange(before)
        gc.collect()
        device_arenas.reap()
        assert grantor.leases == {}
        grantor.close()
        forget()

    @pytest.mark.parametrize("device", ["cuda", "cuda:0", 0, torch.device("cuda", 0), "its id"])
    def test_describes_its_file(self, grantor: Grantor, tensors: str, device: Any) -> None:
        device = grantor.memory.device if device == "its id" else device
        with trims_shim.open(tensors, device=device) as handle:
            assert isinstance(handle, trims_shim.DeviceHandle)
            assert (handle.name, handle.device) == (tensors, grantor.memory.device)
            assert handle.size_bytes == os.path.getsize(tensors)
            assert handle.digest in grantor.images
            assert tensors in repr(handle)
            assert handle.device in repr(handle)
            assert set(handle.records) == set(ARRAYS)
            assert handle.records is handle.records

    @pytest.mark.parametrize("name", ARRAYS)
    def test_tensors(self, grantor: Grantor, tensors: str, name: str) -> None:
        with trims_shim.open(tensors, device="cuda") as handle:
            tensor = handle.torch(name)
        assert tuple(tensor.shape) == ARRAYS[name].shape
        assert numpy.array_equal(tensor.numpy(), ARRAYS[name])
        if tensor.numel():
            found = device_arenas.find(tensor.data_ptr(), tensor.nbytes)
            assert found is not None
            assert found[0].digest == handle.digest
            assert numpy.array_equal(torch.from_dlpack(tensor).numpy(), ARRAYS[name])

    def test_a_torch_archive_has_its_storages(self, grantor: Grantor, tmp_path: Path) -> None:
        path = str(tmp_path / "m.pt")
        values = torch.arange(6, dtype=torch.int32)
        torch.save({"x": values, "y": torch.ones(3), "z": torch.ones(0)}, path)
        with trims_shim.open(path, device="cuda") as handle:
            assert set(handle.records) == {"data/0", "data/1", "data/2"}
            assert handle.torch("data/2").shape == (0,)
            assert handle.torch("data/0").view(torch.int32).tolist() == values.tolist()

    def test_private_access(self, grantor: Grantor, tensors: str) -> None:
        with trims_shim.open(tensors, device="cuda", access="private") as handle:
            first, second = handle.torch("weight"), handle.torch("weight")
        first[0, 0] = 99
        assert second[0, 0] == 0
        assert device_arenas.find(first.data_ptr(), 1) is None
        wait_until(lambda: not grantor.leases, "nothing shared is left")

    def test_views_outlive_it(self, grantor: Grantor, tensors: str) -> None:
        handle = trims_shim.open(tensors, device="cuda")
        tensor, part = handle.torch("weight"), handle.torch("weight")[1:]
        handle.close()
        with pytest.raises(ValueError, match="is closed"):
            handle.torch("weight")
        del tensor
        device_arenas.reap()
        assert len(grantor.leases) == 1
        assert part[1, 3] == 11
        del part
        wait_until(lambda: not grantor.leases, "the lease released")

    def test_cupy(self, grantor: Grantor, tensors: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "cupy", FakeCupy())
        with trims_shim.open(tensors, device="cuda") as handle:
            assert isinstance(handle, trims_shim.DeviceHandle)
            arrays = {name: handle.as_cupy(name) for name in ARRAYS}
        for name, array in arrays.items():
            assert array.values.dtype == ARRAYS[name].dtype
            assert numpy.array_equal(array.values, ARRAYS[name])
            assert (array.memory.device_id, array.is_copy) == (0, False)
        device_arenas.reap()
        assert len(grantor.leases) == 1
        del array
        arrays.clear()
        wait_until(lambda: not grantor.leases, "the lease released")
        with trims_shim.open(tensors, device="cuda", access="private") as handle:
            assert isinstance(handle, trims_shim.DeviceHandle)
            assert handle.as_cupy("weight").is_copy

    def test_what_cupy_cannot(
        self, grantor: Grantor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = str(tmp_path / "b.safetensors")
        safetensors.torch.save_file({"x": torch.ones(4, dtype=torch.bfloat16)}, path)
        with trims_shim.open(path, device="cuda") as handle:
            assert isinstance(handle, trims_shim.DeviceHandle)
            monkeypatch.setitem(sys.modules, "cupy", None)
            with pytest.raises(ImportError, match="pip install cupy"):
                handle.as_cupy("x")
            monkeypatch.setitem(sys.modules, "cupy", FakeCupy())
            with pytest.raises(UnsupportedFormat, match=r"CuPy has no dtype BF16; use torch\(\)"):
                handle.as_cupy("x")
            assert handle.torch("x").dtype == torch.bfloat16

    def test_numpy_cannot(self, grantor: Grantor, tensors: str) -> None:
        wanted = r"torch\(\) or as_cupy\(\)"
        with (
            trims_shim.open(tensors, device="cuda") as handle,
            pytest.raises(UnsupportedFormat, match=wanted),
        ):
            handle.numpy("weight")

    def test_an_unknown_record(self, grantor: Grantor, tensors: str) -> None:
        with trims_shim.open(tensors, device="cuda") as handle, pytest.raises(KeyError):
            handle.torch("nothing")

    def test_warm(self, grantor: Grantor, tensors: str) -> None:
        digest = trims_shim.warm(tensors, device="cuda")
        assert digest in grantor.images
        wait_until(lambda: not grantor.leases, "the lease released")

    def test_warm_what_this_process_holds(self, grantor: Grantor, tensors: str) -> None:
        with trims_shim.open(tensors, device="cuda") as handle:
            before = trims_shim.stats().events.get("open:local", 0)
            assert trims_shim.warm(tensors, device="cuda") == handle.digest
            assert trims_shim.stats().events.get("open:local", 0) == before
        wait_until(lambda: not grantor.leases, "the leases released")

    @pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), None])
    def test_the_host(self, daemon: FakeDaemon, tensors: str, device: Any) -> None:
        with trims_shim.open(tensors, device=device) as handle:
            assert isinstance(handle, trims_shim.Handle)

    @pytest.mark.parametrize("device", ["cuda:x", "cuda:-1", "gpu", "", "mps", "cuda:0:1"])
    def test_what_is_no_device(self, grantor: Grantor, tensors: str, device: str) -> None:
        with pytest.raises(ValueError, match="is no device"):
            trims_shim.open(tensors, device=device)
        with pytest.raises(ValueError, match="'shared' or 'private'"):
            trims_shim.open(tensors, device="cuda", access="mine")  # type: ignore[call-overload]

    def test_a_device_that_is_not_there(self, grantor: Grantor, tensors: str) -> None:
        for device in (7, "cuda:7"):
            with pytest.raises(DriverFailure, match="no CUDA device 7"):
                trims_shim.open(tensors, device=device)

    @pytest.mark.parametrize(
        "emulated_environment", [{"devices": 2}], indirect=True, ids=["two devices"]
    )
    def test_the_current_device(
        self, grantor: Grantor, emulated_cuda: Emulated, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert api._device_id("cuda") == emulated_cuda.ids[0]
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
        assert api._device_id("cuda") == emulated_cuda.ids[1]
        assert api._device_id("cuda:0") == emulated_cuda.ids[0]

    def test_torch_is_not_imported_for_it(self, emulated_cuda: Emulated) -> None:
        code = (
            "import sys, trims_shim.api as api\n"
            "assert api._device_id('cuda') == sys.argv[1]\n"
            "assert 'torch' not in sys.modules and 'cupy' not in sys.modules\n"
        )
        command = [sys.executable, "-c", code, emulated_cuda.ids[0]]
        subprocess.run(command, check=True, timeout=120)


def test_warm(daemon: FakeDaemon, tensors: str) -> None:
    digest = trims_shim.warm(tensors)
    assert (daemon.leases, daemon.images[0].is_pinned) == (0, False)
    assert trims_shim.warm(tensors, pin=True) == digest
    assert daemon.images[0].is_pinned
    with pytest.raises(FileNotFoundError):
        trims_shim.warm("/no/such/file")


def test_warm_what_this_process_holds_of_another_daemon(daemon: FakeDaemon, tensors: str) -> None:
    with trims_shim.open(tensors) as handle:
        daemon.go_away()
        daemon.come_back()
        assert trims_shim.warm(tensors) == handle.digest
        assert len(daemon.images) == 1
        daemon.go_away()
        daemon.come_back()
        assert trims_shim.warm(tensors, pin=True) == handle.digest
        assert daemon.images[0].is_pinned


class TestSwitch:
    @pytest.fixture(autouse=True)
    def _restored(self) -> Iterator[None]:
        was = trims_shim.enabled()
        yield
        (trims_shim.enable if was else trims_shim.disable)()

    def test_enable_and_disable(self) -> None:
        original = torch.serialization._load
        trims_shim.disable()
        assert not trims_shim.enabled()
        stock = torch.serialization._load
        trims_shim.enable()
        assert trims_shim.enabled()
        assert torch.serialization._load is not stock
        trims_shim.enable()
        trims_shim.disable()
        assert torch.serialization._load is stock
        assert original is not None

    def test_a_block_of_an_abandoned_generator(self) -> None:
        """The event loop ends it, in a task of its own."""
        problems: list[object] = []

        async def numbers() -> AsyncIterator[int]:
            with trims_shim.disabled():
                yield 1
                yield 2

        async def abandon() -> None:
            loop = asyncio.get_running_loop()
            loop.set_exception_handler(lambda _, problem: problems.append(problem))
            async for _ in numbers():
                break
            gc.collect()
            await asyncio.sleep(0.01)

        asyncio.run(abandon())
        assert problems == []

    def test_a_block_without_the_cache(self, daemon: FakeDaemon, tmp_path: Path) -> None:
        path = str(tmp_path / "m.pt")
        torch.save({"x": torch.ones(100)}, path)
        trims_shim.enable()
        with trims_shim.disabled():
            assert not trims_shim.enabled()
            torch.load(path)
        assert trims_shim.enabled()
        assert daemon.opened == []
        torch.load(path)
        assert daemon.reads(path) == 1

    def test_only_this_thread(self, daemon: FakeDaemon) -> None:
        import threading

        trims_shim.enable()
        seen: list[bool] = []
        with trims_shim.disabled():
            thread = threading.Thread(target=lambda: seen.append(trims_shim.enabled()))
            thread.start()
            thread.join(PATIENCE_S)
        assert seen == [True]


def test_stats(daemon: FakeDaemon, tensors: str) -> None:
    before = trims_shim.stats()
    for _ in range(2):
        trims_shim.open(tensors).close()
    after = trims_shim.stats()
    assert after.misses - before.misses == 1
    assert after.hits - before.hits == 1
    assert after.bytes_shared - before.bytes_shared == 2 * os.path.getsize(tensors)


def test_info_is_json(daemon: FakeDaemon) -> None:
    described: dict[str, Any] = trims_shim.info()
    assert json.loads(json.dumps(described)).keys() == described.keys()
    assert daemon.opened == []


@pytest.mark.parametrize(
    "package", ["trims_shim", "trims_shim.batching", "trims_shim.batching.simulator"]
)
def test_annotations_can_be_evaluated(package: str) -> None:
    """As libraries do that inject dependencies, which import nothing for it."""
    module = importlib.import_module(package)
    names = [name for name in module.__all__ if name[0] != "_"]
    public = [getattr(module, name) for name in names]
    classes = [each for each in public if isinstance(each, type)]
    methods = [each for kind in classes for each in vars(kind).values()]
    for function in filter(inspect.isfunction, public + methods):
        assert get_type_hints(function).keys() == function.__annotations__.keys()
