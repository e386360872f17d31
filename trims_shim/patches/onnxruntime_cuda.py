"""Sessions of onnxruntime's CUDA provider over weights in shared device memory.

Behind ``TRIMS_ORT_CUDA=1`` (docs/gpu.md). A prepared model of such a recipe has a directory of the
initializers that its sessions take from outside (:mod:`trims_shim.formats.onnx_directory`).
:func:`creating` opens its weights at the device tier and adds each listed initializer to the
options as a value over the arena. ``add_initializer`` uses a value in place if it lies on the
device that onnxruntime planned it on. All others, and all of them if the device tier has no room,
onnxruntime reads from the prepared file, into private memory.

    session -> value -> DLPack's deleter -> _Hold -> DeviceArena -> ... (client/device_arenas.py)

The arena is mapped read-only: a session does not write to constants, and what a kernel packs is a
copy of its own. onnxruntime's threads unmap nothing: the deleter drops a reference.

Hazards: ``add_initializer`` keeps a bare pointer to the value, so values live until the session
exists, and options that were given values must not be used again. A GPU build of onnxruntime whose
CUDA does not work makes a CPU session without an error; that is not the prepared model's session.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from trims_shim import diagnostics
from trims_shim.client.cache import cache
from trims_shim.daemon.preparer.recipes import OF_THE_PROCESS
from trims_shim.errors import NotServed, TrimsError
from trims_shim.formats.onnx_directory import read_directory
from trims_shim.late_imports import ensure_imported
from trims_shim.memory import dlpack
from trims_shim.patches.device_skips import Skips
from trims_shim.specs import PREPARED_WEIGHTS, DeviceId, Record

if TYPE_CHECKING:
    from trims_shim.client.device_arenas import DeviceArena

__all__ = ["PROVIDER", "Runtime", "creating", "describe", "is_served", "runtime"]

PROVIDER = "CUDAExecutionProvider"
_COMPANIONS = frozenset({"CPUExecutionProvider", "AzureExecutionProvider"})
_DEVICE_OPTION = "device_id"
_skip = Skips("device_off")
"""Count a session that gets private device memory; warn once if that is a fault."""


class Runtime:
    """The parts of :data:`runtime` that a test on an emulated device replaces."""

    provider = PROVIDER
    device_type = dlpack.DeviceType.CUDA

    def device_id(self, index: int) -> DeviceId:
        """The driver's id of a device of this process. Raises DriverFailure."""
        ensure_imported("trims_shim.client.device_arenas")
        from trims_shim.client import device_arenas

        return device_arenas.device_id(index)

    def device_of(self, provider: tuple[str, ...]) -> DeviceId:
        """The device of a provider that :func:`describe` described."""
        return dict(zip(provider[1::2], provider[2::2], strict=True))[_DEVICE_OPTION]


runtime = Runtime()


def is_served(names: tuple[str, ...]) -> bool:
    """Whether sessions of these providers, in this order, take weights from device memory."""
    return (
        bool(names)
        and names[0] == runtime.provider
        and set(names[1:]) <= _COMPANIONS
        and cache().config.ort_cuda
        and cache().config.device
    )


def describe(options: Mapping[str, Any]) -> dict[str, str]:
    """The CUDA provider's options as a recipe has them, the same in every process.

    The device is named by its id instead of its number, and options of the process alone are left
    out. Raises NotServed if there is no such device; onnxruntime then says so itself.
    """
    kept = {str(key): str(value) for key, value in options.items() if key not in OF_THE_PROCESS}
    number = kept.get(_DEVICE_OPTION, "0")
    try:
        return kept | {_DEVICE_OPTION: runtime.device_id(int(number))}
    except (ValueError, TrimsError) as error:
        raise NotServed("no_cuda", f"device_id {number}: {error}") from error


@contextlib.contextmanager
def creating(
    session: Any, options: Any, model: str, providers: tuple[tuple[str, ...], ...]
) -> Iterator[None]:
    """Around the creation of ``session`` from the prepared model at the path ``model``.

    ``options`` are those of this one creation; ``providers`` the recipe's. Does nothing if these
    are not of the CUDA provider. Raises NotServed after the block if the session is not on the
    device, whatever the reason: it is not the one that was asked for.
    """
    if providers[0][0] != runtime.provider:
        yield
        return
    values, holds = _lend(options, model, runtime.device_of(providers[0]))
    try:
        yield
    finally:
        # Cleared here, because a traceback may keep this frame.
        values.clear()
    names = list(session.get_providers())
    if runtime.provider not in names:
        raise NotServed("no_cuda", f"{model}: onnxruntime made a session of {', '.join(names)}")
    in_place = sum(each() is not None for each in holds)
    diagnostics.count("initializers", "in_place", in_place)
    diagnostics.count("initializers", "not_in_place", len(holds) - in_place)


class _Hold:
    """One initializer's share in an arena."""

    __slots__ = ("__weakref__", "arena")

    def __init__(self, arena: DeviceArena) -> None:
        self.arena = arena


def _lend(options: Any, model: str, device: DeviceId) -> tuple[list[Any], list[weakref.ref[_Hold]]]:
    """Values over device memory for ``options``, which points to them, and their holds."""
    weights = os.path.join(os.path.dirname(model), PREPARED_WEIGHTS)
    values: list[Any] = []
    holds: list[weakref.ref[_Hold]] = []
    try:
        arena = _open(weights, device)
        for record in read_directory(memoryview(arena.outline.buffer).cast("B")):
            hold = _Hold(arena)
            value = _value(record, arena, hold)
            options.add_initializer(record.name, value)
            values.append(value)
            holds.append(weakref.ref(hold))
    # Border: without shared memory the session is the same, so nothing may keep it from being made.
    except Exception as error:
        _skip.error(error, what=weights)
    return values, holds


def _open(weights: str, device: DeviceId) -> DeviceArena:
    descriptor = os.open(weights, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return cache().open_device(descriptor, name=weights, device=device)
    finally:
        os.close(descriptor)


def _value(record: Record, arena: DeviceArena, hold: _Hold) -> Any:
    """An onnxruntime value over a record. Raises NotServed if that is not on the device."""
    import onnxruntime
    from onnxruntime.capi import _pybind_state

    offset = arena.layout.find(record.span.offset_bytes, record.span.size_bytes)
    if offset is None:
        raise NotServed("not_on_device", f"initializer {record.name!r} is in no device memory")
    tensor = dlpack.DlpackTensor(
        arena.address + offset, record.dtype, record.shape, runtime.device_type, arena.index
    )

    def take(capsule: Any) -> Any:
        # Not the method of this name of onnxruntime.OrtValue, which came with 1.26.
        return onnxruntime.OrtValue(dlpack.ort_value(_pybind_state.OrtValue, capsule))

    return dlpack.offer(tensor, hold, take)
