"""The public functions, over the fake daemon."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import safetensors.numpy
import safetensors.torch
import torch

import trims_shim
from trims_shim.errors import FormatError, UnsupportedFormat
from trims_shim.testing import FakeDaemon

ARRAYS = {
    "weight": numpy.arange(12, dtype=numpy.float32).reshape(3, 4),
    "count": numpy.array(7, dtype=numpy.int64),
    "empty": numpy.zeros((0, 5), dtype=numpy.float16),
}


@pytest.fixture
def daemon() -> Iterator[FakeDaemon]:
    with FakeDaemon(strict="1") as daemon:
        yield daemon


@pytest.fixture
def tensors(tmp_path: Path) -> str:
    path = str(tmp_path / "model.safetensors")
    safetensors.numpy.save_file(ARRAYS, path)
    return path


class TestHandle:
    def test_describes_its_file(self, daemon: FakeDaemon, tensors: str) -> None:
        with trims_shim.open(tensors) as handle:
            assert handle.name == tensors
            assert handle.size_bytes == os.path.getsize(tensors)
            assert handle.digest == daemon.images[0].digest
            assert tensors in repr(handle)
            assert set(handle.records) == set(ARRAYS)
            assert handle.records is handle.records
            assert bytes(handle.buffer()) == Path(tensors).read_bytes()

    @pytest.mark.parametrize("name", ARRAYS)
    def test_arrays_and_tensors(self, daemon: FakeDaemon, tensors: str, name: str) -> None:
        with trims_shim.open(tensors) as handle:
            array, tensor = handle.numpy(name), handle.torch(name)
        assert array.dtype == ARRAYS[name].dtype
        assert array.shape == ARRAYS[name].shape == tuple(tensor.shape)
        assert numpy.array_equal(array, ARRAYS[name])
        assert numpy.array_equal(tensor.numpy(), ARRAYS[name])

    def test_writes_are_private(self, daemon: FakeDaemon, tensors: str) -> None:
        with trims_shim.open(tensors) as handle, trims_shim.open(tensors) as other:
            handle.numpy("weight")[0, 0] = 99
            assert handle.torch("weight")[0, 0] == 99
            assert other.numpy("weight")[0, 0] == 0
        with trims_shim.open(tensors) as again:
            assert again.numpy("weight")[0, 0] == 0

    def test_views_outlive_it(self, daemon: FakeDaemon, tensors: str) -> None:
        handle = trims_shim.open(tensors)
        array, tensor = handle.numpy("weight"), handle.torch("weight")
        handle.close()
        for use in (handle.buffer, lambda: handle.numpy("weight"), lambda: handle.torch("weight")):
            with pytest.raises(ValueError, match="is closed"):
                use()
        assert daemon.leases == 1
        del array
        assert tensor[2, 3] == 11
        del tensor
        assert daemon.leases == 0

    def test_an_unknown_record(self, daemon: FakeDaemon, tensors: str) -> None:
        with trims_shim.open(tensors) as handle:
            for view in (handle.numpy, handle.torch):
                with pytest.raises(KeyError, match="nothing"):
                    view("nothing")

    def test_a_dtype_numpy_does_not_have(self, daemon: FakeDaemon, tmp_path: Path) -> None:
        path = str(tmp_path / "b.safetensors")
        safetensors.torch.save_file({"x": torch.ones(4, dtype=torch.bfloat16)}, path)
        with trims_shim.open(path) as handle:
            assert handle.torch("x").dtype == torch.bfloat16
            with pytest.raises(UnsupportedFormat, match=r"torch\(\)"):
                handle.numpy("x")

    def test_a_torch_archive_has_records_of_bytes(self, daemon: FakeDaemon, tmp_path: Path) -> None:
        path = str(tmp_path / "m.pt")
        values = torch.arange(6, dtype=torch.int32)
        torch.save({"x": values}, path)
        with trims_shim.open(path) as handle:
            assert "data.pkl" in handle.records
            assert handle.numpy("data/0").tobytes() == values.numpy().tobytes()
            assert handle.torch("data/0").view(torch.int32).tolist() == values.tolist()

    @pytest.mark.parametrize("content", [b"PK\x03\x04", b"\xff" * 100, b"x"])
    def test_a_file_of_neither_format(
        self, daemon: FakeDaemon, make_file: Callable[..., str], content: bytes
    ) -> None:
        with trims_shim.open(make_file(content)) as handle:
            assert bytes(handle.buffer()) == content
            with pytest.raises(FormatError):
                _ = handle.records

    def test_paths_of_every_kind(self, daemon: FakeDaemon, tmp_path: Path) -> None:
        odd = os.path.join(os.fsencode(tmp_path), b"m\xff\xfe.bin")
        with open(odd, "wb") as file:
            file.write(b"content")
        for path in (odd, os.fsdecode(odd), Path(os.fsdecode(odd))):
            with trims_shim.open(path) as handle:  # type: ignore[arg-type]
                assert bytes(handle.buffer()) == b"content"
        assert daemon.images[0].names[0][1].endswith(r"m\udcff\udcfe.bin")

    def test_a_missing_file(self, daemon: FakeDaemon) -> None:
        with pytest.raises(FileNotFoundError):
            trims_shim.open("/no/such/file")
        assert daemon.counters == {}


def test_warm(daemon: FakeDaemon, tensors: str) -> None:
    digest = trims_shim.warm(tensors)
    assert (daemon.leases, daemon.images[0].is_pinned) == (0, False)
    assert trims_shim.warm(tensors, pin=True) == digest
    assert daemon.images[0].is_pinned
    with pytest.raises(FileNotFoundError):
        trims_shim.warm("/no/such/file")


class TestSwitch:
    @pytest.fixture(autouse=True)
    def _restored(self) -> Iterator[None]:
        was = trims_shim.enabled()
        yield
        (trims_shim.enable if was else trims_shim.disable)()

    def test_enable_and_disable(self) -> None:
        original = torch.serialization._load
        trims_shim.disable()
        assert not trims_shim.enabled()
        stock = torch.serialization._load
        trims_shim.enable()
        assert trims_shim.enabled()
        assert torch.serialization._load is not stock
        trims_shim.enable()
        trims_shim.disable()
        assert torch.serialization._load is stock
        assert original is not None

    def test_a_block_without_the_cache(self, daemon: FakeDaemon, tmp_path: Path) -> None:
        path = str(tmp_path / "m.pt")
        torch.save({"x": torch.ones(100)}, path)
        trims_shim.enable()
        with trims_shim.disabled():
            assert not trims_shim.enabled()
            torch.load(path)
        assert trims_shim.enabled()
        assert daemon.opened == []
        torch.load(path)
        assert daemon.reads(path) == 1

    def test_only_this_thread(self, daemon: FakeDaemon) -> None:
        import threading

        trims_shim.enable()
        seen: list[bool] = []
        with trims_shim.disabled():
            thread = threading.Thread(target=lambda: seen.append(trims_shim.enabled()))
            thread.start()
            thread.join(10)
        assert seen == [True]


def test_stats(daemon: FakeDaemon, tensors: str) -> None:
    before = trims_shim.stats()
    for _ in range(2):
        trims_shim.open(tensors).close()
    after = trims_shim.stats()
    assert after.misses - before.misses == 1
    assert after.hits - before.hits == 1
    assert after.bytes_shared - before.bytes_shared == 2 * os.path.getsize(tensors)


def test_info_is_json(daemon: FakeDaemon) -> None:
    described: dict[str, Any] = trims_shim.info()
    assert json.loads(json.dumps(described)).keys() == described.keys()
    assert daemon.opened == []
