"""Items to a batch and back: dtypes, devices, structures, and who shares memory with whom."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import warnings
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trims_shim.batching import Batcher, Pad
from trims_shim.batching.collating.arrays import library_of
from trims_shim.batching.collating.collate import Collate, answers, collate_of, columns
from trims_shim.batching.collating.collates import padded_size
from trims_shim.errors import BadBatch


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass
class Pair:
    image: Any
    name: str
    made: int = field(default=0, init=False)


@dataclass(frozen=True, slots=True)
class Frozen:
    image: Any


class Foreign:
    """An array of no known library, by the array API standard."""

    dtype, device = "float32", "foreign:0"

    def __init__(self, values: list[float]) -> None:
        self.values = values
        self.shape = (len(values),)

    def __array_namespace__(self) -> type[Foreign]:
        return Foreign

    def __getitem__(self, index: Any) -> Any:
        return np.array(self.values)[index]

    @staticmethod
    def stack(arrays: list[Any]) -> np.ndarray:
        return np.stack([each.values for each in arrays])

    @staticmethod
    def concat(arrays: list[Any]) -> np.ndarray:
        return np.concatenate([each.values for each in arrays])


class Keys(Foreign):
    """As JAX's keys of random numbers, which have the method in name only."""

    def __array_namespace__(self) -> type[Foreign]:
        raise NotImplementedError


class Both(tuple[Any, ...]):
    """A tuple that is made of two values."""

    def __new__(cls, first: Any, second: Any) -> Both:
        return super().__new__(cls, (first, second))


AUTO = collate_of("auto")


def share_batch(*items: Any, spec: Any = "auto") -> bool:
    collate = collate_of(spec)
    return len({collate.key(item) for item in items}) == 1


# --- what the function gets -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64, torch.bool])
def test_tensors_are_stacked_without_changing_their_type(dtype: torch.dtype) -> None:
    batch = AUTO.join([torch.ones(2, 3, dtype=dtype), torch.zeros(2, 3, dtype=dtype)])
    assert batch.shape == (2, 2, 3)
    assert batch.dtype == dtype
    assert batch.sum() == 6


def test_a_batch_of_one_is_a_copy_too() -> None:
    """A function that writes into its batch never writes into a caller's memory."""
    tensor, array = torch.ones(3), np.ones(3)
    AUTO.join([tensor]).zero_()
    AUTO.join([array])[:] = 0
    collate_of("concatenate").join([tensor]).zero_()
    assert tensor.sum() == array.sum() == 3


def test_a_batch_has_no_graph() -> None:
    items = [torch.ones(2, requires_grad=True), torch.ones(2)]
    assert share_batch(*items)
    assert not AUTO.join(items).requires_grad
    assert not collate_of("concatenate").join(items).requires_grad


@pytest.mark.parametrize(
    "other",
    [
        torch.ones(3, dtype=torch.float64),
        torch.ones(4),
        torch.ones(3, device="meta"),
        np.ones(3, dtype=np.float32),
        [1.0, 1.0, 1.0],
    ],
)
def test_tensors_of_another_kind_are_in_another_batch(other: Any) -> None:
    assert not share_batch(torch.ones(3), other)


def test_arrays_on_another_device_are_in_another_batch_whatever_their_library() -> None:
    here, there = Foreign([1.0]), Foreign([1.0])
    assert share_batch(here, there)
    there.device = "foreign:1"
    assert not share_batch(here, there)


def test_tensors_that_cannot_be_stacked_are_listed() -> None:
    sparse = torch.eye(2).to_sparse()
    batch = AUTO.join([sparse, sparse])
    assert isinstance(batch, list)
    assert batch[0] is sparse


@pytest.mark.parametrize("dtype", ["<f4", ">f4", "<i2", "?", "<c8", "<M8[s]", "i4,f4"])
def test_arrays_keep_their_type(dtype: str) -> None:
    array = np.zeros(2, dtype=dtype)
    batch = AUTO.join([array, array])
    assert batch.shape == (2, 2)
    assert batch.dtype == np.dtype(dtype)
    batch = collate_of("concatenate").join([array, array])
    assert batch.shape == (4,)
    assert batch.dtype == np.dtype(dtype)


def test_arrays_of_strings_of_different_widths_share_a_batch() -> None:
    short, long = np.array(["a", "b"]), np.array(["abc", "d"])
    assert share_batch(short, long)
    assert AUTO.join([short, long]).tolist() == [["a", "b"], ["abc", "d"]]
    assert collate_of("concatenate").join([short, long]).tolist() == ["a", "b", "abc", "d"]


def test_arrays_of_objects_are_stacked_as_objects() -> None:
    items = [np.array([{}, None], dtype=object), np.array(["a", 1], dtype=object)]
    batch = AUTO.join(items)
    assert batch.dtype == object
    assert batch[1].tolist() == ["a", 1]


def test_masked_arrays_keep_their_masks() -> None:
    masked = np.ma.masked_array([1, 2], mask=[True, False])
    assert AUTO.join([masked])[0] is masked


@pytest.mark.parametrize("item", [np.bytes_(b"a\0"), np.str_("a\0")])
def test_null_characters_at_an_end_are_not_lost(item: Any) -> None:
    assert AUTO.join([item])[0] is item
    without = type(item)(item[:1])
    assert not share_batch(item, without)
    assert AUTO.join([without]).tolist() == [without]


def test_numpys_numbers_become_an_array() -> None:
    batch = AUTO.join([np.float32(1), np.float32(2)])
    assert batch.dtype == np.float32
    assert batch.tolist() == [1, 2]


def test_other_libraries_stack_by_the_standard() -> None:
    items = [Foreign([1.0, 2.0]), Foreign([3.0, 4.0])]
    assert share_batch(*items)
    assert not share_batch(Foreign([1.0]), items[0])
    assert AUTO.join(items).tolist() == [[1, 2], [3, 4]]
    assert collate_of("concatenate").join(items).tolist() == [1, 2, 3, 4]
    whole = Foreign([1.0, 2.0, 3.0])
    assert split(whole) == [1, 2, 3]
    parts = collate_of("concatenate").split(whole, [[0], [0, 0]])
    assert [part.tolist() for part in parts] == [[1], [2, 3]]
    assert split(Foreign([]), 0) == []


def test_arrays_that_have_no_operations_are_listed() -> None:
    items = [Keys([1.0, 2.0]), Keys([3.0])]
    assert share_batch(*items)
    assert AUTO.join(items) == items


def test_anything_else_is_listed_as_it_is() -> None:
    items = ["text", [1, 2], None, 7]
    assert share_batch(*items)
    batch = AUTO.join(items)
    assert isinstance(batch, list)
    assert all(found is given for found, given in zip(batch, items, strict=True))


@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_mappings_are_batched_by_field(kind: type) -> None:
    batch = AUTO.join([kind(image=torch.zeros(3), name=name) for name in "ab"])
    assert type(batch) is kind
    assert batch["image"].shape == (2, 3)
    assert batch["name"] == ["a", "b"]


def test_a_mapping_that_cannot_be_made_of_a_mapping_becomes_a_dict() -> None:
    assert AUTO.join([defaultdict(int, a=1)]) == {"a": [1]}


def test_structure_decides_who_shares_a_batch() -> None:
    assert share_batch({"a": 1, "b": 2}, {"b": 2, "a": 1})
    assert not share_batch({"a": 1}, {"b": 1})
    assert not share_batch({"a": torch.ones(2)}, {"a": torch.ones(3)})
    assert not share_batch((1, 2), (1, 2, 3))
    assert not share_batch(Point(1, 2), (1, 2))


def test_a_named_tuple_that_is_made_of_something_else() -> None:
    class Square(NamedTuple("Rectangle", [("width", Any), ("height", Any)])):
        def __new__(cls, width: int) -> Square:
            return super().__new__(cls, width, width)

    batch = AUTO.join([Square(1), Square(2)])
    assert type(batch) is Square
    assert batch == ([1, 2], [1, 2])
    assert AUTO.split(batch, [0, 0]) == [Square(1), Square(2)]


def test_a_tuple_that_cannot_be_made_of_its_parts_becomes_a_plain_one() -> None:
    batch = AUTO.join([Both(1, 2), Both(3, 4)])
    assert type(batch) is tuple
    assert batch == ([1, 3], [2, 4])


def test_what_a_dataclass_has_computed_of_its_fields_is_its_own() -> None:
    """Of one item it is not that of a batch, nor the reverse."""

    @dataclass
    class Item:
        values: Any

        @functools.cached_property
        def total(self) -> Any:
            return self.values.sum(-1)

    items = [Item(np.array([1, 2])), Item(np.array([3, 4]))]
    assert items[0].total == 3
    batch = AUTO.join(items)
    assert list(batch.total) == [3, 7]
    assert [each.total for each in AUTO.split(batch, items)] == [3, 7]


def test_tuples_and_dataclasses_are_batched_by_part() -> None:
    assert AUTO.join([(1, "a"), (2, "b")]) == ([1, 2], ["a", "b"])
    points = AUTO.join([Point(torch.zeros(2), 1), Point(torch.ones(2), 2)])
    assert type(points) is Point
    assert points.x.shape == (2, 2)
    pair = Pair(np.zeros(3), "a")
    pair.made = 5
    pair.extra = "kept"  # type: ignore[attr-defined]
    batch = AUTO.join([pair, pair])
    assert batch.image.shape == (2, 3)
    assert (batch.name, batch.made, batch.extra) == (["a", "a"], [5, 5], "kept")
    assert AUTO.join([Frozen(np.zeros(3))]).image.shape == (1, 3)
    assert pair.name == "a"


def test_listing_leaves_everything_alone() -> None:
    items = [torch.ones(2), torch.ones(3), {"a": 1}]
    assert share_batch(*items, spec="list")
    assert collate_of("list").join(items) == items


def test_stacking_converts_numbers() -> None:
    stack = collate_of("stack")
    assert stack.join([1, 2]).tolist() == [1, 2]
    assert stack.join([[1.0, 2.0], [3.0, 4.0]]).shape == (2, 2)
    assert stack.join([{"a": 1}, {"a": 2}])["a"].tolist() == [1, 2]
    assert share_batch(["a", "b"], ["c", "longer\0 one"], spec="stack")
    assert stack.join([[("a", "b")], [("c", "d\0e")]]).tolist() == [[["a", "b"]], [["c", "d\0e"]]]
    assert not share_batch([1, 2], [1, 2, 3], spec="stack")
    assert not share_batch(1, 1.0, spec="stack")


MASKED = np.ma.masked_array([1, 2], mask=[True, False])


@pytest.mark.parametrize(
    "item",
    [
        object(),
        [[1], [1, 2]],
        None,
        MASKED,
        {"a": MASKED},
        b"a\0",
        "a\0",
        np.bytes_(b"a\0"),
        np.str_("a\0"),
        ["a", "b\0"],
        [[b"a\0"], [b"b"]],
        [1, "a"],
    ],
)
def test_stacking_refuses_what_it_cannot_stack(item: Any) -> None:
    with pytest.raises(TypeError, match="cannot be stacked"):
        collate_of("stack").key(item)


OPENMP_THREADS = """
import ctypes, glob, os, threading, torch
from trims_shim.batching.collating.collate import collate_of
libraries = glob.glob(os.path.join(os.path.dirname(torch.__file__), "lib", "libgomp*"))
count = ctypes.CDLL(libraries[0]).omp_get_max_threads if libraries else lambda: 0
torch.set_num_threads(3)
item, found = torch.ones(2), []
def run():
    before = count()
    collate_of("auto").join([item])
    found.extend([before, count()])
thread = threading.Thread(target=run)
thread.start()
thread.join()
print(*found)
"""


def test_torchs_number_of_threads_holds_where_batches_run() -> None:
    done = subprocess.run(
        [sys.executable, "-c", OPENMP_THREADS],
        env={name: value for name, value in os.environ.items() if not name.startswith("OMP_")},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    before, after = map(int, done.stdout.split())
    if before in (0, 3):
        pytest.skip("this torch has no OpenMP of its own, or hands its number of threads on")
    assert after == 3


# --- what callers get -----------------------------------------------------------------------------


def split(results: Any, count: int = 3) -> list[Any]:
    return answers(AUTO, results, [0] * count, function="classify")


def test_rows_are_views_of_the_batch() -> None:
    tensor, array = torch.zeros(3, 2), np.zeros((3, 2))
    for row in (*split(tensor), *split(array)):
        row += 1
    assert tensor.sum() == array.sum() == 6


def test_rows_of_an_expanded_tensor_are_not_the_same_memory() -> None:
    weights = torch.zeros(2)
    for row in split(weights.expand(3, 2)):
        row += 1
        assert row.tolist() == [1, 1]
    assert weights.tolist() == [0, 0]


@pytest.mark.parametrize("sizes", [None, [2, 1]])
def test_rows_of_a_broadcast_array_are_not_the_same_memory(sizes: Any) -> None:
    weights = np.zeros(2)
    for array in (np.broadcast_to(weights, (3, 2)), torch.from_numpy(weights).expand(3, 2).numpy()):
        for part in library_of(array).parts(array, sizes):
            part += 1
            assert part.max() == 1
    assert weights.tolist() == [0, 0]


def test_small_rows_of_a_big_batch_are_copies() -> None:
    rows = 4096
    big = torch.zeros(rows, 128)
    assert split(big, rows)[0].untyped_storage().nbytes() == 128 * 4
    assert split(big.numpy().copy(), rows)[0].base is None


def test_records_of_a_big_batch_are_copies() -> None:
    big = np.zeros(1 << 17, dtype=[("label", "i8"), ("score", "f8")])
    big["label"] = np.arange(len(big))
    results = split(big, len(big))
    assert results[7].base is not big
    assert results[7].dtype == big.dtype
    assert results[7].item() == (7, 0.0)
    few = big[:2].copy()
    assert split(few, 2)[1].base is few


def test_large_rows_of_a_big_batch_are_views() -> None:
    big = torch.zeros(3, 1 << 20)
    assert split(big)[1].untyped_storage().data_ptr() == big.untyped_storage().data_ptr()
    array = np.zeros((3, 1 << 20))
    assert split(array)[1].base is array


def test_a_part_of_something_bigger_does_not_keep_it() -> None:
    tokens = torch.zeros(3, 8, 1 << 15)
    assert split(tokens[:, -1])[0].untyped_storage().nbytes() == 4 << 15
    array = np.zeros((3, 8, 1 << 15), dtype=np.float32)
    assert split(array[:, -1])[0].base is None
    assert split(tokens[:, -1].numpy())[0].base is None


def test_results_have_no_graph_and_may_be_written_to() -> None:
    results = split(torch.nn.Linear(2, 2)(torch.ones(3, 2)))
    assert not any(each.requires_grad for each in results)
    results[0].zero_()
    results[1].requires_grad_()


@pytest.mark.parametrize("sizes", [None, [1, 2]])
def test_a_result_in_a_graph_of_its_caller_takes_no_other_one_with_it(sizes: Any) -> None:
    weight = torch.ones(2, requires_grad=True)
    batch = torch.ones(3, 2)
    results = collate_of("auto").split(batch, [1, 2, 3])
    if sizes is not None:
        items = [torch.ones(size, 2) for size in sizes]
        results = collate_of("concatenate").split(batch, items)
    results[0].mul_(weight)
    assert results[0].requires_grad
    assert not results[1].requires_grad
    assert results[1].data_ptr() == batch[1].data_ptr()


def test_rows_of_one_axis_have_none() -> None:
    rows = split(torch.tensor([1.0, 2.0, 3.0]))
    assert [row.shape for row in rows] == [()] * 3
    assert [row.item() for row in rows] == [1, 2, 3]
    assert split(np.array([1, 2, 3])) == [1, 2, 3]
    assert split(np.array(["a", "bc", ""])) == ["a", "bc", ""]


def test_inference_tensors_stay_what_they_are() -> None:
    with torch.inference_mode():
        results = torch.ones(3, 2) * 2
    assert split(results)[0].is_inference()


@pytest.mark.parametrize(
    "results",
    [["a", "b", "c"], iter("abc"), (each for each in "abc"), map(str, "abc")],
)
def test_sequences_and_iterators_hold_one_each(results: Any) -> None:
    assert split(results) == ["a", "b", "c"]


def test_results_that_cannot_be_stacked_can_be_split() -> None:
    masked = split(np.ma.masked_array([[1, 2], [3, 4], [5, 6]], mask=[[0, 1], [0, 0], [0, 0]]))
    assert masked[0].mask.tolist() == [False, True]
    sparse = split(torch.eye(3).to_sparse())
    assert sparse[1].to_dense().tolist() == [0, 1, 0]
    ragged = [torch.ones(length) for length in (1, 2, 3)]
    nested = torch.nested.nested_tensor(ragged, layout=torch.jagged)
    assert [len(each) for each in split(nested)] == [1, 2, 3]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls them a prototype
        padded_inside = torch.nested.nested_tensor(ragged, layout=torch.strided)
    assert [len(each) for each in split(padded_inside)] == [1, 2, 3]


def test_none_is_none_for_each() -> None:
    assert split(None) == [None] * 3


def test_several_outputs_are_split_each() -> None:
    scores = torch.arange(3)
    assert split({"score": scores, "name": ["a", "b", "c"]})[1] == {"score": 1, "name": "b"}
    assert split((scores, None))[2] == (2, None)
    point = split(Point(scores, (scores, [4, 5, 6])))[1]
    assert point == Point(1, (1, 5))
    assert type(point) is Point
    assert split(Frozen(scores))[2] == Frozen(torch.tensor(2))
    assert split(()) == [()] * 3


def test_a_tuple_is_several_outputs_whatever_its_length() -> None:
    """Else a function that returns two outputs would work but for batches of two."""
    outputs = (["a", "b"], ["c", "d"])
    assert split(outputs, 2) == [("a", "c"), ("b", "d")]
    with pytest.raises(BadBatch):
        split(("a", "b"), 2)


def test_torchs_own_tuples_keep_their_names() -> None:
    results = split(torch.tensor([[1.0, 3.0, 2.0], [6.0, 4.0, 5.0], [7.0, 8.0, 9.0]]).topk(2))
    assert results[0].indices.tolist() == [1, 2]
    assert results[2].values.tolist() == [9.0, 8.0]


def test_models_outputs_keep_their_type() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    hidden = (torch.zeros(3, 4, 2), torch.ones(3, 4, 2))
    results = split(
        outputs.BaseModelOutput(last_hidden_state=torch.zeros(3, 4, 2), hidden_states=hidden)
    )
    assert type(results[0]) is outputs.BaseModelOutput
    assert results[0].last_hidden_state.shape == (4, 2)
    assert results[1].hidden_states[1].sum() == 8
    assert results[1].attentions is None


def test_encodings_are_joined_as_encodings() -> None:
    transformers = pytest.importorskip("transformers")
    encoding = transformers.BatchEncoding({"input_ids": torch.arange(4)})
    batch = AUTO.join([encoding, encoding])
    assert type(batch) is transformers.BatchEncoding
    assert batch["input_ids"].shape == (2, 4)


class Soon:
    def __await__(self) -> Any:
        yield


@pytest.mark.parametrize(
    ("results", "message"),
    [
        ([1, 2], r"classify returned 2 results \(list\) for a batch of 3 items"),
        ([1, 2, 3, 4], r"classify returned 4 results"),
        (iter([1, 2]), r"returned 2 results"),
        (iter(range(100)), r"returned too many results"),
        (torch.zeros(2, 5), r"classify returned a Tensor of 2 rows for a batch of 3 items"),
        (torch.eye(4).to_sparse(), r"a Tensor of 4 rows"),
        (torch.tensor(1.0), r"a Tensor without axes, where its batch of 3 needs rows"),
        (np.float32(1), r"a float32 without axes"),
        ({"a": [1, 2, 3], "b": [1]}, r"1 results \(list\) at \['b'\]"),
        ((torch.zeros(3), {"c": torch.zeros(2)}), r"at \[1\]\['c'\]"),
        (Point([1, 2, 3], [1]), r"at \[1\]"),
        (Frozen([1]), r"at \.image"),
        ("abc", r"type str, which is not a result for each of 3 items"),
        (7, r"type int"),
        (object(), r"type object"),
        ({1, 2, 3}, r"type set"),
        (Soon(), r"returned a Soon; a function that is awaited is an `async def`"),
    ],
)
def test_anything_else_is_a_bad_batch(results: Any, message: str) -> None:
    with pytest.raises(BadBatch, match=message):
        split(results)


def test_a_collate_of_the_users_is_checked_as_well() -> None:
    class Wrong:
        def key(self, item: Any) -> int:
            return 0

        def join(self, items: Any) -> Any:
            return items

        def split(self, results: Any, items: Any) -> list[Any]:
            return results[:-1]

    assert isinstance(Wrong(), Collate)
    with pytest.raises(BadBatch, match=r"f: Wrong\.split made 1 results of 2 items"):
        answers(collate_of(Wrong()), [1, 2], [1, 2], function="f")


def test_results_are_counted_not_asked_for_their_number() -> None:
    class Fewer(list[int]):
        def __len__(self) -> int:
            return 2

    class Wrong(type(collate_of("list"))):  # type: ignore[misc]
        def split(self, results: Any, items: Any) -> Any:
            return Fewer([1])

    with pytest.raises(BadBatch, match=r"f: Wrong\.split made 1 results of 2 items"):
        answers(Wrong(), [], [1, 2], function="f")


# --- sizes, columns, fields -----------------------------------------------------------------------


def test_batches_are_filled_to_allowed_sizes() -> None:
    collate = collate_of("auto", batch_sizes=[8, 1, 4])
    items = [torch.full((2,), float(number)) for number in range(3)]
    batch = collate.join(items)
    assert batch[:, 0].tolist() == [0, 1, 2, 2]
    assert [row[0] for row in answers(collate, batch * 2, items)] == [0, 2, 4]
    assert collate.join(items[:1]).shape == (1, 2)
    assert collate.key(items[0]) == AUTO.key(items[0])
    with pytest.raises(BadBatch, match="batch of 4"):
        answers(collate, batch[:3], items)
    with pytest.raises(ValueError, match="larger than the largest"):
        collate.join(items * 3)


def test_padded_size() -> None:
    assert [padded_size(count, [4, 2, 16]) for count in (1, 2, 3, 5)] == [2, 2, 4, 16]
    assert padded_size(7, None) == 7
    with pytest.raises(ValueError, match="largest"):
        padded_size(17, [16])


@pytest.mark.parametrize("sizes", [[], [0, 2]])
def test_sizes_are_checked(sizes: list[int]) -> None:
    with pytest.raises(ValueError, match="batch_sizes"):
        collate_of("auto", batch_sizes=sizes)


def test_each_argument_has_its_own_collate() -> None:
    items = [(torch.zeros(2), 1), (torch.ones(2), 2)]
    tensors, listed = columns("auto", 2).join(items)
    assert tensors.shape == (2, 2)
    assert listed == [1, 2]
    both = columns(["list", "stack"], 2, batch_sizes=[4])
    tensors, stacked = both.join(items)
    assert isinstance(tensors, list)
    assert stacked.tolist() == [1, 2, 2, 2]
    assert both.split([5, 6, 7, 8], items) == [5, 6]
    assert both.key(items[0]) == both.key(items[1])
    with pytest.raises(ValueError, match="for 2 arguments, and there are 3"):
        columns(["list", "stack"], 3)
    with pytest.raises(ValueError, match="collate is for 2 arguments, and there are 3"):
        both.key((1, 2, 3))


def test_each_field_has_its_own_collate() -> None:
    collate = collate_of({"label": "stack"})
    items = [{"image": torch.zeros(2), "label": 1}, {"image": torch.ones(2), "label": 2}]
    assert collate.key(items[0]) == collate.key(items[1])
    batch = collate.join(items)
    assert batch["image"].shape == (2, 2)
    assert batch["label"].tolist() == [1, 2]
    assert answers(collate, ["a", "b"], items) == ["a", "b"]
    with pytest.raises(ValueError, match="no 'label'"):
        collate.key({"image": torch.zeros(2)})


def test_items_that_are_batches_are_concatenated() -> None:
    collate = collate_of("concatenate")
    items = [torch.zeros(1, 3), torch.ones(2, 3)]
    assert collate.key(items[0]) == collate.key(items[1])
    batch = collate.join(items)
    assert batch.shape == (3, 3)
    first, second = answers(collate, {"y": batch, "n": [1, 2, 3]}, items)
    assert first["y"].shape == (1, 3)
    assert second["n"] == [2, 3]
    assert collate.join([[1], [2, 3]]) == [1, 2, 3]
    named = collate.join([{"x": item, "n": item[:, 0].tolist()} for item in items])
    assert named["x"].tolist() == batch.tolist()
    assert named["n"] == [0, 1, 1]
    assert [len(each) for each in answers(collate, np.zeros(3), [[1], [2, 3]])] == [1, 2]
    with pytest.raises(BadBatch, match="batch of 3"):
        answers(collate, [1, 2], items)


@pytest.mark.parametrize("kind", [list, deque, iter])
def test_each_item_that_is_a_batch_gets_its_share_of_any_sequence(kind: Any) -> None:
    results = kind([1, 2, 3])
    assert collate_of("concatenate").split(results, [["a"], ["b", "c"]]) == [[1], [2, 3]]


def test_items_that_are_batches_need_one_size() -> None:
    collate = columns("concatenate", 2)
    assert collate.key((torch.zeros(2, 1), [1, 2])) == collate.key((torch.zeros(1, 1), [1]))
    with pytest.raises(ValueError, match="one size"):
        collate.key((torch.zeros(2), torch.zeros(3)))
    with pytest.raises(ValueError, match="no axis"):
        collate_of("concatenate").key(torch.tensor(1.0))
    with pytest.raises(TypeError, match="cannot be concatenated"):
        collate_of("concatenate").key("text")
    with pytest.raises(ValueError, match="batch_sizes"):
        collate_of("concatenate", batch_sizes=[4])


def test_unknown_specs_are_refused_with_the_choices() -> None:
    with pytest.raises(ValueError, match="'auto', 'list', 'stack', 'concatenate'"):
        collate_of("pad")


@pytest.mark.parametrize(
    "spec", [7, None, Pad, b"list", [], ["list"], ("auto",), [["list"], "auto"]]
)
def test_specs_of_a_wrong_type_are_refused_with_the_choices(spec: Any) -> None:
    wrong = repr(spec[0] if spec == [["list"], "auto"] else spec)
    choices = "give one of 'auto', 'list', 'stack', 'concatenate', or an object with the methods "
    with pytest.raises(TypeError, match=re.escape(f"collate is {wrong}; {choices}")):
        Batcher(list, collate=spec)


VALUES = st.recursive(
    st.integers() | st.text(max_size=3),
    lambda inner: st.tuples(inner, inner) | st.fixed_dictionaries({"a": inner, "b": inner}),
    max_leaves=5,
)


@given(st.lists(VALUES, min_size=1, max_size=6))
def test_what_is_joined_and_split_is_what_was_there(items: list[Any]) -> None:
    """For any structure: a function that returns its batch answers each with its own item."""
    groups: dict[Any, list[Any]] = {}
    for item in items:
        groups.setdefault(AUTO.key(item), []).append(item)
    for group in groups.values():
        assert answers(AUTO, AUTO.join(group), group) == group


class Feet(torch.Tensor):
    pass


@pytest.mark.parametrize("collate", [collate_of("auto"), collate_of("concatenate"), Pad()])
def test_tensors_of_different_classes_share_no_batch(collate: Collate) -> None:
    """A function may treat a sub-class in another way, and joined, all would be of it."""
    plain = torch.ones(2)
    feet = plain.as_subclass(Feet)
    assert collate.key(plain) != collate.key(feet)
    assert collate.key(feet) == collate.key(feet.clone())
    assert collate.key(plain) == collate.key(torch.nn.Parameter(plain))
