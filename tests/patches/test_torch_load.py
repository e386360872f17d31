"""torch.load over the cached image, where something is odd: the result is that of torch alone."""

from __future__ import annotations

import gc
import io
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from forks import passes_in_child
from served import grown, outcomes

import trims_shim
from trims_shim import diagnostics
from trims_shim.client.cache import Cache
from trims_shim.errors import NoSpace
from trims_shim.patches import torch_archive, torch_load, torch_modes, torch_rebuild
from trims_shim.testing import FakeDaemon


@pytest.fixture
def _enabled() -> Iterator[None]:
    was_enabled = trims_shim.enabled()
    trims_shim.enable()
    yield
    if not was_enabled:
        trims_shim.disable()


@pytest.fixture
def daemon(_enabled: None) -> Iterator[FakeDaemon]:
    with FakeDaemon(strict="1") as daemon:
        yield daemon


@pytest.fixture
def path(tmp_path: Path) -> str:
    torch.save({"weight": torch.arange(10.0)}, tmp_path / "model.pt")
    return str(tmp_path / "model.pt")


def events(name: str) -> int:
    return diagnostics.stats().events.get(name, 0)


def test_a_default_device_that_is_no_mode(
    daemon: FakeDaemon, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with torch.set_default_tensor_type: a tensor made without a device is elsewhere."""
    empty = torch.empty

    def elsewhere(*sizes: Any, device: Any = None, **options: Any) -> torch.Tensor:
        return empty(*sizes, device="meta" if device is None else device, **options)

    monkeypatch.setattr(torch, "empty", elsewhere)
    before = events("built:recipe")
    assert torch.load(path)["weight"].tolist() == list(range(10))
    assert events("built:recipe") == before + 1


def test_a_base_that_a_program_replaces(
    daemon: FakeDaemon, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.serialization, "_opener", lambda *_: None)
    before = events("built:recipe")
    assert torch.load(path)["weight"].tolist() == list(range(10))
    assert events("built:recipe") == before + 1


def test_a_dtype_that_torch_does_not_have(
    daemon: FakeDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not hasattr(torch, "float8_e8m0fnu"):
        pytest.skip("this torch does not have it in any case")
    path = tmp_path / "model.pt"
    torch.save({"weight": torch.arange(10.0).to(torch.float8_e8m0fnu)}, path)
    torch.load(path)  # torch looks its dtypes up once
    monkeypatch.delattr(torch, "float8_e8m0fnu")
    before = events("built:recipe")
    assert torch.load(path)["weight"].element_size() == 1
    with pytest.raises(AttributeError) as ours:
        torch.load(path, weights_only=False)
    with trims_shim.disabled(), pytest.raises(AttributeError) as theirs:
        torch.load(path, weights_only=False)
    assert str(ours.value) == str(theirs.value)
    assert events("built:recipe") == before


@pytest.mark.usefixtures("_enabled")
@pytest.mark.parametrize(("min_bytes", "reason"), [("1M", "small_file"), ("1", "not_a_file")])
def test_why_a_file_in_memory_is_torchs(path: str, min_bytes: str, reason: str) -> None:
    """Found: torch.export.load read its example inputs so, and a path was recommended for them."""
    with FakeDaemon(min_bytes=min_bytes):
        before = outcomes()
        torch.load(io.BytesIO(Path(path).read_bytes()))
        fallbacks = {name for name in outcomes() if name.startswith("fallback:")}
        assert [name for name in fallbacks if grown(before, name)] == [f"fallback:{reason}"]


def test_after_an_error_of_ours_torch_unpickles(
    daemon: FakeDaemon, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over the same bytes of the cache."""

    def fail(*_: Any) -> None:
        raise RuntimeError("ours")

    monkeypatch.setattr(torch_rebuild, "assemble", fail)
    before = events("recipe_error:RuntimeError")
    assert torch.load(path)["weight"].tolist() == list(range(10))
    assert events("recipe_error:RuntimeError") == before + 1
    assert daemon.reads(path) == 1


@pytest.mark.parametrize("count", [b"G\x40\x24" + bytes(6), b"X\1\0\0\0a"], ids=["10.0", "a"])
def test_a_count_that_is_no_integer_is_refused_by_torch(
    daemon: FakeDaemon, path: str, tmp_path: Path, count: bytes
) -> None:
    with zipfile.ZipFile(path) as archive:
        pickled = archive.read("model/data.pkl")
    assert pickled.count(b"K\x0at") == 1
    damaged = tmp_path / "damaged.pt"
    writer: Any = torch._C.PyTorchFileWriter(str(damaged))
    for name, content in [
        ("data.pkl", pickled.replace(b"K\x0at", count + b"t")),
        ("data/0", bytes(40)),
    ]:
        writer.write_record(name, content, len(content))
    writer.write_end_of_file()
    for source in (damaged, io.BytesIO(damaged.read_bytes())):
        with pytest.raises(TypeError, match="incompatible function arguments") as caught:
            torch.load(source)
        assert "trims_shim" not in str(caught.value)  # it prints the reader
    assert daemon.reads(damaged) == 1


def test_the_argument_of_a_load_that_failed_is_forgotten(
    daemon: FakeDaemon, path: str, tmp_path: Path
) -> None:
    """Tensors of subclasses that are unpickled later would be moved there."""
    torch.save([path, Path(path)], tmp_path / "refused.pt")
    with pytest.raises(Exception, match="Weights only load failed"):
        torch.load(tmp_path / "refused.pt", map_location="meta")
    kept: Any = torch.serialization._serialization_tls
    assert kept.map_location == "meta"
    torch.load(path)
    assert kept.map_location is None


def test_sparse_tensors_of_a_load_that_failed_are_validated(daemon: FakeDaemon, path: str) -> None:
    """By the next load, as torch does."""
    left = torch_load._sparse_tensors()
    left.append(torch.eye(3).to_sparse())
    try:
        torch.load(path, weights_only=False)
        assert not left
    finally:
        left.clear()


def test_compilers_get_tensors_without_bytes(daemon: FakeDaemon, path: str) -> None:
    from torch._guards import TracingContext, tracing
    from torch._subclasses.fake_tensor import FakeTensorMode

    with tracing(TracingContext(FakeTensorMode())):
        loaded = torch.load(path)
    assert loaded["weight"].is_meta


def test_an_error_of_the_cache_is_raised_if_asked_for(daemon: FakeDaemon, path: str) -> None:
    """TRIMS_STRICT."""
    daemon.refuse(NoSpace("full"))
    with pytest.raises(NoSpace):
        torch.load(path)


@pytest.mark.usefixtures("_enabled")
def test_an_error_while_tensors_are_served_is_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found: a load of thousands of tensors counted as thousands."""

    def fail(storage: torch.UntypedStorage) -> torch.Tensor:
        raise MemoryError

    path = tmp_path / "model.pt"
    torch.save([torch.arange(10.0) + index for index in range(3)], path)
    monkeypatch.setattr(torch_load, "_build_on_host", lambda *_: None)  # as for other objects
    monkeypatch.setattr(torch_archive, "bytes_over", fail)
    with FakeDaemon(strict="0"):
        before = events("fallback:internal_error")
        loaded = torch.load(path)
    assert [each[0].item() for each in loaded] == [0, 1, 2]
    assert events("fallback:internal_error") == before + 1


def test_garbage_is_collected_while_a_load_waits_for_the_daemon(
    daemon: FakeDaemon, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may read a large file for minutes, in which other threads go on making garbage."""
    seen: dict[str, bool] = {}

    def noting(name: str, function: Any) -> Any:
        def note(*args: Any, **kwargs: Any) -> Any:
            seen[name] = gc.isenabled()
            return function(*args, **kwargs)

        return note

    monkeypatch.setattr(Cache, "open", noting("waiting", Cache.open))
    monkeypatch.setattr(torch_rebuild, "assemble", noting("building", torch_rebuild.assemble))
    assert torch.load(path)["weight"].tolist() == list(range(10))
    assert seen == {"waiting": True, "building": False}
    assert gc.isenabled()


def test_a_fork_leaves_the_collector_to_the_child_while_loads_end_and_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Found: the end of one load let the pause of the next, in another thread, be forgotten."""
    pauses = [torch_rebuild.collector_paused() for _ in range(2)]
    enable = gc.enable

    def enabled() -> None:
        enable()
        monkeypatch.undo()
        pauses[1].__enter__()

    pauses[0].__enter__()
    monkeypatch.setattr(gc, "enable", enabled)
    pauses[0].__exit__(None, None, None)
    assert not gc.isenabled()
    assert passes_in_child(gc.isenabled)
    pauses[1].__exit__(None, None, None)
    assert gc.isenabled()


def test_torch_compile_leaves_ours_alone_before_2_7(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found: it compiled each of our functions, and warned of those that it could not."""
    frames = torch._C._dynamo.eval_frame

    def skip_code(code: Any) -> None:
        action = frames._FrameAction
        strategy = frames._FrameExecStrategy(action.SKIP, action.DEFAULT)
        frames.set_code_exec_strategy(code, strategy)

    if hasattr(frames, "_FrameExecStrategy"):
        older = SimpleNamespace(set_eval_frame=frames.set_eval_frame, skip_code=skip_code)
        monkeypatch.setattr(torch_modes, "_frames", older)
    graphs = []

    def note(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def added(tensor: torch.Tensor) -> torch.Tensor:
        return tensor + 1

    @torch_modes.uncompiled
    def ours(tensor: torch.Tensor) -> torch.Tensor:
        return added(tensor)

    @torch.compiler.disable(recursive=False)
    def torchs(tensor: torch.Tensor, function: Any) -> torch.Tensor:
        result: torch.Tensor = function(tensor)
        return result

    def step(tensor: torch.Tensor, function: Any) -> torch.Tensor:
        return torchs(tensor, function)

    for function, count in ((ours, 0), (added, 1)):
        assert torch.compile(step, backend=note)(torch.ones(2), function).tolist() == [2, 2]
        assert len(graphs) == count
