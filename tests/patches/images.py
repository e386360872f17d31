"""Tensors over images as a load would map them, with no daemon behind them."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from blake3 import blake3

from trims_shim import diagnostics, patches
from trims_shim.client.arenas import Image, Original, find
from trims_shim.memory import copying, copying_native
from trims_shim.patches import points, torch_mappings, torch_stacking
from trims_shim.patches.torch_rounding import dtype_name
from trims_shim.patches.torch_storage import storage_of
from trims_shim.specs import Conversion, Variant

__all__ = [
    "assert_alike",
    "cached",
    "conversion",
    "image_of",
    "image_with",
    "make_variants",
    "needs_extension",
    "patched",
]

needs_extension = pytest.mark.skipif(
    not copying.can_convert(), reason="the extension was not built (no compiler)"
)


@contextlib.contextmanager
def patched(monkeypatch: pytest.MonkeyPatch, *targets: points.PatchPoint) -> Iterator[None]:
    """These patches and no others, switched on; counters begin anew."""
    monkeypatch.setattr(patches, "_is_enabled", True)
    diagnostics.reset_after_fork()
    applied = [points.apply(target) for target in targets]
    assert all(each.state is points.PatchState.APPLIED for each in applied)
    yield
    for each in applied:
        points.undo(each)


def cached(state: dict[str, torch.Tensor], *, shift: int = 0) -> OrderedDict[str, torch.Tensor]:
    """The same state dict, its bytes in an image that is mapped as a load would map it."""
    offsets, end = {}, shift
    for key, value in state.items():
        offsets[key] = end
        end = -(-(end + value.nbytes) // 64) * 64 + shift
    descriptor = os.memfd_create("weights")
    os.ftruncate(descriptor, end)
    for key, value in state.items():
        data = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        os.pwrite(descriptor, data, offsets[key])
    image = Image(descriptor, end, digest="test")
    storage = storage_of(image.map())
    result: OrderedDict[str, torch.Tensor] = OrderedDict()
    for key, value in state.items():
        record = storage[offsets[key] : offsets[key] + value.nbytes]
        tensor = torch.empty(0, dtype=value.dtype)
        result[key] = tensor.set_(record, 0, value.shape)  # type: ignore[call-overload]
    return result


def image_with(content: bytes, *, name: str = "") -> Image:
    descriptor = os.memfd_create("segment")
    os.write(descriptor, content)
    return Image(descriptor, len(content), digest=blake3(content).hexdigest(), name=name)


def make_variants(monkeypatch: pytest.MonkeyPatch) -> list[Variant]:
    """Have variants made as the daemon makes them; return those that are asked for."""
    asked: list[Variant] = []
    made: dict[tuple[Image, Variant], Image] = {}

    def variant_image(image: Image, variant: Variant) -> Image:
        asked.append(variant)
        if (image, variant) not in made:
            data = bytes(variant.lead_bytes) + bytes(memoryview(image.map().buffer))
            if variant.pieces:
                data = b"".join(data[at : at + variant.piece_bytes] for at in variant.pieces)
            if variant.conversion:
                result = memoryview(bytearray(variant.size_bytes(image.size_bytes)))
                copying_native.convert(memoryview(data), result, variant.conversion)
                data = bytes(result)
            found = made[image, variant] = image_with(data, name=f"{image.name} ({variant})")
            found.original = Original(image.digest, variant, weakref.ref(image), image.name)
        return made[image, variant]

    monkeypatch.setattr(torch_mappings, "variant_image", variant_image)
    monkeypatch.setattr(torch_stacking, "variant_image", variant_image)
    monkeypatch.setattr(torch_stacking, "_MIN_SIZE_BYTES", 0)
    monkeypatch.setattr(torch_mappings, "_VARIANTS_FROM_BYTES", 0)
    return asked


def conversion(source: torch.dtype, target: torch.dtype) -> Conversion:
    return Conversion(dtype_name(source), dtype_name(target))


def assert_alike(ours: Any, theirs: Any) -> None:
    """The parameters of two models, and how they are held."""
    for (name, tensor), expected in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(tensor, expected), name
        for attribute in ("dtype", "requires_grad", "is_leaf", "_version"):
            assert getattr(tensor, attribute) == getattr(expected, attribute), (name, attribute)
        assert tensor.stride() == expected.stride()


def image_of(tensor: torch.Tensor) -> Image | None:
    found = find(tensor.data_ptr(), tensor.nbytes)
    return found[0] if found else None
