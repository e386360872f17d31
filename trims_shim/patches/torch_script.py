"""torch.jit.load of a path: the weights of TorchScript modules.

C++ reads the archive and makes the tensors, so no place in it can be given other memory. Instead it
reads the archive without its weights (:mod:`.torch_script_archive`), as an archive in
memory: each weight is then an empty tensor, which is laid over its record in the cache afterwards.
Modules whose restoring could look at a weight meanwhile are left to torch, and so are constants of
a graph (where ``torch.jit.freeze`` puts weights), because their shapes have a meaning for it.
"""

from __future__ import annotations

import functools
import io
import os
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from trims_shim import diagnostics, patches
from trims_shim.client.cache import cache
from trims_shim.errors import FormatError, UnsupportedFormat
from trims_shim.patches.asking import arena_of_file, opened, or_none
from trims_shim.patches.points import PatchPoint
from trims_shim.patches.torch_modes import has_foreign_mode, uncompiled, unseen
from trims_shim.patches.torch_rebuild import Blanks
from trims_shim.patches.torch_script_archive import Script, Weight, read_script
from trims_shim.patches.torch_storage import storage_of
from trims_shim.specs import Identity

__all__ = ["POINTS"]

_C: Any = torch._C
_CPU = torch.device("cpu")
_data: Any = torch.Tensor.data


def _wrap(original: Callable[..., Any]) -> Callable[..., Any]:
    # What a program put in its place runs, and may call ours.
    is_torchs_own = isinstance(original, types.BuiltinFunctionType)

    @uncompiled
    @functools.wraps(original)
    def import_ir_module(*args: Any, **kwargs: Any) -> Any:
        is_call = len(args) == 5 and not kwargs and type(args[1]) is str
        if is_call and is_torchs_own and patches.active() and not has_foreign_mode():
            module = _served(*args[1:])
            if module is not None:
                return module
        return original(*args, **kwargs)

    return import_ir_module


@or_none
def _served(path: str, map_location: Any, extra_files: Any, restores_shapes: bool) -> Any | None:
    """Return the module over the cached archive; None (counted) where torch has to load it."""
    if restores_shapes or map_location not in (None, _CPU):
        reason = "arguments" if restores_shapes else "device"
        diagnostics.fallback(reason, what="torch.jit.load")
        return None
    with opened(path) as descriptor:
        if descriptor is None:
            return None
        identity = Identity.from_stat(os.fstat(descriptor))
        script = _script(descriptor, path)
        arena = None if script is None else arena_of_file(descriptor, path)
        if script is None or arena is None:
            return None
        # The weights would be the new file's, where the old one had them.
        if Identity.from_stat(os.fstat(descriptor)) != identity:
            diagnostics.fallback("model_changed", what=path)
            return None
    try:
        unit = _C.CompilationUnit()  # The program's must be empty if torch has to load after all.
        module = _C.import_ir_module_from_buffer(
            unit, script.archive, map_location, extra_files, False
        )
        _lay(module, script.weights, storage_of(arena))
    # Border: torch loads it from the file, and raises an error of its own where it has to.
    except Exception as error:
        diagnostics.pass_on(error)
        diagnostics.fallback("unsupported_format", error, what=path)
        return None
    diagnostics.count("served", "torch_script")
    return module


def _script(descriptor: int, path: str) -> Script | None:
    """Return the archive without its weights; None (counted) where there is nothing to share."""
    if os.fstat(descriptor).st_size < cache().config.min_bytes:
        diagnostics.fallback("small_file", what=path)
        return None
    try:
        with io.FileIO(descriptor, closefd=False) as file:
            script = read_script(file)
            # Refuses what zipfile takes; of such an archive, what is left might be in order.
            file.seek(0)
            _C.PyTorchFileReader(file)
            return script
    # RuntimeError: of torch's reader.
    except (FormatError, OSError, RuntimeError) as error:
        diagnostics.fallback("unsupported_format", error, what=path)
        return None


def _lay(module: Any, weights: Sequence[Weight], storage: torch.UntypedStorage) -> None:
    """Lay each weight, empty so far, over its record. Raises UnsupportedFormat."""
    blanks = Blanks(_CPU)
    owners: dict[tuple[str, ...], Any] = {(): module}
    with unseen():
        for (path, _, dtype, _, offset, size, stride, _), record in weights:
            weight = _owner(owners, path[:-1]).getattr(path[-1])
            blank = blanks[getattr(torch, dtype)]
            if type(weight) is not torch.Tensor or weight.shape != (0,):
                raise UnsupportedFormat(f"attribute {'.'.join(path)} is not the tensor it was")
            part = storage[record.offset_bytes : record.end_bytes]
            _data.__set__(weight, blank.new_empty(0).set_(part, offset, size, stride))


def _owner(owners: dict[tuple[str, ...], Any], path: tuple[str, ...]) -> Any:
    """Return the object at these attributes of the module; ``owners`` are those found before."""
    if path not in owners:
        owners[path] = _owner(owners, path[:-1]).getattr(path[-1])
    return owners[path]


def _probe() -> str | None:
    if not hasattr(_C, "import_ir_module_from_buffer"):
        return "torch._C.import_ir_module_from_buffer is gone"
    return None


POINTS: tuple[PatchPoint, ...] = (
    PatchPoint("torch._C:import_ir_module", "2.4+", _wrap, probe=_probe),
)
