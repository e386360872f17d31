"""torch.load: map_location in every form, default devices and device contexts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from .payloads import saved, state
from .registry import Work, attempt, case, cases

NAMED = {
    "none": None,
    "cpu": "cpu",
    "device_cpu": torch.device("cpu"),
    "empty_dict": {},
    "dict_cpu_to_cpu": {"cpu": "cpu"},
    "dict_cuda_to_cpu": {"cuda:0": "cpu"},
}
REFUSED = {
    "cuda": "cuda",
    "cuda_0": "cuda:0",
    "device_cuda": torch.device("cuda"),
    "mps": "mps",
    "cpu_index_0": "cpu:0",
    "device_cpu_index_0": torch.device("cpu:0"),
    "nonsense": "nonsense",
    "empty": "",
    "malformed": "cpu:x",
    "number": 0,
    "list": ["cpu"],
    "dict_cpu_to_cuda": {"cpu": "cuda:0"},
    "dict_cpu_to_none": {"cpu": None},
    "dict_with_device": {"cpu": torch.device("cpu")},
}


@cases(NAMED, served=True)
def map_location(work: Work, location: Any) -> object:
    return torch.load(work.file("model.pt", saved(state())), map_location=location)


@cases(REFUSED)
def map_location_refused(work: Work, location: Any) -> object:
    path = work.file("model.pt", saved(state()))
    return [
        attempt(torch.load, path, map_location=location),
        attempt(torch.load, path, map_location=location, mmap=True),
        attempt(torch.load, path, map_location=location, weights_only=False),
    ]


@cases({"string": "meta", "device": torch.device("meta"), "dict": {"cpu": "meta"}})
def map_location_meta(work: Work, location: Any) -> object:
    path = work.file("model.pt", saved(state()))
    return [
        attempt(torch.load, path, map_location=location),
        attempt(torch.load, path, map_location=location, mmap=True),
    ]


def _returns_storage(storage: Any, tag: str) -> Any:
    return storage


def _returns_none(storage: Any, tag: str) -> Any:
    return None


def _returns_clone(storage: Any, tag: str) -> Any:
    return storage.clone()


def _returns_meta(storage: Any, tag: str) -> Any:
    return torch.UntypedStorage(storage.nbytes(), device="meta")


def _returns_nonsense(storage: Any, tag: str) -> Any:
    return 3


def _writes(storage: Any, tag: str) -> Any:
    storage[0] = 77
    return storage


def _grows(storage: Any, tag: str) -> Any:
    storage.resize_(storage.nbytes() + 64)
    storage[storage.nbytes() - 64 :].fill_(1)
    return storage


def _raises(storage: Any, tag: str) -> Any:
    raise KeyError(f"no place for {storage.nbytes()} bytes from {tag}")


def _takes_one(storage: Any) -> Any:
    return storage


CALLABLES = {
    function.__name__.strip("_"): function
    for function in (
        _returns_storage,
        _returns_none,
        _returns_clone,
        _returns_meta,
        _returns_nonsense,
        _writes,
        _grows,
        _raises,
        _takes_one,
    )
}


@cases(CALLABLES)
def map_location_callable(work: Work, function: Any) -> object:
    path = work.file("model.pt", saved(state()))
    return [
        attempt(torch.load, path, map_location=function),
        attempt(torch.load, path, map_location=function, mmap=True),
        attempt(torch.load, path, map_location=function, weights_only=False),
        # What a callable wrote must not be seen by a later load.
        torch.load(path),
    ]


@case(served=True)
def map_location_callable_sees_storages(work: Work) -> object:
    seen: list[Any] = []

    def note(storage: Any, tag: str) -> Any:
        seen.append([storage.clone(), tag])
        return storage

    small = {"weight": torch.arange(4.0), "empty": torch.empty(0)}
    path = work.file("model.pt", saved({**small, "bulk": torch.zeros(1 << 20)}))
    return [torch.load(path, map_location=note), seen]


def _saved_as_cuda(path: Path) -> None:
    original = torch.serialization.location_tag
    torch.serialization.location_tag = lambda storage: "cuda:0"
    try:
        torch.save(state(), path)
    finally:
        torch.serialization.location_tag = original


CUDA_FILE = {
    "none": None,
    "cpu": "cpu",
    "dict": {"cuda:0": "cpu"},
    "other_dict": {"cuda:1": "cpu"},
    "callable": _returns_storage,
    "callable_none": _returns_none,
    "meta": "meta",
}


@cases(CUDA_FILE)
def file_from_cuda(work: Work, location: Any) -> object:
    path = work.file("model.pt", _saved_as_cuda)
    return [
        attempt(torch.load, path, map_location=location),
        attempt(torch.load, path, map_location=location, mmap=True),
    ]


@case(served=True)
def file_from_cuda_to_cpu(work: Work) -> object:
    return torch.load(work.file("model.pt", _saved_as_cuda), map_location="cpu")


@cases({"cpu": "cpu", "meta": "meta"})
def default_device(work: Work, device: str) -> object:
    path = work.file("model.pt", saved(state()))
    torch.set_default_device(device)
    try:
        return [attempt(torch.load, path), attempt(torch.load, path, mmap=True)]
    finally:
        torch.set_default_device(None)


@cases({"cpu": "cpu", "meta": "meta"})
def device_context(work: Work, device: str) -> object:
    path = work.file("model.pt", saved(state()))
    with torch.device(device):
        return [
            attempt(torch.load, path),
            attempt(torch.load, path, map_location="cpu"),
            attempt(torch.load, path, mmap=True),
            attempt(torch.load, path, weights_only=False),
        ]
