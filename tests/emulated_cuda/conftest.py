"""What the emulator's own tests share: a machine in this process, and children that use it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import emulated_cuda as emulation

PATIENCE_S = 60.0
_PRELUDE = """\
import os, socket, sys, time
from emulated_cuda.calls import *
link = socket.socket(fileno=int(sys.argv[1]))
def say(text="", *descriptors):
    socket.send_fds(link, [text.encode() or b"-"], descriptors)
def hear():
    text, descriptors, _, _ = socket.recv_fds(link, 4096, 4)
    return text.decode(), descriptors
"""


class Child:
    """A process with the emulated driver that talks over a socket, also in descriptors."""

    def __init__(self, script: str, variables: dict[str, str]) -> None:
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._link.settimeout(PATIENCE_S)
        path = str(Path(__file__).parents[1])
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _PRELUDE + script, str(theirs.fileno())],
                env=os.environ | variables | {"PYTHONPATH": path},
                pass_fds=(theirs.fileno(),),
                stderr=subprocess.PIPE,
                text=True,
            )

    def hear(self) -> tuple[str, list[int]]:
        """What it said, and descriptors, which are the caller's."""
        text, descriptors, _, _ = socket.recv_fds(self._link, 4096, 4)
        assert text, f"the child ended with {self.wait()}: {self.errors}"
        return text.decode(), descriptors

    def say(self, text: str = "-", *descriptors: int) -> None:
        """Answer its hear()."""
        socket.send_fds(self._link, [text.encode()], descriptors)

    def wait(self) -> int:
        """Its exit status, once it has ended by itself."""
        _, self.errors = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode

    def kill(self) -> None:
        """SIGKILL, and wait until the kernel has taken everything back."""
        self.process.kill()
        self.wait()

    def close(self) -> None:
        """Whatever it is doing."""
        if self.process.poll() is None:
            self.process.kill()
        assert self.process.stderr is not None
        self.process.stderr.close()
        self.process.wait(PATIENCE_S)
        self._link.close()


@pytest.fixture
def spawn(emulated_environment: dict[str, str]) -> Iterator[Callable[..., Child]]:
    """Start children on the test's machine; further variables by keyword."""
    children: list[Child] = []

    def start(script: str, **variables: str) -> Child:
        children.append(Child(script, emulated_environment | variables))
        return children[-1]

    yield start
    for child in children:
        child.close()


@pytest.fixture
def machine(emulated_environment: dict[str, str]) -> emulation.Emulated:
    """The machine, from outside."""
    return emulation.Emulated.of(emulated_environment)


@pytest.fixture
def cuda(emulated_cuda: emulation.Emulated) -> Iterator[emulation.Emulated]:
    """The machine in this process, initialised, with a current context; all is given back."""
    from emulated_cuda import calls

    calls.start()
    yield emulated_cuda
    for ordinal in range(calls.call("cuDeviceGetCount")):
        calls.call("cuDevicePrimaryCtxReset", ordinal)
    assert emulation.held() == emulation.Held(0, 0, 0, 0, 0, 0, 0, 0, 0)
