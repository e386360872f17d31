"""Other memory for tensors that exist: everything that lies on a storage goes on with another one.

Where torch can swap the memory of two storages (``_swap_data_ptr_``, from about 2.12 on), that is
done, below all tensors, views and aliases. Where it cannot, each tensor is put on the other storage
by itself, with ``tensor.data = ...``: that keeps the object, its version counter, gradient, graph
and hooks. Which tensors those are is known by torch's count of a storage's users, or else found by
one pass over what the garbage collector knows, which has every tensor that a program can reach.

What no tensor in Python stands for cannot follow then: what autograd saved of an expression, such
as the transpose in a linear layer; a storage object or a DLPack capsule in somebody's hands; what
``gc.freeze`` has put away. It keeps the old memory, and its bytes, and is counted.

Everything here is for tensors of ordinary memory, under the GIL.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import operator
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

__all__ = ["has_swap", "missing_capability", "move", "replace"]

_SWAP = "_swap_data_ptr_"
_untyped_storage: Any = torch.Tensor.untyped_storage
_data: Any = torch.Tensor.data
_Users = dict[int, dict[int, torch.Tensor]]
"""Tensors by their identity, by the address of torch's storage object that they lie on."""


def has_swap() -> bool:
    """Whether this torch can swap the memory of two storages."""
    return hasattr(torch.UntypedStorage, _SWAP)


def replace(tensor: torch.Tensor, storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """Put ``tensor``, of whose memory nothing else reads, on ``storage``, which nothing else uses.

    Returns the storage that has the old memory afterwards; ``tensor`` keeps its storage object
    where torch can swap, and has ``storage`` where not.
    """
    old: torch.UntypedStorage = tensor.untyped_storage()
    if has_swap():
        _swap(old, storage)
        return storage
    with _plain():
        _put(tensor, storage)
    return old


def move(
    sources: Sequence[torch.UntypedStorage],
    targets: Sequence[torch.UntypedStorage],
    tensors: Iterable[torch.Tensor],
) -> int:
    """Put everything over each of ``sources`` on that of ``targets``; how many could not wholly be.

    ``tensors`` are those the caller knows of. The caller has no reference to a source but that in
    ``sources``.
    """
    if has_swap():
        for source, target in zip(sources, targets, strict=True):
            _swap(source, target)
        return 0
    with _plain():
        users = _users_of(sources, tensors)
        for source, target in zip(sources, targets, strict=True):
            _put_all(users[source._cdata].values(), target)
        del source
        return sum(_Uses.of(sources, index) != _unused() for index in range(len(sources)))


def _swap(storage: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
    getattr(storage, _SWAP)(other)


@contextlib.contextmanager
def _plain() -> Iterator[None]:
    """Torch's own code, whatever modes and subclasses of tensors there are."""
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        yield


def _put(tensor: torch.Tensor, storage: torch.UntypedStorage) -> None:
    """Lay one tensor over ``storage`` as it lies over its own; for :func:`_plain`."""
    # The other mode is rare, and takes longer to enter than all the rest.
    is_inference = tensor.is_inference()
    if is_inference == torch.is_inference_mode_enabled():
        _lay(tensor, storage)
    else:
        with torch.inference_mode(is_inference):
            _lay(tensor, storage)


def _lay(tensor: torch.Tensor, storage: torch.UntypedStorage) -> None:
    other = tensor.new_empty(0)
    other.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
    if tensor.is_conj():
        other = other.conj()
    if tensor.is_neg():
        other = torch._neg_view(other)
    _data.__set__(tensor, other)


def _put_all(tensors: Iterable[torch.Tensor], storage: torch.UntypedStorage) -> None:
    for tensor in tensors:
        # What cannot be put elsewhere, quantized for one, shows in the counts.
        with contextlib.suppress(RuntimeError, TypeError):
            _put(tensor, storage)


def _users_of(storages: Sequence[torch.UntypedStorage], known: Iterable[torch.Tensor]) -> _Users:
    """All tensors over ``storages``, of which ``known`` may already be all."""
    users: _Users = {each._cdata: {} for each in storages}
    _collect(known, users)
    uses = (_Uses.of(storages, index).storage for index in range(len(storages)))
    if any(map(operator.gt, uses, (_unused().storage + len(each) for each in users.values()))):
        _collect(gc.get_objects(), users)
    return users


def _collect(objects: Iterable[Any], users: _Users) -> None:
    """Add the tensors among ``objects`` to ``users``. Looks at nothing but their types."""
    kinds: dict[int, bool] = {}
    for each in objects:
        kind = type(each)  # what isinstance asks may be code of the program, and wake lazy objects
        is_tensor = kinds.get(id(kind))
        if is_tensor is None:
            is_tensor = kinds[id(kind)] = type.__subclasscheck__(torch.Tensor, kind)
        if is_tensor:
            # Sparse, lazy and functorch's tensors have no storage of their own.
            with contextlib.suppress(RuntimeError, ValueError):
                storage = _untyped_storage(each)._cdata
                if storage in users:
                    users[storage][id(each)] = each


# --- who uses a storage ---------------------------------------------------------------------------


class _Uses(NamedTuple):
    """Reference counts of a storage: torch's own, and those to its object in Python."""

    storage: int
    objects: int

    @classmethod
    def of(cls, storages: Sequence[torch.UntypedStorage], index: int) -> _Uses:
        """Takes a sequence, so that there is one reference to the object that is known."""
        count: int = torch._C._storage_Use_Count(storages[index]._cdata)
        return cls(count, sys.getrefcount(storages[index]))


@functools.lru_cache(maxsize=1)
def _unused() -> _Uses:
    """Those of a storage that only a sequence holds: measured, they are torch's business."""
    with _plain():
        return _Uses.of([torch.zeros(4, device="cpu").untyped_storage()], 0)


# --- what torch must be able to do ----------------------------------------------------------------


def missing_capability() -> str | None:
    """Why this torch cannot move tensors to other memory, or None; tried in host memory."""
    if not has_swap():
        for name in ("_storage_Use_Count", "_DisableTorchDispatch", "DisableTorchFunction"):
            if not hasattr(torch._C, name):
                return f"torch {torch.__version__} has no {name}"
    return _broken_promise(has_swap())


@functools.lru_cache(maxsize=2)
def _broken_promise(is_swapped: bool) -> str | None:
    with _plain(), torch.inference_mode(False):
        parameter = torch.nn.Parameter(torch.zeros(4, device="cpu"))
        alias = parameter.detach()
        before = (id(parameter), parameter._version, parameter.requires_grad, alias._version)
        ones = torch.ones(4, device="cpu").untyped_storage()
        address = ones.data_ptr()
        sources = [parameter.untyped_storage()]
        if not (gc.is_tracked(parameter) and gc.is_tracked(alias)):
            return "the garbage collector does not know tensors"
        if move(sources, [ones], [parameter, alias]):
            return "what uses a storage cannot be told"
        after = (id(parameter), parameter._version, parameter.requires_grad, alias._version)
        if before != after or parameter.data_ptr() != address or alias.data_ptr() != address:
            return "tensors do not follow to other memory"
        if is_swapped:
            return None
        sources = [parameter.untyped_storage()]
        hidden = alias.untyped_storage()
        del alias
        if move(sources, [hidden.clone()], [parameter]) != 1:  # type: ignore[no-untyped-call]
            return "a storage in use cannot be noticed"
    return None
