"""One filled-in instance of every message, made from the types of its fields."""

from __future__ import annotations

import types
import typing
from typing import Any

from trims_shim.wire import admin, duties, messages

KINDS = sorted(
    {
        value
        for module in (messages, admin, duties)
        for value in vars(module).values()
        if hasattr(value, "_fields")
    },
    key=lambda kind: kind.__name__,
)


def sample(kind: type) -> Any:
    """An instance with values that differ from field to field and need every part of the codec."""
    hints = enumerate(typing.get_type_hints(kind).items(), 1)
    return kind(**{name: _value(hint, number) for number, (name, hint) in hints})


def is_optional(hint: Any) -> bool:
    """Whether None is allowed."""
    return typing.get_origin(hint) is types.UnionType and type(None) in typing.get_args(hint)


def _value(hint: Any, number: int) -> Any:
    if is_optional(hint):
        return _value(typing.get_args(hint)[0], number)
    if hasattr(hint, "_fields"):
        return sample(hint)
    if typing.get_origin(hint) is tuple:
        item = typing.get_args(hint)[0]
        return (_value(item, number), _value(item, number + 100))
    if typing.get_origin(hint) is dict:
        return {f"key-{number}": number, "grün": 1 << 40}
    simple = {
        int: number * 1_000_003,
        str: f"text-{number}-ü",
        bytes: bytes([number, 0, 255]),
        bool: bool(number % 2),
        float: number + 0.5,
    }
    return simple[hint]
