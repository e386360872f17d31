"""torch.load: everything that can name or be a file, and where it stands afterwards."""

from __future__ import annotations

import contextlib
import gzip
import io
import mmap
import os
import threading
import zipfile
from pathlib import Path
from typing import Any

import fsspec
import torch

from .payloads import legacy_bytes, saved, saved_bytes, state
from .registry import Work, attempt, case, cases


class CustomPath:
    """An os.PathLike that is no Path."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __fspath__(self) -> str:
        return str(self.path)


class CustomString(str):
    """A str subclass."""


SERVED_PATHS = {
    "str": str,
    "path": Path,
    "relative": lambda path: path.name,
    "relative_dots": lambda path: f"./../{path.parent.name}/{path.name}",
    "doubled_slash": lambda path: f"{path.parent}//{path.name}",
    "str_subclass": CustomString,
}
OTHER_PATHS = {
    "custom_path_like": CustomPath,
    "bytes": os.fsencode,
    "integer": lambda path: 3,
    "none": lambda path: None,
    "list": lambda path: [str(path)],
    "nul": lambda path: f"{path}\0",
    "empty": lambda path: "",
    "url": lambda path: f"file://{path}",
}


@cases(SERVED_PATHS, served=True)
def path(work: Work, form: Any) -> object:
    return torch.load(form(work.file("model.pt", saved(state()))))


@cases(OTHER_PATHS)
def path_of_another_kind(work: Work, form: Any) -> object:
    value = form(work.file("model.pt", saved(state())))
    return [
        attempt(torch.load, value),
        attempt(torch.load, value, mmap=True),
        attempt(torch.load, value, weights_only=False),
    ]


@cases({"space": "a model.pt", "unicode": "modèle 模型.pt", "newline": "a\nb.pt", "no_suffix": "m"})
def path_name(work: Work, name: str) -> object:
    return torch.load(work.file(name, saved(state())))


@case(served=True)
def symbolic_and_hard_links(work: Work) -> object:
    target = work.file("model.pt", saved(state()))
    symbolic = work.file("symbolic.pt", lambda path: path.symlink_to(target))
    hard = work.file("hard.pt", lambda path: path.hardlink_to(target))
    return [torch.load(symbolic), torch.load(hard), torch.load(symbolic, mmap=True)]


@case()
def descriptor_paths(work: Work) -> object:
    with work.file("model.pt", saved(state())).open("rb") as file:
        loaded = torch.load(f"/proc/self/fd/{file.fileno()}")
        return [loaded, attempt(torch.load, f"/dev/fd/{file.fileno()}"), file.tell()]


@case(served=True)
def changed_working_directory(work: Work) -> object:
    work.file("model.pt", saved(state()))
    (work.directory / "inner").mkdir(exist_ok=True)
    work.file("inner/model.pt", saved(state(start=5)))
    first = torch.load("model.pt")
    os.chdir("inner")
    return [first, torch.load("model.pt")]


OPENERS = {
    "buffered": lambda path: path.open("rb"),
    "unbuffered": lambda path: path.open("rb", buffering=0),
    "updating": lambda path: path.open("r+b"),
    "small_buffer": lambda path: path.open("rb", buffering=16),
    "fdopen": lambda path: os.fdopen(os.open(path, os.O_RDONLY), "rb"),
    "bytes_io": lambda path: io.BytesIO(path.read_bytes()),
    "bytes_io_reader": lambda path: io.BufferedReader(io.BytesIO(path.read_bytes())),
}


def _facts(file: Any) -> object:
    return [file.closed, attempt(file.tell), len(file.read(7))]


@cases(OPENERS)
def open_file(work: Work, opener: Any) -> object:
    path = work.file("model.pt", saved(state()))
    with opener(path) as file:
        first = torch.load(file)
        return [first, _facts(file), attempt(torch.load, file), file.seek(0), torch.load(file)]


BY_FSSPEC = {
    "file_system": lambda path: fsspec.filesystem("file").open(path, "rb"),
    "url": lambda path: fsspec.open(f"file://{path}", "rb"),
}


@cases(BY_FSSPEC, served=True)
def opened_by_fsspec(work: Work, opener: Any) -> object:
    path = work.file("model.pt", saved(state()))
    with opener(path) as file:
        first = torch.load(file)
        return [first, _facts(file), attempt(torch.load, file), file.seek(0), torch.load(file)]


@cases({"none": {}, "empty": {"empty": torch.empty(0, 3)}}, served=True)
def open_file_without_data_of_tensors(work: Work, tensors: dict[str, Any]) -> object:
    path = work.file("model.pt", saved({"text": "a" * (2 << 20), **tensors}))
    with path.open("rb") as file:
        return [torch.load(file), file.tell()]


@case(served=False)
def unpacked_by_fsspec(work: Work) -> object:
    path = work.file("model.pt.gz", lambda p: p.write_bytes(gzip.compress(saved_bytes(state()), 1)))
    with fsspec.filesystem("file").open(path, "rb", compression="gzip") as file:
        return [torch.load(file), file.tell()]


@case(served=False)
def behind_a_header_by_fsspec(work: Work) -> object:
    path = work.file("model.pt", lambda path: path.write_bytes(bytes(640) + saved_bytes(state())))
    with fsspec.filesystem("file").open(path, "rb") as file:
        file.seek(640)
        return [attempt(torch.load, file), file.tell()]


@cases({"text": "r", "write_only": "ab", "append_and_read": "a+b"})
def open_file_of_wrong_mode(work: Work, mode: str) -> object:
    with work.file("model.pt", saved(state())).open(mode) as file:
        return [attempt(torch.load, file), attempt(file.tell)]


@cases({"buffered": 8192, "unbuffered": 0})
def open_file_after_reading(work: Work, buffering: int) -> object:
    seen: list[object] = []
    for position in (1, 4, 4096):
        with work.file("model.pt", saved(state())).open("rb", buffering=buffering) as file:
            file.read(position)
            seen += [attempt(torch.load, file), file.tell()]
    return seen


class _Unprintable:
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


@case(served=True)
def open_file_whose_name_is_no_text(work: Work) -> object:
    """Programs may put anything there."""
    seen: list[object] = []
    for name in (b"bytes", b"\xff", 7, None, _Unprintable()):
        with work.file("model.pt", saved(state())).open("rb") as file:
            file.raw.name = name
            seen.append(attempt(torch.load, file))
    return seen


@cases({"zeros": bytes(640), "text": b"header\n" * 9, "zip_magic": b"PK\x03\x04" + bytes(60)})
def archive_behind_a_header(work: Work, header: bytes) -> object:
    path = work.file("model.pt", lambda path: path.write_bytes(header + saved_bytes(state())))
    with path.open("rb") as file:
        file.seek(len(header))
        loaded = attempt(torch.load, file)
        return [
            loaded,
            file.tell(),
            attempt(torch.load, path),
            attempt(torch.load, path, mmap=True),
        ]


@case()
def two_archives_in_one_file(work: Work) -> object:
    def write(path: Path) -> None:
        with path.open("wb") as file:
            torch.save(state(), file)
            torch.save(state(start=5), file)

    path = work.file("model.pt", write)
    with path.open("rb") as file:
        first = attempt(torch.load, file)
        return [first, file.tell(), attempt(torch.load, file), attempt(torch.load, path)]


@case()
def archive_before_a_trailer(work: Work) -> object:
    path = work.file("m.pt", lambda path: path.write_bytes(saved_bytes(state()) + b"trailer" * 5))
    return [attempt(torch.load, path), attempt(torch.load, path, mmap=True)]


@case()
def legacy_objects_in_one_file(work: Work) -> object:
    both = legacy_bytes(state()) + legacy_bytes(state(start=5))
    with work.file("model.pt", lambda path: path.write_bytes(both)).open("rb") as file:
        return [torch.load(file), file.tell(), torch.load(file), file.tell()]


@case()
def closed_file(work: Work) -> object:
    file = work.file("model.pt", saved(state())).open("rb")
    file.close()
    return [attempt(torch.load, file), attempt(torch.load, io.BytesIO())]


class Partial:
    """A file object with only the named methods."""

    def __init__(self, file: Any, names: str) -> None:
        self.file, self.calls = file, 0
        for name in names.split():
            setattr(self, name, getattr(file, name))


PARTIAL = {
    "needed": "read readline seek tell",
    "with_fileno": "read readline seek tell fileno",
    "with_readinto": "read readline readinto seek tell",
    "without_readline": "read seek tell",
    "without_tell": "read readline seek",
    "without_seek": "read readline tell",
    "read_only": "read",
}


@cases(PARTIAL)
def partial_file_object(work: Work, names: str) -> object:
    with work.file("model.pt", saved(state())).open("rb") as file:
        return [attempt(torch.load, Partial(file, names)), file.tell()]


class Lying(io.BytesIO):
    """In-memory bytes whose fileno belongs to another file."""

    other: Any

    def fileno(self) -> int:
        return int(self.other.fileno())


@case()
def file_object_with_foreign_descriptor(work: Work) -> object:
    path = work.file("model.pt", saved(state()))
    other = work.file("other.pt", saved(state(start=5)))
    with other.open("rb") as file:
        lying = Lying(path.read_bytes())
        lying.other, lying.name = file, str(other)  # type: ignore[attr-defined]
        return torch.load(lying)


class Counting(io.FileIO):
    """A FileIO that counts what is read through it."""

    def read(self, size: int = -1) -> Any:
        self.reads = getattr(self, "reads", 0) + 1
        return super().read(size)


@case()
def file_subclass(work: Work) -> object:
    with Counting(work.file("model.pt", saved(state()))) as file:
        return [torch.load(file), file.tell(), file.reads > 0]


@case()
def compressed_and_mapped_streams(work: Work) -> object:
    path = work.file("model.pt", saved(state()))
    packed = work.file("model.pt.gz", lambda p: p.write_bytes(gzip.compress(path.read_bytes(), 1)))
    with gzip.open(packed) as stream, path.open("rb") as file:
        loaded = attempt(torch.load, stream)
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            return [loaded, attempt(torch.load, mapped), attempt(torch.load, packed)]


@case()
def member_of_a_zip(work: Work) -> object:
    def write(path: Path) -> None:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("model.pt", saved_bytes(state()))

    path = work.file("outer.zip", write)
    with zipfile.ZipFile(path) as archive, archive.open("model.pt") as member:
        return [attempt(torch.load, member), attempt(torch.load, path)]


@case()
def pipe(work: Work) -> object:
    data = saved_bytes(state())

    def feed() -> None:
        with os.fdopen(writing, "wb") as stream, contextlib.suppress(BrokenPipeError):
            stream.write(data)

    reading, writing = os.pipe()
    thread = threading.Thread(target=feed)
    thread.start()
    with os.fdopen(reading, "rb") as stream:
        error = attempt(torch.load, stream)
    thread.join()
    return error


@case()
def named_pipe(work: Work) -> object:
    path = work.fresh("fifo", os.mkfifo)
    data = saved_bytes(state())

    def feed() -> None:
        with contextlib.suppress(BrokenPipeError):
            path.write_bytes(data)

    thread = threading.Thread(target=feed, daemon=True)
    thread.start()
    error = attempt(torch.load, path)
    thread.join(1)
    return error


@cases({"null": "/dev/null", "zero": "/dev/zero", "proc": "/proc/self/status"})
def special_file(work: Work, name: str) -> object:
    return [attempt(torch.load, name), attempt(torch.load, name, mmap=True)]
