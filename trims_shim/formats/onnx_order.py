"""The order in which an optimised model must list its nodes to be run as it was saved.

onnxruntime saves the nodes of an optimised graph in the order in which it runs them, but a session
of the saved model runs them in another one. (A sub-graph in which it changed nothing is saved as it
was listed, and a session runs it as before.) It walks the graph depth first, from the nodes whose
outputs no other node takes to their inputs, and of several it takes the one that is listed last.
The order decides which buffers share memory, and so which run fails when the sizes of inputs
contradict the names that the model gives to its dimensions (an axis ``batch`` of two inputs, say).

:func:`in_running_order` finds the walk that leads to the saved order, and lists the nodes so that
it is taken again: at each step the node that is walked to is listed after all others that were open
there. The result need not be a topological order: onnxruntime asks for one only of sub-graphs, and
it is looked for among these there.

Pure. Source: ``Graph::ReverseDFSFrom`` and ``GraphViewer`` of onnxruntime (core/graph); tried with
1.22, 1.24 and 1.31.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from trims_shim.formats.onnx_structure import (
    GRAPH_INITIALIZER,
    GRAPH_INPUT,
    GRAPH_NODE,
    GRAPH_OUTPUT,
    NODE_INPUT,
    NODE_OUTPUT,
    TENSOR_NAME,
    VALUE_NAME,
    Message,
    read_children,
)
from trims_shim.formats.protobuf import WireReader, encode_field

__all__ = ["in_running_order", "listing_of"]

_NODES_LIMIT = 20_000
_RULES_LIMIT = 2_000_000
"""Larger models are left as they are saved: memory here grows with the square of the nodes."""
_MAIN_DEPTH = 1
"""Of the model's own graph: the model is around it."""


def in_running_order(model: Any, source: Any) -> bytes:
    """``model`` (a buffer), nodes of its graph and sub-graphs listed to run in their present order.

    Unchanged where there is no such listing, or none was found, and sub-graphs that are listed as
    in ``source`` (a buffer), from which it was made. Raises TruncatedFile, CorruptFile or
    UnsupportedFormat.
    """
    with WireReader(source) as reader:
        kept = frozenset(_listings(reader, Message.MODEL, 0, len(reader.view), depth=0))
    with WireReader(model) as reader:
        end = len(reader.view)
        listed = _with_listed_graphs(reader, Message.MODEL, 0, end, kept, depth=0)
        return reader.copy(0, end) if listed is None else listed


def _listings(
    reader: WireReader, message: Message, start: int, end: int, *, depth: int
) -> Iterator[tuple[bytes, ...]]:
    """Of each graph: see :func:`_made`."""
    nodes = []
    for _, child, first, stop in read_children(reader, message, start, end, depth=depth):
        if child is Message.NODE:
            nodes.append((first, stop))
        if child in (Message.GRAPH, Message.NODE, Message.ATTRIBUTE):
            yield from _listings(reader, child, first, stop, depth=depth + 1)
    if message is Message.GRAPH:
        yield _made(reader, nodes)


def _made(reader: WireReader, nodes: Sequence[tuple[int, int]]) -> tuple[bytes, ...]:
    """What the nodes make, in their order."""
    return tuple(
        reader.name(first, stop)
        for node in nodes
        for key, first, stop in reader.fields(*node)
        if key == NODE_OUTPUT and first < stop
    )


def _with_listed_graphs(
    reader: WireReader,
    message: Message,
    start: int,
    end: int,
    kept: Collection[tuple[bytes, ...]],
    *,
    depth: int,
) -> bytes | None:
    """The message in ``[start, end)`` with the nodes of its graphs listed anew; None: unchanged."""
    parts: list[bytes] = []
    copied = position = start
    for key, child, first, stop in read_children(reader, message, start, end, depth=depth):
        content = None
        if child is Message.GRAPH:
            content = _listed(reader, first, stop, kept, depth=depth + 1)
        elif child is Message.ATTRIBUTE:
            content = _with_listed_graphs(reader, child, first, stop, kept, depth=depth + 1)
        if content is not None:
            parts += (reader.copy(copied, position), encode_field(key, content))
            copied = stop
        position = stop
    return b"".join((*parts, reader.copy(copied, end))) if parts else None


def _listed(
    reader: WireReader, start: int, end: int, kept: Collection[tuple[bytes, ...]], *, depth: int
) -> bytes | None:
    """The graph in ``[start, end)`` with its nodes listed anew, before everything else."""
    nodes: list[tuple[int, int]] = []
    changed: dict[int, bytes] = {}
    others = []
    position = start
    for key, first, stop in reader.fields(start, end):
        if key == GRAPH_NODE:
            node = _with_listed_graphs(reader, Message.NODE, first, stop, kept, depth=depth + 1)
            if node is not None:
                changed[len(nodes)] = node
            nodes.append((first, stop))
        else:
            others.append(reader.copy(position, stop))
        position = stop
    listing: Sequence[int] | None = None
    is_kept = depth > _MAIN_DEPTH and _made(reader, nodes) in kept
    if len(nodes) <= _NODES_LIMIT and not is_kept:
        inputs = _inputs(reader, nodes, depth=depth + 1)
        listing = listing_of(inputs, is_topological=depth > _MAIN_DEPTH)
    if listing is None:
        if not changed:
            return None
        listing = range(len(nodes))
    contents = (changed.get(each) or reader.copy(*nodes[each]) for each in listing)
    return b"".join([*(encode_field(GRAPH_NODE, each) for each in contents), *others])


def _inputs(reader: WireReader, nodes: Sequence[tuple[int, int]], *, depth: int) -> list[list[int]]:
    """For each node the numbers of the nodes whose outputs it, or a sub-graph of it, takes."""
    taken, makers = [], {}
    for number, (first, stop) in enumerate(nodes):
        inputs, outputs = _values_of(reader, first, stop, depth=depth)
        taken.append(inputs)
        makers.update(dict.fromkeys(outputs, number))
    return [sorted({makers[name] for name in inputs if name in makers}) for inputs in taken]


def _values_of(
    reader: WireReader, start: int, end: int, *, depth: int
) -> tuple[set[bytes], set[bytes]]:
    """(what the node takes, what it makes)"""
    inputs: set[bytes] = set()
    outputs: set[bytes] = set()
    for key, child, first, stop in read_children(reader, Message.NODE, start, end, depth=depth):
        if child is Message.ATTRIBUTE:
            for graph in _graphs_of(reader, first, stop, depth=depth + 1):
                inputs |= _taken_from_outside(reader, *graph, depth=depth + 2)
        elif key == NODE_INPUT:
            inputs.add(reader.name(first, stop))
        elif key == NODE_OUTPUT:
            outputs.add(reader.name(first, stop))
    return inputs - {b""}, outputs - {b""}


def _graphs_of(
    reader: WireReader, start: int, end: int, *, depth: int
) -> Iterator[tuple[int, int]]:
    for _, child, first, stop in read_children(reader, Message.ATTRIBUTE, start, end, depth=depth):
        if child is Message.GRAPH:
            yield first, stop


def _taken_from_outside(reader: WireReader, start: int, end: int, *, depth: int) -> set[bytes]:
    taken: set[bytes] = set()
    made: set[bytes] = set()
    names = {
        GRAPH_INPUT: VALUE_NAME,
        GRAPH_OUTPUT: VALUE_NAME,
        GRAPH_INITIALIZER: TENSOR_NAME,
    }
    for key, child, first, stop in read_children(reader, Message.GRAPH, start, end, depth=depth):
        if child is Message.NODE:
            inputs, outputs = _values_of(reader, first, stop, depth=depth + 1)
            taken |= inputs
            made |= outputs
        elif key in names:
            name = reader.name_in(first, stop, names[key])
            (taken if key == GRAPH_OUTPUT else made).add(name)
    return taken - made


# --- the listing ----------------------------------------------------------------------------------


def listing_of(
    inputs: Sequence[Sequence[int]], *, is_topological: bool = False
) -> list[int] | None:
    """How to list nodes so that they run as 0, 1, 2 ...; None if no way is found.

    ``inputs`` are, for each node, the nodes whose outputs it takes, all of lower numbers.
    ``is_topological``: it is to be listed after those.
    """
    if any(each and each[-1] >= number for number, each in enumerate(inputs)):
        return None
    rules = _rules(inputs, is_topological=is_topological)
    listing = None if rules is None else _sorted(rules)
    if listing is None or _walk(inputs, listing) != list(range(len(inputs))):
        return None
    return listing


def _ends(inputs: Sequence[Sequence[int]]) -> list[int]:
    taken = {each for some in inputs for each in some}
    return [number for number in range(len(inputs)) if number not in taken]


def _rules(inputs: Sequence[Sequence[int]], *, is_topological: bool) -> list[set[int]] | None:
    """For each node the nodes that must be listed before it; None if no walk leads to the order.

    The walk goes to the lowest open node that needs all nodes before it that have not run; to the
    highest one, which needs the others, in a topological order.
    """
    reached: list[int] = []  # as bits: the node, and all that it needs
    for number, some in enumerate(inputs):
        bits = 1 << number
        for each in some:
            bits |= reached[each]
        reached.append(bits)
    rules: list[set[int]] = [set(some if is_topological else ()) for some in inputs]
    count = done = 0
    stack = [(-1, _ends(inputs))]
    while stack:
        node, open_there = stack[-1]
        open_there[:] = [each for each in open_there if each >= done]
        if not open_there:
            stack.pop()
            if node >= 0 and node != done:
                return None
            done += node >= 0
            continue
        chosen = _next(reached, sorted(open_there, reverse=is_topological), done)
        if chosen is None:
            return None
        open_there.remove(chosen)
        rules[chosen].update(open_there)
        count += len(open_there)
        if count > _RULES_LIMIT:
            return None
        stack.append((chosen, [each for each in inputs[chosen] if each >= done]))
    return rules


def _next(reached: Sequence[int], open_there: Sequence[int], done: int) -> int | None:
    for each in open_there:
        wanted = (1 << (each - done + 1)) - 1
        if reached[each] >> done & wanted == wanted:
            return each
    return None


def _sorted(rules: Sequence[set[int]]) -> list[int] | None:
    """An order that follows the rules; None if they contradict each other."""
    waiting = [0] * len(rules)
    for some in rules:
        for each in some:
            waiting[each] += 1
    free = [number for number, count in enumerate(waiting) if not count]
    backwards = []
    while free:
        number = heapq.heappop(free)
        backwards.append(number)
        for each in rules[number]:
            waiting[each] -= 1
            if not waiting[each]:
                heapq.heappush(free, each)
    return backwards[::-1] if len(backwards) == len(rules) else None


def _walk(inputs: Sequence[Sequence[int]], listing: Sequence[int]) -> list[int]:
    """The order in which onnxruntime runs nodes that are listed in this way."""
    place = [0] * len(inputs)
    for position, number in enumerate(listing):
        place[number] = position
    order: list[int] = []
    seen = [False] * len(inputs)
    stack = [(number, False) for number in sorted(_ends(inputs), key=place.__getitem__)]
    while stack:
        number, is_left = stack.pop()
        if is_left:
            order.append(number)
        elif not seen[number]:
            seen[number] = True
            stack.append((number, True))
            open_there = (each for each in inputs[number] if not seen[each])
            stack += [(each, False) for each in sorted(open_there, key=place.__getitem__)]
    return order
