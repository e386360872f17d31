"""Patches of the libraries that load models, and the switch that turns them on and off.

Owns which patch points exist, when they are applied (now, or when their library is imported) and
whether they act. Importing this package imports none of the patched libraries.
"""

from __future__ import annotations

import contextvars
import functools
import importlib
import sys
import threading

from trims_shim.late_imports import ensure_imported, no_fork
from trims_shim.patches.importing import call_when_imported

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from trims_shim.patches.points import AppliedPatch

__all__ = ["ELIDING", "active", "applied", "disable", "enable", "overridden", "requested"]

ELIDING = "trims_shim.patches.torch_module"
"""The patch file that a setting can leave out."""
_UNSHARING = "trims_shim.patches.torch_unshare"
_INITIALIZING = "trims_shim.patches.torch_initializers"
_MERGING = "trims_shim.patches.peft_merge"
_SWAPPING = "trims_shim.patches.peft_hotswap"
_RESCALING = "trims_shim.patches.transformers_rwkv"
_PUTTING = "trims_shim.patches.accelerate_buffers"
_SESSIONS = "onnxruntime.capi.onnxruntime_inference_collection"
PATCH_FILES = (
    # (settings that ask for it, modules whose import completes the library, patch file)
    (("torch", "safetensors"), ("torch",), "trims_shim.patches.torch_from_file"),
    (("torch",), ("torch",), "trims_shim.patches.torch_load"),
    (("torch",), ("torch",), ELIDING),
    (("torch", "safetensors"), ("torch",), _UNSHARING),
    (("torch", "safetensors"), ("torch",), _INITIALIZING),
    (("torch",), ("torch",), "trims_shim.patches.torch_module_move"),
    (("safetensors",), ("safetensors.numpy",), "trims_shim.patches.safetensors_numpy"),
    (("safetensors",), ("safetensors", "torch"), "trims_shim.patches.safetensors_device"),
    (("safetensors",), ("safetensors.torch",), "trims_shim.patches.safetensors_model"),
    (
        ("safetensors",),
        ("transformers.core_model_loading", "transformers.modeling_utils"),
        "trims_shim.patches.transformers_load",
    ),
    (
        ("torch", "safetensors"),
        ("peft.tuners.tuners_utils", "peft.tuners.lora.layer"),
        _MERGING,
    ),
    (("torch", "safetensors"), ("peft.utils.hotswap",), _SWAPPING),
    (("torch", "safetensors"), ("transformers.models.rwkv.modeling_rwkv",), _RESCALING),
    (("torch", "safetensors"), ("accelerate.utils.modeling",), _PUTTING),
    (("onnxruntime",), (_SESSIONS,), "trims_shim.patches.onnxruntime_options"),
    (("onnxruntime",), (_SESSIONS,), "trims_shim.patches.onnxruntime_session"),
)
_GUARDS = (ELIDING, _UNSHARING, _INITIALIZING, _MERGING, _SWAPPING, _RESCALING, _PUTTING)
"""Patch files that keep programs from writing to shared device memory, which is fatal. They stay
applied while this process has any."""

overridden: contextvars.ContextVar[bool | None] = contextvars.ContextVar(
    "trims_shim_override", default=None
)
"""Set by the context managers: True or False wins over :func:`enable` for this context."""

_lock = threading.RLock()
_is_enabled = False
_applied: dict[str, list[AppliedPatch]] = {}
_requested: set[str] = set()


def active() -> bool:
    """Whether patched calls use the cache right now."""
    override = overridden.get()
    return _is_enabled if override is None else override


def enable(libraries: tuple[str, ...], *, elide_copies: bool = True) -> None:
    """Patch these libraries, now or as soon as they are imported.

    Without ``elide_copies``, load_state_dict is left alone.
    """
    global _is_enabled
    with no_fork(), _lock:
        _is_enabled = True
        for wanted_by, modules, patch_file in PATCH_FILES:
            if not set(wanted_by) & set(libraries) or patch_file in _requested:
                continue
            if patch_file == ELIDING and not elide_copies:
                continue
            _requested.add(patch_file)
            _when_imported(modules, functools.partial(_apply, patch_file))


def _when_imported(modules: tuple[str, ...], hook: Callable[[], None]) -> None:
    """Call ``hook`` when all of ``modules`` have been imported."""
    for module in reversed(modules):
        hook = functools.partial(call_when_imported, module, hook)
    hook()


def disable() -> None:
    """Put the originals back. A replacement that another tool has wrapped stays, inactive."""
    global _is_enabled
    ensure_imported("trims_shim.patches.points")
    from trims_shim.patches.points import undo

    with no_fork(), _lock:
        _is_enabled = False
        kept = _GUARDS if _is_any_shared() else ()
        for patch_file in [each for each in _applied if each not in kept]:
            for patch in reversed(_applied.pop(patch_file)):
                undo(patch)
        _requested.intersection_update(_applied)


def _is_any_shared() -> bool:
    devices = sys.modules.get("trims_shim.patches.torch_device")
    return devices is not None and bool(devices.is_any_shared())


def applied() -> dict[str, list[AppliedPatch]]:
    """Return the state of the patch points of each patch file whose library is imported."""
    with _lock:
        return {patch_file: list(patches) for patch_file, patches in _applied.items()}


def requested() -> frozenset[str]:
    """Return the patch files asked for, also those that wait for their library's import."""
    with _lock:
        return frozenset(_requested)


def _apply(patch_file: str) -> None:
    # A child forked in the middle would inherit a half-applied patch, and our lock held.
    with no_fork(), _lock:
        from trims_shim.patches.points import apply

        if patch_file not in _requested or patch_file in _applied:
            return
        points = importlib.import_module(patch_file).POINTS
        _applied[patch_file] = done = []
        for point in points:  # a signal handler may end it in the middle
            done.append(apply(point))
        _preload()


def _preload() -> None:
    """Import what a load needs now, while the program is importing rather than loading a model.

    ZeroMQ is left out: only the first process to load a file needs it.
    """
    importlib.import_module("trims_shim.client.cache")
    importlib.import_module("trims_shim.wire.codec").prepare()
    if "torch" in sys.modules or "safetensors" in sys.modules:
        importlib.import_module("trims_shim.formats")
    devices = sys.modules.get("trims_shim.patches.torch_device")
    if devices is not None and devices.runtime.is_built():
        importlib.import_module("trims_shim.client.device_arenas")
