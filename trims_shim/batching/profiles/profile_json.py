"""The JSON in which profiles are kept: one reader and one writer for all kinds of them.

Content is not trusted: whatever is wrong with it is a FormatError.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trims_shim.errors import CorruptFile, TruncatedFile, UnsupportedFormat
from trims_shim.naming import naming
from trims_shim.replacing import replace_file

__all__ = ["LARGEST_SIZE", "JsonFormat", "largest_of", "latencies_of"]

LARGEST_SIZE = 1 << 16


@dataclass(frozen=True, slots=True)
class JsonFormat:
    """One kind of file: ``name`` is its ``format``; messages use ``noun``; ``command`` makes it."""

    name: str
    noun: str
    version: int
    command: str
    limit_bytes: int = 4 << 20
    """Far more than any has: a larger one is not ours, and not worth decoding."""

    def write(self, path: str | os.PathLike[str], fields: Mapping[str, Any]) -> None:
        """Write or replace the file at ``path``, also a link. Raises OSError."""
        whole = {"format": self.name, "version": self.version, **fields}
        replace_file(os.fspath(path), (json.dumps(whole, indent=1) + "\n").encode())

    def read(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """The fields of the file, unchecked. Raises OSError and FormatError."""
        name = os.fspath(path)
        with naming(name), open(name, "rb") as file:
            content = file.read(self.limit_bytes + 1)
        if len(content) > self.limit_bytes:
            raise CorruptFile(f"{name} is too large for a {self.noun}")
        if not content.strip():
            raise TruncatedFile(f"{name} is empty, not a {self.noun}; `{self.command}` makes one")
        try:
            fields = json.loads(content)
        # RecursionError: very deep nesting.
        except (ValueError, RecursionError) as error:
            raise CorruptFile(f"{name} is not a {self.noun}: {error}") from error
        if not isinstance(fields, dict) or fields.get("format") != self.name:
            raise CorruptFile(f"{name} is not a {self.noun}; see `{self.command}`")
        if fields.get("version") != self.version:
            raise UnsupportedFormat(
                f"{name} is a {self.noun} of version {fields.get('version')!r}, and this is for "
                f"{self.version}; measure it anew with `{self.command}`"
            )
        return fields


# --- values ---------------------------------------------------------------------------------------


def largest_of(name: str, fields: Mapping[str, Any]) -> int:
    """The ``max_batch_size`` of the file ``name``."""
    largest = fields.get("max_batch_size")
    if type(largest) is not int or not 1 <= largest <= LARGEST_SIZE:
        raise CorruptFile(f"{name} has a max_batch_size of {largest!r}")
    return largest


def latencies_of(name: str, fields: Mapping[str, Any]) -> dict[int, float]:
    """The ``latencies_ns`` by batch size, of the file ``name``."""
    latencies = fields.get("latencies_ns")
    if not isinstance(latencies, dict) or not latencies:
        raise CorruptFile(f"{name} has no latencies")
    return {_size(name, size): _latency(name, each) for size, each in latencies.items()}


def _size(name: str, text: str) -> int:
    is_number = text.isascii() and text.isdigit() and len(text) <= 5
    if not is_number or not 1 <= int(text) <= LARGEST_SIZE:
        raise CorruptFile(f"{name} has the latency of a batch of {text[:40]!r}")
    return int(text)


def _latency(name: str, value: object) -> float:
    # A bool is an int, too. The limit is more than a century; not-a-number is not below it.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1 << 62:
        raise CorruptFile(f"{name} has a latency of {str(value)[:40]} ns")
    return float(value)
