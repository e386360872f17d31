"""Batch functions as type checkers see them: which items callers give, and which answers they get.

A function of ``list[A]`` is called with a single ``A``. If it returns a list of ``B``, a tensor or
an array, each caller gets an element or a row. All else is Any: the type of a batch does not say
what its items are (a tensor may be made of numbers, padded items have other lengths), and that of a
tuple or a mapping not what each caller gets.

Nothing of this exists at run time: Python 3.10 has no defaults of type variables.
"""

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any, Generic, Literal, Protocol, TypeAlias, overload

from typing_extensions import Self, TypedDict, TypeVar, Unpack

from trims_shim.batching.batcher import Batcher
from trims_shim.batching.collating.collate import CollateSpec
from trims_shim.batching.collating.padding import Pad
from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.rules import RuleMaker
from trims_shim.batching.staged.model import StagedModel

Item = TypeVar("Item", contravariant=True, default=Any)
Result = TypeVar("Result", covariant=True, default=Any)
Piece = TypeVar("Piece", covariant=True, default=Any)
"""A part of a streamed answer. It defaults to Any: stages may stream if their function does not."""
Answer = TypeVar("Answer", default=Any)
"""The result of a future. Invariant: a future can be set, too."""

_A = TypeVar("_A", default=Any)
_B = TypeVar("_B", default=Any)
_Row = TypeVar("_Row", covariant=True)

class Rows(Protocol[_Row]):
    """One result for each item: a list, a tensor or an array.

    Tuples (no assignment) and mappings (no addition) do not match: they are several outputs.
    """

    def __getitem__(self, index: int, /) -> _Row: ...
    def __setitem__(self, index: int, row: Any, /) -> None: ...
    def __add__(self, rows: Any, /) -> Any: ...

Answers: TypeAlias = Rows[_B] | Awaitable[Rows[_B]]
Pieces: TypeAlias = Iterator[list[_B]] | AsyncIterator[list[_B]]
"""The results of generators. A plain function that returns an iterator of lists answers with lists,
too."""
_AnyFunction: TypeAlias = Callable[..., Any] | classmethod[Any, ..., Any]

class BatchedMethod(Batcher[Any, Result, Piece], Generic[Item, Result, Piece]):
    """A function of two arguments, whose first may be ``self``: an instance's takes only one."""

    @overload  # type: ignore[override]  # that of an instance takes one item less
    def __get__(self, instance: None, owner: type | None = None) -> Self: ...
    @overload
    def __get__(
        self, instance: object, owner: type | None = None
    ) -> Batcher[Item, Result, Piece]: ...

class _MostOptions(TypedDict, total=False):
    """The options of a :class:`~trims_shim.batching.Batcher` without ``collate``."""

    model: StagedModel | str | Callable[[Any], StagedModel] | None
    slo_ms: float | None
    max_batch_size: int | None
    policy: str | RuleMaker | None
    profile: LatencyProfile | str | os.PathLike[str] | None
    batch_sizes: Sequence[int] | None
    queue_size: int
    when_full: Literal["wait", "reject"]
    when_late: Literal["drop", "serve"]
    isolate_failures: bool
    weight: Callable[..., int] | None
    max_batch_weight: int | None
    devices: int | Sequence[str] | None
    buffer_pairs: int
    max_active: int | None
    caller_runs: bool
    name: str | None
    clock_ns: Callable[[], int]

class ListOptions(_MostOptions, total=False):
    """Options with which the elements of a list are the items."""

    collate: Literal["auto", "list", "stack"] | Pad

class AllOptions(_MostOptions, total=False):
    """Options whose ``collate`` may decide what items and answers are."""

    collate: CollateSpec

class Decorator(Protocol):
    """The type of :func:`batched`, and of what it returns if it gets options."""

    @overload
    def __call__(self, function: Callable[[list[_A]], Answers[_B]], /) -> Batcher[_A, _B]: ...
    @overload
    def __call__(
        self, function: Callable[[list[_A]], Pieces[_B]], /
    ) -> Batcher[_A, list[_B], _B]: ...
    @overload
    def __call__(
        self, function: Callable[[Any, list[_A]], Answers[_B]], /
    ) -> BatchedMethod[_A, _B]: ...
    @overload
    def __call__(
        self, function: Callable[[Any, list[_A]], Pieces[_B]], /
    ) -> BatchedMethod[_A, list[_B], _B]: ...
    @overload
    def __call__(self, function: Callable[..., Answers[_B]], /) -> Batcher[Any, _B]: ...
    @overload
    def __call__(self, function: _AnyFunction, /) -> Batcher: ...
    @overload
    def __call__(self, **options: Unpack[ListOptions]) -> Decorator: ...
    @overload
    def __call__(self, **options: Unpack[AllOptions]) -> Callable[[_AnyFunction], Batcher]: ...

batched: Decorator
"""Decorate a function of batches, or a method; options as for Batcher."""
