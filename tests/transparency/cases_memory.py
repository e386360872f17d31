"""What a program can ask about the memory behind loaded tensors."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from .payloads import bulk, net, saved, state
from .registry import Work, attempt, case, cases

LOADS = {
    "plain": {},
    "mmap": {"mmap": True},
    "cpu": {"map_location": "cpu"},
    "unsafe": {"weights_only": False},
}


def _each(work: Work, options: dict[str, Any], ask: Any) -> object:
    loaded = torch.load(work.file("model.pt", saved(state())), **options)
    return {name: attempt(ask, tensor) for name, tensor in loaded.items()}


def _alignment(tensor: torch.Tensor) -> object:
    """Whether it suits vector instructions; more than 64 bytes nobody may rely on."""
    return tensor.untyped_storage().data_ptr() % 64 == 0


def _flags(tensor: torch.Tensor) -> object:
    storage = tensor.untyped_storage()
    return {
        "shared": [tensor.is_shared(), storage.is_shared()],
        "pinned": [tensor.is_pinned(), storage.is_pinned()],
        "resizable": storage.resizable(),
        "sizes": [storage.nbytes(), storage.size(), len(storage), tensor.nbytes],
        "device": str(storage.device),
        "cuda": [storage.is_cuda, storage.is_hpu, storage.is_sparse],
        "type": str(storage.type()) if hasattr(storage, "type") else None,
    }


def _filename(tensor: torch.Tensor) -> object:
    storage = tensor.untyped_storage()
    return [storage.filename, attempt(tensor.storage)]


def _filename_of_saved_storage(tensor: torch.Tensor) -> object:
    return tensor.storage().filename


def _offset_attributes(tensor: torch.Tensor) -> object:
    storage = tensor.untyped_storage()
    return [getattr(storage, "_checkpoint_offset", "absent"), sorted(vars(storage))]


def _share(tensor: torch.Tensor) -> object:
    shared = tensor.share_memory_()
    return [shared is tensor, tensor.is_shared(), tensor, tensor.untyped_storage().is_shared()]


def _share_storage(tensor: torch.Tensor) -> object:
    storage = tensor.untyped_storage().share_memory_()
    tensor.fill_(1)
    return [storage.is_shared(), tensor]


def _share_as_file(tensor: torch.Tensor) -> object:
    # The storage owns the descriptor.
    _, size = tensor.untyped_storage()._share_fd_cpu_()
    return [size, tensor]


def _pin(tensor: torch.Tensor) -> object:
    return [tensor.pin_memory(), tensor.untyped_storage().pin_memory()]


def _references(tensor: torch.Tensor) -> object:
    """How many tensors hold the storage: load_state_dict and others decide by it."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def _repr(tensor: torch.Tensor) -> object:
    storage = tensor.untyped_storage()
    return [repr(tensor), tensor.element_size(), type(storage), str(storage.device)]


QUESTIONS = {
    function.__name__.strip("_"): function
    for function in (
        *(_alignment, _flags, _filename, _filename_of_saved_storage, _offset_attributes, _share),
        *(_share_storage, _share_as_file, _pin, _references, _repr),
    )
}


@cases(
    {
        f"{name}-{way}": (ask, options)
        for name, ask in QUESTIONS.items()
        for way, options in (("plain", {}), ("mmap", {"mmap": True}))
    },
    served=True,
)
def question(work: Work, asked: Any) -> object:
    ask, options = asked
    return _each(work, options, ask)


@cases(LOADS, served=True)
def addresses_are_apart(work: Work, options: dict[str, Any]) -> object:
    """No two storages overlap, in one load and between loads."""
    path = work.file("model.pt", saved(state()))
    loads = [torch.load(path, **options) for _ in range(3)]
    spans = sorted(
        (t.untyped_storage().data_ptr(), t.untyped_storage().nbytes())
        for loaded in loads
        for t in loaded.values()
    )
    return [left[0] + left[1] <= right[0] for left, right in itertools.pairwise(spans)]


@case(served=True)
def memory_formats_and_layouts(work: Work) -> object:
    tensor = torch.load(work.file("model.pt", saved(bulk())))
    reshaped = tensor.view(4, 64, 64, 5)
    return [
        reshaped.to(memory_format=torch.channels_last),
        tensor.is_contiguous(),
        tensor.untyped_storage()._weak_ref() is not None,
        torch._C._is_alias_of(tensor, tensor[3]),
    ]


@case(served=True)
def same_storage_questions(work: Work) -> object:
    loaded = torch.load(
        work.file("model.pt", saved({"a": bulk(), "b": bulk()[2:], "c": net()})), weights_only=False
    )
    first, second = loaded["a"], loaded["b"]
    return [
        first.untyped_storage() is first.untyped_storage(),
        first.is_set_to(first),
        first.is_set_to(second),
        first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr(),
        torch._C._storage_Use_Count(first.untyped_storage()._cdata),
        loaded["c"],
    ]


@case(served=True)
def shared_memory_of_a_module(work: Work) -> object:
    module = net()
    module.load_state_dict(torch.load(work.file("model.pt", saved(net(2).state_dict()))))
    module.share_memory()
    return [module, [parameter.is_shared() for parameter in module.parameters()]]


@case()
def from_file_directly(work: Work) -> object:
    """torch.UntypedStorage.from_file and torch.from_file keep their own meaning."""
    path = work.fresh("data.bin", lambda p: p.write_bytes(bulk().numpy().tobytes()))
    size = path.stat().st_size
    private = torch.UntypedStorage.from_file(str(path), False, size)
    private[0] = 5
    first = path.read_bytes()[0]
    shared = torch.UntypedStorage.from_file(str(path), True, size)
    shared[0] = 7
    second = path.read_bytes()[0]
    tensor = torch.from_file(str(path), shared=False, size=1000)
    return [
        *(private, first, shared, second, tensor, private.filename, shared.filename),
        [private.is_shared(), shared.is_shared(), private.resizable(), shared.resizable()],
        torch.UntypedStorage.from_file(str(path), nbytes=64, shared=False),
        attempt(torch.UntypedStorage.from_file, str(path), False, size * 2),
        attempt(torch.UntypedStorage.from_file, "no-such-file", False, 8),
        attempt(torch.UntypedStorage.from_file, str(path), True, size * 2),
        attempt(torch.UntypedStorage.from_file, str(path)),
        attempt(torch.UntypedStorage.from_file, path, False, size),
        attempt(torch.UntypedStorage.from_file),
        attempt(torch.UntypedStorage.from_file, str(path), filename=str(path)),
        attempt(torch.UntypedStorage.from_file, str(path), False, size, nbytes=size),
        attempt(torch.UntypedStorage.from_file, ".", False, work.directory.stat().st_size),
        path.stat().st_size,
    ]


@case(served=True)
def from_file_of_a_model(work: Work) -> object:
    """What a private mapping says of itself; is_shared() differs (docs/transparency.md)."""
    path = work.file("model.pt", saved(state()))
    storage = torch.UntypedStorage.from_file(str(path), False, path.stat().st_size)
    part = storage[64:128]
    seen = [storage.filename, part.filename]
    storage[3] = 0
    again = torch.UntypedStorage.from_file(str(path), nbytes=path.stat().st_size, shared=False)
    tensor = torch.empty(0, dtype=torch.uint8).set_(again)
    return [seen, storage.resizable(), storage[:8], part, tensor, tensor.untyped_storage().filename]


@case(served=True)
def default_shared_strategy_by_name(work: Work) -> object:
    import torch.multiprocessing as mp

    mp.set_sharing_strategy("file_system")
    loaded = torch.load(work.file("model.pt", saved(state())))
    tensor = loaded["bulk"].share_memory_()
    return [tensor.is_shared(), bool(tensor.untyped_storage().filename), tensor]
