"""The program's side of one worker: starts its process, and has its socket.

A worker is a new interpreter, not a fork: CUDA does not survive a fork, and threads should know
from the start how many there may be. It finds modules as the program does, and imports the
program's main module (not as ``__main__``) if the member's load function is in it, as
``multiprocessing`` does for processes that it spawns.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing.process
import multiprocessing.reduction
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from trims_shim.config import PACKAGE_DIRECTORY
from trims_shim.ensemble import messages
from trims_shim.ensemble.devices import cores_of
from trims_shim.errors import EnsembleError

__all__ = ["WorkerProcess", "pickled"]

_PATIENCE_S = 5.0
_MOMENT_S = 1.0
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
# Imports this very package, and everything else as the program finds it.
_BOOT = (
    "import importlib.machinery, importlib.util, json, sys; "
    "home, paths, descriptor = sys.argv[1:]; "
    "sys.path[:] = json.loads(paths); "
    "spec = importlib.machinery.PathFinder.find_spec('trims_shim', [home]); "
    "module = sys.modules['trims_shim'] = importlib.util.module_from_spec(spec); "
    "spec.loader.exec_module(module); "
    "from trims_shim.ensemble.worker import main; "
    "main(int(descriptor))"
)


def pickled(load: Callable[[str], Any], member: str) -> bytes:
    """A load function for another process. Raises EnsembleError if it cannot be found there."""
    if getattr(multiprocessing.process.current_process(), "_inheriting", False):
        raise EnsembleError(
            "an ensemble is made while a process imports this program's main module; make it "
            "under `if __name__ == '__main__':`"
        )
    try:
        content = pickle.dumps(load)
    except Exception as error:
        raise EnsembleError(
            f"the load function of {member!r} cannot be sent to a worker ({error}); define it at "
            "the top of a module, and give it arguments by functools.partial"
        ) from error
    if b"__main__" in content and not _main():
        raise EnsembleError(
            f"the load function of {member!r} is defined in an interactive session, where workers "
            "cannot find it; put it into a module and import it"
        )
    return content


def _main() -> dict[str, str]:
    """Where a worker finds the main module, as ``multiprocessing.spawn.prepare`` wants it."""
    main = sys.modules["__main__"]
    name = getattr(getattr(main, "__spec__", None), "name", None)
    if name is not None:
        return {"init_main_from_name": name}
    path = getattr(main, "__file__", None)
    return {} if path is None else {"init_main_from_path": os.path.abspath(path)}


class WorkerProcess:
    """One process; its first message is Ready or a Failure. Any one thread may use it at a time."""

    def __init__(self, *, member: str, device: str, load: bytes) -> None:
        """Raises OSError where no process can be started."""
        self._buffers: set[int] = set()
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = _started(theirs.fileno(), _threads_on(device))
            except BaseException:
                ours.close()
                raise
        self.connection: Connection[Any, Any] = Connection(ours.detach())
        uses_main = b"__main__" in load
        main: dict[str, Any] = {"sys_argv": sys.argv, "dir": os.getcwd()}
        self._send(messages.SetUp(member, device, load, main | (_main() if uses_main else {})))

    @property
    def pid(self) -> int:
        """The process's."""
        return self._process.pid

    def run(self, message: messages.RunJob, descriptor: int) -> None:
        """Send a job whose samples are in the memory of ``descriptor``."""
        number = message.layout.buffer
        if number not in self._buffers:
            self._buffers.add(number)
            self._send(messages.OpenBuffer(number))
            with contextlib.suppress(OSError):
                multiprocessing.reduction.send_handle(self.connection, descriptor, self.pid)
        self._send(message)

    def close_buffer(self, number: int) -> None:
        """Let the worker unmap memory that is no longer used."""
        if number in self._buffers:
            self._buffers.remove(number)
            self._send(messages.CloseBuffer(number))

    def ask_memory(self) -> None:
        """Ask for a :class:`~.messages.Memory`, after the jobs that were sent."""
        self._send(messages.AskMemory())

    def end(self) -> None:
        """End the process: by closing its socket, and if that does not help, by a signal."""
        self.forget()
        try:
            self._process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def forget(self) -> None:
        """Close this process's end of the socket only."""
        self.connection.close()

    def death(self) -> str:
        """How it ended, in words; makes sure that it has."""
        self.forget()
        try:
            status = self._process.wait(_MOMENT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return "closed its socket"
        if status < 0:
            return f"was ended by signal {-status}" + (" (memory?)" if status == -9 else "")
        return f"ended with status {status}"

    def _send(self, message: object) -> None:
        # That it has died is found out by who receives.
        with contextlib.suppress(OSError):
            self.connection.send(message)


def _started(descriptor: int, threads: int) -> subprocess.Popen[bytes]:
    environment = {name: str(threads) for name in _THREADS} if threads else {}
    paths = [path or os.getcwd() for path in sys.path if isinstance(path, str)]
    return subprocess.Popen(
        [
            sys.executable,
            *subprocess._args_from_interpreter_flags(),  # type: ignore[attr-defined]
            "-u",  # it may end at any time, and what it has printed should be there
            "-c",
            _BOOT,
            os.path.dirname(PACKAGE_DIRECTORY),
            json.dumps(paths),
            str(descriptor),
        ],
        stdin=subprocess.DEVNULL,
        env=environment | os.environ,
        pass_fds=(descriptor,),
    )


def _threads_on(device: str) -> int:
    """How many threads a worker's libraries should use; 0 for what they choose themselves."""
    if not device.startswith("cpu"):
        return 0
    return len(cores_of(device) or os.sched_getaffinity(0))
