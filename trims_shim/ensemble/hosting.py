"""The program's side of one worker: starts its process, and has its socket.

A worker is a new interpreter, not a fork: CUDA does not survive a fork, and threads should know
from the start how many there may be. It finds modules as the program does, and imports the
program's main module (not as ``__main__``) if the member's load function is in it, as
``multiprocessing`` does for processes that it spawns.
"""

from __future__ import annotations

import contextlib
import multiprocessing.process
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from trims_shim.children import NoInterpreter, interpreter
from trims_shim.config import PACKAGE_DIRECTORY
from trims_shim.ensemble import messages
from trims_shim.ensemble.channel import Channel
from trims_shim.ensemble.devices import cores_of
from trims_shim.errors import EnsembleError
from trims_shim.late_imports import no_fork

__all__ = ["WorkerProcess", "end_all", "keep_from_children", "pickled", "set_up"]

_PATIENCE_S = 5.0
_MOMENT_S = 1.0
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
# Imports this very package, and everything else as the program finds it: nothing from the current
# directory, which `-c` would look through first.
_BOOT = (
    "import sys; "
    "descriptor, home, *sys.path[:] = sys.argv[1:]; "
    "import importlib.machinery, importlib.util; "
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
        interpreter()
    except NoInterpreter as error:
        raise EnsembleError(f"{error} and cannot start workers; run it with Python") from error
    try:
        content = pickle.dumps(load)
    except Exception as error:
        raise EnsembleError(
            f"the load function of {member!r} cannot be sent to a worker ({error}); define it at "
            "the top of a module, and give it arguments by functools.partial"
        ) from error
    if _uses_main(content) and not _main():
        raise EnsembleError(
            f"the load function of {member!r} is defined in a session, on a command line or in a "
            "package's `__main__.py`, where workers cannot find it; put it into a module and "
            "import it"
        )
    return content


def _uses_main(content: bytes) -> bool:
    # By its other name in processes that multiprocessing has spawned.
    return b"__main__" in content or b"__mp_main__" in content


def _main() -> dict[str, str]:
    """Where a worker finds the main module, as ``multiprocessing.spawn.prepare`` wants it."""
    main = sys.modules["__main__"]
    name: str | None = getattr(getattr(main, "__spec__", None), "name", None)
    if name is not None:
        # `multiprocessing` does not import these, of packages, folders and archives.
        return {} if name.rpartition(".")[2] == "__main__" else {"init_main_from_name": name}
    path = getattr(main, "__file__", None)
    if path is None or not os.path.exists(path):  # it is "<stdin>", for one
        return {}
    return {"init_main_from_path": path}


def set_up(*, member: str, device: str, load: bytes) -> messages.SetUp:
    """What a worker is told first. It starts where the program is now, also if it starts later."""
    main = {"sys_argv": sys.argv, "dir": os.getcwd()} | (_main() if _uses_main(load) else {})
    return messages.SetUp(member, device, load, main)


class WorkerProcess:
    """One process; its first message is Ready or a Failure. Any one thread may use it at a time."""

    def __init__(self, setup: messages.SetUp) -> None:
        """Raises OSError where no process can be started."""
        self._buffers: set[int] = set()
        with no_fork():  # A child would have copies that it does not know.
            ours, theirs = socket.socketpair()
            self.channel = Channel(ours)
            """For who receives."""
            keep_from_children(self.channel, theirs)
        with theirs:
            try:
                self._process = _started(
                    theirs.fileno(), _threads_on(setup.device), setup.main["dir"]
                )
            except BaseException:
                self.channel.close()
                raise
        self._send(setup)

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
            self._send_descriptor(descriptor)
        self._send(message)

    def close_buffer(self, number: int) -> None:
        """Let the worker unmap memory that is no longer used."""
        if number in self._buffers:
            self._buffers.remove(number)
            self._send(messages.CloseBuffer(number))

    def ask_memory(self) -> None:
        """Ask for a :class:`~.messages.Memory`, after the jobs that were sent."""
        self._send(messages.AskMemory())

    def kill(self) -> None:
        """End the process by a signal; who receives from it finds out."""
        self._process.kill()

    def death(self) -> str:
        """How it ended, in words; makes sure that it has."""
        self.channel.close()
        if not self._has_ended(_MOMENT_S):
            return "closed its socket"
        status = self._process.returncode
        if status < 0:
            return f"was ended by signal {-status}" + (" (memory?)" if status == -9 else "")
        return f"ended with status {status}"

    def _has_ended(self, patience_s: float) -> bool:
        """Whether it has ended within so many seconds by itself; else it is killed."""
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return False
        return True

    def _send(self, message: object) -> None:
        with self._sending():
            self.channel.connection.send(message)

    def _send_descriptor(self, descriptor: int) -> None:
        with self._sending():
            self.channel.send_descriptor(descriptor)

    @contextlib.contextmanager
    def _sending(self) -> Iterator[None]:
        """That it has died is found out by who receives."""
        try:
            yield
        except ConnectionError:
            pass
        except OSError:  # no memory, for one: it would wait for what was not sent
            self.kill()


def end_all(processes: Sequence[WorkerProcess]) -> None:
    """End them by closing their sockets, and those that this does not help by a signal."""
    for process in processes:
        process.channel.close()
    until_s = time.monotonic() + _PATIENCE_S
    for process in processes:
        process._has_ended(until_s - time.monotonic())


def _started(descriptor: int, threads: int, directory: str) -> subprocess.Popen[bytes]:
    environment = {name: str(threads) for name in _THREADS} if threads else {}
    paths = [path or directory for path in sys.path if isinstance(path, str)]
    # Popen reads from a pipe until the last copy of its other end is closed: a child that another
    # thread forks here has one.
    with no_fork(), _without_interrupts():
        return subprocess.Popen(
            [
                interpreter(),
                *subprocess._args_from_interpreter_flags(),  # type: ignore[attr-defined]
                "-u",  # it may end at any time, and what it has printed should be there
                "-c",
                _BOOT,
                str(descriptor),
                os.path.dirname(PACKAGE_DIRECTORY),
                *paths,
            ],
            stdin=subprocess.DEVNULL,
            env=environment | os.environ,
            pass_fds=(descriptor,),
        )


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """What is started here gets no Ctrl-C, which is for the program, until it says what to do."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _threads_on(device: str) -> int:
    """How many threads a worker's libraries should use; 0 for what they choose themselves."""
    if not device.startswith("cpu"):
        return 0
    return len(cores_of(device) or os.sched_getaffinity(0))


_not_for_children: weakref.WeakSet[Any] = weakref.WeakSet()
"""Sockets, also those of workers that are being started."""


def keep_from_children(*sockets: Channel | socket.socket) -> None:
    """Close them in forked children."""
    _not_for_children.update(sockets)


def _after_fork_in_child() -> None:
    """A forked child that holds them would keep both sides from seeing the other's end."""
    for each in list(_not_for_children):
        each.close()


os.register_at_fork(after_in_child=_after_fork_in_child)
