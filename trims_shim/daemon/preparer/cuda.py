"""What the preparer does for recipes of onnxruntime's CUDA provider, and for no others.

Such a session takes initializers that are in device memory already
(:mod:`trims_shim.patches.onnxruntime_cuda`). onnxruntime decides which ones: it plans some for host
memory, and gives up some that a kernel packs. So a session of the finished model is given every
candidate, and those that it still holds afterwards are listed in the directory at the end of the
weights (:mod:`trims_shim.formats.onnx_directory`).

Packed weights are not saved: those of kernels on the device would be host copies of device memory.

Runs in the preparer; onnxruntime and numpy are the client's.
"""

from __future__ import annotations

import contextlib
import io
import os
import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

from trims_shim.daemon.preparer.optimising import Refusal, Sessions, mapped
from trims_shim.errors import TrimsError
from trims_shim.formats.onnx import OnnxModel, read_model
from trims_shim.formats.onnx_directory import (
    DTYPES,
    ELEMENT_BYTES,
    directory_of,
    read_directory,
)
from trims_shim.memory import dlpack
from trims_shim.specs import PREPARED_MODEL, PREPARED_WEIGHTS, Record
from trims_shim.wire.messages import SessionRecipe

__all__ = ["MIN_SHARED_BYTES", "CudaSessions", "candidates", "sessions_of"]

MIN_SHARED_BYTES = 1 << 10
"""Smaller ones are most of the initializers, are often planned for the host, and weigh nothing."""
_PROVIDER = "CUDAExecutionProvider"
_DEVICE_OPTION = "device_id"


def sessions_of(recipe: SessionRecipe) -> Sessions:
    """The maker of sessions for a recipe. Raises Refusal (``no_cuda``), and as Sessions does."""
    if recipe.providers and recipe.providers[0][0] == _PROVIDER:
        return CudaSessions(recipe)
    return Sessions(recipe)


class CudaSessions(Sessions):
    """Sessions of the CUDA provider, which take what the directory lists from device memory."""

    provider = _PROVIDER
    device_type = dlpack.DeviceType.CUDA

    def __init__(self, recipe: SessionRecipe) -> None:
        self.index = self.index_of(recipe.providers[0])
        self._values: list[tuple[str, Any]] = []
        super().__init__(recipe._replace(providers=self._here(recipe.providers)))
        if self.provider not in self._binding.get_available_providers():
            raise _no_cuda("this onnxruntime is built without CUDA")
        self.prepare_libraries()

    def original(self, path: str) -> Any:
        """As of Sessions. Also raises Refusal (``no_cuda``) for a session without the device."""
        session = super().original(path)
        names = session.get_providers()
        if self.provider not in names:
            raise _no_cuda(f"onnxruntime makes sessions of {', '.join(names)} here")
        return session

    def save(self, path: str, directory: str, *, is_packed: bool) -> None:
        """As of Sessions, never with packed weights."""
        super().save(path, directory, is_packed=False)

    def complete(self, directory: str) -> None:
        """As of Sessions: find out, and list, what a hit will be given."""
        listed = self._in_place(directory, self._candidates(directory))
        _append(os.path.join(directory, PREPARED_WEIGHTS), directory_of(listed))

    def prepared(self, directory: str) -> Any:
        """As of Sessions, of files that are complete."""
        with mapped(os.path.join(directory, PREPARED_WEIGHTS)) as data:
            listed = read_directory(data)
        return self._given(directory, listed)[0]

    # --- what is different on an emulated device --------------------------------------------------

    def index_of(self, provider: tuple[str, ...]) -> int:
        """This process's number of the recipe's device, which it names by its id."""
        from trims_shim.memory.driver import driver

        device = dict(zip(provider[1::2], provider[2::2], strict=True)).get(_DEVICE_OPTION, "")
        try:
            index = driver().index_of(device)
            is_exclusive = driver().devices()[index].is_exclusive
        except TrimsError as error:
            raise _no_cuda(f"device {device}: {error}") from error
        if is_exclusive:  # the program would get none while we have it
            raise _no_cuda(f"device {device}: its compute mode lets one process at a time use it")
        return index

    def prepare_libraries(self) -> None:
        """Load CUDA's libraries from the wheels they come in, if that is where they are."""
        import onnxruntime

        preload = getattr(onnxruntime, "preload_dlls", None)
        if preload is not None:
            # It prints what it cannot find; onnxruntime may still find it elsewhere.
            with contextlib.redirect_stdout(io.StringIO()):
                preload()

    def put(self, data: memoryview) -> tuple[int, object]:
        """Copy to the device; the address, and what keeps it."""
        import numpy
        import onnxruntime

        array = numpy.frombuffer(data, numpy.uint8)
        value = onnxruntime.OrtValue.ortvalue_from_numpy(array, "cuda", self.index)
        return int(value.data_ptr()), value

    # --- behind it --------------------------------------------------------------------------------

    def _here(self, providers: tuple[tuple[str, ...], ...]) -> tuple[tuple[str, ...], ...]:
        """A recipe's providers with the device's number instead of its id."""
        name, *texts = providers[0]
        options = dict(zip(texts[::2], texts[1::2], strict=True))
        options[_DEVICE_OPTION] = str(self.index)
        flat = (text for pair in sorted(options.items()) for text in pair)
        return ((name, *flat), *providers[1:])

    def _candidates(self, directory: str) -> list[Record]:
        # onnxruntime before 1.21 has no such method.
        if not hasattr(self._binding.OrtValue, "from_dlpack"):
            return []
        with mapped(os.path.join(directory, PREPARED_MODEL)) as model:
            return candidates(read_model(model), PREPARED_WEIGHTS)

    def _in_place(self, directory: str, records: Iterable[Record]) -> list[Record]:
        """The records that a session uses where they are given to it."""
        session, lent = self._given(directory, records)
        in_place = [record for record, hold in lent if hold() is not None]
        del session
        return in_place

    def _given(
        self, directory: str, records: Iterable[Record]
    ) -> tuple[Any, list[tuple[Record, weakref.ref[_Hold]]]]:
        """A session that is given these, and weak references to their memory."""
        lent = []
        with mapped(os.path.join(directory, PREPARED_WEIGHTS)) as data:
            for record in records:
                with data[record.span.offset_bytes : record.span.end_bytes] as part:
                    hold = _Hold(*self.put(part))
                self._values.append((record.name, self._value(record, hold)))
                lent.append((record, weakref.ref(hold)))
                del hold
        try:
            return super().prepared(directory), lent
        finally:
            # The session has references of its own to what it uses.
            self._values.clear()

    def _create(self, path: str, options: Any) -> Any:
        # Options hold bare pointers to the values, which live until the session exists.
        for name, value in self._values:
            options.add_initializer(name, value)
        return super()._create(path, options)

    def _value(self, record: Record, hold: _Hold) -> Any:
        import onnxruntime

        tensor = dlpack.DlpackTensor(
            hold.address, record.dtype, record.shape, self.device_type, self.index
        )

        def take(capsule: Any) -> Any:
            return onnxruntime.OrtValue(dlpack.ort_value(self._binding.OrtValue, capsule))

        return dlpack.offer(tensor, hold, take)


def candidates(model: OnnxModel, location: str) -> list[Record]:
    """Initializers in that file that a session could be given; by offset, without overlaps."""
    # add_initializer goes by the name alone, in all graphs at once.
    names = Counter(each.name for each in model.tensors)
    found = []
    for each in model.tensors:
        dtype = DTYPES.get(each.dtype)
        if dtype is None or each.span is None or each.location != location:
            continue
        size_bytes = ELEMENT_BYTES[dtype]
        for length in each.shape:
            size_bytes *= length
        if each.span.size_bytes == size_bytes >= MIN_SHARED_BYTES and names[each.name] == 1:
            found.append(Record(each.name, each.span, dtype, each.shape))
    apart: list[Record] = []
    for record in sorted(found, key=lambda each: each.span.offset_bytes):
        if not apart or record.span.offset_bytes >= apart[-1].span.end_bytes:
            apart.append(record)
    return apart


class _Hold:
    """One candidate's memory."""

    __slots__ = ("__weakref__", "address", "keeper")

    def __init__(self, address: int, keeper: object) -> None:
        self.address = address
        self.keeper = keeper


def _no_cuda(message: str) -> Refusal:
    return Refusal("no_cuda", message, is_lasting=False)


def _append(path: str, data: bytes) -> None:
    """Write behind a file that is read-only; its publisher syncs it to the disk."""
    mode = os.stat(path).st_mode & 0o777
    os.chmod(path, 0o600)
    with open(path, "ab") as file:
        file.write(data)
    os.chmod(path, mode)
