"""The engines of methods: one for each instance, gone with it.

An engine that does not refer to its instance is kept beside it (:class:`Beside`). One that may is
kept inside (:class:`Inside`), as that of a model whose stages are methods of the instance: a
reference from outside to such an engine would keep both alive for good.
"""

from __future__ import annotations

import itertools
import weakref

from trims_shim.batching.drivers.engine import Engine

__all__ = ["Beside", "Inside"]

_numbers = itertools.count(1)


class Beside:
    """The engines of one batcher, by the instance's identity, as it need not be hashable.

    Methods may be called from any thread.
    """

    def __init__(self) -> None:
        self._kept: dict[int, tuple[weakref.ref[object], Engine]] = {}

    def find(self, instance: object) -> Engine | None:
        """The engine of the instance; None if it has none yet."""
        found = self._kept.get(id(instance))
        return found[1] if found is not None and found[0]() is instance else None

    def keep(self, instance: object, engine: Engine) -> Engine:
        """Keep ``engine`` unless another thread was first; return the one that is kept.

        Raises TypeError for an instance without weak references, and says what to do.
        """
        kept, number = self._kept, id(instance)
        found = kept.get(number)
        if found is not None and found[0]() is not instance:
            _remove(kept, number, found[0])
        try:
            reference = weakref.ref(instance, lambda ref: _remove(kept, number, ref))
        except TypeError:
            raise TypeError(
                f"a batched method needs weak references to its instance, and a "
                f"{type(instance).__name__} has none: add '__weakref__' to its __slots__ "
                "(of a dataclass: weakref_slot=True)"
            ) from None
        return kept.setdefault(number, (reference, engine))[1]


class Inside(Beside):
    """Engines in the instance's ``__dict__``; beside it if it has none."""

    def __init__(self, name: str) -> None:
        super().__init__()
        # Not the name alone: several methods of a class may have been given one and the same.
        self._name = f"batcher {next(_numbers)} of {name}"

    def find(self, instance: object) -> Engine | None:
        """See :class:`Beside`."""
        attributes = getattr(instance, "__dict__", None)
        if attributes is None:
            return super().find(instance)
        found = attributes.get(self._name)
        return found.engine if isinstance(found, _Kept) and found.owner() is instance else None

    def keep(self, instance: object, engine: Engine) -> Engine:
        """See :class:`Beside`."""
        attributes = getattr(instance, "__dict__", None)
        if attributes is None:
            return super().keep(instance, engine)
        if self.find(instance) is None:
            attributes.pop(self._name, None)  # that of the instance of which this one is a copy
        kept: _Kept = attributes.setdefault(self._name, _Kept(instance, engine))
        assert kept.engine is not None
        return kept.engine


class _Kept:
    """An engine in its instance. A copy of the instance, or its pickle, gets an empty one."""

    __slots__ = ("engine", "owner")

    def __init__(self, instance: object = None, engine: Engine | None = None) -> None:
        self.owner = (lambda: None) if instance is None else weakref.ref(instance)
        self.engine = engine

    def __reduce__(self) -> tuple[type[_Kept], tuple[()]]:
        return _Kept, ()


def _remove(
    kept: dict[int, tuple[weakref.ref[object], Engine]], number: int, ref: weakref.ref[object]
) -> None:
    found = kept.get(number)
    if found is not None and found[0] is ref:
        del kept[number]
