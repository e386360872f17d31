"""What an ensemble makes of its members' outputs.

Source: Pochelu et al. (2022), section 2.2 ("combination rule": averaging, weighted averaging,
majority voting).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trims_shim.batching.collating.arrays import library_of
from trims_shim.batching.collating.structures import part_of, parts_of, with_parts

__all__ = ["Combine", "combine_of"]

Combine = Callable[[Mapping[str, Any]], Any]
"""The outputs of some samples by member, to the result for these samples."""


def combine_of(rule: str | Combine, weights: Mapping[str, float]) -> Combine:
    """The rule of a name, with the members' weights, or the user's own.

    ``"mean"``: the weighted mean of each output. ``"vote"``: the class for which members of most
    weight vote, the smallest of equals; outputs are scores ``[n, classes]`` (of which NaN counts as
    the largest) or classes ``[n]``, the result ``[n]``. ``"none"``: the outputs by member. Raises
    ValueError for other names.
    """
    if callable(rule):
        return rule
    total = sum(weights.values())
    if rule == "mean":
        shares = [weight / total for weight in weights.values()]
        return lambda outputs: _mean(list(outputs.values()), shares)
    if rule == "vote":
        return lambda outputs: _vote(list(outputs.values()), list(weights.values()))
    if rule == "none":
        return dict
    raise ValueError(f"combine is {rule!r}; there are 'mean', 'vote', 'none', and functions")


def _mean(values: Sequence[Any], shares: Sequence[float]) -> Any:
    _check_parts(values)
    first = values[0]
    others = [value for value in values if library_of(value) is None]
    if not others:
        return _mean_array(values, shares)
    parts = parts_of(first)
    if parts is None:
        kind = type(others[0]).__name__
        raise TypeError(f"the mean of a {kind} is not defined; give a function as `combine`")
    return with_parts(
        first, {name: _mean([part_of(value, name) for value in values], shares) for name in parts}
    )


def _mean_array(values: Sequence[Any], shares: Sequence[float]) -> Any:
    _check_shapes(values)
    first = values[0]
    # In the members' order, whoever came first, so that equal samples have equal results.
    found = sum(
        share * _like(first, _at_least_single(value))
        for value, share in zip(values, shares, strict=True)
    )
    if _is_floating(first) and _is_complex(first) == _is_complex(found):
        return found.to(first.dtype) if hasattr(found, "to") else found.astype(first.dtype)
    return found


def _check_shapes(values: Sequence[Any]) -> None:
    shapes = {tuple(value.shape) for value in values}
    if len(shapes) > 1:
        raise ValueError(
            f"members return {' and '.join(map(str, sorted(shapes)))}: outputs need one shape to "
            "be combined; give a function as `combine`"
        )


def _check_parts(values: Sequence[Any]) -> None:
    """An array has none."""
    found = {frozenset(parts_of(value) or ()) for value in values}
    if len(found) > 1:
        parts = " and ".join(map(str, sorted(sorted(map(str, each)) for each in found)))
        raise ValueError(
            f"members return outputs of the parts {parts}: outputs need the same ones to be "
            "combined; give a function as `combine`"
        )


def _is_floating(array: Any) -> bool:
    dtype = array.dtype
    return bool(
        dtype.is_floating_point if hasattr(dtype, "is_floating_point") else dtype.kind in "fc"
    )


def _is_complex(array: Any) -> bool:
    dtype = array.dtype
    return bool(dtype.is_complex if hasattr(dtype, "is_complex") else dtype.kind == "c")


def _like(first: Any, value: Any) -> Any:
    """``value`` in the library of ``first``: one member may return tensors and another arrays."""
    if hasattr(value, "numpy") and not hasattr(first, "numpy"):
        return value.numpy(force=True)
    if hasattr(first, "numpy") and not hasattr(value, "numpy"):
        import torch

        return torch.as_tensor(value, device=first.device)
    return value


def _at_least_single(array: Any) -> Any:
    """Half precision would lose bits in sums."""
    if array.dtype.itemsize >= 4 or not _is_floating(array):
        return array
    return array.float() if hasattr(array, "float") else array.astype("float32")


def _vote(values: Sequence[Any], weights: Sequence[float]) -> Any:
    import numpy

    votes = [_classes(value) for value in values]
    _check_shapes(votes)
    count = len(votes[0])
    # Only those that got a vote: classes may be large numbers.
    classes, columns = numpy.unique(numpy.stack(votes), return_inverse=True)
    ballots = numpy.zeros((count, len(classes)))
    for column, weight in zip(columns.reshape(len(votes), count), weights, strict=True):
        ballots[numpy.arange(count), column] += weight
    winners = classes[ballots.argmax(axis=1)] if count else classes
    if type(values[0]).__module__ == "torch":
        import torch

        return torch.from_numpy(winners)
    return winners


def _classes(value: Any) -> Any:
    """``[n, classes]`` scores or ``[n]`` classes, as numpy's ``[n]`` classes."""
    import numpy

    if getattr(value, "ndim", 0) == 2 and value.shape[1]:
        return numpy.asarray(value.argmax(1))
    array = numpy.asarray(value)
    if array.ndim == 1 and array.dtype.kind in "iu":
        classes = array.astype(numpy.int64)
        if classes.min(initial=0) >= 0:
            return classes
    raise ValueError(
        f"a member returns {array.dtype} {list(array.shape)}; to vote, it has to return scores "
        "[n, classes] or classes [n] from 0 on"
    )
