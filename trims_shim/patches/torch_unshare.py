"""Private memory for tensors on shared device memory that a program is about to write.

A write to shared device memory is fatal to the writing process. Owns the seams in front of the
usual writers. For tensors elsewhere, each seam costs one lookup in an empty index, or nothing:

- an optimizer gets a parameter (``add_param_group``, which every constructor calls), or its
  state (``load_state_dict``, which keeps tensors that are on the device already), or updates it
  from a copy on the host (:mod:`.torchao_offload`);
- ``load_state_dict`` copies into a module (patched here only when :mod:`.torch_module` is not
  applied, which does the same), or with ``assign=True`` puts in tensors that the module will write;
- ``torch.nn.init`` fills a tensor (:mod:`.torch_initializers`), or an initialiser of transformers
  or timm does (:mod:`.transformers_initializers`, :mod:`.timm_initializers`);
- a buffer, which its module may write, is registered or put in (:mod:`.accelerate_buffers`);
- an embedding renormalises its weight, also where ``max_norm`` was set, or given to the function,
  after the load;
- ``AveragedModel`` updates its module; ``DistributedDataParallel``, FSDP, DeepSpeed and others
  broadcast tensors to give all ranks the same weights (``distribute_tensor`` by a name of its own:
  :mod:`.torch_dtensor`); ``torch.distributed.checkpoint`` loads into them
  (:mod:`.torch_checkpoint`);
- ``torch.multiprocessing`` sends a tensor: memory that is not torch's cannot be sent, a copy can;
- peft writes to base weights and adapters (:mod:`.peft_merge`, :mod:`.peft_hotswap`,
  :mod:`.peft_adapters`), loralib and lycoris to base weights (:mod:`.loralib_merge`,
  :mod:`.lycoris_merge`), RWKV and
  Shap-E to their own (:mod:`.transformers_rwkv`, :mod:`.diffusers_shap_e`), averages of
  diffusers and torch-ema to a model (:mod:`.diffusers_average`, :mod:`.torch_ema_average`),
  diffusers' textual inversion to embeddings
  (:mod:`.diffusers_inversion`), ema-pytorch to averages and models (:mod:`.ema_pytorch_average`),
  Lightning's callbacks to models (:mod:`.lightning_average`, :mod:`.pytorch_lightning_average`),
  trl to reference models (:mod:`.trl_reference`).

Every parameter, view, alias and ``.data`` over the same storage becomes private with it
(:mod:`.torch_repoint`). Parameters that their module writes in passing
(:func:`writes_own_parameters`) and parameters that an optimizer has (:func:`trained`) are not put
on shared memory in the first place.

These writers slip through and need ``TRIMS_DEVICE_ACCESS=private``: ``parameter.data += delta``
(merging adapters by hand, manual update steps, evolution strategies); other collectives, which are
left alone because torch.compile knows them by their identity; kernels that are given a parameter to
write; consumers of DLPack and ``__cuda_array_interface__`` that write. A CUDA graph that was
captured before a tensor became private goes on reading the shared bytes.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from trims_shim import diagnostics, patches
from trims_shim.patches import torch_device
from trims_shim.patches.points import PatchPoint, PatchState
from trims_shim.patches.torch_device import DevicePoint

__all__ = [
    "POINTS",
    "guarded_load",
    "is_assigning",
    "is_shared",
    "trained",
    "unshare",
    "unshare_buffer",
    "unshare_module",
    "wrap_broadcast",
    "writes_own_parameters",
    "writing_module",
    "writing_tensor",
]

_optimizers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""All that have parameters, by identity: one that defines equality need not have a hash."""
_moving = threading.RLock()
"""A forked child never waits for it: nothing is shared there."""


def is_shared(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies in shared device memory."""
    return torch_device.find(tensor) is not None


def unshare(tensors: Iterable[Any], why: str) -> None:
    """Give private memory to those of ``tensors`` that lie in shared device memory.

    Searching for aliases costs the same for many tensors as for one, so call this once for all.
    """
    if not torch_device.is_any_shared():
        return
    shared = [part for each in tensors for part in _parts(each) if is_shared(part)]
    if not shared:
        return
    # Without the lock, a second thread would put its copy over what the first has written since.
    with _moving:
        shared = list(filter(is_shared, shared))
        if not shared:
            return
        moved, left = torch_device.take_back(shared)
    diagnostics.count("unshared", why, moved)
    if left:
        diagnostics.count("alias_left", why, left)
        _warn_of_aliases()
    if torch_device.are_addresses_kept():
        _warn_of_graphs()


def _parts(value: Any) -> Iterator[torch.Tensor]:
    """Yield a tensor, or those that one without memory of its own wraps: of a DTensor its shard."""
    if is_traceable_wrapper_subclass(value):
        for name in value.__tensor_flatten__()[0]:
            yield from _parts(getattr(value, name))
    elif isinstance(value, torch.Tensor):
        yield value


@functools.lru_cache(maxsize=1)
def _warn_of_aliases() -> None:
    diagnostics.log(
        logging.WARNING,
        "a tensor became private while something that this torch has no way to move (an expression "
        "saved for backward, a storage object) reads its shared memory: it will not see the writes "
        "to the tensor. Load with TRIMS_DEVICE_ACCESS=private if it has to.",
    )


@functools.lru_cache(maxsize=1)
def _warn_of_graphs() -> None:
    diagnostics.log(
        logging.WARNING,
        "a parameter became private after a CUDA graph was captured; the graph goes on reading "
        "the shared weights. Set TRIMS_DEVICE_ACCESS=private to update weights under graphs.",
    )


def unshare_module(module: torch.nn.Module, why: str) -> None:
    """Make every parameter and buffer of a module tree private."""
    if torch_device.is_any_shared():
        unshare(_tensors(module), why)


def unshare_buffer(module: torch.nn.Module, name: str) -> None:
    """Make a tensor that was put into a module private, if it is a buffer."""
    buffers = module._buffers  # of a ScriptModule no dict, but a wrapper without get
    if torch_device.is_any_shared() and name in buffers:
        unshare((buffers[name],), "buffer")


def _own_writes(module: torch.nn.Module) -> Iterator[Any]:
    """Yield the tensors that a module tree writes itself: buffers and some parameters."""
    for each in module.modules():
        yield from each._buffers.values()
        if writes_own_parameters(each):
            yield from each.parameters()


def _tensors(module: torch.nn.Module) -> Iterator[Any]:
    for each in module.modules():
        yield from each._parameters.values()
        yield from each._buffers.values()


def trained() -> frozenset[int]:
    """Return the identities of all parameters of live optimizers."""
    return frozenset(
        id(parameter)
        for reference in _optimizers.valuerefs()  # a list, whatever other threads add meanwhile
        if (optimizer := reference()) is not None
        for group in optimizer.param_groups
        for parameter in group["params"]
    )


def writes_own_parameters(module: torch.nn.Module) -> bool:
    """Whether a module writes its parameters, or those of the modules in it.

    An embedding that is renormalised does in its forward. A merged layer of peft does when it is
    unmerged, by a method that each of its classes has for itself.
    """
    own = module.__dict__
    return own.get("max_norm") is not None or bool(own.get("merged_adapters"))


# --- seams ----------------------------------------------------------------------------------------


def writing_tensor(keyword: str, why: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return what wraps a function that writes its first argument, a tensor of this name."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def write(*args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                unshare((args[0] if args else kwargs.get(keyword),), why)
            return original(*args, **kwargs)

        return write

    return wrap


def writing_module(
    why: str, of: Callable[[Any], Any] = lambda own: own
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return what wraps a function, or a method, that writes the tensors of a module.

    It is ``of`` the first argument; by default that itself.
    """

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def write(own: Any, *args: Any, **kwargs: Any) -> Any:
            unshare_module(of(own), why)
            return original(own, *args, **kwargs)

        return write

    return wrap


wrap_broadcast = functools.lru_cache(maxsize=1)(writing_tensor("tensor", "distributed"))
"""All names of broadcast share one wrapper: pickle finds it by one of them."""


def _wrap_add_param_group(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def add_param_group(self: Any, param_group: Any) -> Any:
        result = original(self, param_group)
        _optimizers[id(self)] = self
        unshare(param_group["params"], "optimizer")
        return result

    return add_param_group


def _wrap_optimizer_load(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if torch_device.is_any_shared():
            # A subclass may yet put what it was given in the place of what torch made of it.
            unshare(_nested((self.state, args, kwargs)), "optimizer")
        return result

    return load_state_dict


def _nested(values: Iterable[Any]) -> Iterator[Any]:
    """Yield what is in an optimizer's state; SOAP and Shampoo keep lists of what they write."""
    for each in values:
        if isinstance(each, dict):
            yield from _nested(each.values())
        elif isinstance(each, (list, tuple)):
            yield from _nested(each)
        else:
            yield each


def _wrap_register(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def register_buffer(self: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, name, *args, **kwargs)
        unshare_buffer(self, name)
        return result

    return register_buffer


def _wrap_broadcasts(original: Callable[..., Any]) -> Callable[..., Any]:
    def _broadcast_coalesced(*args: Any, **kwargs: Any) -> Any:
        if torch_device.is_any_shared():
            unshare(args[1] if len(args) > 1 else kwargs.get("tensors", ()), "distributed")
        return original(*args, **kwargs)

    return _broadcast_coalesced


def _wrap_share(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _share_cuda_(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch_device.lies_in_arena(self):
            diagnostics.count("unshared", "multiprocessing")
            # torch keeps the sent copy alive until the receivers are done with it.
            return original(self.clone(), *args, **kwargs)
        return original(self, *args, **kwargs)

    return _share_cuda_


def _wrap_capture(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        torch_device.keep_addresses()
        # No arena is unmapped during a capture: unmapping waits for the device, which it forbids.
        arenas = _arenas()
        if arenas is None:
            return original(self, *args, **kwargs)
        arenas.begin_capture(id(self))
        try:
            return original(self, *args, **kwargs)
        except BaseException:
            arenas.end_capture(id(self))
            raise

    return capture_begin


def _wrap_capture_end(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def capture_end(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, *args, **kwargs)
        finally:
            arenas = _arenas()
            if arenas is not None:
                arenas.end_capture(id(self))

    return capture_end


def _arenas() -> Any:
    """Return the module that unmaps arenas; None if nothing has imported it to map any."""
    return sys.modules.get("trims_shim.client.device_arenas")


def _wrap_load_state_dict(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        return guarded_load(original, (self, *args), kwargs)

    return load_state_dict


def is_assigning(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of load_state_dict may put the state dict's own tensors into the module."""
    return bool(kwargs.get("assign")) or args[3:4] not in ((), (False,))


def guarded_load(original: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
    """Call a load_state_dict; tensors that it or the module will write become private."""
    if not torch_device.is_any_shared() or not args or not isinstance(args[0], torch.nn.Module):
        return original(*args, **kwargs)
    if not is_assigning(args, kwargs):
        unshare_module(args[0], "load_state_dict")
    result = original(*args, **kwargs)
    # Assigned tensors are the state dict's own. A mark in the state dict also makes torch assign.
    unshare(_own_writes(args[0]), "buffer")
    return result


def _probe_load_state_dict() -> str | None:
    for each in patches.applied().get("torch_module", []):
        is_load = each.point.target.endswith(":Module.load_state_dict")
        if is_load and each.state is PatchState.APPLIED:
            return "torch_module does it"
    return torch_device.missing_capability()


POINTS: tuple[PatchPoint, ...] = (
    DevicePoint("torch.optim.optimizer:Optimizer.add_param_group", "2.4+", _wrap_add_param_group),
    DevicePoint("torch.storage:UntypedStorage._share_cuda_", "2.4+", _wrap_share),
    DevicePoint("torch.cuda.graphs:CUDAGraph.capture_begin", "2.4+", _wrap_capture),
    DevicePoint("torch.cuda.graphs:CUDAGraph.capture_end", "2.4+", _wrap_capture_end),
    DevicePoint("torch.accelerator.graphs:Graph.capture_begin", "about 2.12+", _wrap_capture),
    DevicePoint("torch.accelerator.graphs:Graph.capture_end", "about 2.12+", _wrap_capture_end),
    DevicePoint("torch.optim.optimizer:Optimizer.load_state_dict", "2.4+", _wrap_optimizer_load),
    DevicePoint(
        "torch.optim.swa_utils:AveragedModel.update_parameters", "2.4+", writing_module("average")
    ),
    DevicePoint("torch.nn.modules.module:Module.register_buffer", "2.4+", _wrap_register),
    # torch.nn.functional calls this one from a function that TorchScript knows.
    DevicePoint("torch:embedding_renorm_", "2.4+", writing_tensor("input", "renorm")),
    DevicePoint("torch.distributed:broadcast", "2.4+", wrap_broadcast),
    DevicePoint("torch.distributed.distributed_c10d:broadcast", "2.4+", wrap_broadcast),
    DevicePoint("torch.distributed:_broadcast_coalesced", "2.4+", _wrap_broadcasts),
    PatchPoint(
        "torch.nn.modules.module:Module.load_state_dict",
        "2.4+",
        _wrap_load_state_dict,
        probe=_probe_load_state_dict,
    ),
)
