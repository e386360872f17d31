"""Shared by the tests of the readers: real archives, a builder, and a deep comparison."""

from __future__ import annotations

import io
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from trims_shim.formats import read_archive, read_recipe


class Same:
    """Asserts that two object graphs cannot be told apart, also not by writing to them."""

    def __init__(self) -> None:
        self.pairs: dict[int, Any] = {}
        self.mirrored: dict[int, int] = {}

    def check(self, left: Any, right: Any, path: str = "$") -> None:
        """Raise AssertionError at the first difference; ``path`` says where it is."""
        assert type(left) is type(right), path
        if isinstance(left, (str, bytes, int, float, bool, type(None))):
            assert repr(left) == repr(right), path
            return
        if type(left) is tuple and not left and not right:
            return
        if not self._pair(left, right, path):
            return
        if isinstance(left, torch.Tensor):
            self._check_tensor(left, right, path)
        elif isinstance(left, dict):
            self._check_items(list(left.items()), list(right.items()), path)
            self._check_items(
                list(getattr(left, "__dict__", {}).items()),
                list(getattr(right, "__dict__", {}).items()),
                f"{path}.__dict__",
            )
        else:
            self._check_items(list(enumerate(left)), list(enumerate(right)), path)

    def _pair(self, left: Any, right: Any, path: str) -> bool:
        """Same objects here where there are the same objects there. False: seen before."""
        known = self.pairs.get(id(left))
        if known is not None or id(right) in self.mirrored:
            assert known is right, f"{path}: shared differently"
            assert self.mirrored[id(right)] == id(left), f"{path}: shared differently"
            return False
        self.pairs[id(left)], self.mirrored[id(right)] = right, id(left)
        return True

    def _check_items(self, left: list[Any], right: list[Any], path: str) -> None:
        assert len(left) == len(right), path
        for (key, value), (other_key, other) in zip(left, right, strict=True):
            assert type(key) is type(other_key), path
            assert repr(key) == repr(other_key), path
            self.check(value, other, f"{path}[{key!r}]")

    def _check_tensor(self, left: torch.Tensor, right: torch.Tensor, path: str) -> None:
        for name in ("dtype", "shape", "requires_grad", "is_leaf", "device", "layout"):
            assert getattr(left, name) == getattr(right, name), f"{path}.{name}"
        assert left.stride() == right.stride(), path
        assert left.storage_offset() == right.storage_offset(), path
        ours, theirs = left.untyped_storage(), right.untyped_storage()
        assert _bytes_of(ours) == _bytes_of(theirs), path
        first = self.pairs.setdefault(ours.data_ptr(), theirs.data_ptr())
        assert first == theirs.data_ptr(), f"{path}: storage shared differently"
        second = self.mirrored.setdefault(theirs.data_ptr(), ours.data_ptr())
        assert second == ours.data_ptr(), f"{path}: storage shared differently"


def _bytes_of(storage: torch.UntypedStorage) -> bytes:
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy().tobytes()


def _storage_of(data: bytes) -> torch.UntypedStorage:
    if not data:
        return torch.UntypedStorage(0)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).untyped_storage()


def build(data: bytes, *, interns_names: bool = False) -> Any:
    """What the readers make of an archive, put together the simplest way."""
    archive = read_archive(data)
    span = archive.records["data.pkl"]
    pickle = data[span.offset_bytes : span.end_bytes]
    recipe = read_recipe(pickle, interns_names=interns_names)
    storages = []
    for spec in recipe.storages:
        span = archive.records[f"data/{spec.key}"]
        assert span.size_bytes == spec.size_bytes
        storages.append(_storage_of(data[span.offset_bytes : span.end_bytes]))
    tensors = []
    for storage, offset, size, stride, requires_grad, dtype in recipe.tensors:
        tensor = torch.empty(0, dtype=getattr(torch, dtype))
        tensor.set_(storages[storage], offset, size, stride)
        tensor.requires_grad = requires_grad
        tensors.append(tensor)
    parameters = [torch.nn.Parameter(tensors[index], grad) for index, grad in recipe.parameters]
    return recipe.assemble(tensors, parameters)


def save(value: Any, **arguments: Any) -> bytes:
    """``torch.save`` to bytes."""
    file = io.BytesIO()
    torch.save(value, file, **arguments)
    return file.getvalue()


def pickle_of(data: bytes) -> bytes:
    """``data.pkl`` of an archive, through torch's own reader."""
    return torch._C.PyTorchFileReader(io.BytesIO(data)).get_record("data.pkl")


def archive_of(records: Mapping[str, bytes], *, prefix: str = "archive/") -> bytes:
    """An archive as Python's zipfile writes it."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in records.items():
            archive.writestr(prefix + name, content)
    return file.getvalue()


@pytest.fixture(scope="session")
def assert_same() -> Callable[[Any, Any], None]:
    """Deep comparison of two results."""
    return lambda left, right: Same().check(left, right)


@pytest.fixture(scope="session")
def tools() -> Any:
    """The functions above, without importing a conftest."""

    class Tools:
        pass

    for function in (build, save, pickle_of, archive_of):
        setattr(Tools, function.__name__, staticmethod(function))
    return Tools


@pytest.fixture(scope="session")
def model_state() -> OrderedDict[str, torch.Tensor]:
    """State dict of a module: ``_metadata``, 0-dimensional and 1- to 4-dimensional tensors."""
    torch.manual_seed(0)
    layers = [
        torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.BatchNorm2d(3)) for _ in range(12)
    ]
    return torch.nn.Sequential(*layers, torch.nn.Linear(3, 4)).state_dict()
