"""safe_open asks the cache at its first tensor, and all tensors of one file are of one memory."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import process_state, wait_until
from safetensors import safe_open
from safetensors.torch import save_file

from trims_shim import diagnostics, patches
from trims_shim.errors import NoSpace
from trims_shim.patches import points, torch_from_file
from trims_shim.testing import FakeDaemon

NUMBERS = torch.arange(4096, dtype=torch.float32).reshape(64, 64)


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDaemon]:
    monkeypatch.setattr(patches, "active", lambda: True)
    applied = points.apply(torch_from_file.POINTS[0])
    assert applied.state is points.PatchState.APPLIED, applied.reason
    with FakeDaemon(strict="1") as daemon:
        yield daemon
    points.undo(applied)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return saved(tmp_path / "m.safetensors", NUMBERS)


def saved(path: Path, numbers: torch.Tensor) -> Path:
    save_file({"w": numbers, "b": torch.ones(3)}, path, metadata={"format": "pt"})
    return path


def changed() -> int:
    return diagnostics.stats().fallbacks.get("model_changed", 0)


def test_names_and_shapes_ask_nothing(daemon: FakeDaemon, path: Path) -> None:
    with safe_open(path, "pt") as file:
        assert sorted(file.keys()) == ["b", "w"]
        assert file.metadata() == {"format": "pt"}
        assert file.get_slice("w").get_shape() == [64, 64]
        assert not daemon.opened
        assert torch.equal(file.get_tensor("w"), NUMBERS)
        assert daemon.reads(path) == 1


def test_a_slice_asks_as_a_tensor_does(daemon: FakeDaemon, path: Path) -> None:
    with safe_open(path, "pt") as file:
        assert torch.equal(file.get_slice("w")[3:5], NUMBERS[3:5])
        assert daemon.reads(path) == 1


def test_the_file_is_asked_for_once(daemon: FakeDaemon, path: Path) -> None:
    with safe_open(path, "pt") as file:
        for _ in range(3):
            file.get_tensor("w")
            file.get_tensor("b")
    assert len(daemon.opened) == 1


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Have the cache's answer come only after a call has returned."""
    served = torch_from_file.served

    def until(call: Callable[[], object]) -> None:
        def slowly(file: Any) -> Any:
            storage = served(file)
            call()
            return storage

        monkeypatch.setattr(torch_from_file, "served", slowly)

    return until


def test_threads_that_come_at_once_ask_once(
    daemon: FakeDaemon, path: Path, slow: Callable[[Callable[[], object]], None]
) -> None:
    slow(lambda: time.sleep(0.05))
    with safe_open(path, "pt") as file, ThreadPoolExecutor(4) as pool:
        tensors = list(pool.map(file.get_tensor, ["w"] * 4))
    assert len(daemon.opened) == 1
    tensors[0][0, 0] = -1
    assert [tensor[0, 0].item() for tensor in tensors] == [-1] * 4


def test_threads_that_asked_after_all_get_the_same_memory(
    daemon: FakeDaemon, path: Path, slow: Callable[[Callable[[], object]], None]
) -> None:
    """A write through the tensor of one is seen in that of another, as without the shim."""
    slow(threading.Barrier(4, timeout=30).wait)
    with safe_open(path, "pt") as file, ThreadPoolExecutor(4) as pool:
        tensors = list(pool.map(file.get_tensor, ["w"] * 4))
    tensors[0][0, 0] = -1
    assert [tensor[0, 0].item() for tensor in tensors] == [-1] * 4


def test_a_child_that_is_forked_while_a_thread_asks(
    daemon: FakeDaemon, path: Path, slow: Callable[[Callable[[], object]], None]
) -> None:
    """The thread that would answer is not in the child."""
    asks, may_end = threading.Event(), threading.Event()
    parent = os.getpid()

    def wait() -> None:
        if os.getpid() == parent:
            asks.set()
            may_end.wait(30)

    slow(wait)
    with safe_open(path, "pt") as file, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(file.get_tensor, "w")
        assert asks.wait(30)
        child = os.fork()
        if child == 0:
            os._exit(0 if torch.equal(file.get_tensor("w"), NUMBERS) else 1)
        try:
            wait_until(lambda: process_state(child) == "Z", "the child has its tensor")
        finally:
            may_end.set()
        assert os.waitpid(child, 0)[1] == 0
        assert torch.equal(asked.result(30), NUMBERS)


def test_the_first_tensor_decides(
    daemon: FakeDaemon, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it could not be served: its writes are seen in later ones."""
    with safe_open(path, "pt") as file:
        monkeypatch.setattr(patches, "active", lambda: False)
        file.get_tensor("w")[0, 0] = -1
        monkeypatch.setattr(patches, "active", lambda: True)
        assert file.get_tensor("w")[0, 0] == -1
    assert not daemon.opened


def test_an_excluded_file_is_torchs(daemon: FakeDaemon, path: Path) -> None:
    with FakeDaemon(exclude=f"{path.parent}/*") as excluding, safe_open(path, "pt") as file:
        assert torch.equal(file.get_tensor("w"), NUMBERS)
        assert not excluding.opened


def replaced(path: Path) -> None:
    saved(path.with_name("next"), -NUMBERS).replace(path)


def deleted(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("change", [replaced, deleted])
def test_a_file_that_went_meanwhile_is_torchs(
    change: Callable[[Path], None], daemon: FakeDaemon, path: Path
) -> None:
    before = changed()
    with safe_open(path, "pt") as file:
        change(path)
        assert torch.equal(file.get_tensor("w"), NUMBERS)
    assert changed() == before + 1
    assert not daemon.opened


def test_a_file_written_meanwhile_has_what_torch_would_see(daemon: FakeDaemon, path: Path) -> None:
    before = changed()
    with safe_open(path, "pt") as file:
        content = bytearray(path.read_bytes())
        content[-NUMBERS.nbytes :] = bytes(NUMBERS.nbytes)
        with path.open("r+b") as writing:
            writing.write(content)
        assert not file.get_tensor("w").any()
    assert changed() == before + 1


def test_a_file_that_is_half_written_as_the_cache_is_asked(
    daemon: FakeDaemon, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, content = changed(), path.read_bytes()
    ask = torch_from_file.arena_of_file

    def ask_meanwhile(descriptor: int, name: object) -> Any:
        path.write_bytes(content[: -NUMBERS.nbytes // 2])
        return ask(descriptor, name)

    monkeypatch.setattr(torch_from_file, "arena_of_file", ask_meanwhile)
    with safe_open(path, "pt") as file:
        tensor = file.get_tensor("w")
    path.write_bytes(content)
    assert torch.equal(tensor, NUMBERS)
    assert changed() == before + 1


def test_a_relative_name_is_of_the_directory_at_opening(
    daemon: FakeDaemon, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(path.parent)
    with safe_open(path.name, "pt") as file:
        monkeypatch.chdir("/")
        assert torch.equal(file.get_tensor("w"), NUMBERS)
    assert daemon.reads(path) == 1


@pytest.mark.parametrize("is_archive", [False, True])
def test_a_name_that_goes_up_from_a_link_is_the_kernels(
    is_archive: bool, daemon: FakeDaemon, tmp_path: Path
) -> None:
    """Not that of a file beside the link."""
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "link").symlink_to("a/b")
    name = f"{tmp_path}/link/../m"
    if is_archive:
        torch.save({"w": NUMBERS}, name)
        loaded = torch.load(name, mmap=True)["w"]
    else:
        save_file({"w": NUMBERS}, name)
        with safe_open(name, "pt") as file:
            loaded = file.get_tensor("w")
    assert torch.equal(loaded, NUMBERS)
    assert [opened.outcome for opened in daemon.opened] == ["miss"]


def test_an_archive_that_is_replaced_while_the_cache_refuses_it(
    daemon: FakeDaemon, tmp_path: Path, slow: Callable[[Callable[[], object]], None]
) -> None:
    """torch.load has read where its tensors are."""
    path = tmp_path / "m.pt"
    torch.save({"a": NUMBERS, "b": NUMBERS}, path)

    def replace() -> None:
        torch.save({"a": torch.zeros(128, 128), "b": NUMBERS}, tmp_path / "next")
        (tmp_path / "next").replace(path)

    slow(replace)
    with FakeDaemon() as refusing:
        refusing.refuse(NoSpace("full"))
        loaded = torch.load(path, mmap=True)
    assert all(torch.equal(each, NUMBERS) for each in loaded.values())


def test_what_a_program_does_with_a_mapping_of_its_own_is_torchs(
    daemon: FakeDaemon, path: Path
) -> None:
    mapping = torch.UntypedStorage.from_file(str(path), False, path.stat().st_size)
    mapping[9] = 7
    assert mapping[8:10].tolist() == [ord("{"), 7]
    assert not daemon.opened


def test_nothing_stays_of_a_file_that_was_only_looked_at(daemon: FakeDaemon, path: Path) -> None:
    """At once, not when the collector runs next."""
    mapping = torch.UntypedStorage.from_file(str(path), False, path.stat().st_size)
    gone = weakref.ref(mapping)
    gc.disable()
    try:
        del mapping
        assert gone() is None
    finally:
        gc.enable()
