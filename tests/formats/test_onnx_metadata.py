"""Metadata keep the order of the model they came from; whatever else is in the model stays."""

from __future__ import annotations

import onnx
import pytest
from onnx_unusual import metadata

from trims_shim.errors import TruncatedFile
from trims_shim.formats.onnx_metadata import with_metadata_order


def model(*properties: tuple[str, str]) -> bytes:
    made = metadata().model
    del made.metadata_props[:]
    for key, value in properties:
        made.metadata_props.add(key=key, value=value)
    return bytes(made.SerializeToString(deterministic=True))


def properties(content: bytes) -> list[tuple[str, str]]:
    return [(each.key, each.value) for each in onnx.ModelProto.FromString(content).metadata_props]


def test_the_order_is_that_of_the_source() -> None:
    saved = model(("c", "3"), ("a", "1"), ("b", "\N{SNOWMAN}" * 500))
    result = with_metadata_order(saved, model(("a", ""), ("b", ""), ("c", "")))
    assert properties(result) == [("a", "1"), ("b", "\N{SNOWMAN}" * 500), ("c", "3")]
    rest, expected = onnx.ModelProto.FromString(result), onnx.ModelProto.FromString(saved)
    del rest.metadata_props[:]
    del expected.metadata_props[:]
    assert rest == expected


def test_fields_between_them_stay_where_they_are() -> None:
    """Fields of a message may come in any order."""
    tail = onnx.ModelProto(producer_version="other").SerializeToString()
    first, second = (
        onnx.ModelProto(metadata_props=[onnx.StringStringEntryProto(key=key, value="v")])
        for key in "ba"
    )
    mixed = first.SerializeToString() + tail + second.SerializeToString()
    result = with_metadata_order(mixed, model(("a", ""), ("b", "")))
    assert result == second.SerializeToString() + tail + first.SerializeToString()


@pytest.mark.parametrize(
    "source",
    [
        [],
        [("a", "1")],
        [("a", "1"), ("x", "2")],
        [("a", "1"), ("b", "2"), ("c", "3")],
    ],
    ids=str,
)
def test_other_properties_change_nothing(source: list[tuple[str, str]]) -> None:
    saved = model(("b", "2"), ("a", "1"))
    assert with_metadata_order(saved, model(*source)) == saved


def test_a_property_that_is_there_twice() -> None:
    """The table keeps one of each name, at the place of its first mention."""
    saved = model(("b", "2"), ("a", "1"))
    source = model(("a", "0"), ("b", "2"), ("a", "1"))
    assert properties(with_metadata_order(saved, source)) == [("a", "1"), ("b", "2")]
    twice = model(("b", "2"), ("a", "1"), ("b", "3"))
    assert with_metadata_order(twice, source) == twice


def test_no_source_and_damaged_ones() -> None:
    saved = model(("b", "2"), ("a", "1"))
    assert with_metadata_order(saved, b"") == saved
    with pytest.raises(TruncatedFile):
        with_metadata_order(saved, model(("a", "1"), ("b", "2"))[:-1])
