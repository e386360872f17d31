"""Retired memory goes back to the system soon, off the caller's path, and not before it may."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from forks import passes_in_child
from harness import PATIENCE_S, wait_until

from trims_shim.memory import reclaim
from trims_shim.memory.mapping import PAGE_BYTES
from trims_shim.memory.pages import PageScanner

SIZE_BYTES = 8 * PAGE_BYTES


class Owner:
    """Anonymous memory of this test, and something whose end can be seen."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, SIZE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.memory[:] = b"x" * SIZE_BYTES
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))


@pytest.fixture(autouse=True)
def _no_grace_and_nothing_pending(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reclaim, "GRACE_S", 0.0)  # a test runner may have threads of its own
    wait_until(lambda: not reclaim._batches)


def test_the_owner_is_dropped_and_the_list_emptied() -> None:
    owner = Owner()
    gone = weakref.ref(owner)
    blocks = [reclaim.RetiredBlock(owner, owner.address, SIZE_BYTES)]
    del owner
    reclaim.retire(blocks)
    assert blocks == []
    wait_until(lambda: gone() is None and not reclaim._batches)


def test_only_whole_pages_inside_are_discarded() -> None:
    owner = Owner()
    start, size = PAGE_BYTES + 100, 3 * PAGE_BYTES
    reclaim.retire([reclaim.RetiredBlock(object(), owner.address + start, size)])
    wait_until(lambda: not reclaim._batches)
    zeros = [index for index, byte in enumerate(owner.memory[:]) if byte == 0]
    assert zeros == list(range(2 * PAGE_BYTES, 4 * PAGE_BYTES))


@pytest.mark.parametrize("forks", [False, True], ids=["no fork", "after a fork"])
def test_memory_stays_readable_for_a_while_when_other_threads_run(
    monkeypatch: pytest.MonkeyPatch, forks: bool
) -> None:
    if forks:
        assert passes_in_child(lambda: True)
    monkeypatch.setattr(reclaim, "GRACE_S", 0.2)
    owner = Owner()
    stop = threading.Event()
    other = threading.Thread(target=stop.wait, args=(PATIENCE_S,))
    other.start()
    try:
        retired_s = time.monotonic()
        reclaim.retire([reclaim.RetiredBlock(object(), owner.address, SIZE_BYTES)])
        wait_until(lambda: owner.memory[0] == 0)
        assert time.monotonic() - retired_s >= reclaim.GRACE_S
    finally:
        stop.set()
        other.join(PATIENCE_S)


@pytest.mark.parametrize("stays", [True, False])
def test_the_program_may_stop_the_clock(monkeypatch: pytest.MonkeyPatch, stays: bool) -> None:
    """Found, with freezegun: what was retired meanwhile, and all that came later, was kept."""
    monkeypatch.setattr(reclaim, "GRACE_S", 0.05)
    owner = Owner()
    gone = weakref.ref(owner)
    blocks = [reclaim.RetiredBlock(owner, owner.address, SIZE_BYTES)]
    del owner
    stop = threading.Event()
    other = threading.Thread(target=stop.wait, args=(PATIENCE_S,))
    other.start()
    try:
        with monkeypatch.context() as stopped:
            clock = SimpleNamespace(monotonic=lambda: 1.7e9, sleep=time.sleep)
            stopped.setattr(reclaim, "time", clock)
            reclaim.retire(blocks)
            if stays:
                wait_until(lambda: gone() is None)
        wait_until(lambda: gone() is None)
    finally:
        reclaim._is_hurried = True  # if it has failed, for the tests after it
        stop.set()
        other.join(PATIENCE_S)


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError()], ids=repr)
def test_without_a_thread_it_is_done_at_once(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(*_: object) -> int:
        raise error

    monkeypatch.setattr(reclaim._thread, "start_new_thread", refuse)
    monkeypatch.setattr(reclaim, "GRACE_S", PATIENCE_S)
    monkeypatch.setattr(reclaim.sys, "_current_exceptions", lambda: {-1: None})  # another thread
    monkeypatch.setattr(
        reclaim, "time", SimpleNamespace(monotonic=time.monotonic, sleep=pytest.fail)
    )
    owner = Owner()
    reclaim.retire([reclaim.RetiredBlock(object(), owner.address, SIZE_BYTES)])
    assert owner.memory[:] == bytes(SIZE_BYTES)


def test_one_thread_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reclaim, "GRACE_S", PATIENCE_S)
    starts = []
    start = reclaim._thread.start_new_thread

    def counted(function: Callable[..., object], arguments: tuple[object, ...]) -> int:
        starts.append(function)
        return start(function, arguments)

    monkeypatch.setattr(reclaim._thread, "start_new_thread", counted)
    stop = threading.Event()
    other = threading.Thread(target=stop.wait, args=(PATIENCE_S,))
    other.start()
    try:
        starts.clear()
        owners = [Owner() for _ in range(50)]
        for owner in owners:
            reclaim.retire([reclaim.RetiredBlock(object(), owner.address, SIZE_BYTES)])
        reclaim._is_hurried = True  # as if their time had come
        wait_until(lambda: all(owner.memory[0] == 0 for owner in owners))
        assert len(starts) <= 2, "a program that replaces models all the time piles up threads"
    finally:
        stop.set()
        other.join(PATIENCE_S)


def test_what_is_retired_after_the_last_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that ends is still there, so that this starts none."""
    first, second = Owner(), Owner()
    late, lock = [second], threading.Lock()

    def release() -> None:
        if late:
            address = late.pop().address
            reclaim.retire([reclaim.RetiredBlock(object(), address, SIZE_BYTES)])
        lock.release()

    monkeypatch.setattr(
        reclaim, "_is_running", SimpleNamespace(acquire=lock.acquire, release=release)
    )
    reclaim.retire([reclaim.RetiredBlock(object(), first.address, SIZE_BYTES)])
    wait_until(lambda: second.memory[0] == 0)
    wait_until(lambda: not lock.locked() and not reclaim._batches)


def test_its_own_thread_is_no_reason_to_wait() -> None:
    """Else a program without threads that loads in a loop keeps a second's worth of memory."""
    code = (
        "import threading, time\n"
        "from trims_shim.memory import reclaim\n"
        "reclaim.GRACE_S = 600.0\n"
        "may_end = threading.Event()\n"
        "reclaim._discard = lambda *_: may_end.wait()\n"
        "reclaim.retire([reclaim.RetiredBlock(object(), 0, 0)])\n"
        "while not reclaim._runner: time.sleep(0.001)\n"
        "reclaim.retire([reclaim.RetiredBlock(object(), 0, 0)])\n"
        "may_end.set()\n"
        "while reclaim._batches: time.sleep(0.001)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_S)


def test_a_signal_handler_may_fork_in_the_middle() -> None:
    """Found: the fork waited for a lock that the interrupted code held, without end."""
    code = (
        "import faulthandler, os, signal, sys, threading\n"
        "from trims_shim.memory import reclaim\n"
        "def fork(*_):\n"
        "  if pid := os.fork(): os.waitpid(pid, 0)\n"
        "  else: os._exit(0)\n"
        "signal.signal(signal.SIGUSR1, fork)\n"
        "reclaim._thread.start_new_thread = lambda *_: None\n"
        "reclaim.FORK_PATIENCE_S = 0.0\n"
        "own = (reclaim.__file__, threading.__file__)\n"
        "signals = []\n"
        "def trace(frame, event, argument):\n"
        "  if frame.f_code.co_filename not in own: return None\n"
        "  if event == 'line': signals.append(signal.raise_signal(signal.SIGUSR1))\n"
        "  return trace\n"
        "faulthandler.dump_traceback_later(20, exit=True)\n"
        "sys.settrace(trace)\n"
        "reclaim.retire([reclaim.RetiredBlock(None, 0, 0)])\n"
        "sys.settrace(None)\n"
        "assert len(signals) > 5, signals\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_S)


def test_a_fork_hurries_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reclaim, "GRACE_S", PATIENCE_S)
    monkeypatch.setattr(reclaim, "FORK_PATIENCE_S", PATIENCE_S / 2)
    monkeypatch.setattr(reclaim.sys, "_current_exceptions", lambda: {-1: None})  # another thread
    owner = Owner()
    try:
        reclaim.retire([reclaim.RetiredBlock(object(), owner.address, SIZE_BYTES)])
        assert passes_in_child(lambda: True)
        assert not reclaim._batches
        assert owner.memory[:] == bytes(SIZE_BYTES)
    finally:
        reclaim._is_hurried = True  # if it has failed, for the tests after it


def test_a_forked_child_drops_what_is_pending(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[object, ...]] = []
    monkeypatch.setattr(
        reclaim._thread, "start_new_thread", lambda *arguments: started.append(arguments)
    )
    owner = Owner()
    gone = weakref.ref(owner)
    reclaim.retire([reclaim.RetiredBlock(owner, owner.address, SIZE_BYTES)])
    del owner
    assert passes_in_child(lambda: gone() is None and not reclaim._batches)
    assert gone() is not None
    (release, arguments) = started[0]
    release(*arguments)  # type: ignore[operator, misc]
    assert gone() is None


def test_the_discarded_pages_are_really_gone() -> None:
    owner = Owner()
    with PageScanner() as scanner:
        assert not scanner.is_pristine(owner.address, SIZE_BYTES)
        reclaim.retire([reclaim.RetiredBlock(object(), owner.address, SIZE_BYTES)])
        wait_until(lambda: not reclaim._batches)
        assert scanner.is_pristine(owner.address, SIZE_BYTES)  # nothing present, nothing swapped


def test_nothing_to_do_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reclaim._thread, "start_new_thread", pytest.fail)
    reclaim.retire([])
