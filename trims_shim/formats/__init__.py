"""Readers of model file formats: pure functions from bytes to plain data.

No reader executes, imports or allocates because a file says so; every way a file can be wrong is a
``FormatError``. Import the readers of ONNX models from their own modules: most programs need none.
"""

from __future__ import annotations

from trims_shim.formats.device_layout import (
    DeviceLayout,
    Placed,
    layout_of,
    layout_of_numbers,
)
from trims_shim.formats.safetensors import read_header
from trims_shim.formats.torch_recipe import (
    ParameterSpec,
    Recipe,
    StorageSpec,
    TensorSpec,
    read_recipe,
)
from trims_shim.formats.torch_zip import TorchArchive, read_archive

__all__ = [
    "DeviceLayout",
    "ParameterSpec",
    "Placed",
    "Recipe",
    "StorageSpec",
    "TensorSpec",
    "TorchArchive",
    "layout_of",
    "layout_of_numbers",
    "read_archive",
    "read_header",
    "read_recipe",
]
