"""What is known of ``onnxruntime.SessionOptions`` objects, which can be read back only in part.

Config entries and free dimensions are write-only; initializers, custom operators and providers
leave no trace at all. So the calls that set them are recorded for each object, from its creation
on. An object without a record (made before the shim was imported, or by onnxruntime itself) may
hold anything and is not served. Nor is one whose class has a method that is not watched.

Recording changes no behaviour: the original method runs first, and what it raises passes. Recording
goes on while patches are inactive, because an object may be made then and used later. Undoing and
applying the patches again forgets all records, because calls in between went unseen.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import onnxruntime.capi.onnxruntime_pybind11_state as binding

__all__ = [
    "Record",
    "adopt",
    "changing_methods",
    "clone",
    "forget_all",
    "is_watched",
    "record_of",
    "recording_dimension",
    "recording_entry",
    "recording_new",
    "recording_other",
    "setting",
    "unknown_settings",
]

SessionOptions: Any = binding.SessionOptions

_READ_ONLY_METHODS = frozenset({"get_session_config_entry", "has_providers"})
_KNOWN_PROPERTIES = frozenset(
    {
        "enable_cpu_mem_arena",
        "enable_mem_pattern",
        "enable_mem_reuse",
        "enable_profiling",
        "execution_mode",
        "execution_order",
        "graph_optimization_level",
        "inter_op_num_threads",
        "intra_op_num_threads",
        "log_severity_level",
        "log_verbosity_level",
        "logid",
        "optimized_model_filepath",
        "profile_file_prefix",
        "use_deterministic_compute",
        "use_per_session_threads",
    }
)
_MARK = "_trims_records"


@dataclass(slots=True)
class Record:
    """The recorded calls on one object.

    ``dimensions`` are overrides of free dimensions by (``name`` or ``denotation``, dimension).
    ``other`` is a called method that cannot be replayed, empty if there was none.
    """

    entries: dict[str, str] = field(default_factory=dict)
    dimensions: dict[tuple[str, str], int] = field(default_factory=dict)
    other: str = ""

    def copy(self) -> Record:
        """An equal copy."""
        return Record(dict(self.entries), dict(self.dimensions), self.other)


# By id, not by the object: a subclass may define equality.
_records: dict[int, tuple[weakref.ref[Any], Record]] = {}


def record_of(options: Any) -> Record | None:
    """The record of an options object, if there is one."""
    found = _records.get(id(options))
    return found[1] if found is not None and found[0]() is options else None


def adopt(options: Any, record: Record) -> None:
    """Set the record of an object of which everything is known."""
    key, all_of_them = id(options), _records

    # May be called when the interpreter ends and globals are gone.
    def forget(_: Any) -> None:
        all_of_them.pop(key, None)

    all_of_them[key] = (weakref.ref(options, forget), record)


def forget_all() -> None:
    """Forget all: calls may go unseen from here on, or have gone unseen."""
    _records.clear()


# --- recording ------------------------------------------------------------------------------------


def recording_new(original: Callable[..., None]) -> Callable[..., None]:
    """``__init__`` that begins a record."""
    forget_all()

    def note(options: Any, *_: Any) -> None:
        adopt(options, Record())

    return _recording(original, note)


def recording_entry(original: Callable[..., Any]) -> Callable[..., Any]:
    """``add_session_config_entry`` that is recorded."""

    def note(options: Any, record: Record, key: Any, value: Any) -> None:
        if type(key) is not str or type(value) is not str:
            raise TypeError("bytes or a subclass of str")
        record.entries[key] = value

    return _recording(original, note)


def recording_dimension(kind: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """``add_free_dimension_override_by_<kind>`` that is recorded."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def note(options: Any, record: Record, dimension: Any, value: Any) -> None:
            if type(dimension) is not str:
                raise TypeError("bytes or a subclass of str")
            # Of two overrides of one dimension onnxruntime takes the first.
            record.dimensions.setdefault((kind, dimension), operator.index(value))

        return _recording(original, note)

    return wrap


def recording_other(original: Callable[..., Any]) -> Callable[..., Any]:
    """Any method that cannot be replayed; objects on which it was called are not served."""

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, *args, **kwargs)
        finally:
            # Also when it failed: it may have done half of its work.
            record = record_of(self)
            if record is not None:
                record.other = method.__name__

    setattr(method, _MARK, True)
    return method


def _recording(original: Callable[..., Any], note: Callable[..., None]) -> Callable[..., Any]:
    """``note`` gets the object, its record (except for ``__init__``) and the arguments."""

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        record = record_of(self)
        try:
            if method.__name__ == "__init__":
                note(self)
            elif record is not None:
                note(self, record, *args, **kwargs)
        # Border: onnxruntime took the call, whatever it was; here it is only not understood.
        except Exception:
            if record is not None:
                record.other = method.__name__
        return result

    setattr(method, _MARK, True)
    return method


# --- what is watched ------------------------------------------------------------------------------


def is_watched() -> bool:
    """Whether every method that could change an options object is recorded at this moment.

    False for a newer onnxruntime with methods that nobody wrapped, and if another tool has replaced
    one of ours.
    """
    return all(hasattr(vars(SessionOptions)[name], _MARK) for name in changing_methods())


def changing_methods() -> list[str]:
    """Methods of the class that could change an object; pybind11's own are not among them."""
    return [
        name
        for name, each in vars(SessionOptions).items()
        if (not name.startswith("_") or name == "__init__")
        and not isinstance(each, property)
        and name not in _READ_ONLY_METHODS
    ]


def unknown_settings(options: Any) -> list[str]:
    """Properties of a newer onnxruntime that differ from those of a fresh object."""
    unknown = [name for name in _properties() if name not in _KNOWN_PROPERTIES]
    if not unknown:
        return []
    fresh = SessionOptions()
    return [name for name in unknown if setting(options, name) != setting(fresh, name)]


def setting(options: Any, name: str) -> Any:
    """A property as onnxruntime sees it; a subclass may have another one of that name."""
    return vars(SessionOptions)[name].__get__(options)


@functools.cache
def _properties() -> tuple[str, ...]:
    return tuple(
        name
        for name, each in vars(SessionOptions).items()
        if isinstance(each, property) and each.fset is not None
    )


# --- cloning --------------------------------------------------------------------------------------


def clone(
    options: Any | None, record: Record, *, level: Any = None, entries: dict[str, str] | None = None
) -> Any:
    """A new SessionOptions set like ``options`` (None: the defaults), with its own record.

    ``level`` replaces the optimisation level, ``entries`` are config entries to add.
    """
    copy = SessionOptions()
    if options is not None:
        for name in _properties():
            value = setting(options, name)
            if value != setting(copy, name):
                setattr(copy, name, value)
    for (kind, dimension), value in record.dimensions.items():
        getattr(copy, f"add_free_dimension_override_by_{kind}")(dimension, value)
    for key, text in {**record.entries, **(entries or {})}.items():
        copy.add_session_config_entry(key, text)
    if level is not None:
        copy.graph_optimization_level = level
    return copy
