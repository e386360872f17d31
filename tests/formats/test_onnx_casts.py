"""The casts of all graphs of a model, and whether one takes what another makes."""

from __future__ import annotations

import pytest
from onnx import helper

from trims_shim.errors import TruncatedFile
from trims_shim.formats.onnx_casts import casts_of, have_pairs


def content(*nodes: tuple[str, str, str], inside: tuple[tuple[str, str, str], ...] = ()) -> bytes:
    """A model of (operator, input, output), and of such nodes in a branch."""
    made = [helper.make_node(operator, [taken], [result]) for operator, taken, result in nodes]
    branch = [helper.make_node(operator, [taken], [result]) for operator, taken, result in inside]
    graph = helper.make_graph(branch, "branch", [], [])
    made.append(helper.make_node("If", ["condition"], ["y"], then_branch=graph))
    model = helper.make_model(helper.make_graph(made, "graph", [], []))
    return bytes(model.SerializeToString())


def test_all_graphs() -> None:
    found = casts_of(content(("Cast", "x", "a"), ("Relu", "a", "b"), inside=(("Cast", "b", "c"),)))
    assert found == [(b"b", b"c"), (b"x", b"a")]
    assert not have_pairs(found)


@pytest.mark.parametrize("is_inside", [False, True])
def test_pairs(is_inside: bool) -> None:
    first, second = ("Cast", "x", "a"), ("Cast", "a", "b")
    made = content(first, inside=(second,)) if is_inside else content(second, first)
    assert have_pairs(casts_of(made))


def test_none_and_a_damaged_model() -> None:
    made = content(("Relu", "x", "a"))
    assert casts_of(made) == []
    assert not have_pairs([])
    with pytest.raises(TruncatedFile):
        casts_of(made[:-1])
