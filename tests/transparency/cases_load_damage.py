"""torch.load: files that are missing, broken, old, of another kind or of another format."""

from __future__ import annotations

import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .payloads import counting, legacy_bytes, net, rewrite_zip, saved, saved_bytes, state
from .registry import Work, attempt, case, cases


def _all_ways(path: object) -> object:
    """The same load with the arguments that change torch's way through its code."""
    return [
        attempt(torch.load, path),
        attempt(torch.load, path, weights_only=False),
        attempt(torch.load, path, mmap=True),
        attempt(torch.load, path, mmap=True, weights_only=False),
        attempt(torch.load, path, map_location="cpu"),
        attempt(torch.load, path, map_location="meta"),
    ]


@cases({"missing": "no-such-file.pt", "missing_folder": "a/b/c.pt", "directory": ".", "root": "/"})
def no_file(work: Work, name: str) -> object:
    return _all_ways(name)


@case()
def unreadable(work: Work) -> object:
    path = work.fresh("model.pt", saved(state()))
    path.chmod(0)
    # Root reads it all the same; either way both sides must agree.
    return _all_ways(path)


CONTENTS: dict[str, Callable[[], bytes]] = {
    "empty": lambda: b"",
    "one_byte": lambda: b"P",
    "magic_only": lambda: b"PK\x03\x04",
    "text": lambda: b"version https://git-lfs.github.com/spec/v1\n",
    "large_text": lambda: b"not a model\n" * 200_000,
    "large_zeros": lambda: bytes(2 << 20),
    "html": lambda: b"<!DOCTYPE html><html></html>",
    "plain_pickle": lambda: pickle.dumps({"a": list(range(500_000))}),
    "safetensors": lambda: struct.pack("<Q", 2) + b"{}" + bytes(2 << 20),
}


@cases(CONTENTS)
def not_a_checkpoint(work: Work, content: Callable[[], bytes]) -> object:
    return _all_ways(work.file("model.pt", lambda path: path.write_bytes(content())))


@cases({"head": 100, "pickle": 900, "weights": 1 << 18, "before_directory": -600, "end": -1})
def truncated(work: Work, size: int) -> object:
    data = saved_bytes(state())
    return _all_ways(work.file("model.pt", lambda path: path.write_bytes(data[:size])))


def _flipped(data: bytes, position: int) -> bytes:
    return data[:position] + bytes([data[position] ^ 0xFF]) + data[position + 1 :]


def _damage_directory(data: bytes) -> bytes:
    return _flipped(data, data.rindex(b"PK\x01\x02") + 42)


def _damage_name(data: bytes) -> bytes:
    start = data.rindex(b"PK\x01\x02")
    return data[:start] + data[start:].replace(b"/data/", b"/DATA/", 1)


def _damage_note(data: bytes) -> bytes:
    """torch finds the record all the same."""
    return data.replace(b"byteorder", b"ByteOrder").replace(b"little", b"middle")


def _damage_end(data: bytes) -> bytes:
    return _flipped(data, data.rindex(b"PK\x05\x06") + 16)


def _damage_weight(data: bytes) -> bytes:
    """One flipped bit in the bulk: the zip's CRC no longer fits."""
    return _flipped(data, 1 << 18)


def _damage_local_header(data: bytes) -> bytes:
    return _flipped(data, data.index(b"PK\x03\x04", 2000))


def _damage_local_size(data: bytes) -> bytes:
    return _flipped(data, data.index(b"PK\x03\x04", 2000) + 26)


DAMAGES = {
    function.__name__.strip("_"): function
    for function in (
        _damage_directory,
        _damage_name,
        _damage_note,
        _damage_end,
        _damage_weight,
        _damage_local_header,
        _damage_local_size,
    )
}


@cases(DAMAGES)
def damaged_zip(work: Work, damage: Callable[[bytes], bytes]) -> object:
    data = damage(saved_bytes(state()))
    return _all_ways(work.file("model.pt", lambda path: path.write_bytes(data)))


def _rewritten(**options: Any) -> Callable[[], bytes]:
    return lambda: rewrite_zip(saved_bytes(state()), **options)


BULK = state()["bulk"].numpy().tobytes()
REWRITTEN = {
    "unaligned": _rewritten(),
    "deflated": _rewritten(compression=zipfile.ZIP_DEFLATED),
    "unknown_byteorder": _rewritten(replace={"byteorder": b"middle"}),
    "no_byteorder": _rewritten(drop=("byteorder",)),
    "no_version": _rewritten(drop=("version",)),
    "future_version": _rewritten(replace={"version": b"99\n"}),
    "malformed_version": _rewritten(replace={"version": b"three"}),
    "no_pickle": _rewritten(drop=("data.pkl",)),
    "empty_pickle": _rewritten(replace={"data.pkl": b""}),
    "corrupt_pickle": _rewritten(replace={"data.pkl": b"\x80\x02}q\x00(X\x04"}),
    "other_pickle": _rewritten(replace={"data.pkl": pickle.dumps({"a": 1}, 2)}),
    "no_record": _rewritten(drop=("data/0",)),
    "empty_record": _rewritten(replace={"data/0": b""}),
    "short_record": _rewritten(replace={"data/0": BULK[:-64]}),
    "long_record": _rewritten(replace={"data/0": BULK + bytes(64)}),
    "short_small_record": _rewritten(replace={"data/1": bytes(64)}),
    "serialization_id_gone": _rewritten(drop=(".data/serialization_id",)),
    "format_version_gone": _rewritten(drop=(".format_version",)),
    "alignment_differs": _rewritten(replace={".storage_alignment": b"4096"}),
    "alignment_is_text": _rewritten(replace={".storage_alignment": b"many"}),
}


@cases(REWRITTEN)
def rewritten_zip(work: Work, content: Callable[[], bytes]) -> object:
    return _all_ways(work.file("model.pt", lambda path: path.write_bytes(content())))


@case()
def big_endian(work: Work) -> object:
    content = rewrite_zip(saved_bytes(state()), replace={"byteorder": b"big"})
    path = work.file("model.pt", lambda path: path.write_bytes(content))
    # Not with map_location="meta": torch 2.13 swaps bytes of a storage without memory and crashes.
    return [torch.load(path), torch.load(path, mmap=True), torch.load(path, weights_only=False)]


@case()
def duplicated_record(work: Work) -> object:
    def write(path: Path) -> None:
        path.write_bytes(rewrite_zip(saved_bytes(state())))
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr(zipfile.ZipInfo("archive/data/0"), bytes(len(BULK)))

    return _all_ways(work.file("model.pt", write))


@case()
def foreign_zip(work: Work) -> object:
    def write(path: Path) -> None:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("folder/readme.txt", "hello")
            archive.writestr("folder/data.bin", bytes(2 << 20))

    return _all_ways(work.file("model.zip", write))


@case()
def legacy_format(work: Work) -> object:
    return _all_ways(work.file("m.pt", saved(state(), _use_new_zipfile_serialization=False)))


@case()
def legacy_format_damaged(work: Work) -> object:
    # One tensor: the order of several follows their addresses.
    data = legacy_bytes(counting(1 << 20))
    half = work.file("half.pt", lambda path: path.write_bytes(data[: -(1 << 20)]))
    wrong = work.file("wrong.pt", lambda path: path.write_bytes(_flipped(data, 3)))
    return [_all_ways(half), _all_ways(wrong)]


@case()
def legacy_tar(work: Work) -> object:
    def write(path: Path) -> None:
        import io
        import tarfile

        with tarfile.open(path, "w") as archive:
            for name in ("sys_info", "pickle", "storages", "tensors"):
                data = pickle.dumps(0, 2) + bytes(1 << 19)
                entry = tarfile.TarInfo(name)
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))

    return _all_ways(work.file("model.tar", write))


@case()
def torchscript_archive(work: Work) -> object:
    def write(path: Path) -> None:
        torch.jit.save(torch.jit.trace(net().eval(), torch.ones(2, 256)), path)

    # The loaded script module's repr and state are compared by its state dict.
    path = work.file("model.pt", write)
    loaded = attempt(torch.load, path, weights_only=False)
    seen = loaded.state_dict() if hasattr(loaded, "state_dict") else loaded
    return [seen, attempt(torch.load, path), attempt(torch.load, path, mmap=True)]


@case(served=True)
def errors_do_not_disturb_later_loads(work: Work) -> object:
    good = work.file("good.pt", saved(state()))
    data = good.read_bytes()
    bad = work.file("bad.pt", lambda path: path.write_bytes(data[:-100]))
    return [attempt(torch.load, bad), torch.load(good), attempt(torch.load, bad), torch.load(good)]


class Unsafe:
    """A class that weights_only refuses."""


class Explosive:
    """Unpickling it raises."""

    def __reduce__(self) -> Any:
        return _explode, ()


def _explode() -> None:
    raise ZeroDivisionError("while unpickling")


@cases({"class": Unsafe(), "function": os.path.join, "explosive": Explosive(), "set": {1}})
def refused_global(work: Work, value: Any) -> object:
    path = work.file("model.pt", saved({"value": value, "bulk": counting(1 << 20)}))
    return _all_ways(path)
