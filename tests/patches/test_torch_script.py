"""torch.jit.load takes weights from the cache, and everything else from torch."""

from __future__ import annotations

import inspect
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from served import grown, is_shared, outcomes

from tests.script_models import BATCH, SHARED, Model, Restoring, load, saved
from trims_shim import patches
from trims_shim.errors import NoSpace
from trims_shim.patches import points, torch_script
from trims_shim.testing import FakeDaemon


@pytest.fixture(scope="module")
def archive() -> bytes:
    return saved(Model().eval(), **{"note.txt": "seen"})


@pytest.fixture
def path(tmp_path: Path, archive: bytes) -> Path:
    path = tmp_path / "model.pt"
    path.write_bytes(archive)
    return path


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDaemon]:
    """With torch's own function beneath, whatever an import of the shim has patched before."""
    plain = inspect.unwrap(torch._C.import_ir_module)
    monkeypatch.setattr(torch._C, "import_ir_module", plain)
    monkeypatch.setattr(patches, "active", lambda: True)
    (applied,) = [points.apply(point) for point in torch_script.POINTS]
    assert applied.state is points.PatchState.APPLIED, applied.reason
    with FakeDaemon() as daemon:
        yield daemon
    points.undo(applied)


def attributes(module: Any) -> dict[str, torch.Tensor]:
    """All tensors, parameters or not, by their names."""
    others = {"listed.0": module.listed[0], "listed.1": module.listed[1], "tied": module.tied}
    bias = {"inner.bias": module.inner.bias, "named.a": module.named["a"]}
    return {**module.state_dict(keep_vars=True), **others, **bias}


def assert_same(module: Any, archive: bytes) -> None:
    """The module that torch loads from the archive's bytes, which no cache can serve."""
    plain = load(io.BytesIO(archive))
    assert torch.equal(module(BATCH), plain(BATCH))
    assert module.code == plain.code
    mine, theirs = attributes(module), attributes(plain)
    assert list(mine) == list(theirs)
    for name, expected in theirs.items():
        found = mine[name]
        assert torch.equal(found, expected), name
        assert properties(found) == properties(expected), name


def properties(tensor: torch.Tensor) -> tuple[object, ...]:
    return (
        *(type(tensor), tensor.dtype, tensor.stride(), tensor.storage_offset()),
        *(tensor.requires_grad, tensor.is_leaf, tensor.grad_fn, tensor.is_inference()),
        *(tensor.untyped_storage().nbytes(), tensor.is_inference() or tensor._version),
    )


@pytest.mark.parametrize("location", [None, "cpu", torch.device("cpu")], ids=str)
def test_weights_are_shared(daemon: FakeDaemon, path: Path, archive: bytes, location: Any) -> None:
    before = outcomes()
    module = load(path, map_location=location)
    assert grown(before, "served:torch_script") == 1
    assert daemon.reads(path) == 1
    found = attributes(module)
    shared = {name for name, tensor in found.items() if is_shared(tensor)}
    assert shared == {*SHARED, "again.table", "listed.1"}
    assert_same(module, archive)


def test_ties_stay_ties(daemon: FakeDaemon, path: Path) -> None:
    module = load(path)
    with torch.no_grad():
        module.inner.weight.fill_(3)
        module.low.fill_(4)
    assert (module.tied == 3).all()
    assert (module.listed[1] == 3).all()
    assert (module.again.weight == 3).all()
    assert not (module.high == 4).any()


def test_writes_are_private(daemon: FakeDaemon, path: Path, archive: bytes) -> None:
    module = load(path)
    module(BATCH).sum().backward()
    with torch.no_grad():
        module.inner.weight.sub_(module.inner.weight.grad)
    assert not torch.equal(module(BATCH), load(io.BytesIO(archive))(BATCH))
    assert_same(load(path), archive)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_in_modes_of_autograd(
    daemon: FakeDaemon, path: Path, archive: bytes, mode: Callable[[], Any]
) -> None:
    before = outcomes()
    with mode():
        assert_same(load(path), archive)
    assert grown(before, "served:torch_script") == 1


def test_extra_files(daemon: FakeDaemon, path: Path) -> None:
    mine, theirs = {"note.txt": "", "other.txt": "x"}, {"note.txt": "", "other.txt": "x"}
    load(path, _extra_files=mine)
    load(io.BytesIO(path.read_bytes()), _extra_files=theirs)
    assert mine == theirs
    assert mine["note.txt"] == b"seen"


def test_conjugate_and_negated_views_stay_so(daemon: FakeDaemon, tmp_path: Path) -> None:
    model = torch.nn.Linear(64, 64)
    weights = {
        "conjugate": torch.randn(64, 64, dtype=torch.complex64).conj(),
        "negated": torch._neg_view(torch.randn(64, 64)),
    }
    for name, tensor in weights.items():
        model.register_buffer(name, tensor)
    path = tmp_path / "model.pt"
    path.write_bytes(saved(model))
    module = load(path)
    assert is_shared(module.weight)
    for name, tensor in weights.items():
        found = getattr(module, name)
        assert (found.is_conj(), found.is_neg()) == (tensor.is_conj(), tensor.is_neg())
        assert torch.equal(found, tensor)


def test_what_is_saved_again_is_whole(daemon: FakeDaemon, path: Path, archive: bytes) -> None:
    again = saved(load(path))
    assert_same(load(io.BytesIO(again)), archive)
    assert len(again) < 1.1 * len(archive)


def test_what_is_loaded_outlives_its_file(daemon: FakeDaemon, path: Path, archive: bytes) -> None:
    module = load(path)
    path.unlink()
    assert_same(module, archive)


def test_errors_of_the_script_name_the_same_places(daemon: FakeDaemon, path: Path) -> None:
    with pytest.raises(RuntimeError) as mine:
        load(path)(torch.ones(2, 3))
    with pytest.raises(RuntimeError) as theirs:
        load(io.BytesIO(path.read_bytes()))(torch.ones(2, 3))
    assert "code/__torch__" in str(mine.value)
    assert str(mine.value) == str(theirs.value)


def test_a_module_that_looks_at_its_weights_is_torchs(daemon: FakeDaemon, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(saved(Restoring()))
    before = outcomes()
    module = load(path)
    assert module.inner.total == 64 * 64
    assert (grown(before, "served:torch_script"), grown(before, "fallback:unsupported_format")) == (
        0,
        1,
    )


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"_restore_shapes": True}, "arguments"), ({"map_location": "meta"}, "device")],
)
def test_other_calls_are_torchs(
    daemon: FakeDaemon, path: Path, options: dict[str, Any], reason: str
) -> None:
    before = outcomes()
    module = load(path, **options)
    expected = load(io.BytesIO(path.read_bytes()), **options)
    assert module.inner.weight.device == expected.inner.weight.device
    assert (grown(before, "served:torch_script"), grown(before, f"fallback:{reason}")) == (0, 1)
    assert not daemon.opened


def test_small_files_are_not_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_script, "read_script", lambda file: pytest.fail("was read"))
    with FakeDaemon(min_bytes="1M"):
        before = outcomes()
        assert torch_script._served(str(path), None, {}, False) is None
    assert grown(before, "fallback:small_file") == 1


def test_what_the_daemon_refuses_is_read_by_torch(
    daemon: FakeDaemon, path: Path, archive: bytes
) -> None:
    daemon.refuse(NoSpace("full"))
    before = outcomes()
    module = load(path)
    assert grown(before, "served:torch_script") == 0
    assert not any(map(is_shared, attributes(module).values()))
    assert_same(module, archive)


def test_a_file_that_is_written_meanwhile_is_torchs(
    daemon: FakeDaemon, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After its pickle was read: the weights would be the new file's, the rest the old one's."""
    model = Model().eval()
    with torch.no_grad():
        model.inner.weight.add_(1)
        model.low.add_(1)
    new = saved(model)
    os.utime(path, (1, 1))  # The clock of files may not have moved since it was made.
    ask = torch_script.arena_of_file

    def write_and_ask(descriptor: int, name: object) -> Any:
        path.write_bytes(new)
        return ask(descriptor, name)

    monkeypatch.setattr(torch_script, "arena_of_file", write_and_ask)
    before = outcomes()
    assert_same(load(path), new)
    assert (grown(before, "served:torch_script"), grown(before, "fallback:model_changed")) == (0, 1)


def test_a_tensor_that_is_not_found_is_torchs(
    daemon: FakeDaemon, path: Path, archive: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever torch made of the archive, it reads the file once more."""
    before = outcomes()
    monkeypatch.setattr(torch_script, "_owner", lambda owners, path: owners[()].inner)
    assert_same(load(path), archive)
    assert (grown(before, "served:torch_script"), grown(before, "fallback:unsupported_format")) == (
        0,
        1,
    )


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x03\x04" + bytes(4096), None])
def test_what_is_no_script_raises_torchs_error(
    daemon: FakeDaemon, tmp_path: Path, content: bytes | None
) -> None:
    path = tmp_path / "broken.pt"
    if content is None:
        torch.save({"weight": torch.ones(4096)}, path)
    else:
        path.write_bytes(content)
    with pytest.raises(RuntimeError) as mine:
        load(path)
    with pytest.raises(RuntimeError) as theirs:
        inspect.unwrap(torch._C.import_ir_module)(
            torch._C.CompilationUnit(), str(path), None, {}, False
        )
    assert str(mine.value).splitlines()[0] == str(theirs.value).splitlines()[0]
    assert not daemon.opened


def test_records_where_no_file_has_any_raise_torchs_error(
    daemon: FakeDaemon, path: Path, archive: bytes
) -> None:
    """Their places are numbers that the kernel does not know, too."""
    place = archive.rindex(b"PK\x06\x06") + 48  # the directory begins there
    path.write_bytes(archive[:place] + b"\xff" * 8 + archive[place + 8 :])
    with pytest.raises(RuntimeError, match="PytorchStreamReader"):
        load(path)
    assert not daemon.opened


def test_what_only_torchs_reader_refuses_raises_its_error(
    daemon: FakeDaemon, path: Path, archive: bytes
) -> None:
    """Python's zipfile does not look at it, and the archive that is left has it no more."""
    disk = archive.rindex(b"PK\x06\x06") + 16
    path.write_bytes(archive[:disk] + b"\x07" + archive[disk + 1 :])
    with pytest.raises(RuntimeError, match="multidisk"):
        load(path)
    assert not daemon.opened


@pytest.mark.usefixtures("no_leak")
def test_no_descriptor_stays_open(daemon: FakeDaemon, path: Path) -> None:
    load(path)
    assert daemon.reads(path) == 1


def test_a_function_of_the_program_in_the_place_of_torchs_runs(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = inspect.unwrap(torch._C.import_ir_module)
    monkeypatch.setattr(torch._C, "import_ir_module", lambda *arguments: plain(*arguments))
    monkeypatch.setattr(patches, "active", lambda: True)
    (applied,) = [points.apply(point) for point in torch_script.POINTS]
    try:
        with FakeDaemon() as daemon:
            assert load(path)(BATCH).shape == (2, 64)
            assert not daemon.opened
    finally:
        points.undo(applied)
