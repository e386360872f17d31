"""torch.load straight onto a device: a plain state dict whose tensors all go to one CUDA device.

torch's own reader reads the pickle from the program's file, so no host image is needed. The pickle
and ``map_location`` decide the device (``map_location`` is a string, a device or a dictionary; or
None where the checkpoint was saved on CUDA). The device image is opened, and the tensors are built
over it from the recipe, as :mod:`.torch_load` does over host memory: ties, views, ``requires_grad``
and parameters are as torch makes them.

A checkpoint with the state of an optimizer is about to be trained on, averaged or resumed: all of
it becomes private copies, made on the device. What is moved there from host memory is copied by
torch (:func:`is_of_training`): programs write averages and teachers, which no optimizer has.

Everything else takes the host tier and torch's own copies: a pickle that is more than a state dict,
a callable ``map_location``, tensors for several devices, an absent device (torch then raises its
own error, from its usual place).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

import torch

from trims_shim import diagnostics
from trims_shim.errors import FormatError, UnsupportedFormat
from trims_shim.formats import Recipe, StorageSpec, TorchArchive, read_archive, read_recipe
from trims_shim.patches import torch_device, torch_rebuild
from trims_shim.patches.asking import absolute
from trims_shim.patches.torch_device import Place
from trims_shim.patches.torch_modes import unseen
from trims_shim.patches.torch_rebuild import Built, collector_paused

if TYPE_CHECKING:
    from trims_shim.client.device_arenas import DeviceArena

__all__ = ["build", "is_of_training", "may_apply"]

_CUDA = re.compile("cuda(:|[0-9]+)")
"""The pattern with which torch.serialization._deserialize recognises CUDA locations."""
_PICKLE = "data.pkl"
_OF_OPTIMIZERS = b"param_groups"
"""A key in the ``state_dict`` of every optimizer."""
_TRAINING = "checkpoint_of_training"


def may_apply(map_location: Any) -> bool:
    """Whether a load with this argument could end on a device. Cheap: called for every load."""
    if torch_device.missing_capability() is not None:
        return False
    if map_location is None or type(map_location) is dict:
        return True
    return type(map_location) in (str, torch.device) and _names_cuda(str(map_location))


def build(
    reader: Any, map_location: Any, *, file: Any, interns_names: bool = False
) -> Built | None:
    """Return the state dict on its device; None where the host tier or torch has to load it.

    ``reader`` is torch's reader of the archive, ``file`` the program's file that it reads.
    ``interns_names``: see :func:`read_recipe`.
    """
    planned = _plan(reader, map_location, interns_names=interns_names)
    if planned is None:
        return None
    data, recipe, device = planned
    place = torch_device.place_of(device)
    if place is None:
        return None
    with _access(data):
        return _on_device(file, data, recipe, place)


def _on_device(file: Any, data: bytes, recipe: Recipe, place: Place) -> Built | None:
    arena = torch_device.arena_of_file(file.fileno(), file.name, place)
    if arena is None:
        return None
    try:
        image = _Image(arena, place)
        with unseen():
            result = image.assemble(recipe, data)
    except FormatError as error:
        torch_device.skip(error.reason, what=f"{absolute(file.name)}: {error}")
        return None
    # Border: torch meets the same error, most likely a failed allocation for small tensors.
    except Exception as error:
        torch_device.skip.error(error, what=absolute(file.name))
        return None
    if image.end_bytes:
        file.seek(image.end_bytes)
    diagnostics.count("served", "torch_zip_device")
    diagnostics.count("built", "recipe")
    return Built(result)


def _names_cuda(location: str) -> bool:
    return location == "cuda" or _CUDA.match(location) is not None


@collector_paused()
def _plan(
    reader: Any, map_location: Any, *, interns_names: bool
) -> tuple[bytes, Recipe, torch.device] | None:
    """Return the pickle, its recipe, and the one device to which all of its storages go."""
    if not reader.has_record(_PICKLE):
        return None
    data: bytes = reader.get_record(_PICKLE)
    if map_location is None and b"cuda" not in data:
        return None
    try:
        recipe = read_recipe(data, interns_names=interns_names)
    except FormatError as error:
        torch_device.skip(error.reason, what="torch.load")
        return None
    locate = _locator(map_location)
    locations = {locate(spec.location) for spec in recipe.storages}
    device = _device(locations)
    return None if device is None else (data, recipe, device)


def _locator(map_location: Any) -> Callable[[str], Any]:
    """Do as torch.serialization._get_restore_location, for the forms :func:`may_apply` takes."""
    if map_location is None:
        return lambda location: location
    if type(map_location) is dict:
        return lambda location: map_location.get(location, location)
    return lambda location: str(map_location)


def _device(locations: set[Any]) -> torch.device | None:
    """Return the device that all locations name, or None."""
    on_cuda = {each for each in locations if type(each) is str and _names_cuda(each)}
    try:
        devices = {torch.device(each) for each in on_cuda}
    except RuntimeError:  # torch has its own words for it
        return None
    if len(devices) == 1 and on_cuda == locations:
        return devices.pop()
    if devices:
        torch_device.skip("several_devices", what="torch.load")
    return None


@contextlib.contextmanager
def _access(pickle: bytes) -> Iterator[None]:
    """Ask for private copies of a checkpoint to train on; else leave the program's choice."""
    if _OF_OPTIMIZERS not in pickle:
        yield
        return
    torch_device.skip(_TRAINING, what="torch.load")
    token = torch_device.access.set("private")
    try:
        yield
    finally:
        torch_device.access.reset(token)


@collector_paused()
def is_of_training(file: memoryview) -> bool:
    """Whether a file in host memory is a checkpoint to train on; counted as such if it is."""
    try:
        span = read_archive(file).records.get(_PICKLE)
    except FormatError:  # of safetensors, most likely
        return False
    if span is None or _OF_OPTIMIZERS not in bytes(file[span.offset_bytes : span.end_bytes]):
        return False
    torch_device.skip(_TRAINING, what="a tensor that is moved")
    return True


class _Image:
    """A device image and the places of its archive's records."""

    def __init__(self, arena: DeviceArena, place: Place) -> None:
        """Raises FormatError where this package reads the archive differently from torch."""
        self._arena = arena
        self._place = place
        archive = arena.layout.contents
        if not isinstance(archive, TorchArchive):
            raise UnsupportedFormat("the image is no torch archive")
        self._view = memoryview(arena.outline.buffer).cast("B")
        self._archive = archive
        self.end_bytes = 0
        """Where torch's reader would leave the program's file; 0: where it is now."""

    @collector_paused()
    def assemble(self, recipe: Recipe, pickle: bytes) -> Any:
        """Build the result. Raises UnsupportedFormat where torch has to build it."""
        records = self._archive.records
        span = records.get(_PICKLE)
        if span is None or bytes(self._view[span.offset_bytes : span.end_bytes]) != pickle:
            raise UnsupportedFormat("the file's pickle is not the image's")
        if not torch_rebuild.is_little_endian(self._archive):
            raise UnsupportedFormat("the records' bytes would have to be swapped")
        with torch_device.Parts(self._arena) as parts:
            storages = [self._storage(spec, parts) for spec in recipe.storages]
        blanks = torch_rebuild.Blanks(self._place.device)
        return torch_rebuild.assemble(recipe, storages, blanks)

    def _storage(self, spec: StorageSpec, parts: torch_device.Parts) -> torch.UntypedStorage:
        name = f"data/{spec.key}"
        span = self._archive.records.get(name)
        if span is None or span.size_bytes != spec.size_bytes:
            raise UnsupportedFormat(f"record {name} is not of {spec.size_bytes} bytes")
        if not spec.size_bytes:
            empty: Any = torch.UntypedStorage
            return cast(torch.UntypedStorage, empty(0, device=self._place.device))
        offset = torch_device.record_of(self._arena, span.offset_bytes, span.size_bytes)
        if offset is None:
            raise UnsupportedFormat(f"record {name} is not in device memory")
        self.end_bytes = span.end_bytes
        return parts.storage(offset, span.size_bytes)
