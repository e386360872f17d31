"""Model files for tests without torch, and digests of what is in them."""

from __future__ import annotations

import hashlib
import json
import os
import random
from typing import Any

__all__ = ["device_digest", "file_digest", "write_model"]


def write_model(path: str, *, seed: int, tensors: int, tensor_bytes: int) -> str:
    """A safetensors file of random bytes; its path. ``tensor_bytes`` is a multiple of 4."""
    header = {
        f"layer.{i}": {
            "dtype": "F32",
            "shape": [tensor_bytes // 4],
            "data_offsets": [i * tensor_bytes, (i + 1) * tensor_bytes],
        }
        for i in range(tensors)
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    generator = random.Random(seed)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _ in range(tensors):
            file.write(generator.randbytes(tensor_bytes))
        os.fsync(file.fileno())
    return path


def file_digest(path: str) -> str:
    """Of all tensors' bytes, in order."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        file.seek(8 + int.from_bytes(file.read(8), "little"))
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def device_digest(cuda: Any, arena: Any) -> str:
    """The same, of a DeviceArena, read by the driver's own copies."""
    digest = hashlib.sha256()
    for each in arena.layout.placed:
        digest.update(cuda.read(arena.address + each.offset_bytes, each.source.size_bytes))
    return digest.hexdigest()
