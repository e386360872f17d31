"""A worker of an ensemble: a process that runs one member on one device.

A thread receives batches and copies them out of shared memory; the main thread runs the model over
them, one after the other, and sends the results. So a batch is always there when the one before has
ended. The process ends when its socket does, which is when its program ends, also while the model
is loaded.

The model is loaded with trims_shim active, so that workers of one member share its weights.

Source: Pochelu et al. (2022), section 2.1 (batcher, predictor and prediction sender).
"""

from __future__ import annotations

import mmap
import multiprocessing
import multiprocessing.process
import multiprocessing.spawn
import os
import pickle
import queue
import signal
import socket
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from trims_shim.children import be_called
from trims_shim.ensemble import messages
from trims_shim.ensemble.channel import Channel
from trims_shim.ensemble.devices import cores_of
from trims_shim.ensemble.dispatch import Job
from trims_shim.ensemble.footprint import memory_used
from trims_shim.ensemble.payloads import count_of, dumped, loaded, rows_of

__all__ = ["main"]


def main(descriptor: int) -> None:
    """Serve the program at the other end of the socket ``descriptor``, until it closes that."""
    be_called("trims-worker")
    # Ctrl-C is for the program, which ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    ours = socket.socket(fileno=descriptor)
    # A child of the model's would keep the program from seeing this process's end: by os.system, or
    # forked.
    ours.set_inheritable(False)
    channel = Channel(ours)
    os.register_at_fork(after_in_child=channel.close)
    try:
        _serve(channel)
    except (EOFError, ConnectionError):  # The program has ended.
        _end(0)
    except BaseException:
        traceback.print_exc()
    _end(1)


def _end(status: int) -> NoReturn:
    """End the process without its threads: one of the model's may keep it from its end.

    What it has started by ``multiprocessing`` ends, too. Else the processes of a pool of
    ``concurrent.futures``, which hold both ends of its pipe, would wait for work for ever.
    """
    try:
        for child in multiprocessing.active_children():
            child.terminate()
    finally:
        os._exit(status)


def _serve(channel: Channel) -> None:
    connection = channel.connection
    setup = connection.recv()
    assert isinstance(setup, messages.SetUp)
    if cores := cores_of(setup.device):
        os.sched_setaffinity(0, cores)
    worker = _Worker(channel, setup.device)
    worker.start()
    try:
        function = _loaded_function(setup)
    except BaseException as error:
        connection.send(_failure(None, error))
    else:
        connection.send(messages.Ready())
        worker.run(function)


def _loaded_function(setup: messages.SetUp) -> Callable[[Any], Any]:
    process: Any = multiprocessing.process.current_process()
    process._inheriting = True  # so it is known that the main module only lends its functions
    multiprocessing.spawn.prepare(dict(setup.main))
    load = pickle.loads(setup.load)
    process._inheriting = False
    function = load(_known_as(setup.device))
    if not callable(function):
        raise TypeError(
            f"the load function of {setup.member!r} returned a {type(function).__name__}, not a "
            "function of a batch"
        )
    found: Callable[[Any], Any] = function
    return found


def _known_as(device: str) -> str:
    """What libraries call a device. They know no cores, which are those of this process anyway."""
    return "cpu" if device.startswith("cpu:") else device


@dataclass(frozen=True, slots=True)
class _Batch:
    job: Job
    samples: Any
    error: BaseException | None = None


class _Worker:
    def __init__(self, channel: Channel, device: str) -> None:
        self._channel = channel
        self._connection = channel.connection
        self._device = device
        self._batches: queue.SimpleQueue[_Batch | messages.AskMemory] = queue.SimpleQueue()
        self._buffers: dict[int, mmap.mmap] = {}
        self._segment: tuple[int, Any] | None = None
        """The samples of the last job's segment, in shared memory."""

    def start(self) -> None:
        """Receive, and from now on end with the program, however long a model takes."""
        threading.Thread(target=self._receive, daemon=True).start()

    # --- the main thread --------------------------------------------------------------------------

    def run(self, function: Callable[[Any], Any]) -> None:
        while True:
            task = self._batches.get()
            if isinstance(task, _Batch):
                self._answer(function, task)
            else:
                buffers_bytes = sum(map(len, self._buffers.values()))
                self._connection.send(memory_used(self._device, buffers_bytes=buffers_bytes))

    def _answer(self, function: Callable[[Any], Any], batch: _Batch) -> None:
        job = batch.job
        try:
            if batch.error is not None:
                raise batch.error
            parts = dumped(_results(function, batch))
        except BaseException as error:
            self._connection.send(_failure(job, error))
            return
        self._connection.send(messages.Answer(job, tuple(part.nbytes for part in parts)))
        self._channel.send_contents(parts)

    # --- the receiving thread ---------------------------------------------------------------------

    def _receive(self) -> None:
        while True:
            try:
                message = self._connection.recv()
            except (EOFError, OSError):
                # The program has ended, or wants no more. The main thread may be in a model for
                # long.
                _end(0)
            try:
                self._handle(message)
            except EOFError:  # It has ended before it sent all of the message.
                _end(0)
            except BaseException:  # no memory, or no descriptor left
                traceback.print_exc()
                _end(1)

    def _handle(self, message: Any) -> None:
        if isinstance(message, messages.RunJob):
            self._batches.put(self._copied(message))
        elif isinstance(message, messages.OpenBuffer):
            descriptor = self._channel.receive_descriptor()
            # Writable, as torch warns of what is not; only copies are handed out.
            self._buffers[message.number] = mmap.mmap(descriptor, 0)
            os.close(descriptor)
        elif isinstance(message, messages.CloseBuffer):
            self._segment = None
            del self._buffers[message.number]
        else:
            self._batches.put(message)

    def _copied(self, message: messages.RunJob) -> _Batch:
        job = message.job
        try:
            samples = self._samples(job.segment, message.layout)
            # One part is the pickle alone: what was made of it does not lie in the buffer.
            is_in_buffer = len(message.layout.spans) > 1
            return _Batch(job, rows_of(samples, job.start, job.stop, is_copied=is_in_buffer))
        except BaseException as error:  # of a class that cannot be imported here, for example
            return _Batch(job, None, error)

    def _samples(self, segment: int, layout: messages.Layout) -> Any:
        if self._segment is None or self._segment[0] != segment:
            buffer = memoryview(self._buffers[layout.buffer])
            parts = [buffer[offset : offset + size] for offset, size in layout.spans]
            self._segment = segment, loaded(parts)
        return self._segment[1]


def _results(function: Callable[[Any], Any], batch: _Batch) -> Any:
    expected = batch.job.stop - batch.job.start
    results = function(batch.samples)
    if (found := count_of(results)) != expected:
        raise ValueError(f"returned {found} rows for a batch of {expected} samples")
    return results


def _failure(job: Job | None, error: BaseException) -> messages.Failure:
    text = "".join(traceback.format_exception(error))
    return messages.Failure(job, f"{type(error).__name__}: {_words(error)}", text)


def _words(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # of the model's own class; the worker must not end with it
        return "str() of it failed"
