"""Take mappings, tuples and dataclasses apart, and rebuild them of other parts."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = [
    "others_of",
    "part_of",
    "parts_of",
    "rebuilt_dataclass",
    "rebuilt_mapping",
    "rebuilt_tuple",
    "with_parts",
]


def parts_of(item: Any) -> Mapping[Any, Any] | None:
    """The parts of a mapping, tuple or dataclass by name; None for anything else."""
    if isinstance(item, Mapping):
        return item
    if isinstance(item, tuple):
        return dict(enumerate(item))
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return {field.name: getattr(item, field.name) for field in dataclasses.fields(item)}
    return None


def part_of(item: Any, name: Any) -> Any:
    """One part of an item, by its name in :func:`parts_of`."""
    if isinstance(item, Mapping | tuple):
        return item[name]
    return getattr(item, name)


def with_parts(like: Any, parts: dict[Any, Any]) -> Any:
    """A structure like ``like`` of other parts."""
    if isinstance(like, Mapping):
        return rebuilt_mapping(like, parts)
    if isinstance(like, tuple):
        return rebuilt_tuple(like, parts.values())
    return rebuilt_dataclass(like, parts)


def rebuilt_tuple(like: tuple[Any, ...], values: Iterable[Any]) -> Any:
    """``values`` as a tuple of the type of ``like``; a plain tuple where that cannot be made."""
    kind: Any = type(like)
    if kind is tuple:
        return tuple(values)
    if hasattr(like, "_make"):
        return kind._make(values)
    values = tuple(values)
    try:
        return kind(values)  # as torch's own, of `max` and `topk`
    except TypeError:
        return values


def rebuilt_mapping(like: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    """``values`` as a mapping of the type of ``like``; a dict where that cannot be made of them."""
    kind: Any = type(like)
    if kind is dict:
        return values
    # Outputs of transformers' models are mappings and dataclasses.
    by_name = dataclasses.is_dataclass(like)
    try:
        return kind(**values) if by_name else kind(values)
    except TypeError:
        return values


def rebuilt_dataclass(like: Any, values: dict[str, Any]) -> Any:
    """A dataclass like ``like`` with these values of its fields.

    ``__init__`` does not run: it may compute fields, or refuse a batch where it expects an item.
    """
    kind: Any = type(like)
    rebuilt = kind.__new__(kind)
    for name, value in {**others_of(like), **values}.items():
        object.__setattr__(rebuilt, name, value)
    return rebuilt


def others_of(item: Any) -> dict[str, Any]:
    """The attributes of a dataclass that are no fields, without properties that it has cached."""
    fields = {field.name for field in dataclasses.fields(item)}
    return {
        name: value
        for name, value in getattr(item, "__dict__", {}).items()  # with __slots__ there is none
        if name not in fields
        and not isinstance(getattr(type(item), name, None), functools.cached_property)
    }
