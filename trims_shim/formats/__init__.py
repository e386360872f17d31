"""Readers of model file formats: pure functions from bytes to plain data.

No reader executes, imports or allocates because a file says so; every way a file can be wrong is a
``FormatError``.
"""

from __future__ import annotations

from trims_shim.formats.device_layout import DeviceLayout, Placed, layout_of
from trims_shim.formats.onnx import OnnxModel, StoredTensor, is_ort_format, read_model
from trims_shim.formats.onnx_relayout import Copy, Relayout, relayout
from trims_shim.formats.safetensors import SafetensorsHeader, read_header
from trims_shim.formats.torch_recipe import (
    ParameterSpec,
    Recipe,
    StorageSpec,
    TensorSpec,
    read_recipe,
)
from trims_shim.formats.torch_zip import TorchArchive, read_archive

__all__ = [
    "Copy",
    "DeviceLayout",
    "OnnxModel",
    "ParameterSpec",
    "Placed",
    "Recipe",
    "Relayout",
    "SafetensorsHeader",
    "StorageSpec",
    "StoredTensor",
    "TensorSpec",
    "TorchArchive",
    "is_ort_format",
    "layout_of",
    "read_archive",
    "read_header",
    "read_model",
    "read_recipe",
    "relayout",
]
