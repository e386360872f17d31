"""A patch point: where a library is patched, under which conditions, and how it is undone.

Owns the mechanics only; what a replacement does is in one file per patched library. A replacement
consults :func:`trims_shim.patches.active` at each call, so that disabling is immediate even where
another tool has wrapped it since; the attribute is put back only while it is still ours.

Preference (deepest first): a method on a class, then a module global that the library looks up at
call time, then a public name plus known holders that imported it by name.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trims_shim.errors import PatchError
from trims_shim.patches import holders

__all__ = ["AppliedPatch", "PatchPoint", "PatchState", "apply", "resolve", "undo"]


class PatchState(enum.Enum):
    """What became of a patch point in this process."""

    WAITING = "waiting"
    APPLIED = "applied"
    SKIPPED = "skipped"
    UNDONE = "undone"


@dataclass(frozen=True, slots=True)
class PatchPoint:
    """One place in one library.

    ``targets`` are candidates, first match wins, each ``"package.module:Class.attribute"``.
    ``supported`` is the version range it was tested with, for people; ``probe`` decides: it returns
    None where the library can do what the replacement needs, else why not; without one it is enough
    that there is a target. ``wrap`` makes the replacement from the original attribute (a function,
    a class, or the raw ``__dict__`` entry such as a ``staticmethod``). ``has_holders``: the name
    itself is what callers hold, so modules that imported it before are rebound.
    """

    name: str
    library: str
    targets: tuple[str, ...]
    supported: str
    wrap: Callable[[Any], Any]
    probe: Callable[[], str | None] = lambda: None
    has_holders: bool = False


@dataclass(slots=True)
class AppliedPatch:
    """The state of a patch point in this process."""

    point: PatchPoint
    state: PatchState = PatchState.WAITING
    reason: str = ""
    target: str = ""
    parent: Any = field(default=None, repr=False)
    attribute: str = ""
    original: Any = field(default=None, repr=False)
    replacement: Any = field(default=None, repr=False)
    was_inherited: bool = False


def resolve(target: str) -> tuple[Any, str, Any, bool]:
    """(parent, attribute, raw original, inherited) of a target in an imported module.

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
        return parent, attribute, _namespace(parent)[attribute], False
    for base in parent.__mro__[1:] if isinstance(parent, type) else ():
        if attribute in vars(base):
            return parent, attribute, vars(base)[attribute], True
    raise PatchError(f"{target}: {attribute} not found")


def _namespace(parent: Any) -> Mapping[str, Any]:
    """``__dict__``, empty for objects (None, numbers) that have none."""
    return getattr(parent, "__dict__", {})


def apply(point: PatchPoint) -> AppliedPatch:
    """Apply a patch point whose library is imported; never raises, the result tells."""
    patch = AppliedPatch(point)
    errors = []
    for target in point.targets:
        try:
            parent, attribute, original, inherited = resolve(target)
        except PatchError as error:
            errors.append(str(error))
            continue
        patch.target, patch.parent, patch.attribute = target, parent, attribute
        patch.original, patch.was_inherited = original, inherited
        break
    else:
        patch.state, patch.reason = PatchState.SKIPPED, "; ".join(errors)
        return patch
    try:
        patch.reason = point.probe() or ""
        if patch.reason:
            patch.state = PatchState.SKIPPED
            return patch
        patch.replacement = point.wrap(patch.original)
        setattr(patch.parent, patch.attribute, patch.replacement)
    # Border: a probe or wrapper that meets a library it does not know must cost the user nothing.
    except Exception as error:
        patch.state, patch.reason = PatchState.SKIPPED, f"{type(error).__name__}: {error}"
        return patch
    patch.state = PatchState.APPLIED
    if point.has_holders:
        holders.rebind(patch.original, patch.replacement, home=target.partition(":")[0])
    return patch


def undo(patch: AppliedPatch) -> None:
    """Put the original back, unless somebody else has replaced ours meanwhile."""
    if patch.state is not PatchState.APPLIED:
        return
    patch.state = PatchState.UNDONE
    if vars(patch.parent).get(patch.attribute) is not patch.replacement:
        patch.reason = "left in place and inactive: another tool wrapped it later"
        return
    if patch.was_inherited:
        delattr(patch.parent, patch.attribute)
    else:
        setattr(patch.parent, patch.attribute, patch.original)
    if patch.point.has_holders:
        holders.rebind(patch.replacement, patch.original, home=patch.target.partition(":")[0])
