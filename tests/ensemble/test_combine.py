"""Combination rules, on all kinds of outputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from trims_shim.ensemble.combine import combine_of

ARRAYS = [np.asarray, torch.tensor]


def combined(rule: Any, *outputs: Any, weights: tuple[float, ...] | None = None) -> Any:
    names = "abcdef"[: len(outputs)]
    given = dict(zip(names, weights or (1.0,) * len(outputs), strict=True))
    return combine_of(rule, given)(dict(zip(names, outputs, strict=True)))


@pytest.mark.parametrize("array", ARRAYS)
def test_means_are_weighted(array: Any) -> None:
    one, other = array([[1.0, 3.0]]), array([[3.0, 7.0]])
    assert combined("mean", one, other).tolist() == [[2, 5]]
    assert combined("mean", one, other, weights=(3, 1)).tolist() == [[1.5, 4]]
    assert combined("mean", one, other, weights=(0, 2)).tolist() == [[3, 7]]


@pytest.mark.parametrize(
    ("library", "name", "tolerance"),
    [
        (np, "float16", 0.0),
        (np, "float32", 3e-7),
        (np, "float64", 1e-15),
        (torch, "float16", 0.0),
        (torch, "bfloat16", 0.0),
        (torch, "float32", 3e-7),
        (torch, "float64", 1e-15),
    ],
)
def test_means_keep_the_type_and_sum_in_single_precision_at_least(
    library: Any, name: str, tolerance: float
) -> None:
    value = library.linspace(1, 2, 1000, dtype=getattr(library, name))
    found = combined("mean", *[value] * 6)
    assert found.dtype == value.dtype
    assert float(abs(found - value).max()) <= tolerance


def test_means_of_whole_numbers_are_not_whole() -> None:
    assert combined("mean", np.array([1]), np.array([2])).tolist() == [1.5]
    assert combined("mean", torch.tensor([1]), torch.tensor([2])).tolist() == [1.5]
    large = np.array([(1 << 40) + 1])
    assert combined("mean", large, large).tolist() == large.tolist()


@pytest.mark.parametrize("array", ARRAYS)
def test_means_with_complex_numbers_are_complex(array: Any) -> None:
    real, other = array(np.ones(1, "float32")), array(np.full(1, 3 + 2j, "complex64"))
    for pair in ((real, other), (other, real)):
        found = combined("mean", *pair)
        assert found.dtype == other.dtype
        assert found.tolist() == [2 + 1j]


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32", "complex64", "int64"])
def test_means_of_arrays_and_tensors_are_of_the_first_ones_library(name: str) -> None:
    tensor, own = torch.tensor([3, 5]).to(getattr(torch, name)), np.array([1, 3], "float32")
    tensor.requires_grad_(name == "float32")
    expected = combined("mean", tensor.detach(), torch.tensor(own))
    assert combined("mean", tensor.detach(), own).dtype == expected.dtype
    assert combined("mean", tensor.detach(), own).tolist() == [2, 4]
    found = combined("mean", own, tensor)
    assert type(found) is np.ndarray
    assert found.tolist() == [2, 4]


def test_means_of_structures_are_structures() -> None:
    outputs = [{"a": np.ones(2) * n, "b": (np.zeros(2), np.ones(2) * n)} for n in (1, 3)]
    found = combined("mean", *outputs)
    assert found["a"].tolist() == [2, 2]
    assert found["b"][1].tolist() == [2, 2]


def test_votes_go_to_the_class_of_most_weight() -> None:
    scores = np.array([[0.1, 0.9, 0.0], [0.5, 0.2, 0.3]])
    assert combined("vote", scores, np.array([2, 0]), np.array([2, 1])).tolist() == [2, 0]
    votes = scores, np.array([2, 1]), np.array([2, 1])
    assert combined("vote", *votes, weights=(3, 1, 1)).tolist() == [1, 0]
    # Of equals the smallest.
    assert combined("vote", np.array([2]), np.array([1])).tolist() == [1]
    assert combined("vote", *[np.array([200], np.uint8)] * 2).tolist() == [200]


def test_votes_are_for_classes_of_any_number() -> None:
    large = (1 << 63) - 1
    votes = np.array([large, 0]), np.array([7, 7]), np.array([large, 7])
    assert combined("vote", *votes).tolist() == [large, 7]
    assert combined("vote", *votes, weights=(1, 3, 1)).tolist() == [7, 7]


def test_votes_of_tensors_are_a_tensor() -> None:
    found = combined("vote", torch.tensor([[0.0, 1.0]]), torch.tensor([1]))
    assert torch.equal(found, torch.tensor([1]))
    half = torch.tensor([[0.0, 1.0]], dtype=torch.bfloat16)
    assert torch.equal(combined("vote", half, half), torch.tensor([1]))


@pytest.mark.parametrize("array", ARRAYS)
def test_votes_of_no_rows(array: Any) -> None:
    empty = array(np.zeros((0, 3)))
    assert combined("vote", empty, empty).tolist() == []


def test_none_and_functions_get_all_outputs() -> None:
    assert combined("none", 1, 2) == {"a": 1, "b": 2}
    assert combined(lambda outputs: outputs["a"] + outputs["b"], 1, 2) == 3


@pytest.mark.parametrize(
    ("rule", "outputs", "message"),
    [
        ("mean", (np.zeros((2, 3)), np.zeros((2, 4))), r"return \(2, 3\) and \(2, 4\)"),
        ("mean", (["a"], ["b"]), "mean of a list"),
        ("mean", (np.ones(1), ["b"]), "mean of a list"),
        ("mean", ({"a": np.ones(2)}, {"a": np.ones(2), "b": np.ones(2)}), r"'a'\] and \['a', 'b'"),
        ("mean", ({"a": np.ones(2), "b": np.ones(2)}, {"a": np.ones(2)}), r"'a'\] and \['a', 'b'"),
        ("mean", (np.ones(2), {"a": np.ones(2)}), r"parts \[\] and \['a'\]"),
        ("mean", ((np.ones(2),), (np.ones(2), np.ones(2))), r"\['0'\] and \['0', '1'\]"),
        ("vote", (np.array([0.5]), np.array([1])), r"returns float64 \[1\]"),
        ("vote", (np.array([-1]), np.array([1])), "from 0 on"),
        ("vote", (np.array([1 << 63], np.uint64), np.array([1])), r"returns uint64 \[1\]"),
        ("vote", (np.zeros((2, 0)), np.zeros((2, 0))), r"returns float64 \[2, 0\]"),
        ("vote", (np.array([1, 2]), np.array([1])), r"return \(1,\) and \(2,\)"),
        ("vote", (np.zeros((1, 2, 3)), np.zeros((1, 2, 3))), "scores"),
    ],
)
def test_outputs_that_do_not_fit(rule: str, outputs: tuple[Any, ...], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        combined(rule, *outputs)


def test_unknown_rules() -> None:
    with pytest.raises(ValueError, match="'median'; there are 'mean', 'vote', 'none'"):
        combine_of("median", {"a": 1.0})
