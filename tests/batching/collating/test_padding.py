"""Padding: every value is where it was, the rest is the pad value, and the mask says which."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trims_shim.batching.buckets import bucket_in, may_share
from trims_shim.batching.collating.collate import answers, collate_of, columns
from trims_shim.batching.collating.collates import padded_length
from trims_shim.batching.collating.padding import Pad, Padded
from trims_shim.batching.profiles.profile_store import key_text
from trims_shim.errors import BadBatch


def make(library: str, values: list[int]) -> Any:
    if library == "torch":
        return torch.tensor(values, dtype=torch.int64)
    return np.array(values, dtype=np.int64) if library == "numpy" else list(values)


def listed(values: Any) -> Any:
    return values if isinstance(values, list) else values.tolist()


@pytest.mark.parametrize("library", ["torch", "numpy", "lists"])
@given(
    rows=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=7), min_size=1, max_size=5),
    to=st.sampled_from(
        [{}, {"multiple": 4}, {"buckets": (8, 3)}, {"buckets": (7, 3), "multiple": 4}]
    ),
)
def test_padding_keeps_every_value(library: str, rows: list[list[int]], to: Any) -> None:
    pad = Pad(-1, unpad=True, **to)
    items = [make(library, row) for row in rows]
    if "buckets" in to:
        items = [each for each in items if pad.key(each) == pad.key(items[0])]
    batch = pad.join(items)
    assert isinstance(batch, Padded)
    values, mask = listed(batch.values), listed(batch.mask)
    assert batch.lengths == [len(each) for each in items]
    length = len(values[0])
    longest = max(batch.lengths)
    assert length in {longest, -(-longest // 4) * 4, 8, 7, 3}
    for item, row, is_own in zip(items, values, mask, strict=True):
        own = len(item)
        assert row == [*listed(item), *[-1] * (length - own)]
        assert is_own == [True] * own + [False] * (length - own)
    found = answers(pad, batch.values, items)
    assert [listed(each) for each in found] == [listed(each) for each in items]


@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_type_and_other_axes_are_kept(library: str) -> None:
    one, two = np.ones((2, 3, 4), np.float32), np.ones((2, 1, 4), np.float32)
    items = [torch.from_numpy(each) if library == "torch" else each for each in (one, two)]
    pad = Pad(axis=1)
    assert pad.key(items[0]) == pad.key(items[1]) != pad.key(items[0][:1])
    batch = pad.join(items)
    assert batch.values.shape == (2, 2, 3, 4)
    assert batch.values.dtype == items[0].dtype
    assert listed(batch.mask.sum(axis=1)) == [3, 1]


def test_buckets_decide_who_shares_a_batch() -> None:
    pad = Pad(buckets=(4, 8))
    keys = [pad.key(torch.zeros(length)) for length in (1, 4, 5, 8)]
    assert keys[0] == keys[1] != keys[2] == keys[3]
    assert pad.join([torch.zeros(2)]).values.shape == (1, 4)
    with pytest.raises(ValueError, match="length 9 is above the largest bucket, 8"):
        pad.key(torch.zeros(9))
    assert Pad().key(torch.zeros(1)) == Pad().key(torch.zeros(9))
    assert Pad().key(torch.zeros(1)) != Pad().key(torch.zeros(1, dtype=torch.int32))


@pytest.mark.parametrize(
    ("multiple", "lengths", "classes"),
    [
        (None, (1, 8, 9, 12, 13, 16, 17, 25, 300), (8, 8, 12, 12, 16, 16, 24, 32, 384)),
        (64, (1, 64, 65, 129, 193, 257), (64, 64, 128, 192, 256, 384)),
        (5, (5, 6, 16), (8, 12, 24)),
    ],
)
def test_classes_are_of_similar_lengths_by_what_they_are_padded_to(
    multiple: int | None, lengths: tuple[int, ...], classes: tuple[int, ...]
) -> None:
    pad = Pad(multiple=multiple).with_classes()
    keys = [pad.key(torch.zeros(length)) for length in lengths]
    assert [bucket_in(key) for key in keys] == [*classes]
    assert may_share(keys)
    assert (
        pad.join([torch.zeros(9)]).values.shape
        == Pad(multiple=multiple).join([torch.zeros(9)]).values.shape
    )


class _OwnPad(Pad):
    """Its keys may be anything."""


@pytest.mark.parametrize("pad", [Pad(mask=None), Pad(buckets=(4, 8)), _OwnPad()], ids=repr)
def test_who_must_not_share_a_batch_with_others_has_no_classes(pad: Pad) -> None:
    assert collate_of(pad, by_length=True) is pad


def test_one_part_that_is_padded_has_classes() -> None:
    item = torch.zeros(20), torch.zeros(2)
    for spec in ([Pad(), "stack"], {"0": Pad(), "1": "stack"}):
        collate = collate_of(spec, by_length=True)
        given = item if isinstance(spec, list) else {"0": item[0], "1": item[1]}
        assert bucket_in(collate.key(given)) == 24
        assert bucket_in(collate_of(spec).key(given)) is None
    assert bucket_in(columns([Pad(), "stack"], 2, by_length=True).key(item)) == 24
    nested: list[Any] = [{"ids": Pad()}, {"ids": "stack"}]
    fields = {"ids": item[0]}, {"ids": item[1]}
    assert bucket_in(columns(nested, 2, by_length=True).key(fields)) == 24
    nested[1] = {"ids": Pad()}  # two lengths: none counts
    assert bucket_in(columns(nested, 2, by_length=True).key(fields)) is None


@pytest.mark.parametrize("spec", [[Pad(), Pad()], [Pad(), Pad(mask="other")]])
def test_of_two_parts_that_are_padded_none_has(spec: list[Pad]) -> None:
    key = columns(spec, 2, by_length=True).key((torch.zeros(20), torch.zeros(2)))
    assert bucket_in(key) is None
    beside = columns([Pad(buckets=(4, 32)), Pad()], 2, by_length=True)
    keys = [beside.key((torch.zeros(20), torch.zeros(length))) for length in (2, 20)]
    assert keys[0] == keys[1]
    assert columns(Pad(), 2, by_length=True).key((torch.zeros(20), torch.zeros(2))) == key


def test_with_a_multiple_buckets_only_say_who_shares_a_batch() -> None:
    pad = Pad(buckets=(8, 30), multiple=4)
    keys = [pad.key(torch.zeros(length)) for length in (1, 8, 9, 30)]
    assert keys[0] == keys[1] != keys[2] == keys[3]
    shapes = [
        pad.join([torch.zeros(each) for each in lengths]).values.shape[1]
        for lengths in (
            (1, 3),
            (2, 5),
            (9,),
            (29,),
        )
    ]
    assert shapes == [4, 8, 12, 30]
    with pytest.raises(ValueError, match="length 31 is above the largest bucket, 30"):
        pad.key(torch.zeros(31))


def test_results_of_some_of_a_batch_are_cut_by_what_it_was_padded_to() -> None:
    collate = columns([Pad(unpad=True), "list"], 2)
    items = [(torch.ones(length), None) for length in (2, 5)]
    padded = padded_length(collate, items)
    batch = collate.join(items)[0].values
    assert [len(each) for each in answers(collate, batch, items)] == [2, 5]
    assert [len(each) for each in answers(collate, batch[:1], items[:1], padded=padded)] == [2]
    with pytest.raises(BadBatch, match="not of the padded length 2"):
        answers(collate, batch[:1], items[:1])
    assert padded_length(columns([Pad(), "list"], 2), items) is None
    assert padded_length(columns("list", 1), items) is None


def tokens(*ids: int) -> dict[str, Any]:
    return {"input_ids": torch.tensor(ids), "name": f"{len(ids)} tokens"}


def test_mappings_get_a_mask_as_models_expect_it() -> None:
    pad = Pad({"input_ids": 99})
    batch = pad.join([tokens(1, 2, 3), tokens(4)])
    assert batch["input_ids"].tolist() == [[1, 2, 3], [4, 99, 99]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["attention_mask"].dtype == torch.int64
    assert batch["name"] == ["3 tokens", "1 tokens"]
    assert "attention_mask" not in Pad(mask=None).join([tokens(1)])
    assert "own" in Pad(mask="own").join([tokens(1)])


def test_a_mask_that_is_there_is_padded_with_zeros() -> None:
    items = [{**tokens(1, 2), "attention_mask": torch.tensor([0, 1])}]
    items.append({**tokens(3), "attention_mask": torch.tensor([1])})
    batch = Pad(7).join(items)
    assert batch["attention_mask"].tolist() == [[0, 1], [1, 0]]
    assert batch["input_ids"].tolist() == [[1, 2], [3, 7]]


def test_lists_in_a_mapping_stay_lists() -> None:
    batch = Pad().join([UserDict(input_ids=[1, 2]), UserDict(input_ids=[3])])
    assert isinstance(batch, UserDict)
    assert batch["input_ids"] == [[1, 2], [3, 0]]
    assert batch["attention_mask"] == [[1, 1], [1, 0]]


def test_named_fields_are_padded_and_the_others_stacked() -> None:
    items = [{"ids": torch.ones(n), "image": torch.ones(5)} for n in (2, 3)]
    with pytest.raises(ValueError, match=r"lengths \[2, 5\]; name those in `fields`"):
        Pad().key(items[0])
    pad = Pad(fields=["ids"])
    assert pad.key(items[0]) == pad.key(items[1])
    batch = pad.join(items)
    assert batch["ids"].shape == (2, 3)
    assert batch["image"].shape == (2, 5)


def test_parts_are_padded_with_their_value_or_zero_or_else_stacked() -> None:
    items = [
        {"ids": np.arange(1, 1 + length), "types": np.ones(length, int), "label": np.array(length)}
        for length in (1, 2)
    ]
    batch = Pad({"ids": 9}).join(items)
    assert batch["ids"].tolist() == [[1, 9], [1, 2]]
    assert batch["types"].tolist() == [[1, 0], [1, 1]]
    assert batch["label"].tolist() == [1, 2]


def test_without_a_mask_the_value_is_the_given_one_too() -> None:
    assert Pad(7, mask=None).join([np.array([1]), np.array([2, 3])]).tolist() == [[1, 7], [2, 3]]


def test_tuples_are_padded_part_by_part() -> None:
    batch = Pad().join([(torch.ones(2), torch.ones(2, 5)), (torch.ones(1), torch.ones(1, 5))])
    assert isinstance(batch, Padded)
    assert batch.values[1].shape == (2, 2, 5)
    assert batch.mask.tolist() == [[True, True], [True, False]]


@pytest.mark.parametrize(
    ("item", "value", "message"),
    [
        (torch.ones(2, dtype=torch.uint8), -1, "torch.uint8 cannot hold the pad value -1"),
        (torch.ones(2, dtype=torch.int64), 0.5, "cannot hold the pad value 0.5"),
        (torch.ones(2, dtype=torch.bool), 2, "torch.bool cannot hold"),
        (np.ones(2, dtype=np.int8), 200, "int8 cannot hold the pad value 200"),
        (np.ones(2, dtype=np.int8), float("nan"), "cannot hold"),
        (np.ones(2, dtype=np.int8), float("-inf"), "int8 cannot hold the pad value -inf"),
        (torch.ones(2, dtype=torch.int64), float("inf"), "torch.int64 cannot hold"),
        (torch.ones(2, dtype=torch.bool), float("inf"), "torch.bool cannot hold"),
        (np.array(["a"]), 0, "cannot be padded with a number"),
    ],
)
def test_a_pad_value_that_does_not_fit_is_refused(item: Any, value: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Pad(value).join([item])


@pytest.mark.parametrize(
    ("item", "error", "message"),
    [
        (torch.tensor(1), ValueError, "has no axis 0"),
        ("text", TypeError, "a str cannot be padded"),
        ({"a": 1}, ValueError, "nothing of a dict can be padded"),
        (torch.eye(2).to_sparse(), TypeError, "layout"),
    ],
)
def test_items_that_cannot_be_padded_are_refused(
    item: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Pad().key(item)


@pytest.mark.parametrize(
    "wrong", [{"axis": -1}, {"multiple": 0}, {"buckets": []}, {"buckets": [0]}]
)
def test_settings_are_checked(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"from (0|1 on)"):
        Pad(**wrong)


def test_named_outputs_are_cut() -> None:
    pad = Pad(unpad=["tags"])
    items = [tokens(1, 2, 3), tokens(4)]
    results = {"tags": torch.arange(6).reshape(2, 3), "pooled": torch.zeros(2, 3)}
    first, second = answers(pad, results, items)
    assert first["tags"].tolist() == [0, 1, 2]
    assert second["tags"].tolist() == [3]
    assert second["pooled"].shape == (3,)
    assert answers(Pad(unpad=[0]), (results["tags"],), items)[1][0].tolist() == [3]
    with pytest.raises(BadBatch, match="no 'tags', which `unpad` names"):
        answers(pad, {"pooled": torch.zeros(2, 3)}, items)
    with pytest.raises(BadBatch, match=r"tag returned a result of shape \[5\].*padded length 3"):
        answers(pad, {"tags": torch.zeros(2, 5)}, items, function="tag")


@pytest.mark.parametrize("unpad", [True, ["tags"]])
def test_what_stands_for_no_result_is_not_cut(unpad: Any) -> None:
    error = ValueError("of the second")
    items = [tokens(1, 2, 3), tokens(4), tokens(5, 6)]
    results = [{"tags": torch.arange(3)}, error, StopIteration]
    first, *others = answers(Pad(unpad=unpad), results, items)
    assert first["tags"].tolist() == [0, 1, 2]
    assert others == [error, StopIteration]
    assert answers(Pad(unpad=unpad), {"tags": None}, items) == [{"tags": None}] * 3


def test_padding_one_argument_of_several() -> None:
    collate = columns([Pad(unpad=True), "list"], 2, batch_sizes=[4])
    items = [(torch.ones(2), "a"), (torch.ones(3), "b")]
    assert collate.key(items[0]) == collate.key(items[1])
    padded, names = collate.join(items)
    assert padded.values.shape == (4, 3)
    assert names == ["a", "b", "b", "b"]
    assert [len(each) for each in collate.split(padded.values, items)] == [2, 3]


def test_the_part_that_cuts_results_is_found_behind_others() -> None:
    for first, part in ((Pad(), torch.ones(2)), ({"n": "list"}, {"n": 1})):
        collate = columns([first, Pad(unpad=True)], 2)
        items = [(part, torch.ones(2)), (part, torch.ones(3))]
        values = collate.join(items)[1].values
        assert [len(each) for each in answers(collate, values, items)] == [2, 3]
        assert padded_length(collate, items) == 3


def test_padding_one_field() -> None:
    collate = collate_of({"ids": Pad(mask=None)})
    batch = collate.join([{"ids": torch.ones(1), "n": 1}, {"ids": torch.ones(2), "n": 2}])
    assert batch["ids"].tolist() == [[1, 0], [1, 1]]
    assert batch["n"] == [1, 2]


@pytest.mark.parametrize("batch_sizes", [None, [4]])
def test_results_are_cut_by_the_field_that_was_padded(batch_sizes: list[int] | None) -> None:
    collate = collate_of({"n": "list", "ids": Pad(unpad=True)}, batch_sizes=batch_sizes)
    items = [{"ids": torch.ones(1), "n": 1}, {"ids": torch.ones(2), "n": 2}]
    results = collate.join(items)["ids"].values
    assert [len(each) for each in answers(collate, results, items)] == [1, 2]
    if batch_sizes is None:
        assert padded_length(collate, items) == 2
        assert len(answers(collate, results[:1], items[:1], padded=2)[0]) == 1


def test_results_are_cut_by_the_field_that_was_concatenated() -> None:
    collate = collate_of({"rows": "concatenate"})
    items = [{"rows": torch.ones(1)}, {"rows": torch.ones(2)}]
    batch = collate.join(items)
    assert [len(each) for each in answers(collate, batch["rows"], items)] == [1, 2]


def test_a_graph_does_not_come_in_by_padding() -> None:
    assert not Pad().join([torch.ones(2, requires_grad=True)]).values.requires_grad


def test_the_bucket_of_a_key() -> None:
    """Wherever it is in it; the longest of several, and none where nothing is in buckets."""
    pad = Pad(buckets=(4, 8))
    key = pad.key([1] * 5)
    assert bucket_in(key) == bucket_in(("x", frozenset([("ids", key), ("size", 3)]))) == 8
    assert bucket_in((pad.key([1]), key)) == 8
    assert [bucket_in(each) for each in (None, 4, (4, 8), Pad().key([1]), "text")] == [None] * 5
    assert key_text(key) == "(8, builtins.list)"  # profiles of earlier versions are found by it
