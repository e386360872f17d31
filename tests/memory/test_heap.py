"""What a block of work leaves free in the C heap goes back, and only that; it finds huge pages.

Each case runs in a process of its own: the heap of the test process has a past.
"""

from __future__ import annotations

import ctypes
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
import ctypes, os, sys
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
statm = os.open("/proc/self/statm", os.O_RDONLY)
# Nothing that the C heap would keep a piece for, at the end of what is measured.
resident = lambda: int(os.pread(statm, 100, 0).split()[1]) * {page}
{body}
"""

HAS_MALLINFO2 = hasattr(ctypes.CDLL(None), "mallinfo2")
pytestmark = pytest.mark.skipif(not HAS_MALLINFO2, reason="not glibc 2.33 or later")


def run(body: str) -> None:
    code = PROGRAM.format(size=PIECE_BYTES, page=os.sysconf("SC_PAGE_SIZE"), body=body)
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "TRIMS_ENABLED": "0"},
        capture_output=True,
        text=True,
        timeout=120,
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


@pytest.mark.parametrize("pieces_before", [0, 100])
def test_block_that_frees_little_does_nothing(pieces_before: int) -> None:
    """However much was free before: the program may be about to need that again."""
    run(f"""
fill({pieces_before})
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
with heap.given_back(room_bytes=100 << 20):
    fill({PIECES})
""")


class TestRoom:
    """A block finds room in the heap; what is not there is no trouble."""

    def test_large_allocations_come_from_it(self) -> None:
        run(f"""
heap._libc = libc
advised, taken = [], []
class Libc:
    def __getattr__(self, name):
        return getattr(libc, name)
    def madvise(self, start, length, advice):
        advised.append((start.value, start.value + length.value, advice))
        return libc.madvise(start, length, advice)
    def malloc(self, size):
        taken.append(libc.malloc(size))
        return taken[-1]
    def free(self, piece):
        taken.remove(piece.value)
        libc.free(piece)
heap._libc = Libc()
with heap.given_back(room_bytes=200 << 20):
    held = resident()
    found = libc.malloc(200 << 20)
    (start, end, advice), = advised
    assert start - {os.sysconf("SC_PAGE_SIZE")} < found and found + (200 << 20) <= end
    assert end - start < (200 << 20) + heap._PIECE_BYTES, "no other memory"
    assert advice == 14
    assert resident() < held + (8 << 20), "room is not memory"
    ctypes.memset(found, 1, 200 << 20)
    assert len(taken) == 1, "what keeps the room in the heap"
    libc.free(found)
assert taken == []
assert resident() < held + (8 << 20), (held, resident())
""")

    def test_threads_have_heaps_of_their_own(self) -> None:
        run("""
import threading
heap._libc = libc
def work():
    with heap.given_back(room_bytes=200 << 20):
        found = libc.malloc(150 << 20)
        ctypes.memset(found, 1, 150 << 20)
        libc.free(found)
    done.append(True)
done = []
thread = threading.Thread(target=work)
thread.start()
thread.join()
assert done
""")

    def test_addresses_are_whole_whichever_thread_asks_first(self) -> None:
        """Set at each call, the kind of result could be that of another thread's function."""
        code = "import ctypes\nfrom trims_shim.memory import heap\n"
        code += "assert vars(heap._libc)['malloc'].restype is ctypes.c_void_p"
        environment = os.environ | {"PYTHONPATH": str(ROOT), "TRIMS_ENABLED": "0"}
        subprocess.run([sys.executable, "-c", code], env=environment, timeout=60, check=True)

    def test_a_block_that_raises_leaves_none(self) -> None:
        run("""
heap._libc = libc
try:
    with heap.given_back(room_bytes=200 << 20):
        raise KeyError
except KeyError:
    assert heap.free_bytes() < 64 << 20
else:
    raise AssertionError
""")

    def test_a_heap_with_enough_of_its_own(self) -> None:
        run(f"""
fill({2 * heap._LARGE_BYTES // PIECE_BYTES})
with heap.given_back(room_bytes=200 << 20):  # `Libc` has no malloc
    pass
""")

    def test_huge_pages_that_are_too_large(self) -> None:
        run("""
import mmap
mmap.PAGESIZE = 65536
with heap.given_back(room_bytes=200 << 20):  # `Libc` has no malloc
    pass
""")

    @pytest.mark.parametrize("limit", ["RLIMIT_AS", "RLIMIT_DATA"])
    def test_addresses_that_are_limited(self, limit: str) -> None:
        """They would be taken from what the block needs, and from what comes after it."""
        run(f"""
import resource
resource.setrlimit(resource.{limit}, (4 << 30, 4 << 30))
with heap.given_back(room_bytes=200 << 20):  # `Libc` has no malloc
    pass
""")

    @pytest.mark.parametrize("spare_bytes", [80 << 20, 40 << 20, 20 << 20])
    def test_addresses_that_are_short(self, spare_bytes: int) -> None:
        """For more than one piece, for one, and for none."""
        run(f"""
import resource
heap._libc = libc
heap.are_addresses_limited = lambda: False
status = open("/proc/self/status").read()
held = int(status.partition("VmData:")[2].split()[0]) << 10  # free-threaded Python reserves much
resource.setrlimit(resource.RLIMIT_DATA, (held + {spare_bytes}, held + {spare_bytes}))
for size in (64 << 20, 1 << 40):
    with heap.given_back(room_bytes=size):
        found = libc.malloc(4 << 20)
        assert found
        libc.free(found)
""")

    def test_memory_that_is_mapped_anyway(self) -> None:
        """A program may fix the size from which allocations are mappings."""
        run("""
advised = []
class Libc:
    def __getattr__(self, name):
        return getattr(libc, name)
    def madvise(self, *_):
        advised.append(_)
heap._libc = Libc()
libc.mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD
with heap.given_back(room_bytes=200 << 20):
    found = libc.malloc(150 << 20)
    ctypes.memset(found, 1, 150 << 20)
    libc.free(found)
assert resident() < 100 << 20
assert advised == [], "what lies between the pieces is not ours"
""")
