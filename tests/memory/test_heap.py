"""What a block of work leaves free in the C heap goes back, and only that.

Each case runs in a process of its own: the heap of the test process has a past.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trims_shim.memory import heap

ROOT = Path(__file__).resolve().parents[2]
PIECES = 400
PIECE_BYTES = 100 << 10  # below the size from which glibc maps memory instead
PROGRAM = """
import ctypes, sys
from trims_shim.memory import heap

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]

def fill(pieces):
    found = [libc.malloc({size}) for _ in range(pieces)]
    for each in found:
        ctypes.memset(each, 1, {size})
    last = libc.malloc({size})  # in use, so that nothing goes back by itself
    for each in found:
        libc.free(each)
    return last

trimmed = []
class Libc:
    mallinfo2 = libc.mallinfo2
    def malloc_trim(self, pad):
        trimmed.append(pad)
        return libc.malloc_trim(pad)
heap._libc = Libc()
resident = lambda: int(open("/proc/self/statm").read().split()[1]) * {page}
{body}
"""

pytestmark = pytest.mark.skipif(heap.free_bytes() is None, reason="not glibc 2.33 or later")


def run(body: str) -> None:
    code = PROGRAM.format(size=PIECE_BYTES, page=os.sysconf("SC_PAGE_SIZE"), body=body)
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "TRIMS_ENABLED": "0"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_a_block_freed_is_not_resident_afterwards() -> None:
    run(f"""
with heap.given_back():
    fill({PIECES})
    held = resident()
assert trimmed == [0]
assert resident() <= held - {PIECES * PIECE_BYTES // 2}, (held, resident())
""")


def test_block_that_frees_little_does_nothing() -> None:
    run("""
with heap.given_back():
    fill(10)
assert trimmed == []
""")


def test_large_heap_is_left_alone() -> None:
    run(f"""
fill({2 * heap._LARGE_BYTES // PIECE_BYTES})
assert heap.free_bytes() > heap._LARGE_BYTES
with heap.given_back():
    fill({3 * heap._LARGE_BYTES // PIECE_BYTES})
assert trimmed == []
""")


def test_block_that_raises_is_passed_through() -> None:
    run(f"""
try:
    with heap.given_back():
        fill({PIECES})
        raise KeyError("theirs")
except KeyError as error:
    assert error.args == ("theirs",)
assert trimmed == []
""")


def test_other_c_libraries_are_no_trouble() -> None:
    run(f"""
heap._libc = object()
assert heap.free_bytes() is None
with heap.given_back():
    fill({PIECES})
""")
