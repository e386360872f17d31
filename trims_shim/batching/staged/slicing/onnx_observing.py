"""Find where an ONNX graph may be cut, by running it with batches of two sizes, and a clock.

A value that crosses a border has to have the batch as its first axis, so that rows of several
batches can be joined there. Or it has to be the same for all batches of equal shapes: the two runs
agree on it to the bit, and it does not depend on the contents of the inputs. Batches with other
contents there (a length that no shape shows any more) are not joined. Nor may it be a *step*, that
only some sizes of the batch change (how many eights it has): what came of it before a border is
that of another size than behind it.
"""

from __future__ import annotations

import itertools
import json
import os
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trims_shim.batching.staged.activations import Shared
from trims_shim.batching.staged.slicing.cutting import Cut
from trims_shim.batching.staged.slicing.onnx_graph import OnnxGraph
from trims_shim.errors import StagingError

__all__ = [
    "Exactly",
    "Observed",
    "depends_on_others",
    "is_equal",
    "is_near",
    "legal_cuts",
    "named",
    "observe",
    "times_ns",
]

_ROWS = (0, 1), (1, 0, 1)
"""The rows of the two batches that are compared. In another order, so that values that depend on
the place of a row show."""
_NEAR = 0.1
"""Share of the largest magnitude: less than the error of wrong rows, and more than that of another
size of batch."""
_INEXACT = "fc"
"""Kinds of numpy's types."""
_NOT_OF_NUMPY = "bfloat16", "float8", "float4", "int4", "int2"
"""In the names of onnxruntime's types (``uint4`` as well), whose values it does not return, or as
the bits of another type."""
_RUNS = 5
"""For times; the fastest counts."""
_MOST_CROSSING = 64
"""The most values that may cross at a border."""

_PICKS = frozenset({"Gather", "GatherElements", "GatherND", "Shape", "Size", "Slice", "Split"})
"""Operators of which the result is a part of what they get, as one axis of a shape."""

Feeds = Mapping[str, Any]
MakeSession = Callable[..., Any]
"""(the bytes of a model) -> a session; ``profile=`` is the beginning of its profile's path."""


@dataclass(frozen=True)
class Observed:
    """Inputs, outputs and all crossing values by name, in a batch of each size."""

    values: Sequence[Feeds]
    feeds: Feeds
    """The inputs to take times with: the example, if one was given."""

    def has_rows(self, name: str) -> bool:
        """Whether its first axis is the batch, by its size."""
        pairs = zip(_ROWS, self.values, strict=True)
        return all(each[name].shape[:1] == (len(rows),) for rows, each in pairs)

    def is_batched(self, name: str) -> bool:
        """Whether its first axis is the batch, and each row depends on that row alone."""
        small, large = (each[name] for each in self.values)
        return (
            self.has_rows(name)
            and small.shape[1:] == large.shape[1:]
            and _has_same_rows(small[list(_ROWS[1])], large)
        )

    def is_same(self, name: str) -> bool:
        """Whether it is equal in both batches."""
        return is_equal(*(each[name] for each in self.values))

    def halved(self, feeds: Feeds) -> Feeds:
        """The same inputs, with floating-point numbers of rows half as large."""
        return {
            name: each / 2 if each.dtype.kind in _INEXACT and self.is_batched(name) else each
            for name, each in feeds.items()
        }


class Exactly:
    """An array in a Shared: joins compare its contents, and not its shape alone."""

    __slots__ = ("array",)

    def __init__(self, array: Any) -> None:
        self.array = array

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Exactly) and is_equal(self.array, other.array)

    __hash__ = None  # type: ignore[assignment]


def is_equal(one: Any, other: Any) -> bool:
    """Whether two arrays are equal to the bit."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return bool((one == other).all() if one.dtype == object else one.tobytes() == other.tobytes())


def _has_same_rows(one: Any, other: Any) -> bool:
    """Whether two arrays of one shape are equal, up to errors of floating point."""
    import numpy

    if one.dtype.kind not in _INEXACT:
        return bool((one == other).all())
    with numpy.errstate(invalid="ignore"):
        differences = abs(one - other)
        is_finite = numpy.isfinite(differences)
        limit = _NEAR * abs(other[is_finite]).max(initial=0)
    return bool((differences[is_finite] <= limit).all())


def is_near(one: Any, other: Any) -> bool:
    """Whether two arrays have one shape, and equal rows if they are of floating-point numbers.

    Other types (the index of the largest) may differ altogether where two are nearly equal.
    """
    is_exact = one.dtype.kind not in _INEXACT
    return one.shape == other.shape and (is_exact or _has_same_rows(one, other))


def named(batch: Sequence[Any], names: Sequence[str]) -> dict[str, Any]:
    """The arguments of a stage as arrays by name. Raises ValueError for other names or numbers."""
    if len(batch) == 1 and isinstance(batch[0], Mapping):
        if set(batch[0]) != set(names):
            raise ValueError(f"the model takes {', '.join(names)}, not {', '.join(batch[0])}")
        return {name: _array(batch[0][name]) for name in names}
    if len(batch) != len(names):
        raise ValueError(f"the model takes {', '.join(names)}, not {len(batch)} arguments")
    return {name: _array(each) for name, each in zip(names, batch, strict=True)}


def _array(value: Any) -> Any:
    import numpy

    return numpy.asarray(value.value.array if isinstance(value, Shared) else value)


# --- running it -----------------------------------------------------------------------------------


def observe(graph: OnnxGraph, make_session: MakeSession, example: Any) -> Observed:
    """Run the whole model, and look at all values that cross any border.

    ``example``: a batch, or None to make inputs up. Raises StagingError.
    """
    feeds = None
    if example is not None:
        feeds = named(example if isinstance(example, tuple) else (example,), graph.inputs)
    crossing = {name for cut in range(1, len(graph.nodes)) for name in _crossing(graph, cut)}
    session = make_session(graph.with_outputs(sorted(crossing.difference(graph.inputs))))
    reason: object = "the size of their batches is fixed"
    inputs = session.get_inputs()
    for tried in _made_up(inputs) if feeds is None else [_repeated(inputs, feeds)]:
        try:
            values = [_run(session, each) for each in tried]
        # onnxruntime raises a RuntimeError or ValueError of its own for each kind of failure.
        except Exception as error:
            reason = error
            continue
        observed = Observed(values, feeds or tried[0])
        if any(map(observed.is_batched, graph.inputs)):
            _check_outputs(graph, observed)
            _check_alone(graph, observed, session, tried[0])
            _check_company(graph, observed, session, tried[0])
            _check_chance(graph, observed, again=_run(session, tried[0]))
            return observed
    raise StagingError(
        f"the model cannot be run with batches of 2 and of 3: {reason}; export "
        "it with a dynamic batch axis, the first of its inputs, and give a batch of them as "
        "`example`"
    )


def _check_outputs(graph: OnnxGraph, observed: Observed) -> None:
    for name in graph.outputs:
        if name not in observed.values[0]:
            raise StagingError(f"output {name} is no array of a type that numpy has")
        if not observed.has_rows(name):
            raise StagingError(
                f"the batch is not the first axis of output {name}, so that rows cannot be told "
                "apart; export the model with outputs [batch, ...]"
            )
        # Of other types, see is_near.
        if observed.values[0][name].dtype.kind in _INEXACT and not observed.is_batched(name):
            raise depends_on_others(name)


def depends_on_others(name: str) -> StagingError:
    return StagingError(
        f"output {name} of a row depends on the others in the batch, or on chance; the model "
        "cannot be batched between stages"
    )


def _check_company(graph: OnnxGraph, observed: Observed, session: Any, feeds: Feeds) -> None:
    """Raise StagingError for outputs of any type that depend on the other rows.

    With others beside it in a batch of the same size, a row is computed at the same place, by the
    same kernels: there are no errors of floating point by which an index might differ. The others
    are like it, and have the other sign, too: a choice that is made for the whole batch (by the
    sign of its mean) is another one then.
    """
    small = observed.values[0]
    for row in _ROWS[0]:
        rows = [row] * len(_ROWS[0])
        alike = {
            name: each[rows] if observed.is_batched(name) else each for name, each in feeds.items()
        }
        opposed = {
            name: _opposed(each, row) if observed.is_batched(name) else each
            for name, each in alike.items()
        }
        for tried in alike, opposed:
            try:
                found = _run(session, tried)
            except Exception:  # It may not take such numbers.
                continue
            for name in graph.outputs:
                its, expected = found[name], small[name]
                own = slice(row, row + 1)  # still an array, also of strings
                if its.shape == expected.shape and not _has_same_rows(its[own], expected[own]):
                    raise depends_on_others(name)


def _opposed(batch: Any, row: int) -> Any:
    """A batch with floating-point numbers of the other sign in all rows but one."""
    if batch.dtype.kind not in _INEXACT:
        return batch
    opposed = -batch
    opposed[row] = batch[row]
    return opposed


def _check_alone(graph: OnnxGraph, observed: Observed, session: Any, feeds: Feeds) -> None:
    """Raise StagingError for a model that answers a row otherwise where that is the whole batch."""
    one = {name: each[:1] if observed.is_batched(name) else each for name, each in feeds.items()}
    try:
        alone = _run(session, one)
    except Exception as error:
        raise StagingError(f"the model cannot be run with a batch of one row: {error}") from error
    for name in graph.outputs:
        its, expected = alone[name], observed.values[0][name][:1]
        if its.dtype.kind in _INEXACT and not is_near(its, expected):
            raise StagingError(
                f"output {name} of a row is another one where the row is the whole batch; the "
                "model cannot be batched between stages"
            )


def _check_chance(graph: OnnxGraph, observed: Observed, *, again: Feeds) -> None:
    """Raise StagingError for a model that returns other bits in a second run of the first batch.

    Where its operators have seeds, the first runs of all sessions agree.
    """
    for name in graph.outputs:
        if not is_equal(again[name], observed.values[0][name]):
            raise StagingError(
                f"output {name} depends on chance; the model cannot be cut into stages"
            )


def _crossing(graph: OnnxGraph, position: int) -> list[str]:
    names = graph.crossing(position)
    return names if len(names) <= _MOST_CROSSING else []


def _run(session: Any, feeds: Feeds) -> dict[str, Any]:
    names = [each.name for each in session.get_outputs() if _is_of_numpy(each.type)]
    values = zip(names, session.run(names, feeds), strict=True)
    # Not sequences and maps, which do not cross.
    return {name: value for name, value in values if hasattr(value, "nbytes")} | dict(feeds)


def _is_of_numpy(kind: str) -> bool:
    return not any(each in kind for each in _NOT_OF_NUMPY)


def _repeated(inputs: Sequence[Any], feeds: Feeds) -> list[dict[str, Any]]:
    """Batches of both sizes, of the rows of one, repeated as needed."""
    batches = {}
    for each in inputs:
        value = feeds[each.name]
        # Inputs of any shape are declared as scalars are.
        if not (_is_open(each) if each.shape else value.shape):
            continue
        if not value.shape or not len(value):
            raise StagingError(
                f"the example has no rows for {each.name}; give a batch, whose first axis are rows"
            )
        batches[each.name] = value
    return [
        {**feeds, **{name: each.take(rows, 0, mode="wrap") for name, each in batches.items()}}
        for rows in _ROWS
    ]


def _is_open(declared: Any) -> bool:
    """Whether the first axis of an input may be of any size."""
    return bool(declared.shape) and not isinstance(declared.shape[0], int)


def _made_up(inputs: Sequence[Any]) -> Iterable[list[dict[str, Any]]]:
    from trims_shim.daemon.preparer import probe_inputs

    is_open = {each.name: _is_open(each) for each in inputs}
    arguments = [
        probe_inputs.Argument(
            each.name,
            each.type,
            (len(_ROWS[0]), *each.shape[1:]) if is_open[each.name] else tuple(each.shape),
        )
        for each in inputs
    ]
    for size, filling in itertools.product(probe_inputs.SIZES[2:], probe_inputs.FILLINGS):
        try:
            small = probe_inputs.inputs(arguments, size=size, filling=filling)
        except probe_inputs.NoInputs as error:
            raise StagingError(f"no inputs can be made up: {error}; give an `example`") from error
        rows = list(_ROWS[1])
        yield [small, {name: each[rows] if is_open[name] else each for name, each in small.items()}]


# --- where to cut ---------------------------------------------------------------------------------


def times_ns(graph: OnnxGraph, make_session: MakeSession, feeds: Feeds) -> list[int]:
    """How long each node takes, by onnxruntime's own profile; at least 1."""
    fastest: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix="trims-profile-") as directory:
        session = make_session(graph.with_outputs(()), profile=os.path.join(directory, "profile"))
        for _ in range(_RUNS):
            session.run(None, feeds)
        events = json.loads(Path(session.end_profiling()).read_text())
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            name = event["name"].removesuffix("_kernel_time")
            fastest[name] = min(event["dur"], fastest.get(name, event["dur"]))
    return [1 + 1000 * fastest.get(node.name, 0) for node in graph.nodes]


def legal_cuts(graph: OnnxGraph, observed: Observed) -> list[Cut]:
    """The positions of the nodes before which the graph may be cut."""
    cuts = []
    steps = _steps(graph, observed)
    for position in range(1, len(graph.nodes)):
        names = _crossing(graph, position)
        if names and all(_may_cross(graph, observed, name, steps) for name in names):
            crossing_bytes = sum(observed.values[0][name].nbytes for name in names)
            cuts.append(Cut(position, crossing_bytes))
    return cuts


def _steps(graph: OnnxGraph, observed: Observed) -> set[str]:
    """Values that are the same in both batches, but computed from others, and all that use them.

    None that depends on contents is looked at: it crosses only by its rows.
    """
    seen = observed.values[0]
    found: set[str] = set()
    for number, node in enumerate(graph.nodes):
        used = {
            name
            for name in graph.needed(number, number + 1, [*seen, *found])
            if not graph.depends_on_content(name)
        }
        if not found.isdisjoint(used):
            found.update(node.output)
        elif node.op_type not in _PICKS and not all(map(observed.is_same, used)):
            found.update(name for name in node.output if name in seen and observed.is_same(name))
    return found


def _may_cross(graph: OnnxGraph, observed: Observed, name: str, steps: Collection[str]) -> bool:
    if name not in observed.values[0]:
        return False
    if observed.is_batched(name):
        return True
    return observed.is_same(name) and not graph.depends_on_content(name) and name not in steps
