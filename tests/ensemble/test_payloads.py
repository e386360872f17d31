"""What goes to workers and comes back is what was given."""

from __future__ import annotations

import sys
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from trims_shim.ensemble.payloads import count_of, dumped, joined, loaded, rows_of


@dataclass
class Pair:
    left: Any
    right: Any


class Named(NamedTuple):
    tokens: Any
    mask: Any


def there_and_back(value: Any) -> Any:
    return loaded([bytearray(part) for part in dumped(value)])


def same(one: Any, other: Any) -> bool:
    return bool(type(one) is type(other) and one.dtype == other.dtype and (one == other).all())


DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int64,
    torch.bool, torch.complex64, torch.float8_e4m3fn,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_type(dtype: torch.dtype) -> None:
    given = torch.arange(12).reshape(3, 4).to(dtype)
    found = there_and_back(given)
    assert found.dtype == dtype
    assert found.shape == (3, 4)
    assert torch.equal(found.view(torch.uint8), given.view(torch.uint8))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).reshape(3, 4).T,
        torch.arange(12.0)[::2],
        torch.zeros(0, 3),
        torch.tensor(3.5),
        torch.ones(2, 3).expand(4, 2, 3),
        torch.arange(4.0).to(torch.complex64).conj(),
        torch.ones(3, requires_grad=True),
        torch.nn.Parameter(torch.ones(3)),
    ],
    ids=["transposed", "strided", "empty", "scalar", "expanded", "conjugate", "graph", "parameter"],
)
def test_tensors_of_every_layout(tensor: torch.Tensor) -> None:
    found = there_and_back(tensor)
    assert torch.equal(found, tensor)
    assert not found.requires_grad
    found.add_(1)  # its memory is its own


def test_tensors_need_no_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found: torch comes without it, and no sample got to a worker."""
    for name in list(sys.modules):
        if name.partition(".")[0] == "numpy":
            monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delattr(torch, "from_numpy")
    monkeypatch.setattr(torch.Tensor, "numpy", None, raising=False)
    given = torch.arange(12.0).reshape(3, 4)
    assert torch.equal(there_and_back(given), given)


def test_tensors_without_memory() -> None:
    """Found: their process ended by SIGSEGV."""
    freed = torch.ones(2, 3)
    freed.untyped_storage().resize_(0)
    for tensor in freed, torch._efficientzerotensor(2, 3):
        with pytest.raises(ValueError, match=r"a tensor \[2, 3\] has no memory"):
            dumped(tensor)


def test_unusual_tensors_go_the_way_of_torch() -> None:
    given = torch.eye(3).to_sparse()
    assert torch.equal(there_and_back(given).to_dense(), torch.eye(3))
    # As torch.load does at its end; else the next load would have to look at this tensor, too.
    torch._utils._validate_loaded_sparse_tensors()


@pytest.mark.parametrize("dtype", ["<f4", ">f4", "i8", "U5", "S3", "M8[s]", "?"])
def test_arrays_of_every_type(dtype: str) -> None:
    given = np.arange(6).reshape(2, 3).astype("i8").astype(dtype)
    assert same(there_and_back(given), given)


def test_contents_stay_apart_and_are_not_copied() -> None:
    array, tensor = np.ones((100, 10)), torch.ones(50)
    parts = dumped({"a": array, "t": tensor, "text": ["x"]})
    assert [part.nbytes for part in parts[1:]] == [8000, 200]
    array[0, 0] = 5
    tensor[0] = 6
    found = loaded([bytearray(part) for part in parts])
    assert found["a"][0, 0] == 5
    assert found["t"][0] == 6


def test_results_use_the_memory_that_they_came_in() -> None:
    parts = [bytearray(part) for part in dumped((np.zeros(4), torch.zeros(4)))]
    array, tensor = loaded(parts)
    array[0] = tensor[0] = 1
    again = loaded(parts)
    assert again[0][0] == again[1][0] == 1


VALUES = [
    np.arange(20).reshape(10, 2),
    torch.arange(20).reshape(10, 2),
    list("abcdefghij"),
    (np.arange(10), list(range(10))),
    {"a": torch.arange(10), "b": {"c": np.arange(10)}},
    OrderedDict(a=np.arange(10)),
    Pair(np.arange(10), torch.arange(10)),
    Named(np.arange(10), np.arange(10) > 3),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("is_copied", [False, True])
def test_rows_joined_are_the_whole(value: Any, is_copied: bool) -> None:
    assert count_of(value) == 10
    parts = [rows_of(value, *bounds, is_copied=is_copied) for bounds in ((0, 3), (3, 4), (4, 10))]
    assert [count_of(part) for part in parts] == [3, 1, 6]
    whole = joined(parts)
    assert joined([whole]) is whole
    assert type(whole) is type(value)
    assert str(whole) == str(value)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": np.ones(2)}, {"a": np.ones(2), "b": np.ones(2)}),
        ({"a": np.ones(2), "b": np.ones(2)}, {"a": np.ones(2)}),
        ((np.ones(2),), (np.ones(2), np.ones(2))),
        ({"a": np.ones(2)}, np.ones(2)),
    ],
)
def test_batches_of_other_parts_are_not_joined(one: Any, other: Any) -> None:
    with pytest.raises(ValueError, match="the parts of one batch are"):
        joined([one, other])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.array([1, 0]), np.array([0.5, 1.0])),
        (torch.tensor([1, 0]), torch.tensor([0.5, 1.0])),
        (np.array(["2020"], "M8[Y]"), np.array(["2020-02"], "M8[M]")),
    ],
    ids=["arrays", "tensors", "dates"],
)
def test_batches_of_different_types_lose_nothing_when_joined(one: Any, other: Any) -> None:
    assert joined([one, other]).tolist() == [*one.tolist(), *other.tolist()]


def test_copied_rows_have_memory_of_their_own() -> None:
    array = np.zeros((4, 2))
    rows_of({"a": array}, 1, 3, is_copied=True)["a"][:] = 1
    assert not array.any()
    rows_of({"a": array}, 1, 3)["a"][:] = 1
    assert array.sum() == 4


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.float32(1), "a float32 without axes has no rows"),
        (torch.tensor(1), "a Tensor without axes has no rows"),
        ({"a": np.zeros(3), "loss": np.zeros(())}, "a ndarray without axes"),
        ({}, "are missing"),
        (np.ma.masked_array([1, 2], mask=[1, 0]), "a MaskedArray of this kind"),
        ({"a": torch.eye(3).to_sparse()}, "a Tensor of this kind"),
        ((np.zeros(3), np.zeros(4)), "they have 3 and 4"),
        ("text", "a str has no rows"),
        (None, "a NoneType has no rows"),
        ({"a": 3}, "a int has no rows"),
    ],
)
def test_what_has_no_rows(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        count_of(value)
