"""The processes of an allocation: started, listened to, and started again.

Owns the workers' processes and sockets, and a bell that wakes who listens. It decides nothing about
samples. One thread listens (:meth:`Crew.events`); everything else is called under the lock of the
:class:`~.system.System` that it belongs to.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trims_shim.ensemble import messages
from trims_shim.ensemble.buffers import Buffer
from trims_shim.ensemble.hosting import WorkerProcess, end_all, keep_from_children

__all__ = ["Crew", "Event", "Place"]


@dataclass(slots=True)
class Place:
    """An element of the allocation matrix, and the process that is there."""

    member: int
    setup: messages.SetUp
    batch_size: int
    restarts: int
    """How often a process may still be started in the place of one that has died."""
    process: WorkerProcess | None = None
    is_ready: bool = False

    @property
    def name(self) -> str:
        """The member's."""
        return self.setup.member

    @property
    def device(self) -> str:
        """Where it runs."""
        return self.setup.device


@dataclass(frozen=True, slots=True)
class Event:
    """A worker has said something, or has died."""

    place: int
    message: object
    """None if it has died."""
    parts: Sequence[bytearray] | MemoryError = ()
    """Of an answer; the error if there was no memory for them."""


class Crew:
    """A place for each worker; they are numbered."""

    def __init__(self, places: Sequence[Place]) -> None:
        """Start all. Raises OSError if that is not possible, and leaves none."""
        self.places = places
        self._selector = selectors.DefaultSelector()
        self._bell, self._ear = socket.socketpair()
        keep_from_children(self._bell, self._ear)
        self._selector.register(self._ear, selectors.EVENT_READ)
        try:
            for number in range(len(places)):
                self.start(number)
        except BaseException:
            self.end()
            raise

    def start(self, number: int) -> None:
        """Start a process at a place that has none. Raises OSError."""
        place = self.places[number]
        process = WorkerProcess(place.setup)
        try:
            self._selector.register(process.channel.connection, selectors.EVENT_READ, number)
        except BaseException:  # not one that nobody hears: its callers would wait for ever
            process.kill()
            process.death()
            raise
        place.process = process

    def bury(self, number: int) -> str:
        """Remove a process that has died; return how it ended, in words."""
        place = self.places[number]
        process, place.process, place.is_ready = place.process, None, False
        assert process is not None
        self._selector.unregister(process.channel.connection)
        return process.death()

    def events(self) -> Iterator[Event]:
        """What workers say, until the bell is rung. Blocks."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._ear:
                    return
                yield self._heard(key.data)

    def _heard(self, number: int) -> Event:
        process = self.places[number].process
        assert process is not None
        message: object = None
        try:
            message = process.channel.connection.recv()
            if isinstance(message, messages.Answer):
                parts = process.channel.receive_contents(message.sizes_bytes)
                return Event(number, message, parts)
        except MemoryError as error:
            if not isinstance(message, messages.Answer):
                raise
            return Event(number, message, error.with_traceback(None))  # its frames have some
        except (EOFError, OSError):
            return Event(number, None)
        return Event(number, message)

    def ring(self) -> None:
        """End :meth:`events`. Any thread may."""
        with contextlib.suppress(OSError):  # nobody listens any more
            self._bell.send(b"\0")

    def close_buffer(self, buffer: Buffer) -> None:
        """Let all workers unmap memory that is no longer used."""
        for place in self.places:
            if place.process is not None:
                place.process.close_buffer(buffer.number)

    def kill(self) -> None:
        """End all processes by signals. Any thread may, without the lock."""
        for place in self.places:
            if (process := place.process) is not None:
                process.kill()

    def end(self) -> None:
        """End all processes."""
        end_all([place.process for place in self.places if place.process is not None])
        self._selector.close()
        self._bell.close()
        self._ear.close()
