"""What a model does around its blocks, found by running it with stand-ins for them.

A *shell* is a copy of the modules on the way from the model to its blocks, with stand-ins for the
blocks. Everything else in it, above all the weights, is the model's own. Its ``forward`` is run

- as the *prelude*, until the last block is called. Each stand-in notes its block's arguments, and
  returns an alias of the hidden state among them. By that alias the next stand-in finds the output
  of the block before among its own arguments;
- as the *postlude*, in which the last stand-in returns the real output of the last block.

The model is never changed. Threads may run shells at the same time.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from trims_shim.batching.staged.slicing.examples import Example, version_of
from trims_shim.errors import StagingError

__all__ = ["BlockCalls", "Prelude", "Shell"]

_here = threading.local()


class BlockCalls:
    """The arguments of each block, except for the tensors: the same for all batches of one kind.

    Each leaf of the arguments is the hidden state, one of the prelude's tensors (by its number), or
    a constant. Also the torch.autocast that the model calls it in. Two of these objects are equal
    if all leaves and their structures are.
    """

    __slots__ = ("_calls",)

    def __init__(self, calls: list[_Call]) -> None:
        self._calls = calls

    def arguments(
        self, block: int, hidden: Any, tensors: Sequence[Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a block, positional and by keyword."""
        import torch.utils._pytree as pytree

        shape, slots, _ = self._calls[block]
        leaves = [
            hidden if kind == _HIDDEN else tensors[value] if kind == _TENSOR else value
            for kind, value in slots
        ]
        arguments: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_unflatten(leaves, shape)
        return arguments

    def around(self, block: int) -> AbstractContextManager[Any]:
        """What to call a block in, for it to compute in the types that it does in the model."""
        import torch

        autocast = self._calls[block][2]
        device, dtype = autocast
        if autocast == _autocast(device):
            return contextlib.nullcontext()
        return torch.autocast(device, dtype=dtype, enabled=dtype is not None)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BlockCalls) and self._calls == other._calls

    __hash__ = None  # type: ignore[assignment]


_Autocast = tuple[str, Any]
"""A type of devices, and the type of torch.autocast there; None where that is off."""
_Call = tuple[Any, tuple[tuple[str, Any], ...], _Autocast]
"""The structure of its arguments, their leaves, and the autocast that it is in."""
_HIDDEN, _TENSOR, _CONSTANT = "hidden", "tensor", "constant"


class Prelude:
    """The result of a prelude: the first block's hidden state, other tensors, and the calls."""

    __slots__ = ("calls", "hidden", "tensors")

    def __init__(self, hidden: Any, tensors: list[Any], calls: BlockCalls) -> None:
        self.hidden = hidden
        self.tensors = tensors
        self.calls = calls


class Shell:
    """``path`` leads from the model to the container of the blocks, by attribute names.

    Raises StagingError for blocks that return more than a hidden state, alone or first in a tuple.
    """

    def __init__(self, model: Any, path: Sequence[str], example: Example) -> None:
        import torch

        self.model = model
        self.container = model
        for name in path:
            self.container = getattr(self.container, name)
        self.blocks = list(self.container)
        self.name = type(model).__name__
        self._shell = _copied(model)
        inner = self._shell
        for name in path:
            inner._modules[name] = _copied(inner._modules[name])
            inner = inner._modules[name]
        inner._modules = {
            name: _stand_in(block, number)
            for number, (name, block) in enumerate(inner._modules.items())
        }
        # What follows the hidden state in the tuple that a block returns; None for a lone tensor.
        self._behind: tuple[Any, ...] | None = None
        first = self._prelude(example, 1)
        args, kwargs = first.calls.arguments(0, first.hidden, first.tensors)
        with torch.no_grad(), first.calls.around(0):
            output = self.blocks[0](*args, **kwargs)
        self._behind = self._find_behind(output)

    def hidden_of(self, output: Any) -> Any:
        """The hidden state in what a block returns."""
        return output if self._behind is None else output[0]

    def _find_behind(self, output: Any) -> tuple[Any, ...] | None:
        import torch

        if isinstance(output, torch.Tensor):
            return None
        if not isinstance(output, tuple) or not all(map(_is_constant, output[1:])):
            raise StagingError(
                f"the blocks of {self.name} return more than a hidden state; without attention "
                "weights and caches they could be stages"
            )
        return output[1:]

    def _output(self, hidden: Any) -> Any:
        return hidden if self._behind is None else (hidden, *self._behind)

    def prelude(self, example: Example) -> Prelude:
        """Raises StagingError for a model that does not call its blocks one after the other."""
        return self._prelude(example, len(self.blocks))

    def _prelude(self, example: Example, blocks: int) -> Prelude:
        noting = _Noting(blocks, self.name, self._output)
        try:
            self._run(example, noting)
        except _Reached:
            return noting.prelude()
        raise StagingError(
            f"{self.name} has called {noting.count} of its {len(self.blocks)} blocks; all of them "
            "have to be called, in their order"
        )

    def postlude(self, example: Example, hidden: Any) -> Any:
        """The model's output, where ``hidden`` is what comes out of the last block."""
        return self._run(example, _Handing(len(self.blocks), hidden, self._output))

    def _run(self, example: Example, visitor: _Noting | _Handing) -> Any:
        outer = getattr(_here, "visitor", None)
        _here.visitor = visitor
        try:
            return example.call(self._shell)
        finally:
            _here.visitor = outer


class _Reached(BaseException):
    """The last block is called; no ``except Exception`` of a model must catch this."""


class _Noting:
    """What stand-ins do in a prelude."""

    def __init__(self, blocks: int, name: str, output: Callable[[Any], Any]) -> None:
        self._blocks = blocks
        self._name = name
        self._output = output
        self._calls: list[_Call] = []
        self._tensors: list[Any] = []
        self._aliases: list[Any] = []
        """Of the hidden state, one for each block; the next block has to get the last."""
        self._version: int | None = None
        """The version of the last alias when it was returned."""

    @property
    def count(self) -> int:
        """How many blocks were called."""
        return len(self._calls)

    def visit(self, block: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A block is called."""
        import torch.utils._pytree as pytree

        if block != len(self._calls):
            raise StagingError(
                f"{self._name} calls its block {block} after {len(self._calls)} others; each has "
                "to be called once, in their order"
            )
        leaves, shape = pytree.tree_flatten((args, kwargs), is_leaf=_is_leaf)
        if not block:
            self._aliases.append(_first_tensor(leaves, self._name))
        slots = tuple(self._slot(leaf, block) for leaf in leaves)
        is_same = not block or version_of(self._aliases[-1]) == self._version
        if not is_same or not any(kind == _HIDDEN for kind, _ in slots):
            raise StagingError(
                f"{self._name} does something between its blocks {block - 1} and {block}: the "
                "second is not called with what the first returns; try slice_model"
            )
        self._calls.append((shape, slots, _autocast(self._aliases[-1].device.type)))
        if len(self._calls) == self._blocks:
            raise _Reached
        self._aliases.append(self._aliases[-1].view_as(self._aliases[-1]))
        self._version = version_of(self._aliases[-1])
        return self._output(self._aliases[-1])

    def _slot(self, leaf: Any, block: int) -> tuple[str, Any]:
        import torch

        if leaf is self._aliases[-1]:
            return _HIDDEN, None
        if isinstance(leaf, torch.Tensor):
            if any(leaf is each for each in self._aliases[1:]):
                raise StagingError(
                    f"{self._name} calls its block {block} with what blocks before the last one "
                    "have returned; try slice_model"
                )
            for number, tensor in enumerate(self._tensors):
                if tensor is leaf:
                    return _TENSOR, number
            self._tensors.append(leaf)
            return _TENSOR, len(self._tensors) - 1
        if _is_constant(leaf):
            return _CONSTANT, leaf
        raise StagingError(
            f"{self._name} calls its blocks with a {type(leaf).__name__}, which cannot go from "
            "stage to stage; with a cache of keys and values, call it with use_cache=False"
        )

    def prelude(self) -> Prelude:
        """The result, after the last block was called."""
        return Prelude(self._aliases[0], self._tensors, BlockCalls(self._calls))


class _Handing:
    """What stand-ins do in a postlude."""

    def __init__(self, blocks: int, hidden: Any, output: Callable[[Any], Any]) -> None:
        self._last = blocks - 1
        self._hidden = hidden
        self._output = output

    def visit(self, block: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A block is called."""
        import torch.utils._pytree as pytree

        if block == self._last:
            return self._output(self._hidden)
        leaves = pytree.tree_leaves((args, kwargs), is_leaf=_is_leaf)
        return self._output(_first_tensor(leaves, "the model"))


def _stand_in(block: Any, number: int) -> Any:
    """An object that looks like the block, but calls this thread's visitor."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _here.visitor.visit(number, args, kwargs)

    kind: Any = type(block)
    try:
        stand_in: Any = object.__new__(
            type(kind.__name__, (kind,), {"__call__": call, "forward": call})
        )
    except TypeError as error:
        raise StagingError(f"a block of type {kind.__name__} cannot be stood in for") from error
    stand_in.__dict__.update(block.__dict__)
    return stand_in


def _copied(module: Any) -> Any:
    """A copy of the module alone: with the same weights, and sub-modules that can be exchanged."""
    copied = object.__new__(type(module))
    copied.__dict__.update(module.__dict__)
    copied._modules = dict(module._modules)
    return copied


def _autocast(device: str) -> _Autocast:
    import torch

    is_on = torch.is_autocast_enabled(device)
    return device, torch.get_autocast_dtype(device) if is_on else None


def _is_leaf(value: Any) -> bool:
    """Objects are leaves, also those that torch can take apart (caches)."""
    return not isinstance(value, tuple | list | dict)


def _is_constant(value: Any) -> bool:
    import enum

    import torch

    kinds = (bool, int, float, str, enum.Enum, torch.dtype, torch.device)
    return value is None or isinstance(value, kinds)


def _first_tensor(leaves: Sequence[Any], name: str) -> Any:
    """The hidden state is the first tensor that the first block gets."""
    import torch

    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            if leaf.layout is torch.strided and not leaf.is_nested:
                return leaf
            raise StagingError(
                f"{name} hands nested tensors to its blocks, which cannot be joined; make its "
                "nn.TransformerEncoder with enable_nested_tensor=False"
            )
    raise StagingError(f"{name} calls its blocks with no tensor")
