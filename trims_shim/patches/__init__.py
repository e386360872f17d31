"""Patches of the libraries that load models, and the switch that turns them on and off.

Owns which patch points exist, when they are applied (now, or when their library is imported) and
whether they act. Importing this package imports none of the patched libraries.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib
import sys

from trims_shim.late_imports import ensure_imported, no_fork
from trims_shim.patches import importing
from trims_shim.patches.importing import call_when_imported

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from trims_shim.patches.points import AppliedPatch

__all__ = [
    "ELIDING",
    "active",
    "applied",
    "disable",
    "enable",
    "inactive",
    "overridden",
    "requested",
]

ELIDING = frozenset(
    {"torch_module", "torch_module_dtype", "transformers_dtype", "transformers_experts"}
)
"""The patch files that a setting can leave out."""
_BOTH = ("torch", "safetensors")
_TORCH = ("torch",)
_SAFETENSORS = ("safetensors",)
_ONNXRUNTIME = ("onnxruntime",)
_MODELS = ("transformers.core_model_loading", "transformers.modeling_utils")
_TUNERS = ("peft.tuners.tuners_utils", "peft.tuners.lora.layer")
_ADAPTERS = ("peft.tuners.lora.arrow", "peft.tuners.oft.layer")
_SESSIONS = ("onnxruntime.capi.onnxruntime_inference_collection",)
PATCH_FILES = (
    # (patch file, settings that ask for it, modules whose import completes the library, is a guard)
    ("torch_from_file", _BOTH, ("torch",), False),
    ("torch_load", _TORCH, ("torch",), False),
    ("torch_script", _TORCH, ("torch",), False),
    ("torch_export", _TORCH, ("torch.export.pt2_archive._package",), False),
    ("torch_module", _TORCH, ("torch",), True),
    ("torch_module_dtype", _TORCH, ("torch",), False),
    ("torch_unshare", _BOTH, ("torch",), True),
    ("torch_initializers", _BOTH, ("torch",), True),
    ("torch_checkpoint", _BOTH, ("torch.distributed.checkpoint.default_planner",), True),
    ("torch_dtensor", _BOTH, ("torch.distributed.tensor._collective_utils",), True),
    ("torch_module_move", _TORCH, ("torch",), False),
    ("safetensors_numpy", _SAFETENSORS, ("safetensors.numpy",), False),
    ("safetensors_device", _SAFETENSORS, ("safetensors", "torch"), False),
    ("safetensors_model", _SAFETENSORS, ("safetensors.torch",), False),
    ("transformers_load", _SAFETENSORS, _MODELS, False),
    ("transformers_dtype", _TORCH, _MODELS, False),
    ("transformers_experts", _TORCH, _MODELS, False),
    ("peft_merge", _BOTH, _TUNERS, True),
    ("peft_adapters", _BOTH, _ADAPTERS, True),
    ("peft_hotswap", _BOTH, ("peft.utils.hotswap",), True),
    ("lycoris_merge", _BOTH, ("lycoris.modules.base",), True),
    ("torchao_offload", _BOTH, ("torchao.optim.cpu_offload",), True),
    ("loralib_merge", _BOTH, ("loralib.layers",), True),
    ("transformers_initializers", _BOTH, ("transformers.initialization",), True),
    ("timm_initializers", _BOTH, ("timm.layers.weight_init",), True),
    ("transformers_rwkv", _BOTH, ("transformers.models.rwkv.modeling_rwkv",), True),
    ("diffusers_shap_e", _BOTH, ("diffusers.pipelines.shap_e.renderer",), True),
    ("diffusers_average", _BOTH, ("diffusers.training_utils",), True),
    ("torch_ema_average", _BOTH, ("torch_ema.ema",), True),
    ("ema_pytorch_average", _BOTH, ("ema_pytorch",), True),
    ("lightning_average", _BOTH, ("lightning.pytorch.callbacks",), True),
    ("pytorch_lightning_average", _BOTH, ("pytorch_lightning.callbacks",), True),
    ("trl_reference", _BOTH, ("trl.trainer.callbacks",), True),
    ("diffusers_inversion", _BOTH, ("diffusers.loaders.textual_inversion",), True),
    ("accelerate_buffers", _BOTH, ("accelerate.utils.modeling",), True),
    ("onnxruntime_options", _ONNXRUNTIME, _SESSIONS, False),
    ("onnxruntime_session", _ONNXRUNTIME, _SESSIONS, False),
)
"""The files of this package that patch libraries; what each patches is in its POINTS.

Guards keep programs from writing to shared device memory, which is fatal. They stay applied while
this process has any.
"""

overridden: contextvars.ContextVar[bool | None] = contextvars.ContextVar(
    "trims_shim_override", default=None
)
"""Set by the context managers: True or False wins over :func:`enable` for this context."""


_is_enabled = False
_applied: dict[str, list[AppliedPatch]] = {}
_requested: set[str] = set()


def active() -> bool:
    """Whether patched calls use the cache right now."""
    override = overridden.get()
    return _is_enabled if override is None else override


@contextlib.contextmanager
def inactive() -> Iterator[None]:
    """Let patched calls of this thread or task do as the library inside the block."""
    token = overridden.set(False)
    try:
        yield
    finally:
        # An abandoned asynchronous generator ends in another task, where it has set nothing.
        with contextlib.suppress(ValueError):
            overridden.reset(token)


def enable(libraries: tuple[str, ...], *, elide_copies: bool = True) -> None:
    """Patch these libraries, now or as soon as they are imported.

    Without ``elide_copies``, load_state_dict is left alone, and conversions are.
    """
    global _is_enabled
    with no_fork(), importing.lock:
        for patch_file, wanted_by, modules, _ in PATCH_FILES:
            if not set(wanted_by) & set(libraries) or patch_file in _requested:
                continue
            if patch_file in ELIDING and not elide_copies:
                continue
            try:
                _requested.add(patch_file)
                _hook_of(patch_file, modules)()
            except BaseException:  # of a signal handler: who calls again wants it, too
                _requested.discard(patch_file)
                raise
        importing.run_overdue()
        _is_enabled = True


@functools.cache  # the same hook each time, as it may wait still since an earlier one
def _hook_of(patch_file: str, modules: tuple[str, ...]) -> Callable[[], None]:
    return _when_imported(modules, functools.partial(_apply, patch_file))


def _when_imported(modules: tuple[str, ...], hook: Callable[[], None]) -> Callable[[], None]:
    """Return what calls ``hook`` when all of ``modules`` have been imported."""
    for module in reversed(modules):
        hook = functools.partial(call_when_imported, module, hook)
    return hook


def disable() -> None:
    """Put the originals back. A replacement that another tool has wrapped stays, inactive."""
    global _is_enabled
    ensure_imported("trims_shim.patches.points")
    with no_fork(), importing.lock:
        _is_enabled = False
        keeps_guards = _is_any_shared()
        for patch_file, _, _, is_guard in PATCH_FILES:
            if keeps_guards and is_guard:
                continue
            _undo(patch_file)
        _requested.intersection_update(_applied)


def _is_any_shared() -> bool:
    devices = sys.modules.get("trims_shim.patches.torch_device")
    return devices is not None and bool(devices.is_any_shared())


def applied() -> dict[str, list[AppliedPatch]]:
    """Return the state of the patch points of each patch file whose library is imported."""
    with importing.lock:
        return {patch_file: list(patches) for patch_file, patches in _applied.items()}


def requested() -> frozenset[str]:
    """Return the patch files asked for, also those that wait for their library's import."""
    with importing.lock:
        return frozenset(_requested)


def _apply(patch_file: str) -> None:
    # A child forked in the middle would inherit a half-applied patch, and our lock held.
    with no_fork(), importing.lock:
        from trims_shim.patches.points import apply

        if patch_file not in _requested or patch_file in _applied:
            return
        points = importlib.import_module(f"{__name__}.{patch_file}").POINTS
        try:
            done = _applied.setdefault(patch_file, [])
            for point in points:
                apply(point, done)
        except BaseException:  # of a signal handler: the next call starts anew
            _undo(patch_file)
            raise
        _preload()


def _undo(patch_file: str) -> None:
    from trims_shim.patches.points import undo

    for patch in reversed(_applied.pop(patch_file, [])):
        undo(patch)


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
