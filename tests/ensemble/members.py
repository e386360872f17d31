"""Members for tests: load functions that workers can import, and an ensemble of them."""

from __future__ import annotations

import concurrent.futures
import functools
import multiprocessing.connection
import multiprocessing.spawn
import os
import resource
import signal
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from trims_shim.ensemble import Allocation, Ensemble, Member

Function = Callable[[Any], Any]


def times(factor: float, device: str) -> Function:
    return lambda batch: batch * factor


def row_sums(device: str) -> Function:
    return lambda batch: batch.sum(1)


def sizes(device: str) -> Function:
    """The size of the batch that each row was in."""
    return lambda batch: np.full(len(batch), len(batch))


def with_environment(device: str) -> Function:
    """The device's name, the cores of the process, and its threads for arrays, by row."""
    text = f"{device} {sorted(os.sched_getaffinity(0))} {os.environ.get('OMP_NUM_THREADS')}"
    return lambda batch: [text] * len(batch)


def fields(device: str) -> Function:
    return lambda batch: {
        "sum": batch["a"] + batch["b"].numpy(),
        "texts": [text.upper() for text in batch["t"]],
    }


def spoiling(device: str) -> Function:
    """Writes into its batch, as programs may."""

    def spoil(batch: Any) -> Any:
        batch *= 0
        return batch

    return spoil


def spoiling_things(mark: str, device: str) -> Function:
    """Writes into the arrays in its batch, then leaves a mark."""

    def spoil(batch: Any) -> Any:
        for each in batch:
            each *= 0
        Path(mark).touch()
        return batch

    return spoil


def raising_at(value: float, device: str) -> Function:
    def raise_at(batch: Any) -> Any:
        if (batch == value).any():
            raise KeyError(f"no {value:g}")
        return batch

    return raise_at


class Untold(Exception):
    def __str__(self) -> str:
        return self.args  # type: ignore[return-value]


def raising_untold(device: str) -> Function:
    """Raises an error that has no text, as ``__str__`` fails."""

    def raise_it(batch: Any) -> Any:
        raise Untold(7)

    return raise_it


def dying_at(value: float, marks: str, times_: int, device: str) -> Function:
    """Kills its process at a value, so many times; each time leaves a file in ``marks``."""

    def die_at(batch: Any) -> Any:
        found = len(os.listdir(marks))
        if (batch == value).any() and found < times_:
            Path(marks, str(found)).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return batch

    return die_at


def unloadable(device: str) -> Function:
    raise OSError("there are no weights")


def leaving(device: str) -> Function:
    raise SystemExit("no licence")


def leaving_later(device: str) -> Function:
    def leave(batch: Any) -> Any:
        raise SystemExit("no licence")

    return leave


def unloadable_again(marks: str, device: str) -> Function:
    """Loads in the first process only, and dies at a 9."""
    if os.listdir(marks):
        raise OSError("the weights are gone")
    return dying_at(9, marks, 1, device)


def no_function(device: str) -> Function:
    return 3  # type: ignore[return-value]


def returning(value: Any, device: str) -> Function:
    return lambda batch: value


def stubborn(device: str) -> Function:
    """Cannot be sent: a lock in its result."""
    return lambda batch: [threading.Lock()] * len(batch)


def working(ms: float, bytes_: int, device: str) -> Function:
    """Takes so long for each row, and so much memory."""

    def work(batch: Any) -> Any:
        held = np.ones(1 + bytes_ * len(batch), np.uint8)
        time.sleep(ms * len(batch) / 1e3)
        return batch + held[0]

    return work


def linear(path: str, device: str) -> Function:
    """A layer of torch whose weights are those of a checkpoint."""
    import torch

    with torch.device("meta"):
        layer = torch.nn.Linear(2048, 1024, bias=False)
    layer.load_state_dict(torch.load(path), assign=True)
    return torch.inference_mode()(layer.forward)


def waiting_for(path: str, device: str) -> Function:
    """Answers once a file exists."""

    def wait(batch: Any) -> Any:
        until_s = time.monotonic() + 60
        while not os.path.exists(path) and time.monotonic() < until_s:
            time.sleep(0.01)
        return batch

    return wait


def waiting_at(value: float, path: str, device: str) -> Function:
    """As ``waiting_for``, with batches that have the value."""
    wait = waiting_for(path, device)
    return lambda batch: wait(batch) if (batch == value).any() else batch


def ensemble_of(*loads: Any, batch_size: int = 8, workers: int = 1, **options: Any) -> Ensemble:
    """Members ``a``, ``b``, ... on the processor; several workers are on parts of it."""
    members = [Member(name, load) for name, load in zip("abcdef", loads, strict=False)]
    row = (batch_size,) * len(members)
    devices = options.pop("devices", ["cpu"] * workers if workers == 1 else None)
    if devices is None:
        from trims_shim.ensemble import Device

        devices = [Device(f"part-{number}", 1 << 40, kind="cpu") for number in range(workers)]
    return Ensemble(members, devices=devices, allocation=Allocation((row,) * workers), **options)


def by(function: Any, *arguments: Any) -> Any:
    return functools.partial(function, *arguments)


def dying_while_it_loads(marks: str, times_: int, device: str) -> Function:
    found = len(os.listdir(marks))
    if found < times_:
        Path(marks, str(found)).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return lambda batch: batch


def without_descriptors(device: str) -> Function:
    """From now on its process can open nothing more."""
    descriptor = os.open("/", os.O_RDONLY)  # the smallest that is free
    os.close(descriptor)
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (descriptor, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    )
    return lambda batch: batch


def dying_with_a_child(value: float, marks: str, device: str) -> Function:
    """As ``dying_at``, once; its process has a child that lives on until there is a mark "end"."""
    if os.fork() == 0:
        waiting_for(f"{marks}/end", device)(None)
        os._exit(0)
    return dying_at(value, marks, 1, device)


def dying_with_a_command(value: float, marks: str, device: str) -> Function:
    """As ``dying_at``, once; its process has started a command that lives until a mark "end"."""
    os.system(f"until [ -e '{marks}/end' ]; do sleep .1; done &")
    return dying_at(value, marks, 1, device)


def with_a_pool(device: str) -> Function:
    """Answers with the number of the process in its pool."""
    pool = concurrent.futures.ProcessPoolExecutor(1)
    return lambda batch: [pool.submit(os.getpid).result()] * len(batch)


def stopping_as_it_answers(device: str) -> Function:
    def stop(connection: Any, content: bytes) -> None:
        os.write(connection.fileno(), struct.pack("!i", len(content)) + content[:3])
        os.kill(os.getpid(), signal.SIGSTOP)

    def answer(batch: Any) -> Any:
        multiprocessing.connection.Connection._send_bytes = stop  # type: ignore[attr-defined]
        return batch

    return answer


def relative(path: str, value: float, marks: str, device: str) -> Function:
    """As ``dying_at``, once, with weights that lie in the current directory."""
    with open(path):
        return dying_at(value, marks, 1, device)


def allocating_once(bytes_: int, device: str) -> Function:
    """Takes so much memory with the first batch, for good."""
    held: list[Any] = []

    def work(batch: Any) -> Any:
        if not held:
            held.append(np.ones(bytes_, np.uint8))
        return batch

    return work


def unloadable_with_a_thread(mark: str, device: str) -> Function:
    """Leaves a thread that ends late, and then a mark."""

    def wait() -> None:
        time.sleep(20)
        Path(mark).touch()

    threading.Thread(target=wait).start()
    raise OSError("there are no weights")


class Foreign:
    """Can be read in the process that made it, and in no other."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _own, (os.getpid(),)


def _own(pid: int) -> Foreign:
    if pid != os.getpid():
        raise ValueError("it is of another process")
    return Foreign()


class Ended:
    """Raises StopIteration where it is read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return next, (iter(()),)


def ended(device: str) -> Function:
    """Returns what the program cannot read."""
    return lambda batch: [Ended() for _ in batch]


def foreign(device: str) -> Function:
    """Returns its batch, with something for "foreign" that the program cannot read."""
    return lambda batch: [Foreign() if each == "foreign" else each for each in batch]


def silent_of_memory(device: str) -> Function:
    """Cannot say how much memory it uses, as where the kernel tells too little."""
    from trims_shim.ensemble import worker

    def refuse(*_: Any, **__: Any) -> Any:
        raise FileNotFoundError("/proc/self/clear_refs")

    worker.memory_used = refuse
    return lambda batch: batch


def allocating_to_load(bytes_: int, device: str) -> Function:
    """Takes so much memory while it loads, and gives it back."""
    np.ones(bytes_, np.uint8)
    return lambda batch: batch


def dying_when_ready(marks: str, device: str) -> Function:
    """Its first process dies once it has said that it is ready; the next one loads after "go"."""
    first = Path(marks, "first")
    if first.exists():
        Path(marks, "second").touch()
        waiting_for(f"{marks}/go", device)(None)
        return lambda batch: batch

    send = multiprocessing.connection.Connection.send

    def send_and_die(connection: Any, message: object) -> None:
        send(connection, message)
        os.kill(os.getpid(), signal.SIGKILL)

    first.touch()
    multiprocessing.connection.Connection.send = send_and_die  # type: ignore[method-assign]
    return lambda batch: batch


def without_listener(device: str) -> Function:
    """Its program has closed the socket when it says that it is ready."""

    def send(connection: Any, message: object) -> None:
        raise BrokenPipeError

    multiprocessing.connection.Connection.send = send  # type: ignore[method-assign]
    return lambda batch: batch


def spawning(device: str) -> Function:
    """Needs what ``multiprocessing`` hands to processes that it spawns."""
    multiprocessing.spawn.get_preparation_data("a")
    return lambda batch: batch


def loading_after(before: str, mark: str, device: str) -> Function:
    """Loads once a file exists, and leaves another one."""
    waiting_for(before, device)(None)
    Path(mark).touch()
    return lambda batch: batch
