"""Functions of torch that a program has replaced before the shim came."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules import batchnorm

from .payloads import net, saved
from .registry import Work, attempt, cases


def _noting(holder: Any, name: str, calls: list[str]) -> None:
    """Replace a function by one that notes its calls."""
    original: Callable[..., Any] = getattr(holder, name)

    def replacement(*arguments: Any) -> Any:
        calls.append(name)
        return original(*arguments)

    setattr(holder, name, replacement)


def _note_modules(calls: list[str]) -> None:
    _noting(torch.nn.Module, "_load_from_state_dict", calls)


def _note_norms(calls: list[str]) -> None:
    _noting(batchnorm._NormBase, "_load_from_state_dict", calls)


def _note_loads(calls: list[str]) -> None:
    original = torch.serialization._load

    def replacement(*arguments: Any, **keywords: Any) -> Any:
        calls.append("_load")
        return original(*arguments, **keywords)

    torch.serialization._load = replacement  # type: ignore[assignment]


def _subclass_reader(calls: list[str]) -> None:
    original: Any = torch.serialization._open_zipfile_reader

    class Noting(original):  # type: ignore[misc]
        def __init__(self, file: Any) -> None:
            calls.append("reader")
            super().__init__(file)

    torch.serialization._open_zipfile_reader = Noting  # type: ignore[misc]


def _note_mappings(calls: list[str]) -> None:
    _noting(torch.UntypedStorage, "from_file", calls)


def _note_tensors(calls: list[str]) -> None:
    _noting(torch._utils, "_rebuild_tensor_v2", calls)


def _note_parameters(calls: list[str]) -> None:
    _noting(torch._utils, "_rebuild_parameter", calls)


def _note_locations(calls: list[str]) -> None:
    _noting(torch.serialization, "default_restore_location", calls)


def _subclass_unpickler(calls: list[str]) -> None:
    class Noting(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            calls.append(name)
            return super().find_class(module, name)

    pickle.Unpickler = Noting  # type: ignore[misc]


def _register_package(calls: list[str]) -> None:
    def restore(storage: Any, location: str) -> Any:
        calls.append(location)
        return storage.clone()

    torch.serialization.register_package(1, lambda _: None, restore)


REPLACEMENTS = {
    function.__name__.strip("_"): function
    for function in (
        *(_note_modules, _note_norms, _note_loads, _note_tensors, _note_parameters),
        *(_note_locations, _subclass_unpickler, _register_package),
        *(_subclass_reader, _note_mappings),
    )
}


@cases(REPLACEMENTS, early=False)
def replaced_before_the_shim(work: Work, replace: Callable[[list[str]], None]) -> object:
    """What a program put in the place of torch's own runs, also where the shim comes later."""
    state = net().state_dict() | {"parameter": torch.nn.Parameter(torch.ones(3))}
    path = work.file("model.pt", saved(state))
    calls: list[str] = []
    replace(calls)
    work.enable_shim()
    safe = attempt(torch.load, path)
    loaded = torch.load(path, weights_only=False)
    mapped = attempt(torch.load, path, mmap=True)
    module = net(2)
    result = module.load_state_dict({name: loaded[name] for name in module.state_dict()})
    return [calls, safe, loaded, mapped, result, module]
