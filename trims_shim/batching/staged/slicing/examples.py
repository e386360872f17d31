"""An example of a model's batch: how the model is called, and batches of other sizes like it.

An example is what the model is called with: one tensor, a tuple of positional arguments, or a
mapping of keyword arguments. Each tensor in it with any axis has the batch as its first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from trims_shim.batching.staged.flow import NotJoinable, join, take
from trims_shim.errors import StagingError
from trims_shim.printable import first_line

__all__ = [
    "Example",
    "are_identical",
    "are_near",
    "check_stages",
    "has_same_rows",
    "stage_times",
    "version_of",
]

_ALIGNMENT = 64
"""Of the memory that torch allocates."""
_NEAR = 0.1
"""Results may differ by this share of the largest magnitude."""
_REPEATS = 5
"""For times."""


class Example:
    """See the module docstring. Raises StagingError for tensors that disagree, or none at all."""

    def __init__(self, example: Any) -> None:
        # One of the two is not empty, as there is a tensor.
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}
        if isinstance(example, Mapping):
            self.kwargs = dict(example)
        else:
            self.args = tuple(example) if isinstance(example, tuple | list) else (example,)
        sizes = {each.shape[0] for each in self.leaves() if _has_rows(each)}
        if len(sizes) != 1:
            raise StagingError(
                f"the example's tensors have {sorted(sizes) or 'no'} rows; each tensor needs the "
                "batch as its first axis, and there has to be one"
            )
        (self.rows,) = sizes

    def leaves(self) -> list[Any]:
        """Everything in it that is no structure, in the order of torch's pytrees."""
        import torch.utils._pytree as pytree

        leaves: list[Any] = pytree.tree_leaves((self.args, self.kwargs))
        return leaves

    def arguments(self, batch: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The model's arguments, from those of the first stage.

        If the example is a mapping, the first stage gets one mapping. Then raises TypeError for
        anything else, for a missing name, and for a value of another name, which the model would
        not get.
        """
        if not self.kwargs:
            return tuple(batch), {}
        mapping = batch[0] if len(batch) == 1 else None
        if not isinstance(mapping, Mapping):
            found = ", ".join(type(each).__name__ for each in batch)
            raise TypeError(
                f"the batch is ({found}), and has to be one mapping of "
                f"{', '.join(map(repr, self.kwargs))}, as the example was"
            )
        missing = [name for name in self.kwargs if name not in mapping]
        if missing:
            raise TypeError(f"the batch has no {', '.join(map(repr, missing))}")
        others = [name for name in mapping if name not in self.kwargs and mapping[name] is not None]
        if others:
            raise TypeError(
                f"the batch has {', '.join(map(repr, others))}, and the example had not: cut the "
                "model with an example that has all it is called with"
            )
        return (), {name: mapping[name] for name in self.kwargs}

    def like(self, batch: Sequence[Any]) -> Example:
        """The arguments of the first stage as an example of the same kind."""
        args, kwargs = self.arguments(batch)
        return Example(kwargs or args)

    def of_leaves(self, leaves: Sequence[Any]) -> Example:
        """As :meth:`like`, from what :meth:`leaves` returned."""
        import torch.utils._pytree as pytree

        shape = pytree.tree_structure((self.args, self.kwargs))
        args, kwargs = pytree.tree_unflatten(list(leaves), shape)
        return Example(kwargs or args)

    def with_rows(self, rows: int) -> Example:
        """A batch of another size, by repeating rows or leaving some out. Copies.

        Raises StagingError if it has none.
        """
        return self.of_rows(range(rows))

    def of_rows(self, rows: Sequence[int]) -> Example:
        """A batch of these of its rows; numbers beyond the last row start anew. Copies."""
        import torch
        import torch.utils._pytree as pytree

        if not self.rows:
            raise StagingError("the example has no rows; give a batch of at least one")
        index = torch.tensor(rows, dtype=torch.int64) % self.rows

        def of(each: Any) -> Any:
            return each[index.to(each.device)] if _has_rows(each) else each

        args, kwargs = pytree.tree_map(of, (self.args, self.kwargs))
        return Example(kwargs or args)

    def opposed(self, row: int) -> Example:
        """The same batch, with floating-point numbers of the other sign in all rows but one."""
        import torch.utils._pytree as pytree

        def of(each: Any) -> Any:
            if not (_has_rows(each) and _is_inexact(each)):
                return each
            opposed = -each
            opposed[row] = each[row]
            return opposed

        args, kwargs = pytree.tree_map(of, (self.args, self.kwargs))
        return Example(kwargs or args)

    def halved(self) -> Example:
        """The same batch, with floating-point numbers half as large."""
        import torch.utils._pytree as pytree

        def of(each: Any) -> Any:
            return each / 2 if _has_rows(each) and _is_inexact(each) else each

        args, kwargs = pytree.tree_map(of, (self.args, self.kwargs))
        return Example(kwargs or args)

    def with_sizes_of_one(self, axes: Collection[int]) -> Example:
        """The same rows, with size 1 of these axes besides the first."""
        import torch.utils._pytree as pytree

        def of(each: Any) -> Any:
            for axis in axes:
                if _has_rows(each) and 0 < axis < each.dim() and each.shape[axis]:
                    each = each.narrow(axis, 0, 1)
            return each

        args, kwargs = pytree.tree_map(of, (self.args, self.kwargs))
        return Example(kwargs or args)

    def copy(self) -> Example:
        """The same batch, for a model that may write into what it is called with."""
        return self.with_rows(self.rows)

    def batch(self) -> tuple[Any, ...]:
        """The arguments of the first stage."""
        return (self.kwargs,) if self.kwargs else self.args

    def synchronize(self) -> None:
        """Wait for its device, before a clock is read."""
        import torch

        if any(isinstance(each, torch.Tensor) and each.is_cuda for each in self.leaves()):
            torch.cuda.synchronize()

    def call(self, model: Callable[..., Any]) -> Any:
        """The model's output, without a graph of gradients."""
        import torch

        with torch.no_grad():
            return model(*self.args, **self.kwargs)

    def check_runs(self, model: Callable[..., Any]) -> None:
        """Raise StagingError if the model itself does not run with it."""
        try:
            self.copy().call(model)
        except Exception as error:
            raise StagingError(
                f"{type(model).__name__} does not run with the example: {first_line(error)}. Give "
                "a batch of its inputs"
            ) from error


def stage_times(stages: Sequence[Callable[..., Any]], example: Example) -> list[int]:
    """The least time of each stage; first runs, in which compilers compile, do not count."""
    taken_ns: list[list[int]] = [[] for _ in stages]
    for _ in range(_REPEATS):
        value: Any = example.copy().batch()
        for number, stage in enumerate(stages):
            begin_ns = time.perf_counter_ns()
            value = stage(value) if number else stage(*value)
            example.synchronize()
            taken_ns[number].append(time.perf_counter_ns() - begin_ns)
    return [min(each[1:]) for each in taken_ns]


def check_stages(
    stages: Sequence[Callable[..., Any]],
    model: Callable[..., Any],
    example: Example,
    *,
    tells_apart: bool = False,
) -> None:
    """Raise StagingError if the stages do not compute what the model does, or rows affect others.

    ``tells_apart``: batches for which the model takes different ways are never joined.

    For single batches of some sizes, results have to be the model's bit for bit, also where what
    crosses a border is copied there, and parts without rows serve twice. For two batches
    that are joined at every border they only have to be near, as kernels sum in other orders.
    """
    import torch

    name = type(model).__name__
    for rows in (1, example.rows, example.rows + 1):
        run = example.with_rows(rows)
        try:
            expected = run.copy().call(model)
        except Exception as error:
            raise StagingError(
                f"{name} does not run with a batch of {rows}: {first_line(error)}"
            ) from error
        try:
            with torch.no_grad():
                value: Any = stages[0](*run.copy().batch())
                for stage in stages[1:]:
                    value = stage(value)
        # Of any operation, as they were traced for other sizes of the batch.
        except Exception as error:
            raise StagingError(
                f"the stages of {name} do not run with a batch of {rows}: {first_line(error)}"
            ) from error
        if not are_identical(value, expected):
            raise StagingError(
                f"the stages of {name} do not compute what it computes, with a batch of {rows}: it "
                "does something else where it is traced, or keeps something from call to call; cut "
                "it in the other way (slice_model, slice_blocks), or write its stages as functions"
            )
        with torch.no_grad():
            value = stages[0](*run.copy().batch())
            for stage in stages[1:]:
                stage(_apart(value))  # as for the rows that a split has sent on before
                value = stage(_apart(value))
        if not are_identical(value, expected):
            raise StagingError(
                f"{name} cannot be batched between stages: a stage writes to a tensor (x += ...) "
                "that the model has by another name as well, of which joined batches have copies; "
                "write x = x + ..., or cut it elsewhere (slice_model)"
            )
    _check_company(model, example, opposes=not tells_apart)
    # The smaller one first: it moves the rows of the other to other places.
    one = example.with_rows(1)
    if not _are_near_joined(stages, model, one, example):
        raise _depends_on_others(model)
    # Half as large, too: what rows may have in common (their largest number) is another one then.
    try:
        is_near = _are_near_joined(stages, model, one.halved(), example)
    except Exception:  # The model may not take such numbers; some types have no arithmetic.
        return
    if not is_near:
        raise _depends_on_others(model)


def _are_near_joined(
    stages: Sequence[Callable[..., Any]], model: Callable[..., Any], *runs: Example
) -> bool:
    """Whether two batches that are one in every stage but the first come to what the model makes.

    Those that cannot be joined here are not joined in service, either.
    """
    import torch

    try:
        with torch.no_grad():
            results = _joined(stages, *runs)
    except NotJoinable:
        return True
    return all(
        are_near(result, run.copy().call(model)) for run, result in zip(runs, results, strict=True)
    )


def _check_company(model: Callable[..., Any], example: Example, *, opposes: bool) -> None:
    """Raise StagingError if what the model returns for a row depends on the others.

    With others beside it in a batch of the same size, a row is computed at the same place, by the
    same kernels: there are no errors of floating point by which an index might differ. The others
    are like it, and where it ``opposes`` have the other sign, too: a choice that is made for the
    whole batch (``where(x.mean() > 0, ...)``) is another one then.
    """
    import torch.utils._pytree as pytree

    def leaves(run: Example) -> list[Any]:
        return [_in_torch(each) for each in pytree.tree_leaves(run.call(model))]

    example = example.with_rows(max(2, example.rows))
    expected = leaves(example.copy())
    for row in {0, example.rows - 1}:
        alike = example.of_rows([row] * example.rows)
        for is_opposed in (False, True) if opposes else (False,):
            try:
                found = leaves(alike.opposed(row) if is_opposed else alike.copy())
            except Exception:  # The model may not take such numbers; some types have no signs.
                continue
            for each, its in zip(expected, found, strict=False):
                if _has_rows(each) and each.shape == getattr(its, "shape", None):
                    has_all = each.shape[0] == example.rows
                    pair = (each[row], its[row]) if has_all else (each, its)
                    if not has_same_rows(*pair):
                        raise _depends_on_others(model)


def _depends_on_others(model: Callable[..., Any]) -> StagingError:
    return StagingError(
        f"{type(model).__name__} cannot be batched between stages: what it returns for a row "
        "depends on the others in the batch, or has not the batch as its first axis"
    )


def _apart(value: Any) -> Any:
    """An activation as a join makes it: each tensor with rows has a memory of its own."""
    import torch
    import torch.utils._pytree as pytree

    def of(each: Any) -> Any:
        is_own = _has_rows(each) and each.layout is torch.strided and each.stride(0)
        return _copied(each) if is_own else each

    return pytree.tree_map(of, value)


def _copied(tensor: Any) -> Any:
    """A copy as far from an even address: kernels sum in another order at another one."""
    import torch

    shift = tensor.data_ptr() % _ALIGNMENT // tensor.element_size()
    if not shift:
        return tensor.clone()
    memory = tensor.new_empty(shift + tensor.numel())
    strides = torch.empty_like(tensor).stride()
    return memory.as_strided(tensor.shape, strides, shift).copy_(tensor)


def _joined(stages: Sequence[Callable[..., Any]], one: Example, other: Example) -> list[Any]:
    """The results of two batches that were one in every stage but the first."""
    values = [stages[0](*each.copy().batch()) for each in (one, other)]
    everyone = range(one.rows + other.rows)
    parts = everyone[: one.rows], everyone[one.rows :]
    for number, stage in enumerate(stages[1:], 2):
        value = stage(join(values))
        if number < len(stages):
            values = [take(value, part) for part in parts]
        else:
            values = [_rows(value, part, len(everyone)) for part in parts]
    return values


def _rows(output: Any, rows: range, count: int) -> Any:
    """These ``rows`` of the ``count`` rows in a model's output."""
    import torch.utils._pytree as pytree

    def of(each: Any) -> Any:
        each = _in_torch(each)
        has_all = getattr(each, "shape", ())[:1] == (count,)
        return each[rows.start : rows.stop] if has_all else each

    return pytree.tree_map(of, output)


def are_near(one: Any, other: Any) -> bool:
    """Whether floating-point tensors are near to each other, and what is no tensor is equal.

    Of other tensors only shapes are compared: their elements may differ altogether where two
    floating-point numbers are nearly equal (the index of the largest).
    """
    import torch
    import torch.utils._pytree as pytree

    ones, others = pytree.tree_leaves(one), pytree.tree_leaves(other)
    if len(ones) != len(others):
        return False
    for each, its in (map(_in_torch, pair) for pair in zip(ones, others, strict=True)):
        if not isinstance(each, torch.Tensor):
            if not _is_equal(each, its):
                return False
        elif each.shape != its.shape or (_is_inexact(each) and not _is_near(each, its)):
            return False
    return True


def has_same_rows(one: Any, other: Any) -> bool:
    """Whether two tensors of one shape are equal, up to errors of floating point."""
    import torch

    return _is_near(one, other) if _is_inexact(one) else torch.equal(one, other)


def _is_near(one: Any, other: Any) -> bool:
    """Whether two tensors differ by less than wrong rows would.

    The bound is far above what half precision loses.
    """
    if not one.is_complex():
        one, other = one.double(), other.double()
    differences, magnitudes = (one - other).detach().abs(), other.detach().abs()
    is_finite = differences.isfinite() & magnitudes.isfinite()
    if not is_finite.any():
        return True
    limit = _NEAR * float(magnitudes[is_finite].max())
    return float(differences[is_finite].max()) <= limit


def _is_inexact(tensor: Any) -> bool:
    return bool(tensor.is_floating_point() or tensor.is_complex())


def are_identical(one: Any, other: Any) -> bool:
    """Whether two outputs are equal bit for bit, NaNs included."""
    import torch
    import torch.utils._pytree as pytree

    ones, shape = pytree.tree_flatten(one)
    others, other_shape = pytree.tree_flatten(other)
    if shape != other_shape:
        return False
    for each, its in (map(_in_torch, pair) for pair in zip(ones, others, strict=True)):
        if not isinstance(each, torch.Tensor):
            if not _is_equal(each, its):
                return False
        elif not isinstance(its, torch.Tensor) or not _is_identical(each, its):
            return False
    return True


def _is_identical(one: Any, other: Any) -> bool:
    import torch

    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.is_complex():
        one, other = torch.view_as_real(one), torch.view_as_real(other)
    one, other = one.detach().contiguous(), other.detach().contiguous()
    return torch.equal(one, other) or bool(
        torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
    )


def _in_torch(leaf: Any) -> Any:
    """A tensor for an array of numpy's, if torch has its type; anything else as it is.

    Tensors are dense ones then, and plain numbers: not sparse, and no views of conjugates. Raises
    StagingError for nested ones.
    """
    import torch

    if isinstance(leaf, torch.Tensor):
        if leaf.is_nested:
            raise StagingError(
                "the model returns nested tensors, which cannot be checked; return padded ones"
            )
        dense = leaf if leaf.layout is torch.strided else leaf.to_dense()
        return dense.resolve_conj().resolve_neg()
    if not hasattr(leaf, "__array_interface__"):
        return leaf
    try:
        return torch.tensor(leaf.copy())  # in an order that torch has
    except TypeError:
        return leaf


def _is_equal(one: Any, other: Any) -> bool:
    """Whether two values that are no tensors are equal; arrays say so of each element."""
    if one is other:
        return True
    equal = one == other
    return bool(equal.all() if hasattr(equal, "all") else equal)


def _has_rows(each: Any) -> bool:
    import torch

    return isinstance(each, torch.Tensor) and each.dim() > 0


def version_of(tensor: Any) -> int | None:
    """How often a tensor was written to; None where that is not counted."""
    return None if tensor.is_inference() else tensor._version
