"""How this process stands beside others: for CPU and disk, and when memory is short.

It stands back if nobody waits for its work, and dies first if programs can go on without it.
Everything here is a wish: a kernel or container that does not grant it changes nothing else.
"""

from __future__ import annotations

import contextlib
import os
import resource

__all__ = ["be_expendable", "be_ordinary", "give_way"]

_NICE = 10
"""A tenth of the share of a process that is not nice (sched(7)). With less, the very servers whose
models are being prepared would starve it on a machine that is never idle."""
_OOM_FIRST = 1000
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30, "riscv64": 30, "ppc64le": 273, "s390x": 282}
"""Number of the system call (arch/*/entry/syscalls in Linux); libc has no function for it."""
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237, "riscv64": 237, "ppc64le": 261, "s390x": 270}
_MPOL_DEFAULT = 0
"""Of linux/mempolicy.h: memory of the node where a thread runs, of others where that is full."""
_IOPRIO_OF_PROCESS = 1
_IOPRIO_NONE = 0
"""By its niceness."""
_IOPRIO_IDLE = 3 << 13
"""IOPRIO_CLASS_IDLE, of linux/ioprio.h."""


def give_way() -> None:
    """Leave processor and disk to others that want them; for threads started from now on.

    There is no way back.
    """
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, _NICE)
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    # Where autogroups are on, a session of its own is a scheduling group of its own, in which a
    # nice process takes the group's full share (sched(7)). So the group is made nice, all of it:
    # it has to be one of ours.
    if os.getsid(0) == os.getpid():
        _write("/proc/self/autogroup", _NICE)
    _call(_IOPRIO_SET, _IOPRIO_OF_PROCESS, 0, _IOPRIO_IDLE)


def be_ordinary() -> None:
    """Undo `nice`, `chrt`, `ionice` and `numactl` of the starter; for threads started from now on.

    With memory of one node only, a daemon of a large budget would be killed when that is full.
    """
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, min(0, os.getpriority(os.PRIO_PROCESS, 0)))
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    _call(_IOPRIO_SET, _IOPRIO_OF_PROCESS, 0, _IOPRIO_NONE)
    _call(_SET_MEMPOLICY, _MPOL_DEFAULT, 0, 0)


def be_expendable() -> None:
    """Be the first to be killed where memory is short, and leave nothing behind."""
    _write("/proc/self/oom_score_adj", _OOM_FIRST)
    # Whatever kills it, gigabytes of weights are not written to a core file.
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _write(path: str, value: int) -> None:
    with contextlib.suppress(OSError), open(path, "w") as file:
        file.write(str(value))


def _call(numbers: dict[str, int], *arguments: int) -> None:
    number = numbers.get(os.uname().machine)
    if number is None:
        return
    import ctypes

    ctypes.CDLL(None).syscall(*map(ctypes.c_long, (number, *arguments)))
