"""A TorchScript archive without its weights, for torch to read, and where the weights are.

Owns the container; the pickle in it is read by :mod:`trims_shim.formats.torch_script`. Weights that
are attributes of modules are empty in the archive that is returned, and their records are left out.
What a class restores by itself (``__setstate__``) may look at its tensors, so archives with such a
class are refused.
"""

from __future__ import annotations

import io
import struct
import sys
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import BinaryIO, NamedTuple

from trims_shim.errors import CorruptFile, UnsupportedFormat
from trims_shim.formats.torch_script import ScriptTensor, read_script_pickle
from trims_shim.specs import Span

__all__ = ["Script", "Weight", "read_script"]

_PICKLE = "data.pkl"
_LEAST_BYTES = 4096
"""Smaller tensors stay in the archive: torch copies them as fast."""
_ALIGNMENT_BYTES = 64
"""torch.jit.save aligns records so; torch's kernels expect it of torch's allocator."""
_MAX_KEPT_BYTES = 256 << 20
_LOCAL = struct.Struct("<I22xHH")
_LOCAL_SIGNATURE = 0x04034B50


class Weight(NamedTuple):
    """A tensor of the module, over a record of the whole archive."""

    tensor: ScriptTensor
    record: Span


class Script(NamedTuple):
    """``archive``: what torch reads; ``weights``: the tensors that are empty in it."""

    archive: bytes
    weights: Sequence[Weight]


def read_script(file: BinaryIO) -> Script:
    """Read the archive that is all of ``file``, without its weights.

    Raises CorruptFile or UnsupportedFormat, and OSError if the file cannot be read.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            return _read(file, archive)
    except (zipfile.BadZipFile, zlib.error, struct.error, EOFError) as error:
        raise CorruptFile(f"archive: {error}") from error
    except (NotImplementedError, RuntimeError, UnicodeDecodeError) as error:
        raise UnsupportedFormat(f"archive: {error}") from error


def _read(file: BinaryIO, archive: zipfile.ZipFile) -> Script:
    entries = _entries(archive)
    if _PICKLE not in entries or "constants.pkl" not in entries:
        raise UnsupportedFormat("not a TorchScript archive")
    byteorder = entries.get("byteorder")
    if byteorder is not None and archive.read(byteorder) != sys.byteorder.encode():
        raise UnsupportedFormat("numbers are in another order of bytes")
    found = read_script_pickle(archive.read(entries[_PICKLE]))
    weights = list(_weights(file, entries, found.tensors))
    if not weights:
        raise UnsupportedFormat("no large tensor is an attribute of a module")
    gone = {f"data/{each.tensor.key}" for each in weights}
    rest = {name: each for name, each in entries.items() if name not in gone}
    if sum(each.file_size for each in rest.values()) > _MAX_KEPT_BYTES:
        raise UnsupportedFormat("very much beside the weights")
    emptied = found.emptied(each.tensor for each in weights)
    return Script(_rewritten(archive, rest, emptied), weights)


def _entries(archive: zipfile.ZipFile) -> Mapping[str, zipfile.ZipInfo]:
    """The records by their names in the folder that all are in."""
    infos = archive.infolist()
    folder = f"{infos[0].filename.partition('/')[0]}/" if infos else "/"
    found = {each.filename.removeprefix(folder): each for each in infos}
    is_one_folder = all(each.filename.startswith(folder) for each in infos)
    # torch looks records up in letters of any case.
    if not is_one_folder or len({name.lower() for name in found}) != len(infos):
        raise UnsupportedFormat("records of several folders, or of one name")
    return found


def _weights(
    file: BinaryIO, entries: Mapping[str, zipfile.ZipInfo], tensors: Sequence[ScriptTensor]
) -> Iterator[Weight]:
    for tensor in tensors:
        info = entries.get(f"data/{tensor.key}")
        if info is None or tensor.storage_bytes < _LEAST_BYTES:
            continue
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != tensor.storage_bytes:
            continue
        record = Span(_data_offset(file, info), info.file_size)
        if record.offset_bytes % _ALIGNMENT_BYTES == 0:
            yield Weight(tensor, record)


def _data_offset(file: BinaryIO, info: zipfile.ZipInfo) -> int:
    file.seek(info.header_offset)
    signature, name_bytes, extra_bytes = _LOCAL.unpack(file.read(_LOCAL.size))
    if signature != _LOCAL_SIGNATURE:
        raise CorruptFile(f"record {info.filename!r}: no local header where the directory says")
    return info.header_offset + _LOCAL.size + int(name_bytes) + int(extra_bytes)


def _rewritten(
    archive: zipfile.ZipFile, entries: Mapping[str, zipfile.ZipInfo], pickle: bytes
) -> bytes:
    """An archive of these records, with another pickle."""
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as copy:
        for name, info in entries.items():
            content = pickle if name == _PICKLE else archive.read(info)
            if name.startswith("code/") and b"__setstate__" in content:
                raise UnsupportedFormat(f"{name}: a class restores itself")
            copy.writestr(zipfile.ZipInfo(info.filename), content)
    return written.getvalue()
