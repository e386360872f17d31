"""The process that runs cases: it imports torch once and forks for each case.

    python -m tests.transparency.child REQUEST.json RESULT.json

A forked child has the state of a fresh program without the price of another ``import torch``. It
runs one pass of one case, writes one JSON line and leaves by ``os._exit``. The parent never runs
an operation of torch, so no thread pool exists when it forks.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import io
import json
import os
import select
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import shim
from .observe import Normaliser, Observer
from .registry import Case, Work, begin_in_child, load_topics

__all__ = ["die_with_parent", "main", "run_case"]

_CASES_AT_A_TIME = 10
_LARGE_PAGE_BYTES = 2 << 20
_MADV_COLLAPSE = 25  # asm-generic/mman-common.h


def main(request_path: str, result_path: str) -> None:
    """Run the requested cases; for each the observations of both passes."""
    die_with_parent()
    request = json.loads(Path(request_path).read_text())
    is_shimmed, names = request["shim"], request["cases"]
    early = request["early"]
    if is_shimmed and early:
        shim.activate()
    table = load_topics(tuple(dict.fromkeys(name.partition(".")[0] for name in names)))
    results: dict[str, dict[str, Any]] = {name: {} for name in names}
    _import_what_most_import()
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)  # here, as it writes to hundreds of pages
    gc.freeze()  # a child that collects would otherwise copy all that was imported here
    _use_large_pages()
    # The daemon refuses to prepare more than some models at a time.
    size = _CASES_AT_A_TIME if request["is_prepared"] else 1
    for start in range(0, len(names), size):
        for label in request["passes"]:
            if request["is_prepared"] and is_shimmed and label != request["passes"][0]:
                _settle()
            for name in names[start : start + size]:
                directory = Path(request["directory"]) / _file_name(name)
                directory.mkdir(parents=True, exist_ok=True)
                results[name][label] = _run_forked(table[name], directory, is_shimmed)
    Path(result_path).write_text(json.dumps(results))


def _import_what_most_import() -> None:
    """What is imported here costs once what it would cost in each child.

    Nothing where the cases must find neither library imported.
    """
    if not {"torch", "onnxruntime"} & set(sys.modules):
        return
    modules = ["numpy.random"]
    if "torch" in sys.modules:
        modules.append("torch.utils.serialization")
    if "trims_shim" in sys.modules:
        modules += ["zmq", "trims_shim.api", "trims_shim.formats.torch_recipe"]
    for module in modules:
        with contextlib.suppress(ModuleNotFoundError):  # older versions have not all of them
            importlib.import_module(module)


def _use_large_pages() -> None:
    """A fork copies the page table: of hundreds of megabytes in small pages it is most of its cost.

    Only the cost changes where the kernel cannot do it (before Linux 6.1).
    """
    madvise = ctypes.CDLL(None).madvise
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, _, _, inode, *_ = line.split()
        if access == "rw-p" and inode == "0":
            start, end = (int(address, 16) for address in addresses.split("-"))
            start = -(-start // _LARGE_PAGE_BYTES) * _LARGE_PAGE_BYTES
            size = max(0, end - start) // _LARGE_PAGE_BYTES * _LARGE_PAGE_BYTES
            madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _MADV_COLLAPSE)


def _settle() -> None:
    """Wait until the daemon prepares nothing, in a process of its own: cases fork from this one."""
    pid = begin_in_child(lambda: shim.settle(Path(os.environ["TRIMS_SOCKET_DIR"])))
    if os.waitpid(pid, 0)[1] != 0:
        raise RuntimeError("the daemon does not finish its preparations")


def die_with_parent() -> None:
    """Nothing survives a runner that is killed, not even a case that hangs (PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _file_name(name: str) -> str:
    return "".join(c if c.isalnum() or c in "._-" else "_" for c in name)


def _run_forked(case: Case, directory: Path, is_shimmed: bool) -> dict[str, Any]:
    reading, writing = os.pipe()

    def write_answer() -> None:
        die_with_parent()
        os.close(reading)
        # Own group: what a case leaves behind is killed with it.
        os.setpgid(0, 0)
        answer = run_case(case, directory, is_shimmed)
        with open(writing, "wb") as pipe:
            pipe.write(json.dumps(answer).encode())

    pid = begin_in_child(write_answer)
    os.close(writing)
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)
    return _collect(pid, reading, time.monotonic() + case.timeout_s)


def _collect(pid: int, reading: int, deadline: float) -> dict[str, Any]:
    data = b""
    with open(reading, "rb", buffering=0) as pipe:
        while True:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([pipe], [], [], left)[0]:
                _kill_group(pid)
                os.waitpid(pid, 0)
                return {"failed": "timed out"}
            chunk = pipe.read(1 << 20)
            if not chunk:
                break
            data += chunk
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    _kill_group(pid)
    if status != 0 or not data:
        return {"failed": f"the case's process ended with status {status}"}
    answer: dict[str, Any] = json.loads(data)
    return answer


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def run_case(case: Case, directory: Path, is_shimmed: bool) -> dict[str, Any]:
    """Run one pass of a case in this process and describe everything it shows."""
    os.chdir(directory)
    normalise = Normaliser(str(directory))
    work = Work(directory, shim.activate if is_shimmed else lambda: None)
    answer: dict[str, Any] = {}
    started = time.monotonic()
    with _captured_output() as output, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            value = case.function(work)
            answer["value"] = Observer(normalise).describe(value)
        except BaseException:
            answer["failed"] = normalise(traceback.format_exc())
    answer["warnings"] = [
        [w.category.__name__, normalise(str(w.message)), os.path.basename(w.filename)]
        for w in caught
    ]
    answer["seconds"] = round(time.monotonic() - started, 3)
    answer["output"] = [normalise(text) for text in output]
    if is_shimmed:
        answer["counters"] = shim.counters()
    return answer


@contextlib.contextmanager
def _captured_output() -> Iterator[list[str]]:
    """Standard output and error of this process and its children, whoever writes them."""
    texts: list[str] = []
    targets = [os.memfd_create(name) for name in ("stdout", "stderr")]
    saved = [os.dup(1), os.dup(2)]
    for number, target in enumerate(targets, start=1):
        os.dup2(target, number)
    try:
        yield texts
    finally:
        with contextlib.suppress(io.UnsupportedOperation, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        for number, (target, original) in enumerate(zip(targets, saved, strict=True), start=1):
            os.dup2(original, number)
            os.close(original)
            os.lseek(target, 0, os.SEEK_SET)
            with open(target, "rb") as file:
                texts.append(file.read().decode(errors="replace"))


if __name__ == "__main__":
    main(*sys.argv[1:])
