"""From a session's arguments to its recipe: all that decides what onnxruntime makes of a model.

Two sessions of equal recipes on one model can share a prepared model. So the recipe has everything
that changes the graph, the kernels or the packed weights, and nothing that only changes how a
session runs (threads, memory arenas, logging, profiling). Anything not known to be one or the other
is refused: :class:`NotServed` with the reason, and the original makes the session.

Reads arguments and options only; calls nothing that warns, prints or changes them.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import onnxruntime.capi.onnxruntime_pybind11_state as binding

from trims_shim.children import library_first
from trims_shim.client.cache import cache
from trims_shim.client.prepared import PreparedModel
from trims_shim.daemon.preparer.installation import installation
from trims_shim.daemon.preparer.recipes import NO_PREPACKING, OF_THE_RUN, check_entry
from trims_shim.errors import NotServed
from trims_shim.late_imports import ensure_imported
from trims_shim.patches import onnxruntime_models as models
from trims_shim.patches import onnxruntime_records as records
from trims_shim.patches.onnxruntime_records import Record
from trims_shim.wire.messages import SessionRecipe

__all__ = [
    "NO_PREPACKING",
    "Settings",
    "default_recipe",
    "open_prepared",
    "read_settings",
    "recipe_of",
    "search_path",
]

_CPU = "CPUExecutionProvider"
_CUDA = "CUDAExecutionProvider"
_HARMLESS = frozenset({_CPU, "AzureExecutionProvider"})
"""Azure's provider is in the list of every CPU build, and takes no node of an ordinary model."""

_DENORMALS = "session.set_denormal_as_zero"


# Now, while onnxruntime is being imported: later, another one may be on the disk.
installation()


def search_path() -> tuple[str, ...]:
    """``sys.path`` for another process: absolute directories with names in UTF-8.

    Python's library comes first (:func:`trims_shim.children.library_first`).
    """
    found = [each for each in sys.path if isinstance(each, str)]
    try:
        found = [os.path.abspath(each) for each in found]
    except OSError:  # The working directory is gone.
        found = [each for each in found if os.path.isabs(each)]
    return tuple(
        library_first(each for each in found if each.encode(errors="replace").decode() == each)
    )


def open_prepared(
    recipe: SessionRecipe, *, descriptor: int | None = None, path: str = "", digest: str = ""
) -> PreparedModel:
    """As :meth:`Cache.open_prepared`, with the onnxruntime and the modules of this process."""
    externals = None
    if path and descriptor is not None:
        externals = functools.partial(models.externals, descriptor, path)
    return cache().open_prepared(
        recipe,
        package=installation().package,
        search_path=search_path(),
        descriptor=descriptor,
        path=path,
        digest=digest,
        externals=externals,
    )


# --- arguments ------------------------------------------------------------------------------------


class Settings(NamedTuple):
    """What a session was asked to be.

    ``options`` is the user's object, None for the defaults; ``record`` what is known of it.
    """

    options: Any
    record: Record
    providers: tuple[tuple[str, ...], ...]
    disabled_optimizers: tuple[str, ...]


def read_settings(
    options: Any, providers: Any, provider_options: Any, disabled_optimizers: Any
) -> Settings:
    """Read the arguments as onnxruntime gets them. Raises NotServed."""
    record = Record() if options is None else _record(options)
    return Settings(
        options,
        record,
        _providers(_normalized(providers, provider_options)),
        _optimizers(disabled_optimizers),
    )


def _record(options: Any) -> Record:
    record = records.record_of(options)
    if record is None:
        raise NotServed("options_unknown", "these SessionOptions were made unseen")
    if not records.is_watched():
        raise NotServed("options_unknown", "SessionOptions has methods that nobody watches")
    if record.other:
        raise NotServed("session_option", f"SessionOptions.{record.other} was called")
    unknown = records.unknown_settings(options)
    if unknown:
        raise NotServed("options_unknown", f"SessionOptions.{unknown[0]} is set")
    if records.setting(options, "optimized_model_filepath"):
        raise NotServed("session_option", "SessionOptions.optimized_model_filepath is set")
    return record


def _normalized(providers: Any, provider_options: Any) -> list[tuple[str, dict[str, str]]]:
    """Normalise as onnxruntime does, without its warnings; raise NotServed where it refuses."""
    available: list[str] = binding.get_available_providers()
    found = _pairs(providers, provider_options) if providers is not None else []
    if not found:
        return [(name, {}) for name in available]
    pairs: dict[str, dict[str, str]] = {}
    for name, options in found:
        pairs.setdefault(name, {_text(key): _text(value) for key, value in options.items()})
    strangers = pairs.keys() - set(binding.get_all_providers())
    if strangers:
        raise NotServed("provider", f"there is no {', '.join(sorted(strangers))}")
    # onnxruntime warns about others that this build does not have, and passes them over.
    return [(name, options) for name, options in pairs.items() if name in available]


def _pairs(providers: Any, provider_options: Any) -> list[tuple[str, Any]]:
    if type(providers) not in (list, tuple):
        raise NotServed("arguments", f"providers are a {type(providers).__name__}")
    if provider_options is None:
        pairs = [each if type(each) is tuple else (each, {}) for each in providers]
    elif type(provider_options) in (list, tuple) and len(provider_options) == len(providers):
        pairs = list(zip(providers, provider_options, strict=True))
    else:
        raise NotServed("arguments", "provider_options do not fit providers")
    for pair in pairs:
        if len(pair) != 2 or type(pair[0]) is not str or type(pair[1]) is not dict:
            raise NotServed("arguments", "a provider is neither a name nor (name, options)")
    return pairs


def _text(value: Any) -> str:
    """Turn an option into text as onnxruntime does; only if that runs no code of the program."""
    if type(value) not in (str, int, float, bool):
        raise NotServed("arguments", f"a provider option is a {type(value).__name__}")
    return str(value)


def _providers(pairs: list[tuple[str, dict[str, str]]]) -> tuple[tuple[str, ...], ...]:
    names = tuple(name for name, _ in pairs)
    options = dict(pairs)
    if set(names) <= _HARMLESS:
        return (_flat(_CPU, options.get(_CPU, {})),)
    if _CUDA in names:
        ensure_imported("trims_shim.patches.onnxruntime_cuda")
        from trims_shim.patches import onnxruntime_cuda

        if onnxruntime_cuda.is_served(names):
            described = onnxruntime_cuda.describe(options.pop(_CUDA))
            return (_flat(_CUDA, described), _flat(_CPU, options.get(_CPU, {})))
    raise NotServed("provider", f"providers {', '.join(names)}")


def _flat(name: str, options: Mapping[str, str]) -> tuple[str, ...]:
    return (name, *(text for pair in sorted(options.items()) for text in pair))


def _optimizers(disabled: Any) -> tuple[str, ...]:
    if disabled is None:
        return ()
    if type(disabled) not in (set, frozenset, list, tuple):
        # Looking at an iterator would use it up.
        raise NotServed("arguments", f"disabled_optimizers are a {type(disabled).__name__}")
    if not all(type(each) is str for each in disabled):
        raise NotServed("arguments", "disabled_optimizers are not all names")
    return tuple(sorted(set(disabled)))


# --- recipes --------------------------------------------------------------------------------------


def recipe_of(
    settings: Settings, *, prepack: str, has_sessions: bool | None = False
) -> SessionRecipe:
    """The recipe. Raises NotServed for a config entry that is not known to be harmless.

    ``prepack`` is the setting of this name; a program's own entry about packing comes first.
    ``has_sessions``: whether this process has made one; the preparer has not. None: not known.
    Only the first one sets, for the thread that makes it, whether denormal numbers are zero; others
    compute constants as their thread does, whatever their options say.
    """
    entries = _entries(settings.record.entries)
    are_zero = sys.float_info.min / 2 == 0
    if has_sessions is None and are_zero != (entries.get(_DENORMALS) == "1"):
        raise NotServed("config_entry", f"{_DENORMALS} is set, maybe for a later session")
    if has_sessions:
        entries.pop(_DENORMALS, None)
        if are_zero:
            entries[_DENORMALS] = "1"
    asked = entries.pop(NO_PREPACKING, None)
    if asked is not None:
        prepack = "off" if asked == "1" else "share"
    is_deterministic, level = _defaults()
    if settings.options is not None:
        is_deterministic = bool(records.setting(settings.options, "use_deterministic_compute"))
        level = records.setting(settings.options, "graph_optimization_level").name
    return SessionRecipe(
        runtime=installation().runtime,
        build=installation().build,
        providers=settings.providers,
        level=level,
        entries=tuple(sorted(entries.items())),
        free_dimensions=tuple(
            sorted((kind, name, str(v)) for (kind, name), v in settings.record.dimensions.items())
        ),
        disabled_optimizers=settings.disabled_optimizers,
        is_deterministic=is_deterministic,
        prepack=prepack,
    )


def default_recipe(*, prepack: str) -> SessionRecipe:
    """The recipe of a session on the CPU without any option."""
    settings = Settings(None, Record(), ((_CPU,),), ())
    return recipe_of(settings, prepack=prepack)


def _entries(found: Mapping[str, str]) -> dict[str, str]:
    entries = {}
    for key, value in found.items():
        if key not in OF_THE_RUN:
            if key != NO_PREPACKING:
                check_entry(key)
            entries[key] = value
    return entries


@functools.cache
def _defaults() -> tuple[bool, str]:
    fresh = records.SessionOptions()
    return bool(fresh.use_deterministic_compute), fresh.graph_optimization_level.name
