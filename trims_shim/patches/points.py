"""A patch point: where a library is patched, under which conditions, and how it is undone.

Owns the mechanics only; what a replacement does is in one file per patched library. A replacement
asks :func:`trims_shim.patches.active` at each call. So disabling takes effect at once, even where
another tool has wrapped the replacement since. The attribute is put back only while still ours.

Preference (deepest first): a method on a class, then a module global that the library looks up at
call time, then a public name plus known holders that imported it by name.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from trims_shim import diagnostics
from trims_shim.errors import PatchError

__all__ = [
    "AppliedPatch",
    "Found",
    "PatchPoint",
    "PatchState",
    "apply",
    "is_being_imported",
    "is_in_place",
    "is_own",
    "rebind",
    "resolve",
    "undo",
]


_left: list[AppliedPatch] = []
"""Patches that :func:`undo` has left in place."""


class PatchState(enum.Enum):
    """The state of a patch point in this process."""

    APPLIED = "applied"
    SKIPPED = "skipped"
    UNDONE = "undone"


class PatchPoint(NamedTuple):
    """One place in one library.

    ``target`` is ``"package.module:Class.attribute"``. ``supported``: versions of the library it
    was tested with, for people only. ``wrap`` makes the replacement from the original attribute (a
    function, a class, or the raw ``__dict__`` entry such as a ``staticmethod``). ``probe`` decides:
    it returns None where the library can do what the replacement needs, else the reason; the
    default accepts any library that has the target. ``has_holders``: callers import the name
    itself, so modules that imported it before are rebound.

    ``trims info`` reads the target and ``supported`` from the source: both are written as strings.
    """

    target: str
    supported: str
    wrap: Callable[[Any], Any]
    probe: Callable[[], str | None] = lambda: None
    has_holders: bool = False


class Found(NamedTuple):
    """Where a target is: the module or class, its attribute, the raw entry there or in a base."""

    parent: Any
    attribute: str
    original: Any
    is_inherited: bool


@dataclass(slots=True)
class AppliedPatch:
    """The state of a patch point in this process; ``reason`` says why it is not applied."""

    point: PatchPoint
    state: PatchState
    reason: str = ""
    found: Found | None = field(default=None, repr=False)
    replacement: Any = field(default=None, repr=False)


def resolve(target: str) -> Found:
    """Find a target in an imported module.

    Reads ``__dict__`` along the MRO: getattr would bind descriptors and could wake lazy modules.
    Raises PatchError when the module is not imported or the attribute does not exist.
    """
    module_name, _, path = target.partition(":")
    parent: Any = sys.modules.get(module_name)
    if parent is None:
        raise PatchError(f"{target}: module {module_name} is not imported")
    *outer, attribute = path.split(".")
    for name in outer:
        if name not in _namespace(parent):
            raise PatchError(f"{target}: {name} not found")
        parent = _namespace(parent)[name]
    if attribute in _namespace(parent):
        return Found(parent, attribute, _namespace(parent)[attribute], False)
    for base in parent.__mro__[1:] if isinstance(parent, type) else ():
        if attribute in vars(base):
            return Found(parent, attribute, vars(base)[attribute], True)
    raise PatchError(f"{target}: {attribute} not found")


def _namespace(parent: Any) -> Mapping[str, Any]:
    """Return ``__dict__``; empty for objects (None, numbers) that have none."""
    return getattr(parent, "__dict__", {})


def apply(point: PatchPoint, done: list[AppliedPatch] | None = None) -> AppliedPatch:
    """Apply a patch point whose library is imported. The result says all.

    It is in ``done`` before the library is changed: what a signal handler of the program raises
    meanwhile passes, and whoever catches it can undo all that was done. Raises nothing else.
    """
    patch = AppliedPatch(point, PatchState.SKIPPED)
    if done is not None:
        done.append(patch)
    try:
        found = _below_ours(resolve(point.target))
        patch.reason = point.probe() or ""
        if not patch.reason:
            patch.found, patch.replacement = found, point.wrap(found.original)
            patch.state = PatchState.APPLIED
            setattr(found.parent, found.attribute, patch.replacement)
    except PatchError as error:
        patch.reason = str(error)
    # Border: a probe or wrapper that fails on an unknown version must not disturb the program.
    except Exception as error:
        diagnostics.pass_on(error)
        patch.state, patch.reason = PatchState.SKIPPED, f"{type(error).__name__}: {error}"
    is_applied = patch.state is PatchState.APPLIED
    if is_applied and point.has_holders and not is_being_imported(_home(point)):
        rebind(found.original, patch.replacement, home=_home(point))
    return patch


def undo(patch: AppliedPatch) -> None:
    """Put the original back, unless another tool has replaced ours meanwhile."""
    found = patch.found
    if patch.state is not PatchState.APPLIED or found is None:
        return
    is_ours = is_in_place(patch)
    patch.state = PatchState.UNDONE
    if not is_ours:
        patch.reason = "left in place and inactive: another tool wrapped it later"
        _left.append(patch)
        return
    if found.is_inherited:
        delattr(found.parent, found.attribute)
    else:
        setattr(found.parent, found.attribute, found.original)
    if patch.point.has_holders:
        rebind(patch.replacement, found.original, home=_home(patch.point))


def _below_ours(found: Found) -> Found:
    """What ours was made of, if the tool that had wrapped it has put ours back since."""
    for patch in reversed(_left):
        if patch.found is not None and patch.replacement is found.original:
            _left.remove(patch)
            original, is_inherited = patch.found.original, patch.found.is_inherited
            return found._replace(original=original, is_inherited=is_inherited)
    return found


def is_in_place(patch: AppliedPatch) -> bool:
    """Whether it is applied and nobody has put something else in its place since."""
    found = patch.found
    if patch.state is not PatchState.APPLIED or found is None:
        return False
    return vars(found.parent).get(found.attribute) is patch.replacement


def _home(point: PatchPoint) -> str:
    return point.target.partition(":")[0]


def is_being_imported(home: str) -> bool:
    """Whether we are called at the end of a module's import: nobody has its names yet."""
    return bool(getattr(getattr(sys.modules[home], "__spec__", None), "_initializing", False))


def rebind(old: Any, new: Any, *, home: str) -> None:
    """Set every module global that is ``old`` to ``new``, except in ``home``.

    Takes some 10 ms beside torch, and 40 beside transformers.

    Reads module ``__dict__``s only: ``getattr`` and ``dir`` would wake lazy modules.
    """
    modules = list(sys.modules.items())
    names, package = [name for name, _ in modules], home.partition(".")[0]
    # Modules from before an import that is still going on cannot have its names. A look at them
    # copies the memory that a fork has left shared.
    if package in names and is_being_imported(package):
        modules = modules[names.index(package) :]
    for name, module in modules:
        if name == home or type(module).__name__ != "module":
            continue
        namespace = vars(module)
        for key, value in list(namespace.items()):
            if value is old:
                namespace[key] = new


def is_own(value: Any, home: str) -> bool:
    """Whether a function, a partial of one, or a class was written in the module named ``home``.

    Programs may replace a library's private names, even before the shim is imported. So the value
    found there need not be the original, however early it is looked up.

    A function's ``__module__`` and ``__name__`` prove nothing: ``functools.wraps`` copies them.
    """
    if isinstance(value, type):
        return value.__module__ == home
    function = getattr(value, "func", value)
    return getattr(function, "__globals__", None) is vars(sys.modules[home])
