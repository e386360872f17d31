"""A torch model as a line of operations, which can be timed and cut anywhere that is legal.

The trace is ``torch.export``'s before any decomposition: the very operations that the model calls,
in their order, with its own parameters and buffers. So stages compute what the model computes, bit
for bit. The size of the batch is free in it; other axes are as in the example, unless ``varying``
names them. Inputs of another structure, type or shape raise TypeError, as torch does not guard all
that is built into a trace; and so do sizes with which the model does something else (a branch on a
length). A model that is moved to another device has to be traced there.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import reprlib
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from trims_shim.batching.staged.slicing.cutting import Cut, even_cuts
from trims_shim.batching.staged.slicing.examples import Example, are_near
from trims_shim.batching.staged.slicing.graph_stages import GraphStage, StagedGraph
from trims_shim.errors import StagingError
from trims_shim.printable import first_line

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

__all__ = ["Compiler", "TracedModel", "check_evaluates"]

Compiler = Callable[[Any], Callable[..., Any]]
"""For example ``functools.partial(torch.compile, dynamic=True)``."""

_LEAST_ROWS = 2
"""torch.export does not leave an axis of size one free."""


class TracedModel:
    """A model, traced with an example of its batch (:mod:`.examples`).

    ``varying``: the axes of tensors that may be of any size, besides the first. It keeps the model
    and the example. Raises StagingError for a model that cannot be traced, has a batch size built
    in, depends on chance, or changes itself.
    """

    def __init__(self, model: Any, example: Any, *, varying: Collection[int] = ()) -> None:
        self.model = model
        self.name = type(model).__name__
        given = Example(example)
        self.example = given if given.rows >= _LEAST_ROWS else given.with_rows(_LEAST_ROWS)
        check_evaluates(model)
        program = _exported(model, self.example, varying)
        _check_varying(program, varying, self.name)
        module = program.module()
        _check_chance(module, self.name)
        guards = _without_guards(module)
        leaves = _Leaves(
            self.example,
            program.call_spec.in_spec,
            varying=varying,
            guards=guards if _makes_guards() else _size_guards(program),
        )
        try:
            self._graph = StagedGraph(
                module,
                self.example,
                leaves=leaves,
                unflatten=_Unflatten(program.call_spec.out_spec),
            )
        # Of any operation, where a real tensor has another layout than that of the trace.
        except Exception as error:
            raise StagingError(
                f"the trace of {self.name} does not run: {first_line(error)}; cut it at its blocks "
                "(slice_blocks), or write its stages as functions"
            ) from error
        _check_writing(self._graph, self.name)
        _check_branches(self._graph, self.name)
        if varying:
            leaves.refuses_one = not self._holds(self.example.with_sizes_of_one(varying))

    def _holds(self, example: Example) -> bool:
        """Whether the trace computes what the model does, as far as the model itself runs."""
        (whole,) = self.stages([])
        try:
            expected = example.copy().call(self.model)
        # The model's own: of a kernel that is longer than the axis, for example.
        except Exception:
            return True
        try:
            return are_near(whole(*example.copy().batch()), expected)
        # Of any operation, as it was traced for other shapes.
        except Exception:
            return False

    @property
    def operations(self) -> list[str]:
        """The names of operations, in their order."""
        return [str(node.target) for node in self._graph.operations]

    def cuts(self) -> list[Cut]:
        """The legal positions between operations."""
        return self._graph.cuts()

    def even(self, stages: int, times_ns: Sequence[int]) -> list[int]:
        """Positions that cut it into stages of even time, given that of each operation.

        Raises StagingError if it has no place for so many cuts.
        """
        cuts = self.cuts()
        if len(cuts) < stages - 1:
            raise StagingError(
                f"{self.name} can be cut into {len(cuts) + 1} stages at most, not {stages}: "
                "elsewhere something would cross that is no tensor with the batch as its first axis"
            )
        return even_cuts(times_ns, cuts, stages)

    def stages(self, positions: Sequence[int]) -> list[GraphStage]:
        """Its stages, cut at these positions. Weights are the model's own tensors."""
        return self._graph.stages(positions)

    def measure(
        self,
        rows: int | None = None,
        *,
        repeats: int = 5,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> list[int]:
        """What each operation takes with a batch of ``rows`` (default: the example's), in ns.

        The least of some repeats. Blocks, and runs the model ``repeats + 1`` times.
        """
        example = self.example if rows is None else self.example.with_rows(rows)
        return self._graph.measure(example, repeats=repeats, clock_ns=clock_ns)


def check_evaluates(model: Any) -> None:
    """Raise StagingError for no module, a compiled one, and one with a part in train mode.

    Or with a part that always works as there: a BatchNorm without running statistics.
    """
    from torch.nn.modules.batchnorm import _BatchNorm

    modules = getattr(model, "named_modules", None)
    if modules is None:
        raise StagingError(f"{model!r} is no torch.nn.Module; give StagedModel a list of functions")
    if hasattr(model, "_orig_mod"):
        raise StagingError(
            "a compiled model cannot be cut; cut the model itself, and have its stages compiled "
            "(compiler=)"
        )
    for name, module in modules():
        part = f"its {name!r}" if name else "it"
        if isinstance(module, _BatchNorm) and module.running_mean is module.running_var is None:
            raise StagingError(
                f"{type(model).__name__} cannot be cut into stages: {part} has no running "
                "statistics, so that answers depend on who shares a batch"
            )
        if module.training:
            raise StagingError(
                f"{type(model).__name__} cannot be cut into stages: {part} is in train mode, where "
                "answers depend on chance and on who shares a batch; call model.eval()"
            )


class _Leaves:
    """Makes the flat list of a batch's inputs.

    ``varying``: the axes that may have any size, besides the first; ``guards`` raises an error for
    those of which torch knows that the trace does not hold.
    """

    def __init__(
        self,
        example: Example,
        shape: Any,
        *,
        varying: Collection[int],
        guards: Callable[..., object] | None,
    ) -> None:
        self._example = example
        self._shape = shape
        self._varying = tuple(varying)
        self._free = frozenset((0, *varying))
        self._guards = guards
        self.refuses_one = False
        """Whether varying axes may not have size 1: torch.export takes no size that varies for 1,
        and guards nothing there (``x.squeeze(1)``)."""
        self._constants = [self._constant(each) for each in example.leaves()]

    def __call__(self, *batch: Any) -> Sequence[Any]:
        """Raises TypeError for inputs unlike those of the trace."""
        import torch.utils._pytree as pytree

        arguments = self._example.arguments(batch)
        leaves, shape = pytree.tree_flatten(arguments)
        if shape != self._shape or [self._constant(each) for each in leaves] != self._constants:
            expected = self._example.args, self._example.kwargs
            raise TypeError(
                f"the stages were traced with {self._described(expected)}, and are called with "
                f"{self._described(arguments)}"
            )
        self._check_sizes(leaves)
        return leaves

    def _check_sizes(self, leaves: Sequence[Any]) -> None:
        """Raise TypeError where the model would do something else than what was traced."""
        try:
            if self._guards is not None:
                self._guards(*leaves)
        # AssertionError, or that of a term of sizes: ZeroDivisionError.
        except Exception as error:
            raise self._other_sizes(leaves, first_line(error)) from error
        if self.refuses_one and self._has_one(leaves):
            raise self._other_sizes(leaves, "the model does something else with size 1")

    def _has_one(self, leaves: Sequence[Any]) -> bool:
        pairs = zip(leaves, self._example.leaves(), strict=True)
        return any(
            leaf.shape[axis] == 1 != its.shape[axis]
            for leaf, its in pairs
            for axis in self._varying
            if axis < getattr(leaf, "ndim", 0)
        )

    def _other_sizes(self, leaves: Sequence[Any], why: str) -> TypeError:
        def sizes(of: Sequence[Any]) -> str:
            return ", ".join(str(list(each.shape)) for each in of if hasattr(each, "shape"))

        return TypeError(
            f"the stages were traced with varying={self._varying} and sizes "
            f"{sizes(self._example.leaves())}, and do not hold for {sizes(leaves)}: {why}; cut the "
            "model with an example of such sizes, or at its blocks (slice_blocks)"
        )

    def _constant(self, leaf: Any) -> tuple[Any, ...]:
        """What a trace has built in: of a tensor type, device and sizes; anything else itself."""
        import torch

        if not isinstance(leaf, torch.Tensor):
            return type(leaf), leaf
        sizes = [None if axis in self._free else size for axis, size in enumerate(leaf.shape)]
        return leaf.dtype, leaf.device, sizes

    def _described(self, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> str:
        import torch
        import torch.utils._pytree as pytree

        def of(leaf: Any) -> Any:
            return _Tensor(*self._constant(leaf)) if isinstance(leaf, torch.Tensor) else leaf

        args, kwargs = pytree.tree_map(of, arguments)
        return _short.repr(kwargs or (args[0] if len(args) == 1 else args))


class _Tensor:
    """A tensor in messages."""

    def __init__(self, dtype: Any, device: Any, sizes: Sequence[int | None]) -> None:
        axes = ("any" if size is None else str(size) for size in sizes[1:])
        shape = ", ".join(("batch", *axes) if sizes else ())
        self._text = f"{str(dtype).removeprefix('torch.')} [{shape}] on {device}"

    def __repr__(self) -> str:
        return self._text


_short = reprlib.Repr()
_short.maxother = 80


class _Unflatten:
    def __init__(self, shape: Any) -> None:
        self._shape = shape

    def __call__(self, outputs: Sequence[Any]) -> Any:
        import torch.utils._pytree as pytree

        return pytree.tree_unflatten(outputs, self._shape)


def _exported(model: Any, example: Example, varying: Collection[int]) -> Any:
    import torch
    import torch.utils._pytree as pytree
    from torch.export import Dim

    def axes(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return None
        free = {axis: Dim.AUTO for axis in varying if axis < leaf.dim()}
        return {**free, 0: Dim.DYNAMIC} if leaf.dim() else {}

    shapes = pytree.tree_map(axes, (example.args, example.kwargs))
    # First, so that tensors which the model makes in a call, and keeps, are real ones.
    example.check_runs(model)
    named = example.kwargs
    try:
        with torch.no_grad(), _without_warnings(), _unchanged(model):
            named = _by_name(model, *shapes)
            given = example.copy()  # for a slice, the guards ask for the sizes of what it is of
            program = torch.export.export(model, given.args, given.kwargs, dynamic_shapes=named)
            if not named.keys() >= example.kwargs.keys():
                # torch 2.14 traces them, but cannot run a check of their sizes (NameError).
                example.copy().call(program.module())
            return program
    # The errors of torch.export have no common class.
    except Exception as error:
        advice = "Its batch size must be free, and no branch may depend on data"
        loose = [repr(name) for name in example.kwargs if name not in named]
        if loose:  # torch 2.13 takes the shapes of none
            advice = f"Its forward has to name {', '.join(loose)}, not take them by **kwargs"
        raise StagingError(
            f"{type(model).__name__} cannot be traced: {first_line(error)}. {advice}; cut it at "
            "its blocks (slice_blocks), or write its stages as functions"
        ) from error


def _without_guards(module: GraphModule) -> Callable[..., object] | None:
    """Take the check of the inputs' sizes out of a graph, and return it; None if it has none."""
    for node in module.graph.find_nodes(op="call_module", target="_guards_fn"):
        module.graph.erase_node(node)
        guards: Callable[..., object] = module.get_submodule(node.target)
        return guards
    return None


def _makes_guards() -> bool:
    """Whether this torch puts a check of the inputs' sizes into graphs, if they need one."""
    import torch.export._unlift as unlift

    return hasattr(unlift, "GuardsFn")


def _size_guards(program: Any) -> Callable[..., object]:
    """The check of the inputs' sizes that torch before 2.9 or so leaves out of a graph.

    It knows what the trace took for granted (9 <= s0), and does not look at it.
    """
    import torch

    specs = program.graph_signature.input_specs
    inputs = [each.arg.name for each in specs if each.kind.name == "USER_INPUT"]
    values = {each.name: each.meta.get("val") for each in program.graph.nodes}
    sizes = [
        (number, axis, size.node)
        for number, name in enumerate(inputs)
        if isinstance(value := values[name], torch.Tensor)
        for axis, size in enumerate[Any](value.shape)
        if isinstance(size, torch.SymInt)
    ]

    @functools.lru_cache
    def check(*found: int) -> None:
        symbols = {node._expr: size for (*_, node), size in zip(sizes, found, strict=True)}
        for guard in sizes[0][2].shape_env.guards if sizes else ():
            if guard.expr.xreplace(symbols) == False:  # noqa: E712 (sympy's own false)
                raise AssertionError(f"Guard failed: {guard.expr}")

    return lambda *leaves: check(*(leaves[number].shape[axis] for number, axis, _ in sizes))


def _check_varying(program: Any, varying: Collection[int], name: str) -> None:
    """Raise StagingError for an axis that is to vary, and has a fixed size in the trace.

    With several inputs, one may have another kind of axis there, of another size.
    """
    from torch.fx.experimental.symbolic_shapes import is_concrete_int

    inputs = set(program.graph_signature.user_inputs)
    shapes = [
        node.meta["val"].shape
        for node in program.graph.nodes
        if node.name in inputs and hasattr(node.meta.get("val"), "shape")
    ]
    for axis in varying:
        sizes = [shape[axis] for shape in shapes if axis < len(shape)]
        fixed = {int(size) for size in sizes if is_concrete_int(size)}
        free = {size.node.hint for size in sizes if not is_concrete_int(size)}
        if fixed and (not free or fixed & free):
            raise StagingError(
                f"{name} cannot be cut into stages with varying={tuple(varying)}: size "
                f"{min(fixed & free or fixed)} of axis {axis} is built into its trace; cut it at "
                "its blocks (slice_blocks)"
            )


def _by_name(model: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """The shapes of arguments by the names of ``forward``'s parameters, as torch.export wants."""
    import inspect

    parameters = inspect.signature(model.forward).parameters.values()
    named: dict[str, Any] = {}
    rest = list(args)
    for each in parameters:
        if each.kind is each.VAR_POSITIONAL:
            named[each.name], rest = tuple(rest), []
        elif rest:
            named[each.name] = rest.pop(0)
    loose = next((each.name for each in parameters if each.kind is each.VAR_KEYWORD), None)
    known = {each.name for each in parameters}
    named.update((name, shape) for name, shape in kwargs.items() if name in known)
    others = {name: shape for name, shape in kwargs.items() if name not in known}
    if others and loose is not None:
        named[loose] = others
    return named


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Silence torch's warnings about itself, about which a user can do nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def _unchanged(model: Any) -> Iterator[None]:
    """Undo what is assigned to the model meanwhile: tensors of a trace have no content."""
    places = [
        place
        for module in model.modules()
        for place in (module.__dict__, *module.__dict__.values())
        if isinstance(place, dict | list)
    ]
    contents = [list(each) if isinstance(each, list) else dict(each) for each in places]
    try:
        yield
    finally:
        for place, content in zip(places, contents, strict=True):
            if isinstance(place, list):
                place[:] = content
                continue
            for name in place.keys() - content:
                del place[name]
            place.update(content)


def _check_chance(module: GraphModule, name: str) -> None:
    """Raise StagingError for an operation that depends on chance."""
    from torch.fx import GraphModule

    # Those with torch.autocast, or other gradients, have graphs of their own.
    graphs = [each.graph for each in module.modules() if isinstance(each, GraphModule)]
    for node in itertools.chain.from_iterable(graph.nodes for graph in graphs):
        if _is_random(node):
            raise StagingError(
                f"{name} cannot be cut into stages: {node.target} depends on chance{_place(node)}"
            )


def _check_writing(graph: StagedGraph, name: str) -> None:
    """Raise StagingError for an operation that writes to the model's own tensors."""
    for node, attribute in graph.written_attributes():
        raise StagingError(
            f"{name} cannot be cut into stages: {node.target} changes its "
            f"{attribute!r}{_place(node)}; batches that run at the same time would see "
            "each other's"
        )


def _check_branches(graph: StagedGraph, name: str) -> None:
    """Raise StagingError for an operation that branches on what is in the batch."""
    for node in graph.branches():
        raise StagingError(
            f"{name} cannot be cut into stages: {node.target} branches on what is in the "
            "batch; whoever joins it may change what the others get. Choose for each row "
            f"(torch.where with a condition of each){_place(node)}"
        )


def _is_random(node: Node) -> bool:
    import torch

    tags = getattr(node.target, "tags", ())
    if torch.Tag.nondeterministic_seeded not in tags:
        return False
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    values = {each.name: each.default_value for each in arguments if each.has_default_value()}
    values.update(zip((each.name for each in arguments), node.args, strict=False))
    values.update(node.kwargs)
    is_off = values.get("train") is False or values.get("training") is False
    return not is_off and values.get("dropout_p", values.get("p")) != 0.0


def _place(node: Node) -> str:
    """Where in the user's code, as far as torch knows."""
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines()]
    places = [line for line in lines if line.startswith("File ")]
    return f" ({places[-1]})" if places else ""
