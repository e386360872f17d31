"""Emulated devices for the tests of torch's device patches: host memory in the place of a GPU's.

``cuda:N`` is mapped to device N; tensors on it are CPU tensors over the memory of a real
:class:`DeviceArena`, which the cache's ``open_device`` makes of the file it is given. The memory is
compared at the end: nobody may have written it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib
import mmap
import os
import sys
import types
import unittest.mock
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import blake3
import pytest
import torch
from images import image_with
from torch.overrides import TorchFunctionMode

from trims_shim import diagnostics, patches
from trims_shim.client import cache as caches
from trims_shim.client import device_arenas
from trims_shim.client.arenas import Arena, Image
from trims_shim.client.cache import Cache
from trims_shim.client.device_arenas import DeviceArena, DeviceImage
from trims_shim.config import PATCHABLE_LIBRARIES, load
from trims_shim.errors import NotServed
from trims_shim.formats import layout_of, layout_of_numbers
from trims_shim.patches import (
    points,
    torch_device,
    torch_initializers,
    torch_load,
    torch_modes,
    torch_module,
    torch_repoint,
    torch_unshare,
)

WITHOUT_HOLDERS = {
    *sys.stdlib_module_names,
    *("torch", "numpy", "scipy", "ray", "trims_shim", "sympy", "mpmath", "networkx", "cuda"),
    *("_pytest", "google", "onnx", "jinja2", "huggingface_hub", "httpcore2", "httpx2", "filelock"),
}
LARGE = torch_device.MIN_SHARED_BYTES
DEVICES = 2
SIDE = 256
"""SIDE * SIDE float32 are four times what is shared at least."""


class Net(torch.nn.Module):
    """Large and small parameters and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(SIDE, SIDE)
        self.norm = torch.nn.BatchNorm1d(SIDE)
        self.second = torch.nn.Linear(SIDE, SIDE, bias=False)
        self.register_buffer("table", torch.randn(SIDE, SIDE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(self.first(x)))


class Tied(torch.nn.Module):
    """Two modules with one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = torch.nn.Embedding(SIDE, SIDE)
        self.decoder = torch.nn.Linear(SIDE, SIDE, bias=False)
        self.decoder.weight = self.encoder.weight


class EmulatedRuntime:
    """Devices without CUDA."""

    def __init__(self) -> None:
        self.current = 0
        self.made_ready: list[int] = []
        self.settled = 0
        self.free = sys.maxsize

    def is_built(self) -> bool:
        return True

    def index(self, device: torch.device) -> int:
        if device.type != "cuda":
            raise NotServed("device", str(device))
        index = self.current if device.index is None else device.index
        if index >= DEVICES:
            raise NotServed("no_such_device", str(device))
        return index

    def device(self, index: int) -> torch.device:
        return torch.device("cpu")

    def device_id(self, index: int) -> str:
        return f"GPU-{index}"

    def ready(self, index: int) -> None:
        self.made_ready.append(index)

    def settle(self, device: torch.device) -> None:
        self.settled += 1

    def free_bytes(self, index: int) -> int:
        return self.free

    def storage(self, address: int, size_bytes: int, index: int) -> torch.UntypedStorage:
        return torch_device._storage_over(address, torch.device("cpu"), size_bytes)


class Mapping:
    """Memory of an emulated device."""

    def __init__(self, content: bytes) -> None:
        self.memory = mmap.mmap(-1, len(content))
        self.memory[:] = content
        self.array = (ctypes.c_char * len(content)).from_buffer(self.memory)
        self.address = ctypes.addressof(self.array)
        self.checksum = zlib.crc32(content)
        self.is_mapped = True
        self.is_empty = False

    def unmap(self) -> None:
        self.is_mapped = False

    def is_untouched(self) -> bool:
        return zlib.crc32(self.memory) == self.checksum


@dataclass
class Devices:
    """What the emulated devices hold, and what was asked of them."""

    runtime: EmulatedRuntime = field(default_factory=EmulatedRuntime)
    opened: list[tuple[str, str]] = field(default_factory=list)
    opened_on_host: list[str] = field(default_factory=list)
    refusal: Exception | None = None
    mappings: list[Mapping] = field(default_factory=list)
    released: list[str] = field(default_factory=list)

    def open_device(
        self,
        cache: Cache,
        descriptor: int,
        *,
        name: str,
        device: str,
        min_bytes: int | None = None,
        is_numbers: bool = False,
    ) -> DeviceArena:
        self.opened.append((name, device))
        if self.refusal is not None:
            raise self.refusal
        content = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
        # As the host tier names images, so that a host image finds its device image.
        digest = self.digest(content)
        held = device_arenas.held(digest, device)
        return held or self._load(content, digest, device, is_numbers)

    def open(self, cache: Cache, descriptor: int, *, name: str) -> Arena:
        """The host tier."""
        self.opened_on_host.append(name)
        content = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
        return image_with(content, name=name).map()

    @staticmethod
    def digest(content: bytes) -> str:
        return str(blake3.blake3(content).hexdigest())

    def _load(self, content: bytes, digest: str, device: str, is_numbers: bool) -> DeviceArena:
        layout = layout_of_numbers(len(content)) if is_numbers else layout_of(content)
        memory, outline = bytearray(layout.size_bytes), bytearray(content)
        for each in layout.placed:
            span, end = each.source, each.offset_bytes + each.source.size_bytes
            memory[each.offset_bytes : end] = content[span.offset_bytes : span.end_bytes]
            outline[span.offset_bytes : span.end_bytes] = bytes(span.size_bytes)
        descriptor_of_outline = os.memfd_create("outline")
        os.write(descriptor_of_outline, outline)
        mapping = Mapping(bytes(memory))
        self.mappings.append(mapping)
        image = DeviceImage(
            mapping,  # type: ignore[arg-type]
            Image(descriptor_of_outline, len(content), digest=digest).map(),
            layout,
            device=device,
            index=int(device[-1]),
            release=lambda: self.released.append(digest),
        )
        return device_arenas._process.serve(DeviceArena(image))

    def assert_untouched(self) -> None:
        assert all(each.is_untouched() for each in self.mappings)


class _Hidden:
    def __get__(self, instance: object, owner: object) -> Any:
        raise AttributeError("hidden")


OF_LOADING = (*torch_load.POINTS[:2], *torch_module.POINTS[:1])
"""Points of programs that load weights into modules."""
OF_UNSHARING = [
    each for each in torch_unshare.POINTS[:-1] if each.target.partition(":")[0] in sys.modules
]
"""Points that make weights private, without those of a newer torch."""
OF_TRAINING = (*OF_LOADING, *OF_UNSHARING, *torch_initializers.POINTS)
"""Points of programs that load weights and write to them."""
BOTH_WAYS = [pytest.param(True, id="swap"), pytest.param(False, id="no swap")]
"""Whether torch can swap the memory of two storages."""


def let_swap(monkeypatch: pytest.MonkeyPatch, can_swap: bool) -> None:
    """Make this torch as one before 2.12, which cannot."""
    if not can_swap:
        monkeypatch.setattr(torch.UntypedStorage, "_swap_data_ptr_", _Hidden(), raising=False)
        assert not torch_repoint.has_swap()


def library(monkeypatch: pytest.MonkeyPatch, name: str, *stand_ins: Any) -> Any:
    """A library's module; where it is not installed, one of stand-ins."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return stand_in(monkeypatch, name, *stand_ins)


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, *stand_ins: Any) -> Any:
    """A library's module as made of stand-ins, installed or not."""
    module = types.ModuleType(name)
    vars(module).update({each.__name__: each for each in stand_ins})
    monkeypatch.setitem(sys.modules, name, module)
    return module


def share(module: torch.nn.Module, folder: Path) -> None:
    """Put the weights of a module on shared memory, by way of a file."""
    path = folder / "weights.pt"
    torch.save(module.state_dict(), path)
    module.load_state_dict(torch.load(path, map_location="cuda"))
    assert shared(max(module.parameters(), key=torch.Tensor.numel))


def shared(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies in the memory of an emulated device."""
    return torch_device.find(tensor) is not None


def reasons() -> dict[str, int]:
    """How often something did not end on shared device memory, by reason."""
    events = diagnostics.stats().events
    return {
        key.partition(":")[2]: value
        for key, value in events.items()
        if key.startswith("not_on_device:")
    }


def events(name: str) -> int:
    return diagnostics.stats().events.get(name, 0)


def all_events() -> dict[str, int]:
    return diagnostics.stats().events


class ToCuda(TorchFunctionMode):
    """Stands below everything: torch's own copies to a CUDA device become copies in host memory."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.Tensor.cuda, torch.Tensor.to) and shared(args[0]):
            return args[0]
        if func is torch.Tensor.cuda:
            return args[0].clone()
        if func is torch.Tensor.to:
            target = args[1] if len(args) > 1 else kwargs.get("device")
            if isinstance(target, (str, torch.device)) and torch.device(target).type == "cuda":
                dtype = args[2] if len(args) > 2 else kwargs.get("dtype")
                return args[0].clone() if dtype is None else args[0].to(dtype).clone()
        return func(*args, **kwargs)


def prepare(monkeypatch: pytest.MonkeyPatch, devices: Devices, **settings: str) -> None:
    """Put emulated devices below the patches, which act; settings as in TRIMS_*."""
    monkeypatch.setattr(torch_device, "runtime", devices.runtime)
    monkeypatch.setattr(torch_device, "_is_address_kept", False)
    monkeypatch.setattr(torch_modes, "passive_modes", {*torch_modes.passive_modes, ToCuda})
    monkeypatch.setattr(patches, "active", lambda: patches.overridden.get() is not False)
    monkeypatch.setattr(
        Cache,
        "open_device",
        lambda self, descriptor, **options: devices.open_device(self, descriptor, **options),
    )
    monkeypatch.setattr(
        Cache, "open", lambda self, descriptor, **options: devices.open(self, descriptor, **options)
    )
    monkeypatch.setitem(caches._ours, os.geteuid(), Cache(load(None, **settings)))
    diagnostics.reset_after_fork()


@contextlib.contextmanager
def few_modules() -> Iterator[None]:
    """Holders of patched names are looked for only where tests can tell.

    To look through the thousands of modules of a worker takes longer than most tests.
    """
    modules = sys.modules.copy().items()
    near = {name: each for name, each in modules if name.partition(".")[0] not in WITHOUT_HOLDERS}
    seen = types.SimpleNamespace(modules=near)

    def rebind(old: Any, new: Any, *, home: str) -> None:
        with unittest.mock.patch.object(points, "sys", seen):
            everywhere(old, new, home=home)

    everywhere = points.rebind
    with unittest.mock.patch.object(points, "rebind", rebind):
        yield


def apply(*wanted: points.PatchPoint) -> Callable[[], None]:
    """Apply patch points, in the place of those that an import applied; what undoes that."""
    libraries = PATCHABLE_LIBRARIES if patches.requested() else ()
    with few_modules():
        with unittest.mock.patch.object(patches, "_is_any_shared", return_value=False):
            patches.disable()  # also where a failed test's traceback keeps tensors
        applied = [points.apply(point) for point in wanted]
    for each in applied:
        assert each.state is points.PatchState.APPLIED, (each.point.target, each.reason)

    def undo() -> None:
        with few_modules():
            for each in reversed(applied):
                points.undo(each)
            if libraries:
                torch_device.runtime = torch_device.CudaRuntime()
                patches.enable(libraries)

    return undo


def _save(save: Callable[..., None], *args: Any, **options: Any) -> None:
    """Save; torch 2.6 leaves cyclic garbage that uses what was saved, so that it is not elided."""
    save(*args, **options)
    gc.collect(1)


@contextlib.contextmanager
def emulated(monkeypatch: pytest.MonkeyPatch, *wanted: points.PatchPoint) -> Iterator[Devices]:
    """Emulated devices below patch points that are applied; in the end, nobody has written."""
    devices = Devices()
    prepare(monkeypatch, devices, min_bytes="1", strict="1")
    monkeypatch.setattr(torch, "save", functools.partial(_save, torch.save))
    undo = apply(*wanted)
    yield devices
    undo()
    devices.assert_untouched()
