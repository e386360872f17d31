"""What ``trims stage profile`` measures: a model, the way to cut it, and batches for it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trims_shim.batching import Batcher
from trims_shim.batching.collating.collate import Collate, collate_of, columns
from trims_shim.batching.collating.collates import Columns
from trims_shim.batching.staged.model import StagedModel
from trims_shim.cli.targets import items_of, made, named, running
from trims_shim.errors import ConfigError, StagingError, TrimsError

__all__ = ["StageTarget"]

_DEFAULT_MAX_BATCH_SIZE = 64
"""DVABatch (ATC'22), section 7, has batches of up to 64."""
_EXAMPLE_SIZE = 2
"""Of the batch that a model is traced with: with one item, sizes could not be told from ones."""
_TIMED_SIZE = 8
"""Of the batch whose operations are timed, to cut the model into stages of even time."""


@dataclass(frozen=True, slots=True)
class StageTarget:
    """A model, with or without stages, and how copies of an item become a batch."""

    model: StagedModel | None
    """None if the model has to be cut."""
    slice_into: Callable[[int], StagedModel]
    max_batch_size: int
    items: dict[int | None, list[Any]]
    """A value for each argument, by ascending length; None for items of one shape."""
    collate: Collate
    cut_by: str = ""
    """The public function that cuts like ``slice_into``; empty if the model has stages."""

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> StageTarget:
        """From the command line. Raises ConfigError, or TrimsError for what is not there."""
        found = _found(arguments.model)
        collate, largest = collate_of(arguments.collate or "auto"), _DEFAULT_MAX_BATCH_SIZE
        if isinstance(found, Batcher):
            largest = found.max_batch_size
            collate = collate if arguments.collate else found.collate
            found = _model_of(found, arguments.model)
        items = _items(arguments)
        if isinstance(found, str):
            items = {
                length: [_as_array(each) for each in values] for length, values in items.items()
            }
        count = len(next(iter(items.values())))
        if count > 1 and not isinstance(collate, Columns):
            collate = columns(arguments.collate or "auto", count)
        model = found if isinstance(found, StagedModel) else None
        target = cls(model, _refuse, arguments.max_batch_size or largest, items, collate)
        if model is not None:
            return target
        with running(arguments.model, arguments, _EXAMPLE_SIZE):
            slice_into, cut_by = target.slicer(found)
        return replace(target, slice_into=slice_into, cut_by=cut_by)

    @property
    def lengths(self) -> list[int | None]:
        """The lengths of the items, ascending."""
        return list(self.items)

    def make_batch(self, length: int | None) -> Callable[[int], Sequence[Any]]:
        """A function that makes a batch of a size, one value for each argument of the model."""
        values = self.items[length]
        is_single = len(values) == 1

        def make(size: int) -> Sequence[Any]:
            batch = self.collate.join([values[0] if is_single else tuple(values)] * size)
            return (batch,) if is_single else tuple(batch)

        return make

    def slicer(self, model: Any) -> tuple[Callable[[int], StagedModel], str]:
        """What cuts a torch module, or the .onnx file of this path, and how users call it.

        A module is traced; if that is not possible, it is cut between its blocks. Raises
        StagingError if neither is, here or when the result is called.
        """
        if isinstance(model, str):
            from trims_shim.batching.staged.slicing.onnx_slicing import TracedOnnx

            # Without the daemon, which this command must not start.
            example = self._example(self.lengths[-1])
            return TracedOnnx(model, example=example, is_shared=False).even, "slice_onnx"
        try:
            return self._graph_slicer(model), "slice_model"
        except StagingError as error:
            return self._block_slicer(model, untraced=error), "slice_blocks"

    def _graph_slicer(self, model: Any) -> Callable[[int], StagedModel]:
        """Trace and time the model once, for all the numbers of stages that are tried."""
        from trims_shim.batching.staged.slicing.examples import check_stages
        from trims_shim.batching.staged.slicing.tracing import TracedModel

        traced = TracedModel(model, self._example(self.lengths[-1]), varying=self._varying())
        times_ns = traced.measure(min(_TIMED_SIZE, self.max_batch_size))

        def slice_into(count: int) -> StagedModel:
            stages = traced.stages(traced.even(count, times_ns))
            check_stages(stages, model, traced.example)
            return StagedModel(stages, name=traced.name)

        slice_into(1)
        return slice_into

    def _block_slicer(self, model: Any, *, untraced: StagingError) -> Callable[[int], StagedModel]:
        from trims_shim.batching.staged.slicing.block_slicing import slice_blocks

        example = self._example(self.lengths[-1])

        def slice_into(count: int) -> StagedModel:
            try:
                return slice_blocks(model, example, count)
            except (StagingError, ValueError) as error:
                if str(error) == str(untraced):
                    raise
                # Either may be what the user can do something about.
                raise StagingError(f"slice_model: {untraced}\nslice_blocks: {error}") from error

        return slice_into

    def _example(self, length: int | None) -> Any:
        """The arguments of the model; a mapping stands for arguments by name."""
        batch = self.make_batch(length)(_EXAMPLE_SIZE)
        return batch[0] if len(batch) == 1 and isinstance(batch[0], Mapping) else tuple(batch)

    def _varying(self) -> set[int]:
        """The axes of tensors that differ from one length to another."""
        from trims_shim.batching.staged.slicing.examples import Example

        short, long = (Example(self._example(self.lengths[end])).leaves() for end in (0, -1))
        if len(short) != len(long):
            raise StagingError(
                f"items of {self.lengths[0]} and of {self.lengths[-1]} are not of equally many "
                "tensors: make some that differ in their shapes only"
            )
        return {
            axis
            for one, other in zip(short, long, strict=True)
            for axis, sizes in enumerate(zip(_shape(one), _shape(other), strict=False))
            if len(set(sizes)) > 1
        }


def _shape(leaf: Any) -> Sequence[int]:
    return getattr(leaf, "shape", ())


def _items(arguments: argparse.Namespace) -> dict[int | None, list[Any]]:
    lengths = arguments.lengths
    has_place = any(None in shape for shape in arguments.shape or ())
    if has_place and not lengths:
        raise ConfigError("--shape has an N: say with --lengths what it stands for")
    if lengths and arguments.shape and not has_place:
        raise ConfigError("--lengths has no place in --shape: write N where the length is")
    if not lengths:
        return {None: items_of(arguments)}
    return {length: items_of(arguments, length=length) for length in sorted(set(lengths))}


def _as_array(value: Any) -> Any:
    """Return a numpy array, which onnxruntime's sessions take."""
    return value.numpy() if hasattr(value, "numpy") else value


# --- models ---------------------------------------------------------------------------------------


def _found(name: str) -> Any:
    """A StagedModel, a Batcher, a torch module, or the path of an .onnx file."""
    if name.endswith(".onnx"):
        if not os.path.isfile(name):
            raise TrimsError(f"there is no file {name}")
        return name
    found = named(name)
    if _is_model(found):
        return found
    model = made(found, name)
    if not _is_model(model):
        raise TrimsError(
            f"{name} is {type(model).__name__}: not a StagedModel, a torch module, nor a function "
            "that makes one"
        )
    return model


def _is_model(found: Any) -> bool:
    return isinstance(found, StagedModel | Batcher) or _is_module(found)


def _is_module(found: Any) -> bool:
    names = {f"{base.__module__}.{base.__qualname__}" for base in type(found).__mro__}
    return "torch.nn.modules.module.Module" in names


def _model_of(batcher: Batcher, name: str) -> StagedModel:
    if batcher.model is None:
        raise TrimsError(
            f"{name} is a batcher of a function without stages; `trims batch profile` measures it"
        )
    return batcher.model


def _refuse(count: int) -> StagedModel:
    raise AssertionError("a model that has stages is not cut")
