"""Models that are a row of blocks, cut between them: encoders, decoders, sequential bodies.

Nothing is traced: the model's own code runs, so lengths may vary, and it chooses its kernels. The
first stage begins with what the model does before its blocks (the prelude), the last one ends with
what it does after them (the postlude); :mod:`.block_calls` finds these. The prelude (embeddings,
masks) runs twice, which has to be cheap; :func:`.graph_slicing.slice_model` is for models where it
is not.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from trims_shim.batching.staged.activations import Shared
from trims_shim.batching.staged.model import StagedModel
from trims_shim.batching.staged.slicing.block_calls import BlockCalls, Prelude, Shell
from trims_shim.batching.staged.slicing.cutting import Cut, even_cuts
from trims_shim.batching.staged.slicing.examples import Example, check_stages, stage_times
from trims_shim.batching.staged.slicing.tracing import Compiler, check_evaluates
from trims_shim.batching.torch_settings import torch_in_this_thread
from trims_shim.checks import whole
from trims_shim.errors import StagingError
from trims_shim.printable import first_line

__all__ = ["BlockStage", "slice_blocks"]

_STAGES = 4
"""Where nothing speaks for another number."""
_KINDS = 64
_SHARE = 0.2
"""Of the time before the blocks: a larger share is warned of, as stages may gain no more."""

_log = logging.getLogger(__name__)


def slice_blocks(
    model: Any,
    example: Any,
    n_stages: int | None = None,
    *,
    blocks: str | None = None,
    compiler: Compiler | None = None,
) -> StagedModel:
    """A ``torch.nn.Module`` as a :class:`StagedModel` that computes the same, bit for bit.

    ``example`` as for :func:`.graph_slicing.slice_model`, of a typical size.
    ``n_stages``: how many stages of even time; None for four, or one for each block if they are
    fewer. ``blocks``: the name of the ``nn.ModuleList`` or ``nn.Sequential`` that holds them, such
    as ``"encoder.layer"``; None for the one with the most weights. ``compiler``: compiles each
    block, such as ``torch.compile``; results are the model's only as far as compiled blocks' are.

    Nothing is copied: the blocks are the model's own, and their hooks run. Raises StagingError for
    a model that is in train mode, has no blocks, or does not call each block once, with what the
    one before has returned; ValueError for less than one stage, or more than blocks, prelude and
    postlude make. Blocks the caller: the model runs some times.
    """
    if n_stages is not None:
        n_stages = whole("n_stages", n_stages)
    check_evaluates(model)
    path = (
        _path_to_blocks(model) if blocks is None else [each for each in blocks.split(".") if each]
    )
    run = Example(example)
    run.check_runs(model)
    body = _body(model, path, run)
    shell = body.shell
    steps = [BlockStage(body, step, step + 1) for step in range(body.last + 1)]
    if n_stages is not None and n_stages > len(steps):
        raise ValueError(
            f"{shell.name} can be cut into {len(steps)} stages at most, not {n_stages}: its "
            "blocks, and what is before and after them"
        )
    times_ns = _times_of(steps, run, shell.name)
    _warn_of_twice(shell.name, times_ns)
    cuts = [Cut(position) for position in range(1, len(times_ns))]
    n_stages = min(_STAGES, len(shell.blocks)) if n_stages is None else n_stages
    borders = [0, *even_cuts(times_ns, cuts, n_stages), len(times_ns)]
    stages = [BlockStage(body, *border) for border in itertools.pairwise(borders)]
    check_stages(stages, model, run, tells_apart=True)
    if compiler is not None:
        body.blocks = [compiler(block) for block in body.blocks]
    return StagedModel(stages, name=shell.name)


def _body(model: Any, path: Sequence[str], run: Example) -> _Body:
    try:
        return _Body(Shell(model, path, run.copy()), run.copy())
    except StagingError:
        raise
    # Raised by the model's own code, where it gets from a stand-in what no block would return.
    except Exception as error:
        raise StagingError(
            f"{type(model).__name__} does not run with stand-ins for its blocks "
            f"{'.'.join(path)!r} ({error}); name others (blocks=), or try slice_model"
        ) from error


def _times_of(steps: Sequence[BlockStage], run: Example, name: str) -> list[int]:
    try:
        return stage_times(steps, run)
    # A block's own, where the model makes another type of what the one before has returned.
    except Exception as error:
        raise StagingError(
            f"{name} does not run block by block: {first_line(error)}; what a block returns has to "
            "be what the next one is called with; try slice_model"
        ) from error


def _warn_of_twice(name: str, times_ns: Sequence[int]) -> None:
    share = times_ns[0] / sum(times_ns)
    if share > _SHARE:
        _log.warning(
            "%s spends %.0f %% of its time before its blocks, and in stages that is spent twice; "
            "slice_model does not run it again",
            name,
            100 * share,
        )


class _Body:
    """A model's blocks, and what is around them: step 0 is the prelude, the last the postlude."""

    def __init__(self, shell: Shell, example: Example) -> None:
        self.shell = shell
        self.blocks: list[Callable[..., Any]] = list(shell.blocks)
        self._example = example
        self._kinds: list[_Kind] = []
        self.begin(example.batch())

    @property
    def last(self) -> int:
        """The number of the postlude."""
        return len(self.blocks) + 1

    def begin(self, batch: Sequence[Any]) -> tuple[Any, ...]:
        """Run the prelude; returns what goes from stage to stage."""
        run = self._example.like(batch)
        self._check_constants(run)
        prelude = self.shell.prelude(run)
        kind = self._kind(prelude, run)
        tensors = tuple(
            tensor if has_rows else Shared(tensor)
            for tensor, has_rows in zip(prelude.tensors, kind.is_batched, strict=True)
        )
        leaves = tuple(each if _is_array(each) else Shared(each) for each in run.leaves())
        return leaves, prelude.hidden, tensors, Shared(kind.of_contents(tensors))

    def _check_constants(self, run: Example) -> None:
        """Raise TypeError for others than the example's: what the model does then is not checked.

        Such as one by which it returns the hidden states between its blocks as well.
        """
        leaves, expected = run.leaves(), self._example.leaves()
        if len(leaves) == len(expected):
            pairs = zip(leaves, expected, strict=True)
            if all(_is_tensor(one) or _is_tensor(other) or one == other for one, other in pairs):
                return
        found, wanted = (
            [each for each in every if not _is_tensor(each)] for every in (leaves, expected)
        )
        raise TypeError(
            f"the stages were cut with {len(expected) - len(wanted)} tensors and {wanted}, and are "
            f"called with {len(leaves) - len(found)} and {found}"
        )

    def through(self, state: tuple[Any, ...], begin: int, end: int) -> tuple[Any, ...]:
        """Run the blocks from ``begin`` to before ``end``."""
        leaves, hidden, tensors, kind = state
        plain = _without_shared(tensors)
        for number in range(begin, end):
            calls = kind.value.calls
            args, kwargs = calls.arguments(number, hidden, plain)
            with calls.around(number):
                hidden = self.shell.hidden_of(self.blocks[number](*args, **kwargs))
        return leaves, hidden, tensors, kind

    def end(self, state: tuple[Any, ...]) -> Any:
        """Run the postlude; returns the model's output."""
        leaves, hidden, *_ = state
        return self.shell.postlude(self._example.of_leaves(_without_shared(leaves)), hidden)

    def _kind(self, prelude: Prelude, run: Example) -> _Kind:
        """The kind of batches that call the blocks as this one does."""
        for kind in self._kinds:
            if kind.calls == prelude.calls:
                return kind
        # With all of its rows and one more, values that depend on the contents stay as they are.
        larger = self.shell.prelude(run.with_rows(run.rows + 1))
        if larger.calls != prelude.calls:
            raise StagingError(
                f"{self.shell.name} calls its blocks in another way with {run.rows} rows than with "
                f"{run.rows + 1}; what they are called with may not depend on the size of the batch"
            )
        self._check_axes(prelude, larger, run.rows)
        kind = _Kind(
            prelude.calls,
            tuple(
                _has_rows(one, other, run.rows)
                for one, other in zip(prelude.tensors, larger.tensors, strict=True)
            ),
        )
        # Constants that depend on a length make as many kinds as there are lengths.
        self._kinds = [*self._kinds[1 - _KINDS :], kind]
        return kind

    def _check_axes(self, prelude: Prelude, larger: Prelude, rows: int) -> None:
        """Raise StagingError for a tensor that has the batch as another axis than the first."""
        pairs = [(prelude.hidden, larger.hidden)]
        # Other tensors may have no batch axis at all.
        pairs += [
            (one, other)
            for one, other in zip(prelude.tensors, larger.tensors, strict=True)
            if one.shape != other.shape
        ]
        for one, other in pairs:
            if not _has_rows(one, other, rows):
                raise StagingError(
                    f"{self.shell.name} calls its blocks with a tensor {list(one.shape)} where "
                    f"there are {rows} rows, and the batch has to be the first axis; try "
                    "slice_model, or write its stages as functions"
                )


class _Kind:
    """How batches call the blocks, and which of the prelude's tensors have the batch as an axis.

    Batches of one kind (the same object) may be joined: their tensors without a batch axis are
    equal, too.
    """

    __slots__ = ("_seen", "calls", "is_batched")

    def __init__(self, calls: BlockCalls, is_batched: tuple[bool, ...]) -> None:
        self.calls = calls
        self.is_batched = is_batched
        self._seen: dict[tuple[Any, ...], tuple[tuple[Any, ...], _Kind]] = {}
        """By shapes: the first tensors without a batch axis, and the kind of all batches with
        equal ones."""

    def of_contents(self, tensors: Sequence[Any]) -> _Kind:
        """The kind of a batch with these tensors. Threads may ask at the same time."""
        import torch

        values = tuple(each.value for each in tensors if isinstance(each, Shared))
        if not values:
            return self
        shapes = tuple((*each.shape, each.dtype, each.device) for each in values)
        found = self._seen.get(shapes)
        if found is None:
            if len(self._seen) >= _KINDS:
                self._seen = {}
            found = self._seen.setdefault(shapes, (values, self._new()))
        first, kind = found
        return kind if all(map(torch.equal, first, values)) else self._new()

    def _new(self) -> _Kind:
        return _Kind(self.calls, self.is_batched)


class BlockStage:
    """A model's steps from ``begin`` to before ``end``: the prelude, blocks, the postlude."""

    def __init__(self, body: _Body, begin: int, end: int) -> None:
        self._body = body
        self._begin, self._end = begin, end

    def __call__(self, *batch: Any) -> Any:
        """Takes the batch if it is the first stage, else what the stage before returned."""
        torch = torch_in_this_thread()
        body = self._body
        with torch.no_grad():
            state = batch[0] if self._begin else body.begin(batch)
            state = body.through(state, max(self._begin - 1, 0), min(self._end, body.last) - 1)
            return body.end(state) if self._end > body.last else state

    def parameters(self) -> Iterator[Any]:
        """Those of the whole model: they tell on which device it runs."""
        parameters: Iterator[Any] = self._body.shell.model.parameters()
        return parameters

    def __repr__(self) -> str:
        return f"<BlockStage of steps {self._begin} to {self._end - 1}>"


def _has_rows(one: Any, other: Any, rows: int) -> bool:
    return bool(one.dim() and one.shape[0] == rows and other.shape == (rows + 1, *one.shape[1:]))


def _is_tensor(leaf: Any) -> bool:
    import torch

    return isinstance(leaf, torch.Tensor)


def _is_array(leaf: Any) -> bool:
    import torch

    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0


def _without_shared(values: Sequence[Any]) -> list[Any]:
    return [each.value if isinstance(each, Shared) else each for each in values]


def _path_to_blocks(model: Any) -> list[str]:
    """The names of attributes that lead to the container with the most weights."""
    import torch

    containers = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList | torch.nn.Sequential) and len(module) > 1
    ]
    # The first of equal ones is the outermost.
    found = max(
        containers,
        key=lambda found: sum(each.numel() for each in found[1].parameters()),
        default=None,
    )
    if found is None:
        raise StagingError(
            f"{type(model).__name__} has no nn.ModuleList or nn.Sequential of blocks; use "
            "slice_model, or name the container (blocks=)"
        )
    return [name for name in found[0].split(".") if name]
