"""Move existing tensors to other memory: everything over one storage goes over to another.

Where torch can swap the memory of two storages (``_swap_data_ptr_``, from about 2.12 on), it does,
below all tensors, views and aliases. Where it cannot, each tensor is put on the other storage with
``tensor.data = ...``: that keeps the object, its version counter, gradient, graph and hooks. If
torch's count of a storage's users shows more tensors than the caller knows, one pass over the
objects of the garbage collector finds every other tensor that a program can reach.

Without the swap, some users cannot follow: tensors that autograd saved of an expression, such as
the transpose in a linear layer; a storage object or a DLPack capsule that the program holds;
tensors hidden by ``gc.freeze``. They keep the old memory and its bytes, and are counted.

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
"""By the address of torch's storage object, the tensors on it, by identity."""


def has_swap() -> bool:
    """Whether this torch can swap the memory of two storages."""
    return hasattr(torch.UntypedStorage, _SWAP)


def replace(tensor: torch.Tensor, storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """Put ``tensor`` on ``storage``. Nothing else reads the tensor's memory or uses ``storage``.

    Returns the storage that then has the old memory. ``tensor`` keeps its storage object where
    torch can swap; elsewhere its storage object is ``storage``.
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
    """Put everything over each of ``sources`` on its target; return how many keep a user.

    ``tensors`` are those that the caller knows of. The caller's only reference to each source is
    the one in ``sources``.
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
    """Run torch's own code in the block, whatever modes and subclasses of tensors there are."""
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
        # A tensor that cannot be moved, such as a quantized one, shows in the counts.
        with contextlib.suppress(RuntimeError, TypeError):
            _put(tensor, storage)


def _users_of(storages: Sequence[torch.UntypedStorage], known: Iterable[torch.Tensor]) -> _Users:
    """Return all tensors over ``storages``; ``known`` may already be all of them."""
    users: _Users = {each._cdata: {} for each in storages}
    _collect(known, users)
    uses = (_Uses.of(storages, index).storage for index in range(len(storages)))
    if any(map(operator.gt, uses, (_unused().storage + len(each) for each in users.values()))):
        _collect(gc.get_objects(), users)
    return users


def _collect(objects: Iterable[Any], users: _Users) -> None:
    """Add the tensors among ``objects`` to ``users``. Looks at other objects' types only."""
    kinds: dict[int, bool] = {}
    for each in objects:
        kind = type(each)  # isinstance may call code of the program, and wake lazy objects
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
    """Reference counts of a storage: torch's own, and those of its object in Python."""

    storage: int
    objects: int

    @classmethod
    def of(cls, storages: Sequence[torch.UntypedStorage], index: int) -> _Uses:
        """Count the uses. A sequence is passed so that the number of references is known."""
        count: int = torch._C._storage_Use_Count(storages[index]._cdata)
        return cls(count, sys.getrefcount(storages[index]))


@functools.lru_cache(maxsize=1)
def _unused() -> _Uses:
    """Measure the counts of a storage that only a sequence holds: torch decides them."""
    with _plain():
        return _Uses.of([torch.zeros(4, device="cpu").untyped_storage()], 0)


# --- what torch must be able to do ----------------------------------------------------------------


def missing_capability() -> str | None:
    """Say why this torch cannot move tensors to other memory, or None; tried in host memory."""
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
