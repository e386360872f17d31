"""A table of a limited number of keys: the ones that were put there last. Pure."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

__all__ = ["Recent"]

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class Recent(OrderedDict[_Key, _Value]):
    """See the module docstring; in the order in which keys were put, the oldest first."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def put(self, key: _Key, value: _Value) -> _Key | None:
        """Make a key the newest, whether it was there or not; beyond the limit the oldest goes.

        Returns the key that has gone.
        """
        self[key] = value
        self.move_to_end(key)
        return self.popitem(last=False)[0] if len(self) > self._limit else None
