"""Join items to a batch, and split its results into answers.

A :class:`Collate` says which items may share a batch (:meth:`Collate.key`), makes the batch
(:meth:`Collate.join`) and splits the results (:meth:`Collate.split`). It keeps no state, so any
thread may use it. :mod:`trims_shim.batching.collating.splitting` says what functions may return;
:mod:`trims_shim.batching.collating.padding` pads.

A batch holds copies of arrays, and everything else itself. A caller must not change its item until
it is answered.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from trims_shim.batching.collating.collates import (
    Columns,
    Concatenate,
    Fields,
    Filling,
    Listing,
    Stacking,
    with_classes,
)
from trims_shim.errors import BadBatch

__all__ = ["Collate", "CollateSpec", "answers", "collate_of", "columns"]


@runtime_checkable
class Collate(Protocol):
    """How items become a batch, and results become answers."""

    def key(self, item: Any) -> Hashable:
        """Items of equal key may share a batch.

        Raises TypeError or ValueError for an item that fits into no batch; only its caller sees it.
        """

    def join(self, items: Sequence[Any]) -> Any:
        """The batch for the function, of one or more items whose keys may share a batch."""

    def split(self, results: Any, items: Sequence[Any]) -> Sequence[Any]:
        """One result for each item, in their order; ``items`` are those of ``join``.

        Raises BadBatch if there is not one result for each.
        """


CollateSpec = str | Collate | Sequence[Any] | Mapping[str, Any]
"""A name, a Collate, or one of these for each argument (a sequence) or each field (a mapping)."""


def collate_of(
    spec: CollateSpec, *, batch_sizes: Sequence[int] | None = None, by_length: bool = False
) -> Collate:
    """The collate that ``spec`` means.

    ``"auto"``: tensors, arrays and numpy's numbers are stacked to ``[batch, ...]``; tuples,
    mappings and dataclasses are taken part by part; of anything else the function gets a list.
    ``"list"``: a list of the items, whatever they are. ``"stack"``: as ``"auto"``, and numbers,
    text and sequences of them become numpy arrays; what cannot be stacked is refused.
    ``"concatenate"``: items have a batch axis of their own. A sequence of specs: one for each
    argument. A mapping: one for each field of items that are mappings (``"auto"`` for fields it
    does not name).

    With ``batch_sizes`` the function sees batches of these sizes only: the last item is repeated up
    to the next size, and the results of repetitions are dropped. With ``by_length`` keys hold the
    class of the item's length (:meth:`~trims_shim.batching.collating.padding.Pad.with_classes`).

    Raises ValueError, naming the choices, for another name; TypeError for another type.
    """
    collate = _collate_of(spec)
    if by_length:
        collate = with_classes(collate)
    if batch_sizes is None:
        return collate
    if isinstance(collate, Concatenate):
        raise ValueError("batch_sizes count items, and items that are batches have any size")
    return Filling(collate, batch_sizes)


def _collate_of(spec: CollateSpec) -> Collate:
    if isinstance(spec, str):
        maker = _NAMES.get(spec)
        if maker is None:
            raise ValueError(f"collate is {spec!r}; known are {', '.join(map(repr, _NAMES))}")
        return maker()
    if isinstance(spec, Mapping):
        return Fields({name: _collate_of(each) for name, each in spec.items()})
    if isinstance(spec, Collate) and not isinstance(spec, type):
        return spec
    if isinstance(spec, Sequence) and not isinstance(spec, bytes) and len(spec) > 1:
        return Columns([_collate_of(each) for each in spec])
    raise TypeError(
        f"collate is {spec!r}; give one of {', '.join(map(repr, _NAMES))}, or an object with the "
        "methods key, join and split; for several arguments a list of these, one for each; for "
        "mappings a mapping of these by field"
    )


def columns(
    spec: CollateSpec,
    number: int,
    *,
    batch_sizes: Sequence[int] | None = None,
    by_length: bool = False,
) -> Collate:
    """The collate of items that are tuples of ``number`` arguments, each collated by itself.

    A sequence must have ``number`` specs; any other spec is used for every argument. The rest is as
    in :func:`collate_of`.
    """
    collate = _collate_of(spec)
    if isinstance(collate, Concatenate):
        # It sees all arguments at once: they must have equal sizes.
        return collate_of(collate, batch_sizes=batch_sizes)
    if not isinstance(collate, Columns):
        collate = Columns([collate] * number)
    if len(collate.collates) != number:
        raise ValueError(
            f"collate is for {len(collate.collates)} arguments, and there are {number}"
        )
    return collate_of(collate, batch_sizes=batch_sizes, by_length=by_length)


def answers(
    collate: Collate,
    results: Any,
    items: Sequence[Any],
    *,
    function: str = "the batch function",
    padded: int | None = None,
) -> list[Any]:
    """Split ``results`` with ``collate``, and check that there is one for each item.

    ``padded`` is the :func:`~trims_shim.batching.collating.collates.padded_length` of the batch,
    where ``items`` are not all that were joined. Raises BadBatch, naming ``function``, the number
    found and the number expected.
    """
    try:
        more = () if padded is None else (padded,)
        # A list before it is counted: a user's sequence may have another length than it says.
        found = list(collate.split(results, items, *more))
    except BadBatch as error:
        raise BadBatch(f"{function} {error}") from error
    if len(found) != len(items):
        raise BadBatch(
            f"{function}: {type(collate).__name__}.split made {len(found)} results of "
            f"{len(items)} items"
        )
    return found


_NAMES: dict[str, Callable[[], Collate]] = {
    "auto": Stacking,
    "list": Listing,
    "stack": lambda: Stacking(converts=True),
    "concatenate": Concatenate,
}
