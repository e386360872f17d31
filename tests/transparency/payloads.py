"""What the cases store: deterministic values, with one tensor that is large enough for the cache.

A case with files below ``TRIMS_MIN_BYTES`` only would compare the original with itself. So every
file carries ``bulk`` beside what the case is about. It is not much larger, and neither is that
limit large: thousands of processes touch it for the first time.
"""

from __future__ import annotations

import io
import pickle
import re
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

__all__ = [
    "Net",
    "bulk",
    "counting",
    "fixed_length_keys",
    "legacy_bytes",
    "net",
    "pickled_bytes",
    "rewrite_zip",
    "saved",
    "saved_bytes",
    "state",
    "with_bulk",
]

# Pickled strings of 7 to 15 digits: the keys of storages in the format before torch 1.6.
_ADDRESSES = re.compile(b"|".join(rb"X\x%02x\0\0\0\d{%d}" % (n, n) for n in range(7, 16)))


def counting(*shape: int, dtype: torch.dtype = torch.float32, start: int = 0) -> torch.Tensor:
    """start, start + 1, ... in that shape."""
    size = 1
    for length in shape:
        size *= length
    return torch.arange(start, start + size, dtype=dtype).reshape(shape)


def bulk(start: int = 0) -> torch.Tensor:
    """A float32 tensor of 320 KiB."""
    return counting(1024, 80, start=start)


def with_bulk(value: Any) -> dict[str, Any]:
    """The value of a case beside a large tensor."""
    return {"value": value, "bulk": bulk()}


def state(start: int = 0) -> dict[str, torch.Tensor]:
    """A plain state dict: large and small tensors, two dtypes, one scalar."""
    return {
        "bulk": bulk(start),
        "weight": counting(16, 8, start=start),
        "bias": counting(5, dtype=torch.int64, start=start),
        "count": torch.tensor(start + 7),
    }


def saved(value: Any, **options: Any) -> Callable[[Path], None]:
    """A writer for :meth:`Work.file`."""
    return lambda path: torch.save(value, path, **options)


def saved_bytes(value: Any, **options: Any) -> bytes:
    """What torch.save writes."""
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


def legacy_bytes(value: Any) -> bytes:
    """What torch.save writes in its format of before 1.6."""
    return fixed_length_keys(saved_bytes(value, _use_new_zipfile_serialization=False))


def fixed_length_keys(legacy: bytes) -> bytes:
    """The same with keys of 20 digits: torch's are addresses, of as many digits as those have."""
    return _ADDRESSES.sub(lambda found: b"X\x14\0\0\0" + found[0][5:].rjust(20, b"0"), legacy)


class Net(torch.nn.Module):
    """A small network with one large layer, buffers and nesting."""

    def __init__(self) -> None:
        super().__init__()
        self.large = torch.nn.Linear(256, 256)
        self.norm = torch.nn.BatchNorm1d(256)
        self.head = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(256, 4))
        self.register_buffer("table", counting(256, 128))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Shapes ``[batch, 256] -> [batch, 4]``."""
        return self.head(self.norm(self.large(batch)))


def net(seed: int = 1) -> Net:
    """A network whose weights depend on the seed only."""
    torch.manual_seed(seed)
    return Net()


def rewrite_zip(
    source: bytes,
    *,
    replace: Mapping[str, bytes] | None = None,
    drop: tuple[str, ...] = (),
    compression: int = zipfile.ZIP_STORED,
) -> bytes:
    """A checkpoint written anew by zipfile, with records replaced or dropped (names without root).

    The result has no alignment padding.
    """
    target = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(source)) as old,
        zipfile.ZipFile(target, "w", compression) as new,
    ):
        for info in old.infolist():
            name = info.filename.partition("/")[2]
            if name not in drop:
                entry = zipfile.ZipInfo(info.filename)
                entry.compress_type = compression
                new.writestr(entry, (replace or {}).get(name, old.read(info)))
    return target.getvalue()


def pickled_bytes(value: object) -> int:
    """The length of a pickle, but for the addresses by which torch names storages there.

    Those have fewer digits on the heap than where the allocator maps memory.
    """
    return len(re.sub(rb"\d{9,}", b"", pickle.dumps(value)))
