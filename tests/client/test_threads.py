"""Whether threads can start is found out without a limit that the machine would have to have."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from typing import Any

import pytest
from harness import wait_until

from trims_shim.client import threads
from trims_shim.client.threads import can_start


class Limited:
    """A libc that starts so many threads and no more."""

    def __init__(self, libc: Any, limit: int) -> None:
        self._libc = libc
        self._left = limit

    def __getattr__(self, name: str) -> Any:
        return getattr(self._libc, name)

    def pthread_create(self, *arguments: Any) -> int:
        self._left -= 1
        return int(self._libc.pthread_create(*arguments)) if self._left >= 0 else errno.EAGAIN


@pytest.mark.parametrize(("limit", "is_enough"), [(3, True), (2, False), (0, False)])
def test_as_many_as_are_asked_for(
    limit: int, is_enough: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that have started are gone afterwards."""
    before = len(os.listdir("/proc/self/task"))
    monkeypatch.setattr(threads, "_locks", [])
    monkeypatch.setattr(threads, "_libc", Limited(threads._libc, limit))
    assert can_start(3) == is_enough
    wait_until(lambda: len(os.listdir("/proc/self/task")) <= before, "they are gone")
    assert threads._locks == []


def test_they_are_there_at_the_same_time() -> None:
    """One after the other, any number could start under any limit."""
    before = set(os.listdir("/proc/self/task"))
    with threads._waiting(3):
        assert len(set(os.listdir("/proc/self/task")) - before) >= 3


class Interrupted(Limited):
    """The last thread that it starts is the last call: an interrupt follows."""

    def pthread_create(self, *arguments: Any) -> int:
        result = super().pthread_create(*arguments)
        if self._left == 0:
            raise KeyboardInterrupt
        return result


def test_an_interrupt_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found: they waited for ever, at an address that was soon another's: later calls hung."""
    before = len(os.listdir("/proc/self/task"))
    monkeypatch.setattr(threads, "_libc", Interrupted(threads._libc, 2))
    with pytest.raises(KeyboardInterrupt):
        can_start(3)
    wait_until(lambda: len(os.listdir("/proc/self/task")) <= before, "they are gone")


def test_an_interrupt_after_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """glibc leaves the number of a thread that it could not start: nobody may wait for that."""
    joined = []

    class Refusing:
        def __getattr__(self, name: str) -> Any:
            return getattr(libc, name)

        def pthread_create(self, thread: Any, *arguments: Any) -> int:
            thread._obj.value = 1
            raise KeyboardInterrupt

        def pthread_join(self, thread: Any, result: None) -> None:
            joined.append(thread)

    libc = threads._libc
    monkeypatch.setattr(threads, "_libc", Refusing())
    with pytest.raises(KeyboardInterrupt):
        can_start(3)
    assert joined == []


_FILTERED = """
import ctypes, struct, sys
from trims_shim.client.threads import may_set_priority

assert may_set_priority()
program = b"".join(
    struct.pack("HBBI", *each)
    for each in [
        (0x20, 0, 0, 0),  # load the number of the system call
        (0x15, 0, 1, int(sys.argv[1])),  # go on if it is this one, else leave the next out
        (0x06, 0, 0, 0x00050001),  # fail with EPERM
        (0x06, 0, 0, 0x7FFF0000),  # allow
    ]
)
memory = ctypes.create_string_buffer(program)
filter = ctypes.create_string_buffer(struct.pack("HP", 4, ctypes.addressof(memory)))
prctl = ctypes.CDLL(None).prctl
if prctl(38, 1, 0, 0, 0) or prctl(22, 2, filter, 0, 0):  # PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP
    sys.exit("no filters here")
print(may_set_priority())
"""


def test_a_filter_that_refuses_priorities() -> None:
    """Found: ZeroMQ aborted services with systemd's ``SystemCallFilter=~@resources``."""
    number = {"x86_64": 144, "aarch64": 119}.get(os.uname().machine)
    if number is None:
        pytest.skip("the number of sched_setscheduler is not known here")
    command = [sys.executable, "-c", _FILTERED, str(number)]
    done = subprocess.run(command, capture_output=True, text=True)
    if "no filters here" in done.stderr:
        pytest.skip("the kernel takes no seccomp filter")
    assert (done.stdout, done.stderr) == ("False\n", "")


_CHANGED = """
import os
from trims_shim.client.threads import may_set_priority

for policy in (os.SCHED_BATCH, os.SCHED_IDLE):
    assert may_set_priority()
    os.sched_setscheduler(0, policy, os.sched_param(0))
    assert may_set_priority()
    assert os.sched_getscheduler(0) == policy
"""


def test_the_threads_own_policy_stays() -> None:
    """Found: what a program had set after an earlier look was undone."""
    done = subprocess.run([sys.executable, "-c", _CHANGED], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
