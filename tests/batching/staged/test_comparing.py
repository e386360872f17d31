"""What counts as the same result, and what does not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from trims_shim.batching.staged.comparing import is_close

numpy = pytest.importorskip("numpy")


@dataclass
class Output:
    scores: Any
    name: str


def array(*values: float, dtype: str = "float32") -> Any:
    return numpy.array(values, dtype=dtype)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (array(1, 100), array(1.05, 100)),  # a thousandth of the largest magnitude
        (array(1, NAN, INF), array(1, NAN, INF)),
        (array(0, 0), array(0, 0)),
        (array(1, 2, dtype="int64"), array(1, 2, dtype="int64")),
        (array(1 + 1j, dtype="complex64"), array(1 + 1.0001j, dtype="complex64")),
        ({"a": array(1), "b": [1, "x"]}, {"a": array(1.0001), "b": [1, "x"]}),
        (Output(array(3), "n"), Output(array(3), "n")),
        ((1.0, NAN), (1.0001, NAN)),
        (None, None),
        (array(), array()),
    ],
)
def test_the_same_but_for_rounding(one: Any, other: Any) -> None:
    assert is_close([one], [other])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (array(1, 100), array(1.2, 100)),
        (array(1, NAN), array(1, 2)),
        (array(1, 2), array(1, NAN)),
        (array(INF), array(1)),
        (array(INF), array(-INF)),
        (array(1), array(1, dtype="float64")),
        (array(1), array(1, 1)),
        (array(1, 2, dtype="int64"), array(1, 3, dtype="int64")),
        (array(1, dtype="uint8"), array(0, dtype="uint8")),
        (array(1, 0, dtype="bool"), array(1, 1, dtype="bool")),
        ({"a": 1}, {"b": 1}),
        ([1, 2], [1]),
        ([1], (1,)),
        (Output(array(3), "n"), Output(array(3), "m")),
        (1.0, 1.1),
        (None, 0),
        ("a", "b"),
    ],
)
def test_other_results(one: Any, other: Any) -> None:
    assert not is_close([one], [other])


def test_the_largest_magnitude_is_that_of_the_whole_batch() -> None:
    """A score that happens to be near zero is not compared with itself."""
    assert is_close([array(0.001), array(50)], [array(0.002), array(50)])
    assert not is_close([array(0.001)], [array(0.002)])
    assert is_close([], [])
    assert not is_close([1], [])


def test_tensors() -> None:
    torch = pytest.importorskip("torch")
    assert is_close([torch.tensor([1.0, 2.0])], [torch.tensor([1.0, 2.0001])])
    assert is_close([torch.tensor([True])], [torch.tensor([True])])
    assert is_close([torch.tensor(3.0)], [torch.tensor(3.0001)])
    assert not is_close([torch.tensor([1, 2])], [torch.tensor([1, 3])])
    assert not is_close([torch.tensor([1.0, 2.0])], [torch.tensor([1.0, 2.1])])


class Ambiguous:
    """As a data frame: what ``==`` returns is neither true nor false."""

    def __eq__(self, other: object) -> Any:
        return array(1, 2) == array(1, 3)

    __hash__ = None  # type: ignore[assignment]


def test_what_cannot_be_compared_is_not_the_same() -> None:
    assert not is_close([Ambiguous()], [Ambiguous()])


def test_sparse_tensors_are_not_the_same() -> None:
    torch = pytest.importorskip("torch")
    assert not is_close([torch.eye(2).to_sparse()], [torch.eye(2).to_sparse()])
