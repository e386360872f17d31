"""safetensors onto an emulated device: what safe_open, load_file and load_model return is the same.

Results are compared with those of the compiled class on the CPU; what cannot be served, and every
error, is the compiled class's.
"""

from __future__ import annotations

import copy
import inspect
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import devices as emulation
import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from devices import DEVICES, LARGE, SIDE, Devices, Tied, reasons, shared
from harness import PATIENCE_S, World
from torch import nn

import trims_shim
from trims_shim import patches
from trims_shim.client.cache import cache
from trims_shim.errors import UnknownDevice
from trims_shim.patches import (
    safetensors_device,
    safetensors_model,
    torch_device,
    torch_from_file,
    torch_module,
)
from trims_shim.specs import Identity


class Theirs:
    """Where nobody looks for names to rebind."""

    # The compiled class, also where the import of another test file has been patched.
    safe_open = safetensors.safe_open.get_tensor.__objclass__


@pytest.fixture(params=emulation.BOTH_WAYS)
def devices(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Devices]:
    emulation.let_swap(monkeypatch, request.param)
    with emulation.emulated(
        monkeypatch, *torch_module.POINTS[:1], *safetensors_device.POINTS, *safetensors_model.POINTS
    ) as devices:
        yield devices
    assert safetensors.safe_open is safetensors.torch.safe_open
    # A torch built with CUDA has the patch of an import again.
    assert torch.version.cuda or safetensors.safe_open is Theirs.safe_open


def state() -> dict[str, torch.Tensor]:
    return {
        "a.weight": torch.randn(SIDE, SIDE),
        "b.half": torch.randn(2, LARGE).half(),
        "c.brain": torch.randn(4, LARGE).bfloat16(),
        "d.flags": torch.arange(LARGE) % 3 == 0,
        "e.float8": torch.randn(LARGE).to(torch.float8_e4m3fn),
        "f.small": torch.randn(3, 5),
        "g.scalar": torch.tensor(3),
        "h.empty": torch.empty(0, 4),
        "i.long": torch.arange(LARGE),
    }


SMALL = {"f.small", "g.scalar", "h.empty"}


@pytest.fixture
def path(tmp_path: Path) -> str:
    safetensors.torch.save_file(state(), tmp_path / "m.safetensors", metadata={"format": "pt"})
    return str(tmp_path / "m.safetensors")


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert type(actual) is type(expected) is torch.Tensor
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    assert actual.stride() == expected.stride()
    assert actual.storage_offset() == 0
    assert actual.untyped_storage().nbytes() == actual.nbytes
    assert torch.equal(actual.contiguous().view(-1).view(torch.uint8),
                       expected.contiguous().view(-1).view(torch.uint8))  # fmt: skip


def expected_of(path: str) -> dict[str, torch.Tensor]:
    with Theirs.safe_open(path, "pt") as file:
        return {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118


# --- it is served ---------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cuda", "cuda:0", 0], ids=str)
@pytest.mark.parametrize("backend", ["mmap", "pread"])
def test_load_file(devices: Devices, path: str, device: Any, backend: str) -> None:
    devices.runtime.current = 1  # safetensors' "cuda" is device 0 all the same
    expected = expected_of(path)
    actual = safetensors.torch.load_file(path, device=device, backend=backend)
    with Theirs.safe_open(path, "pt") as file:
        assert list(actual) == file.offset_keys()
    for key, value in expected.items():
        assert_same(actual[key], value)
        assert shared(actual[key]) == (key not in SMALL), key
    assert [each for _, each in devices.opened] == ["GPU-0"]


def test_another_device_and_pathlib(devices: Devices, path: str) -> None:
    actual = safetensors.torch.load_file(Path(path), device="cuda:1")
    assert shared(actual["a.weight"])
    assert [each for _, each in devices.opened] == ["GPU-1"]


def test_every_way_to_call_safe_open(devices: Devices, path: str) -> None:
    safe_open = safetensors.safe_open
    for file in (
        safe_open(path, "pt", "cuda"),
        safe_open(path, framework="torch", device="cuda:0"),
        safe_open(filename=path, framework="pytorch", device=0),
    ):
        assert isinstance(file, safe_open)
        assert not isinstance(file, Theirs.safe_open)
        assert shared(file.get_tensor("a.weight"))
    assert len(devices.opened) == 3
    assert len(devices.mappings) == 1


def test_names_ask_for_nothing(
    devices: Devices, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found: a process that read the names could fork none that use CUDA, and took memory."""

    def no_device(_: torch.device) -> None:
        raise AssertionError("the device is set up")

    monkeypatch.setattr(torch_device, "place_of", no_device)
    with safetensors.safe_open(path, "pt", device="cuda") as file:
        assert "a.weight" in file.keys()  # noqa: SIM118
        assert file.metadata() == {"format": "pt"}
        part = file.get_slice("a.weight")
        assert (part.get_shape(), part.get_dtype()) == ([SIDE, SIDE], "F32")
    assert devices.opened == []
    monkeypatch.undo()
    assert reasons() == {}


def test_the_working_directory_may_change(
    devices: Devices, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(os.path.dirname(path))
    with safetensors.safe_open(os.path.basename(path), "pt", device="cuda") as file:
        os.chdir("/")
        assert shared(file.get_tensor("a.weight"))


def test_a_file_replaced_before_its_first_tensor(devices: Devices, path: str) -> None:
    """The compiled class has the old one mapped."""
    relax()
    file = safetensors.safe_open(path, "pt", device="cuda")
    safetensors.torch.save_file(state(), path + ".new")
    os.replace(path + ".new", path)
    assert "CUDA" in outcome(lambda: file.get_tensor("a.weight"))[1]
    assert reasons() == {"model_changed": 1}
    assert devices.opened == []


def test_a_file_replaced_before_it_is_opened(
    devices: Devices, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a file whose tensors will be moved, the image is asked for first."""

    def on_and_replace(self: Any, place: Any) -> Any:
        found = on(self, place)
        safetensors.torch.save_file(state(), path + ".new")
        os.replace(path + ".new", path)
        return found

    on = safetensors_device._DeviceImage._on
    monkeypatch.setattr(safetensors_device._DeviceImage, "_on", on_and_replace)
    token = safetensors_device.destination.set(0)
    with safetensors.safe_open(path, "pt") as file:
        safetensors_device.destination.reset(token)
        weight = file.get_slice("a.weight")
        assert weight.on_device(0, None) is None
        assert_same(weight[:], safetensors.torch.load_file(path)["a.weight"])
    assert reasons() == {"model_changed": 1}


def test_threads_ask_once(devices: Devices, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found: each that wanted a tensor before the first had one asked, and was counted."""

    def slow(self: Any, place: Any) -> Any:
        time.sleep(0.1)
        return on(self, place)

    on = safetensors_device._DeviceImage._on
    monkeypatch.setattr(safetensors_device._DeviceImage, "_on", slow)
    file = safetensors.safe_open(path, "pt", device="cuda")
    with ThreadPoolExecutor(4) as pool:
        assert all(map(shared, pool.map(file.get_tensor, ["a.weight"] * 4)))
    assert len(devices.opened) == emulation.events("served:safetensors_device") == 1


def test_a_child_forked_while_a_thread_asks(
    devices: Devices, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(self: Any, place: Any) -> Any:
        is_asking.set()
        is_forked.wait(PATIENCE_S)
        return on(self, place)

    is_asking, is_forked = threading.Event(), threading.Event()
    on = safetensors_device._DeviceImage._on
    monkeypatch.setattr(safetensors_device._DeviceImage, "_on", slow)
    file = safetensors.safe_open(path, "pt", device="cuda")
    with ThreadPoolExecutor(1) as pool:
        tensor = pool.submit(file.get_tensor, "a.weight")
        assert is_asking.wait(PATIENCE_S)
        child = os.fork()
        if not child:
            signal.alarm(int(PATIENCE_S))
            is_forked.set()
            os._exit(not shared(file.get_tensor("a.weight")))
        is_forked.set()
        assert shared(tensor.result())
    assert os.waitpid(child, 0)[1] == 0


def test_first_tensor_while_disabled(devices: Devices, path: str) -> None:
    """Found: it was shared, also after disable(), when nothing keeps programs from writing."""
    file = safetensors.safe_open(path, "pt", device="cuda")
    part = file.get_slice("a.weight")
    with trims_shim.disabled():
        for use in (
            lambda: file.get_tensor("a.weight"),
            file.get_tensors,
            lambda: part[...],
        ):
            assert "CUDA" in outcome(use)[1]  # safetensors' copy
    assert (devices.opened, reasons()) == ([], {})
    assert shared(file.get_tensor("a.weight"))
    assert shared(part[...])


def test_the_rest_of_safe_open(devices: Devices, path: str) -> None:
    with (
        Theirs.safe_open(path, "pt") as theirs,
        safetensors.safe_open(path, "pt", device="cuda") as ours,
    ):
        assert ours.keys() == theirs.keys()
        assert ours.offset_keys() == theirs.offset_keys()
        assert ours.metadata() == theirs.metadata() == {"format": "pt"}
        assert list(ours.get_tensors()) == theirs.offset_keys()
        for key in theirs.keys():  # noqa: SIM118
            assert ours.get_slice(key).get_shape() == theirs.get_slice(key).get_shape()
            assert ours.get_slice(key).get_dtype() == theirs.get_slice(key).get_dtype()


class Newer:
    """A compiled object with one more method, as each release has had."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def colour_of(self, name: str) -> str:
        return "colour of " + name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_what_a_newer_safetensors_has_besides(devices: Devices, path: str) -> None:
    file = safetensors.safe_open(path, "pt", device="cuda")
    part = file.get_slice("a.weight")
    assert outcome(lambda: file.colour_of)[0] == outcome(lambda: part.colour_of)[0]
    assert outcome(lambda: file.colour_of)[0] == "AttributeError"
    file._file = Newer(file._file)
    part._inner = Newer(part._inner)
    assert file.colour_of("x") == part.colour_of("x") == "colour of x"
    assert shared(file.get_tensor("a.weight"))
    assert shared(part[:])
    assert outcome(lambda: copy.copy(file)._private)[0] == "AttributeError"


class Older:
    """A compiled file of safetensors before 0.6."""

    def __init__(self, inner: Any) -> None:
        self.get_tensor = inner.get_tensor


def test_what_an_older_safetensors_has_not(devices: Devices, path: str) -> None:
    """Found: a program that asked whether there is such a method was told so, and failed."""
    file = safetensors.safe_open(path, "pt", device="cuda")
    names = ("offset_keys", "get_tensors")
    assert all(hasattr(file, each) for each in names if hasattr(Theirs.safe_open, each))
    file._file = Older(file._file)
    assert not any(hasattr(file, each) for each in names)
    assert shared(file.get_tensor("a.weight"))


SLICES: dict[str, tuple[Any, bool]] = {
    # index, whether it is a view of the shared image
    "all": (..., True),
    "all by slice": (slice(None), True),
    "two slices": ((slice(None), slice(None)), True),
    "upper rows": (slice(0, 128), True),
    "lower rows": (slice(128, None), True),
    "a block of rows": (slice(64, 192), True),
    "few rows": (slice(3, 5), False),
    "a row": (7, False),
    "last row": (-1, False),
    "an element": ((3, 4), False),
    "columns": ((slice(None), slice(0, 8)), False),
    "every other column": ((slice(None), slice(None, None, 2)), False),
    "a column": ((slice(None), 3), False),
    "ellipsis and slice": ((..., slice(0, 16)), False),
    "nothing": (slice(5, 5), False),
}


@pytest.mark.parametrize(("index", "is_view"), SLICES.values(), ids=SLICES)
def test_slices(devices: Devices, path: str, index: Any, is_view: bool) -> None:
    with (
        Theirs.safe_open(path, "pt") as theirs,
        safetensors.safe_open(path, "pt", device="cuda") as ours,
    ):
        expected = theirs.get_slice("a.weight")[index].clone()  # as to(device) has it
        part = ours.get_slice("a.weight")[index]
    assert_same(part, expected)
    assert shared(part) == is_view


def test_a_block_that_no_allocator_would_place_there(devices: Devices, path: str) -> None:
    """It is copied, and the copy is waited for: its image may be unmapped next."""
    with safetensors.safe_open(path, "pt", device="cuda") as file:
        whole = file.get_slice("i.long")
        settled = devices.runtime.settled
        part = whole[1:]
    assert_same(part, expected_of(path)["i.long"][1:].clone())
    assert not shared(part)
    assert devices.runtime.settled > settled


def test_copies_are_waited_for(devices: Devices, path: str) -> None:
    """Of small tensors, and of those that become private: their image may be unmapped next."""
    with safetensors.safe_open(path, "pt", device="cuda") as file:
        settled = devices.runtime.settled
        assert not shared(file.get_tensor("f.small"))
        assert devices.runtime.settled > settled
        weight = file.get_tensor("a.weight")
    settled = devices.runtime.settled
    torch_device.take_back([weight])
    assert not shared(weight)
    assert devices.runtime.settled > settled


def test_slices_of_small_tensors(devices: Devices, path: str) -> None:
    with safetensors.safe_open(path, "pt", device="cuda") as file:
        part = file.get_slice("f.small")[:, 1:3]
    assert torch.equal(part, expected_of(path)["f.small"][:, 1:3])
    part.zero_()


def test_tensors_and_slices_outlive_the_file(devices: Devices, path: str) -> None:
    with safetensors.safe_open(path, "pt", device="cuda") as file:
        tensor, view = file.get_tensor("a.weight"), file.get_slice("i.long")
    assert torch.equal(tensor, expected_of(path)["a.weight"])
    assert torch.equal(view[...], expected_of(path)["i.long"])


def test_no_host_image_beside_that_of_the_device(
    devices: Devices, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found: all of the file was read again, into host memory, for one tensor or index."""
    undo = emulation.apply(*torch_from_file.POINTS)
    file = safetensors.safe_open(path, "pt", device="cuda")
    assert shared(file.get_tensor("a.weight"))
    part = file.get_slice("a.weight")
    assert "CUDA" in outcome(lambda: part[np.int64(3)])[1]  # safetensors' copy
    monkeypatch.setattr(safetensors_device._Source, "tensor", lambda *_: None)
    assert "CUDA" in outcome(lambda: file.get_tensor("a.weight"))[1]
    undo()
    assert devices.opened_on_host == []


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(SIDE, SIDE)
        self.norm = nn.BatchNorm1d(SIDE)


def test_load_model(devices: Devices, tmp_path: Path) -> None:
    theirs, ours = Net(), Net()
    safetensors.torch.save_model(theirs, tmp_path / "net.safetensors")
    missing = safetensors.torch.load_model(ours, tmp_path / "net.safetensors", device="cuda")
    assert missing == (set(), [])
    assert shared(ours.first.weight)
    for key, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[key], value)


def test_load_model_with_ties(devices: Devices, tmp_path: Path) -> None:
    theirs, ours = Tied(), Tied()
    safetensors.torch.save_model(theirs, tmp_path / "net.safetensors")
    missing = safetensors.torch.load_model(ours, tmp_path / "net.safetensors", device="cuda")
    assert missing == (set(), [])
    assert shared(ours.decoder.weight)
    assert torch.equal(ours.encoder.weight, theirs.encoder.weight)


def test_load_model_while_somebody_else_holds_the_memory(devices: Devices, tmp_path: Path) -> None:
    theirs, ours = Net(), Net()
    safetensors.torch.save_model(theirs, tmp_path / "net.safetensors")
    alias = ours.first.weight.detach()
    safetensors.torch.load_model(ours, tmp_path / "net.safetensors", device="cuda")
    assert not shared(ours.first.weight)
    assert torch.equal(alias, theirs.first.weight)


def test_load_model_says_what_is_missing(devices: Devices, tmp_path: Path) -> None:
    safetensors.torch.save_model(nn.Linear(SIDE, SIDE), tmp_path / "other.safetensors")
    with pytest.raises(RuntimeError, match="Missing key"):
        safetensors.torch.load_model(Net(), tmp_path / "other.safetensors", device="cuda")


def test_saving_what_is_shared(devices: Devices, path: str, tmp_path: Path) -> None:
    actual = safetensors.torch.load_file(path, device="cuda")
    safetensors.torch.save_file(actual, tmp_path / "again.safetensors", metadata={"format": "pt"})
    with open(path, "rb") as one, open(tmp_path / "again.safetensors", "rb") as other:
        assert one.read() == other.read()


def test_torch_load_of_safetensors(devices: Devices, path: str) -> None:
    if "safetensors" not in inspect.getsource(torch.load):
        pytest.skip("this torch does not read safetensors")
    actual = torch.load(path, map_location="cuda")
    assert shared(actual["a.weight"])


def test_no_descriptor_is_left(devices: Devices, path: str) -> None:
    first = safetensors.torch.load_file(path, device="cuda")
    before = World.descriptors(os.getpid()).items()
    second = safetensors.torch.load_file(path, device="cuda")
    assert World.descriptors(os.getpid()).items() <= before
    assert first.keys() == second.keys()


def test_private_access(devices: Devices, path: str) -> None:
    token = torch_device_access("private")
    actual = safetensors.torch.load_file(path, device="cuda")
    token()
    assert not any(map(shared, actual.values()))
    actual["a.weight"].zero_()


def test_private_copies_of_an_image_that_is_there(devices: Devices, path: str) -> None:
    """Found: room for a second image was asked for, and all was copied from host memory."""
    shared_before = safetensors.torch.load_file(path, device="cuda")
    found = torch_device.find(shared_before["a.weight"])
    assert found is not None
    cache()._digests[Identity.from_stat(os.stat(path))] = found[0].digest
    devices.runtime.free = os.path.getsize(path)
    token = torch_device_access("private")
    actual = safetensors.torch.load_file(path, device="cuda")
    assert not any(map(shared, actual.values()))
    devices.runtime.free -= 1
    assert "CUDA" in outcome(lambda: safetensors.torch.load_file(path, device="cuda"))[1]
    token()
    assert reasons() == {"no_room_for_copies": 1}


def torch_device_access(value: str) -> Callable[[], None]:
    token = torch_device.access.set(value)
    return lambda: torch_device.access.reset(token)


# --- it is the compiled one's ---------------------------------------------------------------------


def outcome(function: Callable[[], Any]) -> tuple[str, str]:
    with pytest.raises(Exception) as caught:  # noqa: PT011  compared with the other one's
        function()
    return type(caught.value).__name__, str(caught.value)


def test_the_cpu_gets_the_compiled_class(devices: Devices, path: str) -> None:
    safe_open = safetensors.safe_open
    for file in (safe_open(path, "pt"), safe_open(path, framework="pt", device="cpu")):
        assert type(file) is Theirs.safe_open
        assert isinstance(file, safe_open)
    assert type(safe_open(path, "np")) is Theirs.safe_open
    assert issubclass(Theirs.safe_open, safe_open)
    assert safe_open.__name__ == Theirs.safe_open.__name__
    assert safe_open.__doc__ == Theirs.safe_open.__doc__
    assert safe_open.get_tensor is Theirs.safe_open.get_tensor
    assert inspect.signature(safe_open) == inspect.signature(Theirs.safe_open)
    assert devices.opened == []


CALLS: dict[str, Callable[[Any, str], Any]] = {
    "no such file": lambda open, path: open(path + "x", "pt", device="cuda"),
    "no arguments": lambda open, path: open(),
    "too many": lambda open, path: open(path, "pt", "cuda", "mmap"),
    "unknown argument": lambda open, path: open(path, "pt", "cuda", color=1),
    "an argument twice": lambda open, path: open(path, "pt", "cuda", filename=path),
    "unknown framework": lambda open, path: open(path, "xx", "cuda"),
    "numpy on a device": lambda open, path: open(path, "np", "cuda"),
    "unknown backend": lambda open, path: open(path, "pt", "cuda", backend="xx"),
    "negative device": lambda open, path: open(path, "pt", -1),
    "odd device": lambda open, path: open(path, "pt", "cuda:x"),
    "device object": lambda open, path: open(path, "pt", torch.device("cuda")),
    "bytes": lambda open, path: open(path.encode(), "pt", device="cuda"),
    "unknown tensor": lambda open, path: open(path, "pt", "cuda").get_tensor("x"),
    "unknown slice": lambda open, path: open(path, "pt", "cuda").get_slice("x"),
    "number as a name": lambda open, path: open(path, "pt", "cuda").get_tensor(3),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_errors(devices: Devices, path: str, call: Callable[[Any, str], Any]) -> None:
    assert outcome(lambda: call(safetensors.safe_open, path)) == outcome(
        lambda: call(Theirs.safe_open, path)
    )


@pytest.mark.parametrize("index", [(300,), slice(None, None, -1), (0, 0, 0), "x"], ids=str)
def test_errors_of_slices(devices: Devices, path: str, index: Any) -> None:
    with (
        Theirs.safe_open(path, "pt") as theirs,
        safetensors.safe_open(path, "pt", device="cuda") as ours,
    ):
        expected = outcome(lambda: theirs.get_slice("a.weight")[index])
        assert outcome(lambda: ours.get_slice("a.weight")[index]) == expected


def test_a_closed_file(devices: Devices, path: str) -> None:
    with safetensors.safe_open(path, "pt", device="cuda") as file:
        pass
    for use in (
        file.keys,
        file.metadata,
        lambda: file.get_tensor("a.weight"),
        file.get_tensors,
        lambda: file.get_slice("a.weight"),
    ):
        assert outcome(use) == ("SafetensorError", "File is closed")


def test_damaged_files(devices: Devices, path: str) -> None:
    with open(path, "r+b") as file:
        file.truncate(5000)
    expected = outcome(lambda: Theirs.safe_open(path, "pt"))
    devices.refusal = UnknownDevice("the daemon refuses what it cannot read")
    relax()
    assert outcome(lambda: safetensors.safe_open(path, "pt", device="cuda")) == expected


def relax() -> None:
    cache().config._values["strict"] = False


def test_a_refusal_ends_in_the_host_tier(devices: Devices, path: str) -> None:
    devices.refusal = UnknownDevice("no")
    relax()
    file = safetensors.safe_open(path, "pt", device="cuda")
    for name in ("a.weight", "b.half"):
        assert "CUDA" in outcome(lambda name=name: file.get_tensor(name))[1]  # safetensors' copy
    assert reasons() == {"unknown_device": 1}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_after_an_error_the_compiled_class_opens_the_file(
    devices: Devices, path: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found: want of memory before the file was opened was the program's, also on the CPU."""

    def no_memory(*_: Any, **__: Any) -> Any:
        raise MemoryError

    relax()
    monkeypatch.setattr(safetensors_device, "_arguments", no_memory)
    assert type(safetensors.safe_open(path, "pt", device=device)) is Theirs.safe_open


def test_after_an_error_with_the_image_the_compiled_class_answers(
    devices: Devices, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found: want of memory for the tensors' names was the program's."""

    def no_memory(*_: Any) -> Any:
        raise MemoryError

    relax()
    monkeypatch.setattr(safetensors_device, "_Found", no_memory)
    file = safetensors.safe_open(path, "pt", device="cuda")
    assert "CUDA" in outcome(lambda: file.get_tensor("a.weight"))[1]
    assert reasons() == {"internal_error": 1}


def test_absent_devices(devices: Devices, path: str) -> None:
    file = safetensors.safe_open(path, "pt", device=f"cuda:{DEVICES}")
    assert "CUDA" in outcome(lambda: file.get_tensor("a.weight"))[1]
    assert reasons() == {"no_such_device": 1}


def test_while_inactive(devices: Devices, path: str) -> None:
    token = patches.overridden.set(False)
    assert type(safetensors.safe_open(path, "pt", device="cuda")) is Theirs.safe_open
    patches.overridden.reset(token)
    assert devices.opened == []


def test_four_bit_tensors_are_the_compiled_ones(devices: Devices, tmp_path: Path) -> None:
    if not hasattr(torch, "float4_e2m1fn_x2"):
        pytest.skip("this torch has no four-bit type")
    packed = torch.zeros(2, LARGE, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    path = str(tmp_path / "four.safetensors")
    safetensors.torch.save_file({"four": packed, "w": torch.randn(SIDE, SIDE)}, path)
    file = safetensors.safe_open(path, "pt", device="cuda")
    assert shared(file.get_tensor("w"))
    message = outcome(lambda: file.get_tensor("four"))[1]
    assert "CUDA" in message or "NVIDIA" in message  # it got as far as the copy


def test_state_dicts_can_be_copied(devices: Devices, path: str) -> None:
    actual = safetensors.torch.load_file(path, device="cuda")
    duplicate = copy.deepcopy(actual)
    assert not any(map(shared, duplicate.values()))
    assert torch.equal(duplicate["a.weight"], actual["a.weight"])
