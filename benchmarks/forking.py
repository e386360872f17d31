"""Many fresh processes for one import: a server that forks one child per order.

A forked child of a process that has only imported libraries is in the state of a program after its
imports. Importing torch anew for each sample costs seconds. The server must never touch the CUDA
driver itself, because a context does not survive a fork.

Both ends are here. An order is ``{"task", "arguments", "is_learned"}``. With ``is_learned`` the
server afterwards imports the modules that the task imported, so that later children find them.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from benchmarks.harness import Worker, WorkerFailed
from benchmarks.process_memory import own_pages
from benchmarks.tasks import send

__all__ = ["Server", "serve", "server"]

Result = dict[str, Any]
Tasks = Mapping[str, Callable[..., Result]]
SAMPLE_DEADLINE_S = 90.0
_GRACE_S = 15.0
_PR_SET_PDEATHSIG = 1


# --- the side that orders -------------------------------------------------------------------------


class Server:
    """Runs tasks, each in a process that has done nothing but imports."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def run(self, task: str, *, deadline_s: float = SAMPLE_DEADLINE_S, **arguments: Any) -> Result:
        """The result of one task. Raises WorkerFailed."""
        return self._order(task, arguments, deadline_s, is_learned=False)

    def learn(self, task: str, **arguments: Any) -> Result:
        """As :meth:`run`; the server then imports the task's modules for all later tasks."""
        return self._order(task, arguments, SAMPLE_DEADLINE_S, is_learned=True)

    def _order(
        self, task: str, arguments: Result, deadline_s: float, *, is_learned: bool
    ) -> Result:
        order = {"task": task, "arguments": arguments, "is_learned": is_learned}
        self._worker.send(order | {"deadline_s": deadline_s})
        # The server ends a task that is late, so that it is free for the next one.
        result = self._worker.result(deadline_s + _GRACE_S)
        if "error" in result:
            raise WorkerFailed(result["error"])
        return result


@contextlib.contextmanager
def server(module: str, environment: Mapping[str, str] | None = None) -> Iterator[Server]:
    """Start the server of a module of tasks; it ends with the block."""
    with Worker("serve", module=module, environment=environment) as worker:
        worker.result()
        yield Server(worker)


# --- the side that serves -------------------------------------------------------------------------


def serve(tasks: Tasks, descriptor: int) -> None:
    """Run orders from standard input until an empty line or its end."""
    send(descriptor, {"ready": True})
    for line in sys.stdin:
        if not line.strip():
            return
        send(descriptor, _in_child(tasks, json.loads(line)))


def _in_child(tasks: Tasks, order: Result) -> Result:
    read_end, write_end = os.pipe()
    known = set(sys.modules)
    # A child's garbage collection would copy every page that it shares with this process.
    gc.collect()
    gc.freeze()
    pid = os.fork()
    if not pid:
        os.close(read_end)
        _run_and_exit(tasks, write_end, order, known)
    os.close(write_end)
    text = _read_until(read_end, time.monotonic() + order["deadline_s"])
    if text is None:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return {"error": f"{order['task']}: not done within {order['deadline_s']:.0f} s"}
    _, status = os.waitpid(pid, 0)
    if not text:
        return {"error": f"{order['task']}: ended with status {os.waitstatus_to_exitcode(status)}"}
    result: Result = json.loads(text)
    for name in result.pop("modules", []):
        with contextlib.suppress(Exception):  # it only makes later imports cheaper
            importlib.import_module(name)
    return result


def _read_until(descriptor: int, end: float) -> bytes | None:
    """The bytes until the other end is closed; None if that takes too long."""
    text = b""
    with os.fdopen(descriptor, "rb", buffering=0) as answers:
        while select.select([answers], [], [], max(0.0, end - time.monotonic()))[0]:
            chunk = answers.read(1 << 16)
            if not chunk:
                return text
            text += chunk
    return None


def _run_and_exit(tasks: Tasks, descriptor: int, order: Result, known: set[str]) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    own_pages()
    try:
        result = tasks[order["task"]](**order["arguments"])
        if order["is_learned"]:
            result["modules"] = sorted(set(sys.modules) - known)
    except Exception as error:
        traceback.print_exc()
        result = {"error": f"{order['task']}: {type(error).__name__}: {error}"}
    with os.fdopen(descriptor, "w") as answers:
        json.dump(result, answers)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
