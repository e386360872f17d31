"""When a ``copy_`` between two tensors may be replaced by something else.

Owns the conditions on the call (:func:`is_watched`), on the pair (:func:`is_stock_copy`,
:func:`is_byte_copy`, :func:`is_ordered_copy`) and on the destination (:func:`is_exclusive`). They
only look, and in doubt they decide for the copy.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.fx import _symbolic_trace

from trims_shim.patches import torch_repoint
from trims_shim.patches.torch_modes import has_mode

__all__ = [
    "PLAIN_TYPES",
    "has_views",
    "held_aliases",
    "holding_state_dict",
    "is_byte_copy",
    "is_exclusive",
    "is_ordered_copy",
    "is_sole_owner",
    "is_stock_copy",
    "is_transformed",
    "is_watched",
    "missing_capability",
]

_holds_state_dict: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "trims_shim_holds_state_dict", default=False
)
_FX_TRACING = next(
    name for name in ("is_fx_symbolic_tracing", "is_fx_tracing") if hasattr(_symbolic_trace, name)
)
"""The second, older name is also true during an export, and warns in a torch with the newer one."""
_COPY = torch._C.TensorBase.copy_
PLAIN_TYPES: frozenset[Any] = frozenset({torch.Tensor, torch.nn.Parameter})
_COMPLEX = frozenset({torch.complex32, torch.complex64, torch.complex128})
_REAL = frozenset(
    getattr(torch, name)
    for name in (
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float16", "bfloat16", "float32", "float64"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
    )
    if hasattr(torch, name)
)


class _Owners(NamedTuple):
    """Reference counts that together show every other way to a tensor's memory.

    - ``storage_uses``: other views of it, also by a numpy array;
    - ``storage_objects``: references to the storage object, also by a typed storage;
    - ``tensor_uses``: a DLPack capsule or its consumer, a graph, a script module.

    They are compared with the counts of a tensor that nothing else holds. Those are measured once,
    because the absolute numbers are torch's business.
    """

    storage_uses: int
    storage_objects: int
    tensor_uses: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Owners:
        storage = tensor.untyped_storage()
        return cls(
            torch._C._storage_Use_Count(storage._cdata),
            sys.getrefcount(storage),
            tensor._use_count(),  # type: ignore[attr-defined]
        )


@functools.lru_cache(maxsize=1)
def _sole() -> _Owners:
    """Return the counts of a tensor that nothing else holds."""
    return _Owners.of(torch.zeros(4, device="cpu"))


def missing_capability() -> str | None:
    """Say why this torch cannot elide copies, or None. Tries its private parts on tiny tensors."""
    needed = (
        (torch.Tensor, "_use_count"),
        (torch._C, "_storage_Use_Count"),
        (torch._C, "_is_cow_tensor"),
        (torch._C, "_len_torch_function_stack"),
        (torch._C, "_len_torch_dispatch_stack"),
    )
    for holder, name in needed:
        if not hasattr(holder, name):
            return f"torch {torch.__version__} has no {name}"
    if reason := torch_repoint.missing_capability():
        return reason
    for what, export in _exports():
        tensor = torch.zeros(4, device="cpu")
        keep = export(tensor)
        if _Owners.of(tensor) == _sole():
            return f"{what} cannot be noticed"
        del keep
    return None


def _exports() -> Iterator[tuple[str, Callable[[torch.Tensor], object]]]:
    yield "a view", lambda tensor: tensor.view(2, 2)
    yield "a detached alias", lambda tensor: tensor.detach()
    yield "a storage", lambda tensor: tensor.untyped_storage()
    yield "a part of the storage", lambda tensor: tensor.untyped_storage()[4:]
    yield "a typed storage", lambda tensor: tensor._typed_storage()  # type: ignore[no-untyped-call]
    yield "a DLPack capsule", lambda tensor: tensor.__dlpack__()
    if "numpy" in sys.modules:  # torch imports it where it can use it
        yield "a numpy array", lambda tensor: tensor.numpy()


def is_transformed() -> bool:
    """Whether torch now compiles, traces or transforms operations, or is in inference mode."""
    return bool(
        torch.compiler.is_compiling()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
        or torch.is_inference_mode_enabled()
        or getattr(_symbolic_trace, _FX_TRACING)()
    )


def is_watched(has_mode: Callable[[], bool] = has_mode) -> bool:
    """Whether something besides the program can see or change what ``copy_`` does right now.

    ``has_mode`` says whether a function or dispatch mode can.
    """
    return bool(
        is_transformed()
        or has_mode()
        or any(each.copy_ is not _COPY for each in PLAIN_TYPES)  # the program replaced it
        or torch.autograd.forward_ad._current_level >= 0
        or torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
        or torch.are_deterministic_algorithms_enabled()
        or torch.__future__.get_swap_module_params_on_conversion()
    )


def is_stock_copy(dst: torch.Tensor, src: torch.Tensor) -> bool:
    """Whether ``dst.copy_(src)`` is an ordinary copy on one device that neither fails nor warns."""
    return (
        type(dst) in PLAIN_TYPES
        and type(src) in PLAIN_TYPES
        and (dst.is_cpu or dst.is_cuda)
        and src.device == dst.device
        and dst.layout is torch.strided
        and src.layout is torch.strided
        and dst.shape == src.shape
        and not dst.is_inference()
        and (src.dtype in _REAL or (src.dtype in _COMPLEX and dst.dtype in _COMPLEX))
        and (dst.dtype in _REAL or dst.dtype in _COMPLEX)
    )


def is_byte_copy(dst: torch.Tensor, src: torch.Tensor) -> bool:
    """Whether ``dst.copy_(src)``, a stock copy, moves bytes in order and leaves no other trace."""
    return dst.dtype is src.dtype and is_ordered_copy(dst, src)


def is_ordered_copy(dst: torch.Tensor, src: torch.Tensor) -> bool:
    """As :func:`is_byte_copy`, of numbers that may be converted on the way."""
    return (
        dst.is_contiguous()
        and src.is_contiguous()
        and not (dst.is_neg() or src.is_neg() or dst.is_conj() or src.is_conj())
        and not src.is_inference()
        and not torch._C._is_cow_tensor(dst)  # type: ignore[attr-defined]
        and dst.is_leaf
        and not (torch.is_grad_enabled() and (dst.requires_grad or src.requires_grad))
    )


@contextlib.contextmanager
def holding_state_dict() -> Iterator[None]:
    """Declare that callers of load_state_dict in the block hold ``module.state_dict()`` meanwhile.

    That is one alias for each name in it.
    """
    token = _holds_state_dict.set(True)
    try:
        yield
    finally:
        _holds_state_dict.reset(token)


def _saves_aliases(module: torch.nn.Module) -> bool:
    """Whether a module's ``state_dict()`` has its tensors, not clones or a part: torch's own."""
    kind, stock = type(module), torch.nn.Module
    return (
        kind.state_dict is stock.state_dict
        and kind._save_to_state_dict is stock._save_to_state_dict
        and not {"state_dict", "_save_to_state_dict"} & module.__dict__.keys()
        and not module._state_dict_hooks
    )


def held_aliases(module: torch.nn.Module) -> Counter[int]:
    """Count the aliases that load_state_dict's caller holds, by id of parameter or buffer."""
    aliases: Counter[int] = Counter()
    if _holds_state_dict.get() and all(map(_saves_aliases, module.modules())):
        for each in module.modules():
            aliases.update(map(id, each._parameters.values()))
            aliases.update(
                id(buffer)
                for name, buffer in each._buffers.items()
                if name not in each._non_persistent_buffers_set
            )
    return aliases


def is_exclusive(dst: torch.Tensor, size: int, *, aliases: int = 0) -> bool:
    """Whether :func:`is_sole_owner` holds, and the memory is neither shared nor pinned."""
    return (
        not dst.is_pinned()  # first: torch lets other threads run, which may become owners
        and not dst.untyped_storage().is_shared()
        and is_sole_owner(dst, size, aliases=aliases)
    )


def is_sole_owner(dst: torch.Tensor, size: int, *, aliases: int = 0) -> bool:
    """Whether ``dst`` is all of its storage, which only ``aliases`` other tensors can reach."""
    expected = _sole()._replace(storage_uses=_sole().storage_uses + aliases)
    # A contiguous tensor as long as its storage begins where the storage does.
    return _Owners.of(dst) == expected and dst.untyped_storage().nbytes() == size


def has_views(storage: torch.UntypedStorage) -> bool:
    """Whether more than one tensor is on a storage, as after ``tensor.numpy()``."""
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count > _sole().storage_uses
