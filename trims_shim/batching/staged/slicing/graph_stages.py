"""A traced graph in stages: what may cross the border between two of them, and the stages.

Operations stand in the order of the trace, which is topological. At a border a value crosses that
is made before it and used after it:

========  ==========================================================================================
batched   a dense tensor ``[batch, ...]``: crosses as it is; not one of rows chosen by contents
          (x[mask]), which are as many as the batch has where all are
shared    tensors and numbers that depend on no data and not on the size of the batch: as Shared
count     numbers that depend on the size of the batch: never cross; computed again behind it. So
          are tensors that depend on a length which their shape does not show: Shared parts of equal
          shape have to be equal
step      numbers that only some sizes of the batch change (how many eights it has): never cross,
          as what came of them before a border is that of another size than behind it
view      another way to look at a tensor that may cross: that one does, and the view is taken again
========  ==========================================================================================

A border that anything else would cross is not legal. Nor is one where two names of one memory
cross, and an operation behind it writes there: joined with others, they would be two memories. Nor
one within torch.vmap, which begins and ends by operations that change the thread's state.

Running the graph with batches of two sizes, and comparing, tells which is which. Weights do not
cross: each stage has those it uses, and they are the model's own tensors.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from trims_shim.batching.staged.activations import Shared
from trims_shim.batching.staged.slicing.branches import branches, nesting, symbols
from trims_shim.batching.staged.slicing.cutting import Cut
from trims_shim.batching.staged.slicing.examples import (
    Example,
    are_identical,
    has_same_rows,
    version_of,
)
from trims_shim.batching.torch_settings import torch_in_this_thread

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

__all__ = ["GraphStage", "StagedGraph"]

_FACTORIES = ("new_", "full_like", "ones_like", "zeros_like", "empty_like")
"""Operations that take a tensor for its kind and shape alone."""
_SMALL, _LARGE, _ALIKE = (0, 1), (1, 1, 1), (0, 0)
"""The rows of the batches that are compared. Not one: a tensor that always has one row would look
batched. At other places, and beside other rows, so that values that depend on either show (that of
the largest of the batch, too)."""

_NO_MEMORY = 0


class StagedGraph:
    """The graph of an exported program's module, with the example that it was traced with.

    ``leaves`` makes the flat list of the graph's inputs from a batch, ``unflatten`` the model's
    output from the flat list of the graph's outputs.
    """

    def __init__(
        self,
        module: GraphModule,
        example: Example,
        *,
        leaves: Callable[..., Sequence[Any]],
        unflatten: Callable[[Sequence[Any]], Any],
    ) -> None:
        import torch

        self._module = module
        self._leaves, self._unflatten = leaves, unflatten
        nodes = list(module.graph.nodes)
        self.inputs = [node for node in nodes if node.op == "placeholder"]
        self.operations = [node for node in nodes if node.op.startswith("call_")]
        self._outputs: Sequence[Any] = nodes[-1].args[0]
        self._order = {node: index for index, node in enumerate(self.operations)}
        self._written: dict[Node, set[int]] = {}
        # In inference mode torch does not count how often tensors are written to.
        with torch.inference_mode(False):
            self._small = self._values(example.of_rows(_SMALL), self._written)
            self._large = self._values(example.of_rows(_LARGE), {})
            alike = self._values(example.of_rows(_ALIKE), {})
        self._with_data = self._find_data(self.inputs)
        self._batch_sizes = {size for node in self.inputs for size in symbols(node, axes=1)}
        self._lengths = self._find_lengths()
        self._batched = {
            node for node in (*self.inputs, *self.operations) if self._has_rows(node, alike[node])
        }
        self._all_written = frozenset(itertools.chain.from_iterable(self._written.values()))
        self._needed: dict[Node, frozenset[Node] | None] = {}
        self._crossing = self._find_crossing()

    def _values(self, run: Example, written: dict[Node, set[int]]) -> dict[Node, Any]:
        """The value of every node. All are kept alive, so equal addresses mean the same memory.

        Enters the memory that each operation writes to in ``written``: by its schema, and by how
        often torch counts that its arguments were written to, as operations that run a graph of
        their own (torch.autocast) have no schema.
        """
        import torch
        from torch.fx import Interpreter

        class Watching(Interpreter):
            def run_node(self, n: Node) -> Any:
                given = _tensors([self.env[each] for each in n.all_input_nodes])
                before = [version_of(each) for each in given]
                result = super().run_node(n)
                pairs = zip(given, before, strict=True)
                found = [each for each, version in pairs if version_of(each) != version]
                found += _tensors([self.env[each] for each in _written_by(n)])
                written[n] = set(map(_memory, found)) - {_NO_MEMORY}
                return result

        interpreter = Watching(self._module, garbage_collect_values=False)
        leaves = self._leaves(*run.batch())
        with torch.no_grad():
            interpreter.run(*leaves, enable_io_processing=False)
        return interpreter.env

    def measure(self, example: Example, *, repeats: int, clock_ns: Callable[[], int]) -> list[int]:
        """The least time of each operation, in ns, after one run that does not count."""
        import torch
        from torch.fx import Interpreter

        taken_ns: dict[Node, list[int]] = {node: [] for node in self.operations}

        class Timing(Interpreter):
            def run_node(self, n: Node) -> Any:
                begin_ns = clock_ns()
                result = super().run_node(n)
                example.synchronize()
                if n in taken_ns:
                    taken_ns[n].append(clock_ns() - begin_ns)
                return result

        with torch.no_grad():
            for _ in range(repeats + 1):
                leaves = self._leaves(*example.copy().batch())
                Timing(self._module).run(*leaves, enable_io_processing=False)
        return [min(each[1:]) for each in taken_ns.values()]

    def written_attributes(self) -> Iterator[tuple[Node, str]]:
        """Each operation that writes to a tensor of the model itself, and the name of that."""
        attributes = self._module.graph.find_nodes(op="get_attr")
        names = {_memory(self._small[each]): each.target for each in attributes}
        for node in self.operations:
            for memory in self._written[node] & names.keys():
                yield node, names[memory]

    def branches(self) -> Iterator[Node]:
        """Each operation that does something else with another batch, as torch.cond does."""
        inputs = {node for node in self.inputs if self._is_batched(node)}
        size = {each for node in inputs for each in symbols(node, axes=1)}
        counts = {
            node
            for node in self.operations
            if isinstance(self._small[node], bool | int | float) and symbols(node) & size
        }
        data = self._find_data(inputs) | counts
        return branches(self._module, data, _contents_of, size=size, rows=self._batched)

    # --- what may cross ---------------------------------------------------------------------------

    def cuts(self) -> list[Cut]:
        """The legal positions among :attr:`operations`."""
        return [
            Cut(position, sum(map(self._row_bytes, crossing)))
            for position, crossing in enumerate(self._crossing)
            if position and crossing and any(map(self._is_batched, crossing))
        ]

    def _find_data(self, inputs: Collection[Node]) -> set[Node]:
        """The nodes that depend on the contents of these inputs, not only on their shapes."""
        found = set(inputs)
        for node in self.operations:
            if found.intersection(_contents_of(node)):
                found.update((node, *self._written_with(node)))
        return found

    def _find_lengths(self) -> dict[Node, set[Any]]:
        """The symbols of sizes on which nodes without data depend."""
        found: dict[Node, set[Any]] = {}
        for node in self.operations:
            if node not in self._with_data:
                before = (found.get(each, set()) for each in node.all_input_nodes)
                found[node] = set().union(symbols(node), *before)
                for each in self._written_with(node):
                    found[each] = found.get(each, set()) | found[node]
        return found

    def _written_with(self, node: Node) -> list[Node]:
        """The nodes whose memory an operation writes to, by whatever name it does."""
        written = self._written[node]
        if not written:
            return []
        return [each for each in self.operations if _memory(self._small[each]) in written]

    def _find_crossing(self) -> list[set[Node] | None]:
        """For each position the nodes that cross there, or None if it is not legal."""
        end = len(self.operations)
        crossing: list[set[Node] | None] = [set() for _ in range(end)]
        for node in [*self.inputs, *self.operations]:
            uses = [self._order.get(user, end) for user in node.users]
            for position in range(self._order.get(node, -1) + 1, max(uses, default=-1) + 1):
                if position < end:
                    _add(crossing, position, self._needs(node))
        depth = 0
        for index, node in enumerate(self.operations):
            if depth:
                crossing[index] = None
            depth += nesting(node)
            for memory in self._written[node]:
                for position in range(index + 1):
                    if self._is_torn(crossing[position] or (), memory):
                        crossing[position] = None
        return crossing

    def _needs(self, node: Node) -> frozenset[Node] | None:
        """What has to cross a border for ``node`` to be used behind it; None if nothing helps."""
        if node not in self._needed:
            self._needed[node] = self._find_needs(node)
        return self._needed[node]

    def _find_needs(self, node: Node) -> frozenset[Node] | None:
        if node.op == "get_attr" or self._is_batch_size(node):
            return frozenset()
        if self._is_batched(node) or self._is_shared(node):
            return frozenset((node,))
        if self._is_step(node) or not (self._is_count(node) or self._is_view(node)):
            return None
        every = [self._needs(each) for each in node.all_input_nodes]
        found = [each for each in every if each is not None]
        return frozenset().union(*found) if len(found) == len(every) else None

    def _is_batched(self, node: Node) -> bool:
        return node in self._batched

    def _has_rows(self, node: Node, alike: Any) -> bool:
        """``alike``: its value for the batch of equal rows."""
        import torch

        small, large = self._small[node], self._large[node]
        return (
            isinstance(small, torch.Tensor)
            and small.dim() > 0
            and (small.shape[0], large.shape[0]) == (len(_SMALL), len(_LARGE))
            and not symbols(node, axes=1).isdisjoint(self._batch_sizes)
            and small.shape[1:] == large.shape[1:]
            and _is_dense(small)
            and _is_dense(large)
            and has_same_rows(small[list(_LARGE)], large)
            and has_same_rows(small[list(_ALIKE)], alike)
        )

    def _is_shared(self, node: Node) -> bool:
        import torch

        if node in self._with_data or self._is_step(node):
            return False
        small, large = self._small[node], self._large[node]
        if isinstance(small, torch.Tensor):
            is_same = small.layout is torch.strided and are_identical(small, large)
            return is_same and self._lengths[node] <= symbols(node)
        return isinstance(small, bool | int | float) and small == large

    def _is_step(self, node: Node) -> bool:
        small = self._small[node]
        is_same = isinstance(small, bool | int | float) and small == self._large[node]
        return is_same and not symbols(node).isdisjoint(self._batch_sizes)

    def _is_count(self, node: Node) -> bool:
        import torch

        if node in self._with_data:
            return False
        small = self._small[node]
        if isinstance(small, torch.Tensor):
            return _memory(small) not in self._all_written
        return isinstance(small, bool | int | float)

    def _is_view(self, node: Node) -> bool:
        """Or a copy in place of one (reshape), if nothing writes to it, or to what it is of."""
        if not _may_be_view(node):
            return False
        memory, *others = (_memory(self._small[each]) for each in (node, *node.all_input_nodes))
        return memory in others or self._all_written.isdisjoint((memory, *others))

    def _is_batch_size(self, node: Node) -> bool:
        sizes = self._small[node], self._large[node]
        is_size = "sym_size" in str(node.target) and sizes == (len(_SMALL), len(_LARGE))
        return is_size and not symbols(node).isdisjoint(self._batch_sizes)

    def _row_bytes(self, node: Node) -> int:
        return self._small[node].nbytes // len(_SMALL) if self._is_batched(node) else 0

    def _is_torn(self, crossing: Collection[Node], memory: int) -> bool:
        names = [node for node in crossing if _memory(self._small[node]) == memory]
        return len(names) > 1 or any(not self._is_batched(node) for node in names)

    # --- stages -----------------------------------------------------------------------------------

    def stages(self, positions: Sequence[int]) -> list[GraphStage]:
        """The stages between these positions, which are legal and ascend."""
        borders = [0, *positions, len(self.operations)]
        stages = []
        for number, (begin, end) in enumerate(itertools.pairwise(borders)):
            is_last = number == len(positions)
            stages.append(
                GraphStage(
                    self._part(begin, end),
                    takes=None if begin else self._leaves,
                    shared=() if is_last else self._shared_at(end),
                    gives=self._unflatten if is_last else tuple,
                )
            )
        return stages

    def _crossing_at(self, position: int) -> list[Node]:
        crossing = self._crossing[position]
        assert crossing is not None
        return sorted(crossing, key=lambda node: self._order.get(node, -1))

    def _shared_at(self, position: int) -> list[int]:
        return [
            index
            for index, node in enumerate(self._crossing_at(position))
            if not self._is_batched(node)
        ]

    def _part(self, begin: int, end: int) -> GraphModule:
        from torch.fx import Graph, GraphModule

        graph = Graph()
        inputs = self._crossing_at(begin) if begin else self.inputs
        known = {node: graph.placeholder(node.name) for node in inputs}
        batched = next((node for node in inputs if begin and self._is_batched(node)), None)

        def here(node: Node) -> Node:
            """The node in this stage, computed again if it was computed before it."""
            if node not in known:
                if batched is not None and self._is_batch_size(node):
                    known[node] = graph.create_node(node.op, node.target, (known[batched], 0))
                else:
                    known[node] = graph.node_copy(node, here)
            return known[node]

        for node in self.operations[begin:end]:
            known[node] = graph.node_copy(node, here)
        is_last = end == len(self.operations)
        outputs = self._outputs if is_last else self._crossing_at(end)
        graph.output(tuple(here(each) if hasattr(each, "users") else each for each in outputs))
        return GraphModule(self._module, graph)


class GraphStage:
    """One stage: a callable that takes an activation and returns one, without a graph of gradients.

    ``module`` has the operations, ``run`` is what runs them: the module, or what a compiler made
    of it.
    """

    def __init__(
        self,
        module: GraphModule,
        *,
        takes: Callable[..., Sequence[Any]] | None,
        shared: Sequence[int],
        gives: Callable[[Sequence[Any]], Any],
    ) -> None:
        self.module = module
        self.run: Callable[..., Any] = module
        self._takes = takes
        self._shared = tuple(shared)
        self._gives = gives

    def __call__(self, *batch: Any) -> Any:
        """Takes the batch if it is the first stage, else what the stage before returned."""
        torch = torch_in_this_thread()
        if self._takes is not None:
            inputs = self._takes(*batch)
        else:
            inputs = [each.value if isinstance(each, Shared) else each for each in batch[0]]
        with torch.no_grad():
            outputs = list(self.run(*inputs))
        for index in self._shared:
            outputs[index] = Shared(outputs[index])
        return self._gives(outputs)

    def parameters(self) -> Iterator[Any]:
        """As a module's: they tell on which device it runs."""
        return self.module.parameters()

    def __repr__(self) -> str:
        operations = sum(node.op.startswith("call_") for node in self.module.graph.nodes)
        return f"<GraphStage of {operations} operations>"


def _add(crossing: list[set[Node] | None], position: int, needs: frozenset[Node] | None) -> None:
    found = crossing[position]
    if needs is None:
        crossing[position] = None
    elif found is not None:
        found.update(needs)


def _contents_of(node: Node) -> list[Node]:
    """The nodes whose contents an operation reads, not only their shapes.

    A size that depends on contents (of rows that are chosen: unbacked, to torch) is read from them.
    """
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    name = str(node.target).removeprefix("aten.")
    if name.startswith("sym_"):
        return node.all_input_nodes if free_unbacked_symbols(node.meta.get("val")) else []
    if not name.startswith(_FACTORIES):
        return node.all_input_nodes
    return [each for each in node.all_input_nodes if each is not node.args[0]]


def _memory(value: Any) -> int:
    import torch

    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return _NO_MEMORY
    return value.untyped_storage().data_ptr()


def _is_dense(tensor: Any) -> bool:
    """Whether its strides stay as they are when it is joined with others."""
    import torch

    if tensor.layout is not torch.strided:
        return False
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    last = formats.get(tensor.dim())
    return tensor.is_contiguous() or (last is not None and tensor.is_contiguous(memory_format=last))


def _may_be_view(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    if schema is None or len(schema.returns) != 1:
        return False
    alias = schema.returns[0].alias_info
    return alias is not None and not alias.is_write


def _tensors(value: Any) -> list[Any]:
    import torch
    import torch.utils._pytree as pytree

    return [each for each in pytree.tree_leaves(value) if isinstance(each, torch.Tensor)]


def _written_by(node: Node) -> list[Node]:
    """The nodes whose tensors an operation writes to, by its schema."""
    import torch.utils._pytree as pytree

    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return []
    arguments = dict(zip((each.name for each in schema.arguments), node.args, strict=False))
    arguments.update(node.kwargs)
    written = [
        arguments.get(each.name)
        for each in schema.arguments
        if each.alias_info is not None and each.alias_info.is_write
    ]
    return [each for each in pytree.tree_leaves(written) if hasattr(each, "users")]
