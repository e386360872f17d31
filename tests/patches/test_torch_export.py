"""torch.export.load takes weights and constants from the cache, and everything else from torch."""

from __future__ import annotations

import inspect
import io
import os
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from served import grown, is_shared, outcomes

package = pytest.importorskip("torch.export.pt2_archive._package")  # of torch 2.8 and newer

from torch._export.serde.serialize import deserialize_scalar_type  # noqa: E402

from trims_shim import patches  # noqa: E402
from trims_shim.errors import NoSpace  # noqa: E402
from trims_shim.patches import points, torch_export  # noqa: E402
from trims_shim.testing import FakeDaemon  # noqa: E402

BATCH = torch.ones(2, 64)


class Model(torch.nn.Module):
    """Tied weights, a buffer, a view, half precision, a constant that is no attribute."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(64, 64)
        self.second = torch.nn.Linear(64, 64)
        self.second.weight = self.first.weight
        both = torch.arange(128.0)
        self.register_buffer("low", both[:64])
        self.register_buffer("high", both[64:])
        self.scale = torch.nn.Parameter(torch.ones(64, dtype=torch.bfloat16), requires_grad=False)
        self.table = torch.arange(64.0)  # a constant of the program

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        seen: torch.Tensor = self.second(self.first(batch)) + self.low - self.high
        return seen * self.scale.float() + self.table


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("exported") / "model.pt2"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(Model().eval(), (BATCH,))
        torch.export.save(program, path, extra_files={"note.txt": "seen"})
    return path.read_bytes()


@pytest.fixture
def path(tmp_path: Path, archive: bytes) -> Path:
    path = tmp_path / "model.pt2"
    path.write_bytes(archive)
    return path


def _as_before_2_13(reader: Any, config: Any, base_dir: str) -> dict[str, torch.Tensor]:
    """Torch's way from 2.9 to 2.12: a tensor over the bytes that the reader returns."""
    tensors: dict[str, torch.Tensor] = {}
    for meta in config.config.values():
        if meta.path_name not in tensors:
            content = reader.read_bytes(os.path.join(base_dir, meta.path_name))
            dtype = deserialize_scalar_type(meta.tensor_meta.dtype)
            wants_grad = meta.tensor_meta.requires_grad
            tensors[meta.path_name] = torch.frombuffer(
                content, dtype=dtype, requires_grad=wants_grad
            )
    return tensors


def torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have torch's own functions, if ``import trims_shim`` has patched them here already."""
    for owner, name in ((package.PT2ArchiveReader, "__init__"), (package, "_build_file_map")):
        monkeypatch.setattr(owner, name, inspect.unwrap(getattr(owner, name)))


@pytest.fixture(params=["as it is", "as it was"])
def daemon(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDaemon]:
    """With torch's way to read weights as it is, and as it was before 2.13."""
    torchs(monkeypatch)
    if request.param == "as it was":
        monkeypatch.setattr(package, "_build_file_map", _as_before_2_13)
    reads_bytes = "read_bytes" in package._build_file_map.__code__.co_names
    monkeypatch.setattr(patches, "active", lambda: True)
    applied = [points.apply(point) for point in torch_export.POINTS]
    assert applied[0].state is points.PatchState.APPLIED, applied[0].reason
    assert (applied[1].state is points.PatchState.APPLIED) == reads_bytes
    with FakeDaemon() as daemon:
        yield daemon
    for patch in applied:
        points.undo(patch)


def load(source: Any, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.export.load(source, **options)


def tensors(program: Any) -> dict[str, torch.Tensor]:
    constants = {name: value for name, value in program.constants.items() if torch.is_tensor(value)}
    return {**program.state_dict, **constants}


def assert_same(program: Any, archive: bytes) -> None:
    """The program that torch loads from the archive's bytes, which no cache can serve."""
    plain = load(io.BytesIO(archive))
    assert torch.equal(program.module()(BATCH), plain.module()(BATCH))
    mine, theirs = tensors(program), tensors(plain)
    assert list(mine) == list(theirs)
    for name, expected in theirs.items():
        found = mine[name]
        assert (type(found), found.dtype, found.requires_grad, found.stride()) == (
            *(type(expected), expected.dtype),
            *(expected.requires_grad, expected.stride()),
        )
        assert found.untyped_storage().nbytes() == expected.untyped_storage().nbytes(), name
        assert torch.equal(found, expected), name


def test_weights_and_constants_are_shared(daemon: FakeDaemon, path: Path, archive: bytes) -> None:
    before = outcomes()
    program = load(path)
    assert grown(before, "served:torch_export") == 1
    assert daemon.reads(path) == 1
    assert len(tensors(program)) >= 6
    assert all(map(is_shared, tensors(program).values()))
    assert_same(program, archive)


def test_ties_and_views_share_memory(daemon: FakeDaemon, path: Path) -> None:
    state = load(path).state_dict
    weights = state["first.weight"], state["second.weight"]
    assert weights[0].data_ptr() == weights[1].data_ptr()
    assert state["high"].data_ptr() == state["low"].data_ptr() + state["low"].nbytes


def test_extra_files_come_from_torchs_reader(daemon: FakeDaemon, path: Path) -> None:
    extra = {"note.txt": ""}
    load(path, extra_files=extra)
    assert extra == {"note.txt": "seen"}


def test_writes_are_private(daemon: FakeDaemon, path: Path, archive: bytes) -> None:
    program = load(path)
    with torch.no_grad():
        program.state_dict["first.weight"].zero_()
    assert_same(load(path), archive)


def test_what_is_loaded_outlives_its_file(daemon: FakeDaemon, path: Path, archive: bytes) -> None:
    program = load(path)
    path.unlink()
    assert_same(program, archive)


def test_a_file_that_vanishes_is_torchs(
    daemon: FakeDaemon, path: Path, archive: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch has it open already; ours would open it a moment later."""
    before = outcomes()
    made = torch_export._reader_of

    def too_late(name: str) -> Any:
        path.unlink(missing_ok=True)
        return made(name)

    monkeypatch.setattr(torch_export, "_reader_of", too_late)
    assert_same(load(path), archive)
    assert (grown(before, "served:torch_export"), grown(before, "fallback:model_changed")) == (0, 1)


def test_a_file_that_is_replaced_is_read_from_one_of_both(
    daemon: FakeDaemon, path: Path, archive: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graph and the weights are of one file, whichever."""
    made = torch_export._reader_of

    def replaced(name: str) -> Any:
        reader = made(name)
        path.replace(path.with_name("old.pt2"))
        path.write_bytes(b"another file")
        return reader

    monkeypatch.setattr(torch_export, "_reader_of", replaced)
    assert_same(load(path), archive)


@pytest.mark.parametrize("make", [io.BytesIO, None], ids=["bytes", "file"])
def test_file_objects_are_torchs(
    daemon: FakeDaemon, path: Path, archive: bytes, make: Callable[[bytes], Any] | None
) -> None:
    with path.open("rb") if make is None else make(archive) as source:
        before = outcomes()
        program = load(source)
        assert grown(before, "served:torch_export") == 0
        assert grown(before, "fallback:not_a_file") >= 1
    assert_same(program, archive)


def test_what_the_daemon_refuses_is_read_by_torch(
    path: Path, archive: bytes, daemon: FakeDaemon
) -> None:
    daemon.refuse(NoSpace("full"))
    before = outcomes()
    program = load(path)
    assert grown(before, "served:torch_export") == 0
    assert not any(map(is_shared, tensors(program).values()))
    assert_same(program, archive)


def rewritten(path: Path, archive: bytes, method: int) -> None:
    """The same records, unaligned, in an archive that torch reads all the same."""
    with zipfile.ZipFile(io.BytesIO(archive)) as source, zipfile.ZipFile(path, "w", method) as to:
        for name in source.namelist():
            to.writestr(name, source.read(name))


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_records_that_cannot_be_mapped_are_read(
    daemon: FakeDaemon, path: Path, archive: bytes, method: int
) -> None:
    rewritten(path, archive, method)
    program = load(path)
    assert not all(map(is_shared, tensors(program).values()))
    assert_same(program, archive)


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x03\x04" + bytes(4096)])
def test_what_is_no_archive_raises_torchs_error(
    daemon: FakeDaemon, tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "broken.pt2"
    path.write_bytes(content)
    with pytest.raises(RuntimeError) as mine:
        package.PT2ArchiveReader(str(path))
    with pytest.raises(RuntimeError) as theirs:
        torch._C.PyTorchFileReader(str(path))
    assert str(mine.value).splitlines()[0] == str(theirs.value).splitlines()[0]
    assert not daemon.opened


def test_listing_an_archive_asks_nothing(daemon: FakeDaemon, path: Path) -> None:
    with package.PT2ArchiveReader(str(path)) as reader:
        assert reader.archive_version() == 0
        assert "data/weights/weight_0" in reader.get_file_names()
    assert not daemon.opened


@pytest.mark.usefixtures("no_leak")
def test_no_descriptor_stays_open(path: Path, daemon: FakeDaemon) -> None:
    load(path)
    assert daemon.reads(path) == 1


def test_records_are_bytes_for_everybody_else(daemon: FakeDaemon, path: Path) -> None:
    load(path)
    with package.PT2ArchiveReader(str(path)) as reader:
        assert type(reader.read_bytes("data/weights/weight_0")) is bytes


def test_a_reader_that_reads_otherwise_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    torchs(monkeypatch)
    monkeypatch.setattr(package, "_build_file_map", lambda reader, config, base: {})
    applied = [points.apply(point) for point in torch_export.POINTS]
    assert [each.state for each in applied] == [points.PatchState.SKIPPED] * 2
    assert applied[0].reason == "weights are read in an unknown way"
