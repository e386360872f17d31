"""Nodes are listed so that a session of the saved model runs them in the order they were saved in.

The walk is onnxruntime's, written down once more here; that it is onnxruntime's is seen in
``tests/transparency`` (``ort_sessions.sizes_that_contradict_their_names``).
"""

from __future__ import annotations

import random
import sys

import onnx
import pytest
from onnx import TensorProto, helper

from trims_shim.errors import TruncatedFile
from trims_shim.formats import onnx_order
from trims_shim.formats.onnx_order import in_running_order, listing_of


def walk(inputs: list[list[int]], rank: list[int]) -> list[int]:
    """Depth first and recursive: of several nodes to the one of the highest rank."""
    order: list[int] = []

    def visit(numbers: list[int]) -> None:
        for number in sorted(numbers, key=rank.__getitem__, reverse=True):
            if number not in order:
                visit(inputs[number])
                order.append(number)

    taken = {each for some in inputs for each in some}
    visit([number for number in range(len(inputs)) if number not in taken])
    return order


def run_order(listing: list[int], inputs: list[list[int]]) -> list[int]:
    rank = [listing.index(number) for number in range(len(inputs))]
    return walk(inputs, rank)


def renumbered(inputs: list[list[int]], order: list[int]) -> list[list[int]]:
    """The same graph, its nodes numbered in this order."""
    place = {number: position for position, number in enumerate(order)}
    return [sorted(place[each] for each in inputs[number]) for number in order]


def some_graph(seed: int) -> list[list[int]]:
    """Of onnxruntime's own: numbered as it runs, from nodes of any indices."""
    chance = random.Random(seed)
    count, reach = chance.randint(3, 40), chance.choice((3, 8, 40))
    inputs: list[list[int]] = [[]]
    for number in range(1, count):
        few = range(chance.randint(0, 3))
        inputs.append(sorted({chance.randrange(max(0, number - reach), number) for _ in few}))
    rank = list(range(count))
    chance.shuffle(rank)
    return renumbered(inputs, walk(inputs, rank))


def test_two_chains_are_listed_the_other_way_round() -> None:
    assert listing_of([[], [0], [], [2]]) == [3, 2, 1, 0]


def test_most_orders_are_found_again_and_none_is_wrong() -> None:
    sys.setrecursionlimit(max(sys.getrecursionlimit(), 2000))
    found = 0
    for seed in range(300):
        inputs = some_graph(seed)
        listing = listing_of(inputs)
        if listing is not None:
            found += 1
            assert run_order(listing, inputs) == list(range(len(inputs))), seed
    assert found >= 295


def test_of_a_sub_graph_that_was_listed_in_topological_order_all_are() -> None:
    for seed in range(300):
        given = some_graph(seed)
        inputs = renumbered(given, walk(given, list(range(len(given)))))
        listing = listing_of(inputs, is_topological=True)
        assert listing is not None, seed
        assert run_order(listing, inputs) == list(range(len(inputs))), seed
        places = [listing.index(number) for number in range(len(inputs))]
        assert all(places[each] < places[n] for n, some in enumerate(inputs) for each in some)


@pytest.mark.parametrize("inputs", [[[1], []], [[0]]], ids=["later", "itself"])
def test_an_order_that_no_graph_runs_in(inputs: list[list[int]]) -> None:
    assert listing_of(inputs) is None


def chains(**attributes: onnx.GraphProto) -> onnx.ModelProto:
    """Two chains, and a node with sub-graphs."""
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n"])
    nodes = [
        helper.make_node("Sin", ["x"], ["a"], name="a"),
        helper.make_node("Cos", ["a"], ["b"], name="b"),
        helper.make_node("Sin", ["x"], ["c"], name="c"),
        helper.make_node("Odd", ["c"], ["d"], name="d", **attributes),
    ]
    graph = helper.make_graph(nodes, "chains", [value], [], value_info=[value])
    return helper.make_model(graph)


def listed(model: onnx.ModelProto) -> list[str]:
    found = onnx.ModelProto.FromString(in_running_order(model.SerializeToString(), b""))
    # Everything but the nodes' order is as it was.
    rest, before = onnx.ModelProto(), onnx.ModelProto()
    rest.CopyFrom(found)
    before.CopyFrom(model)
    for each in (rest, before):
        del each.graph.node[:]
    assert rest == before
    by_name = {each.name: each for each in model.graph.node}
    assert all(each == by_name[each.name] for each in found.graph.node)
    return [each.name for each in found.graph.node]


def test_only_the_nodes_move() -> None:
    assert listed(chains()) == ["d", "c", "b", "a"]


@pytest.mark.parametrize("is_deeper", [False, True])
def test_what_a_sub_graph_takes_counts(is_deeper: bool) -> None:
    """Its node needs ``b`` as well, and would else come before it."""
    inner = helper.make_graph([helper.make_node("Add", ["b", "own"], ["sum"])], "inner", [], [])
    inner.initializer.append(helper.make_tensor("own", TensorProto.FLOAT, [1], [1.0]))
    if is_deeper:
        inner = helper.make_graph([helper.make_node("Odd", [], ["e"], body=inner)], "outer", [], [])
    model = chains(body=chains(body=inner).graph)
    found = onnx.ModelProto.FromString(in_running_order(model.SerializeToString(), b""))
    middle = next(each for each in found.graph.node if each.name == "d").attribute[0].g
    assert "".join(each.name for each in middle.node) == "cabd"


def test_nodes_of_sub_graphs_move_too() -> None:
    inner, deepest = chains().graph, chains().graph
    inner.node[3].attribute.append(helper.make_attribute("body", deepest))
    model = chains(body=inner)
    found = onnx.ModelProto.FromString(in_running_order(model.SerializeToString(), b""))
    middle = next(each for each in found.graph.node if each.name == "d").attribute[0].g
    last = next(each for each in middle.node if each.name == "d").attribute[0].g
    orders = ["".join(each.name for each in graph.node) for graph in (found.graph, middle, last)]
    assert orders == ["dcba", "cdab", "cdab"]
    # Everything but the nodes' order is as it was.
    for each in (found.graph, model.graph):
        _sort_nodes(each)
    assert found == model


def test_sub_graphs_that_are_listed_as_in_the_source_stay_so() -> None:
    """Found: onnxruntime saves those it has not changed so; listed anew, they ran as listed."""
    model = chains(body=chains().graph)
    source = model.SerializeToString()
    model.graph.node[3].attribute[0].g.node[0].output.append("")  # one that is not wanted
    del model.graph.node[1]
    found = onnx.ModelProto.FromString(in_running_order(model.SerializeToString(), source))
    assert [each.name for each in found.graph.node] == ["d", "c", "a"]
    inner = next(each for each in found.graph.node if each.name == "d").attribute[0].g
    assert [each.name for each in inner.node] == ["a", "b", "c", "d"]


def _sort_nodes(graph: onnx.GraphProto) -> None:
    graph.node.sort(key=lambda each: each.name)
    for node in graph.node:
        for attribute in node.attribute:
            _sort_nodes(attribute.g)


def test_large_graphs_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_order, "_NODES_LIMIT", 3)
    assert listed(chains()) == ["a", "b", "c", "d"]
    monkeypatch.undo()
    monkeypatch.setattr(onnx_order, "_RULES_LIMIT", 0)
    assert listed(chains()) == ["a", "b", "c", "d"]


def test_a_truncated_model() -> None:
    with pytest.raises(TruncatedFile):
        in_running_order(chains().SerializeToString()[:-5], b"")
