"""Where a traced graph chooses by what is in the batch: one way for all of its rows.

``torch.cond`` and ``while_loop`` have one condition for the whole batch, so whoever joins it may
change what the others get. So do ``torch.where`` and ``masked_fill`` with a condition that has no
rows. An example shows one way only. (Python's own branches cannot be traced.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

__all__ = ["branches", "nesting", "symbols"]

Contents = Callable[["Node"], Sequence["Node"]]
"""The nodes whose contents an operation reads."""
_CHOOSING = {"where": 0, "masked_fill": 1, "masked_fill_": 1}
"""The place of the condition among the arguments of operations that choose by elements."""


def branches(
    module: GraphModule,
    data: Set[Node],
    contents: Contents,
    *,
    size: Set[Any],
    rows: Set[Node] = frozenset(),
) -> Iterator[Node]:
    """The nodes that branch on ``data``, the nodes that depend on what is in the batch.

    ``size``: the symbols of the batch's size. Also those within other operations (a branch,
    torch.autocast), but for what is mapped over ``rows``, nodes with the batch as their first axis:
    there each row has a branch of its own. So it has within torch.vmap.
    """
    depth = 0
    for node in module.graph.nodes:
        depth += nesting(node)
        if not depth and _chooses_for_all(node, data, size):
            yield node
        graphs = _graphs(module, node)
        if not graphs:
            continue
        name, given = getattr(node.target, "__name__", ""), _operands(node)
        if name == "cond" and node.args[0] in data:
            yield node
        if name == "while_loop" and _ends_by(graphs, [each in data for each in given], contents):
            yield node
        inner = data - rows if name == "map_impl" else data
        for graph in graphs:
            found = _depending(graph, [each in inner for each in given], contents)
            yield from branches(graph, found, contents, size=size)


def _chooses_for_all(node: Node, data: Set[Node], size: Set[Any]) -> bool:
    place = _CHOOSING.get(getattr(getattr(node.target, "overloadpacket", None), "__name__", ""))
    condition: Any = None if place is None else node.args[place]
    return condition in data and not symbols(condition) & size


def nesting(node: Node) -> int:
    """1 where torch.vmap, or another of torch.func, begins, -1 where it ends, else 0."""
    name = getattr(node.target, "__name__", "")
    return name.endswith("_increment_nesting") - name.endswith("_decrement_nesting")


def symbols(node: Node, *, axes: int | None = None) -> set[Any]:
    """The symbols of a number of the trace, or in the sizes of a tensor's first ``axes``."""
    from torch.fx.experimental.symbolic_shapes import free_symbols

    value = node.meta.get("val")
    return set(free_symbols(tuple(getattr(value, "shape", (value,)))[:axes]))


def _graphs(module: GraphModule, node: Node) -> list[GraphModule]:
    """Those that an operation runs."""
    from torch.fx import GraphModule

    names = [each.target for each in node.all_input_nodes if each.op == "get_attr"]
    found = [getattr(module, str(name), None) for name in names]  # weights may be deeper
    return [each for each in found if isinstance(each, GraphModule)]


def _operands(node: Node) -> list[Any]:
    """What the graphs of an operation are called with; they come last among its arguments."""
    import torch.utils._pytree as pytree

    operands: list[Any] = pytree.tree_leaves(node.args)
    return operands


def _depending(graph: GraphModule, given: Sequence[bool], contents: Contents) -> set[Node]:
    """The nodes that depend on the contents of those inputs for which ``given`` says so."""
    inputs = graph.graph.find_nodes(op="placeholder")
    # associative_scan calls its own with more than it was given: two parts of each.
    is_usual = len(inputs) <= len(given)
    flags = given[len(given) - len(inputs) :] if is_usual else [any(given)] * len(inputs)
    found = {each for each, is_data in zip(inputs, flags, strict=True) if is_data}
    for node in graph.graph.nodes:
        if found.intersection(contents(node)):
            found.add(node)
    return found


def _outputs(graph: GraphModule, data: Set[Node]) -> list[bool]:
    import torch.utils._pytree as pytree

    (output,) = graph.graph.find_nodes(op="output")
    return [each in data for each in pytree.tree_leaves(output.args)]


def _ends_by(loop: Sequence[GraphModule], given: Sequence[bool], contents: Contents) -> bool:
    """Whether a loop's condition depends on data: on what is given, or on what its body makes."""
    condition, body = loop
    inputs = condition.graph.find_nodes(op="placeholder")
    flags = list(given[len(given) - len(inputs) :])
    for _ in inputs:  # it goes from one input to the next in each round, at least
        made = _outputs(body, _depending(body, flags, contents))
        flags[: len(made)] = map(max, flags, made)
    return any(_outputs(condition, _depending(condition, flags, contents)))
