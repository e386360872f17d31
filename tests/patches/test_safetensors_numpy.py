"""safetensors.numpy.load_file over the cached image: what the installed library's would be."""

from __future__ import annotations

import inspect
import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import safetensors
import safetensors.numpy as library

from trims_shim import diagnostics, patches
from trims_shim.client.cache import Cache
from trims_shim.errors import DaemonUnavailable
from trims_shim.patches import points, safetensors_numpy
from trims_shim.testing import FakeDaemon


def theirs(path: Path) -> dict[str, Any]:
    """The library's own; not by a name of this module, where the shim would find it."""
    found: dict[str, Any] = inspect.unwrap(library.load_file)(path)
    return found


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDaemon]:
    monkeypatch.setattr(patches, "active", lambda: True)
    # An installed shim may have patched it.
    monkeypatch.setattr(library, "load_file", inspect.unwrap(library.load_file))
    applied = points.apply(safetensors_numpy.POINTS[0])
    assert applied.state is points.PatchState.APPLIED, applied.reason
    with FakeDaemon(strict="1") as daemon:
        yield daemon
    points.undo(applied)


@pytest.fixture
def _before_0_6(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what later versions of the library have."""

    class safe_open:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._file = safetensors.safe_open(*args, **kwargs)

        def __enter__(self) -> safe_open:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def keys(self) -> list[str]:
            return sorted(self._file.keys())

        def get_tensors(self) -> dict[str, Any]:  # by load_file of 0.8, for keys() before 0.6
            return {name: self._file.get_tensor(name) for name in self.keys()}

    known = {name: dtype for name, dtype in library._TYPES.items() if name != "C64"}
    monkeypatch.setattr(library, "safe_open", safe_open)
    monkeypatch.setattr(library, "_TYPES", known)


def saved(folder: Path, **arrays: Any) -> Path:
    library.save_file(arrays, folder / "m.safetensors")
    return folder / "m.safetensors"


def test_order_of_names(daemon: FakeDaemon, tmp_path: Path) -> None:
    path = saved(tmp_path, a=numpy.ones(9, "f2"), b=numpy.ones(9, "f4"), c=numpy.ones(9, "f8"))
    assert list(library.load_file(path)) == list(theirs(path)) == ["c", "b", "a"]
    assert daemon.reads(path) == 1


@pytest.mark.usefixtures("_before_0_6")
def test_order_of_names_in_older_versions(daemon: FakeDaemon, tmp_path: Path) -> None:
    path = saved(tmp_path, a=numpy.ones(9, "f2"), b=numpy.ones(9, "f4"), c=numpy.ones(9, "f8"))
    assert list(library.load_file(path)) == list(theirs(path)) == ["a", "b", "c"]
    assert daemon.reads(path) == 1


def test_a_dtype_that_older_versions_refuse(
    daemon: FakeDaemon, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    path = saved(tmp_path, a=numpy.ones(9, "c8"))
    assert library.load_file(path).keys() == {"a"}
    before = diagnostics.stats().fallbacks.get("unsupported_format", 0)
    request.getfixturevalue("_before_0_6")
    library.load_file(path)
    assert diagnostics.stats().fallbacks["unsupported_format"] == before + 1


def test_an_argument_that_the_library_does_not_know_is_its_error(
    daemon: FakeDaemon, tmp_path: Path
) -> None:
    path = saved(tmp_path, a=numpy.ones(9))
    with pytest.raises(TypeError, match="unexpected keyword argument 'device'"):
        library.load_file(path, device="cpu")
    assert daemon.reads(path) == 0


@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0, 3)])
def test_arrays_without_elements(
    shape: tuple[int, ...], daemon: FakeDaemon, tmp_path: Path
) -> None:
    path = saved(tmp_path, a=numpy.ones(shape, "f4"), b=numpy.ones(9))
    ours, expected = library.load_file(path)["a"], theirs(path)["a"]
    assert (ours.shape, ours.strides, ours.dtype) == (shape, expected.strides, expected.dtype)
    assert daemon.reads(path) == 1


@pytest.mark.parametrize("shape", [[0, 1 << 62], [1] * 70])
def test_a_shape_that_numpy_refuses_is_no_error_of_ours(
    shape: list[int], daemon: FakeDaemon, tmp_path: Path
) -> None:
    path, size_bytes = tmp_path / "odd.safetensors", 4 * math.prod(shape)
    odd = {"dtype": "F32", "shape": shape, "data_offsets": [0, size_bytes]}
    header = json.dumps({"a": odd}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(size_bytes))
    before = Counter(diagnostics.stats().fallbacks)
    for load in (theirs, library.load_file):
        with pytest.raises(ValueError, match=r"dimension|too big"):
            load(path)
    after = Counter(diagnostics.stats().fallbacks)
    assert (after - before, daemon.reads(path)) == ({"unsupported_format": 1}, 1)


def test_what_a_program_put_in_its_place_before_is_called(
    daemon: FakeDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path, a=numpy.ones(9))
    monkeypatch.setattr(library, "load_file", lambda filename: [filename])
    applied = points.apply(safetensors_numpy.POINTS[0])
    assert library.load_file(path) == [path]
    points.undo(applied)


def test_where_the_program_forbids_our_look_at_the_file(
    daemon: FakeDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An audit hook may raise anything; safetensors opens files where no hook sees it."""
    path = saved(tmp_path, w=numpy.arange(9))

    def forbid(*_: object) -> int:
        raise RuntimeError("open")

    with monkeypatch.context() as forbidding:
        forbidding.setattr("trims_shim.patches.asking.os.open", forbid)
        assert list(library.load_file(path)["w"]) == list(range(9))
    assert daemon.reads(path) == 0


def test_where_the_cache_fails_the_library_loads(
    daemon: FakeDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With TRIMS_STRICT, what nobody expects is raised."""
    path = saved(tmp_path, w=numpy.arange(9))
    errors: list[Exception] = []

    def fail(*_: object, **__: object) -> Any:
        raise errors[0]

    def counted(error: Exception) -> int:
        """Fallbacks of one load, which serves what it should."""
        errors[:] = [error]
        before = diagnostics.stats().fallbacks
        assert list(library.load_file(path)["w"]) == list(range(9))
        after = diagnostics.stats().fallbacks
        assert sum(after.values()) == sum(before.values()) + 1
        reason = diagnostics.reason_of(error)
        return after[reason] - before.get(reason, 0)

    monkeypatch.setattr(Cache, "open", fail)
    assert counted(DaemonUnavailable("gone")) == 1
    with pytest.raises(RuntimeError, match="a fault"):
        counted(RuntimeError("a fault"))
    with FakeDaemon(strict="0"):
        assert counted(RuntimeError("a fault")) == 1
