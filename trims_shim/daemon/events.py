"""The events socket: a ZeroMQ PUB that tells subscribers what becomes of images.

Owns the socket and its place in the file system. Subscribers are not asked who they are. Each may
subscribe to as much as it likes, and ZeroMQ keeps a table of it. So what a subscriber sends is
limited in length and in pace. When the owner's memory grows without reason, the socket is closed
with everything in it and bound again under its name.
"""

from __future__ import annotations

import contextlib
import time

import zmq

from trims_shim.daemon.connections import Doorkeeper
from trims_shim.daemon.control import rebound
from trims_shim.daemon.values import Announce
from trims_shim.wire import admin, codec

__all__ = ["EventSocket"]

_SUBSCRIPTION_LIMIT_BYTES = 256
"""The longest topic is ``image.unpinned``; a greeting of ZeroMQ has some 50 bytes."""
_SUBSCRIPTIONS_AT_ONCE = 16
"""ZeroMQ takes in all waiting subscriptions at each event and each :meth:`EventSocket.tend`. With
its default of 1000, a peer that subscribes without end is faster, and that never returns."""


class EventSocket:
    """See the module docstring. Used by the server's thread only."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], path: str) -> None:
        """Bind to ``path``."""
        self._context = context
        self._path = path
        self._publisher = self._bind()

    def publish(self, event: Announce) -> None:
        """Tell the current subscribers; a subscriber that does not read delays nobody."""
        body = admin.ImageEvent(event.event, event.digest, event.size_bytes, time.time_ns())
        with contextlib.suppress(zmq.ZMQError):
            topic = f"image.{event.event}".encode()
            self._publisher.send_multipart([topic, codec.encode(body)], zmq.NOBLOCK)

    def tend(self) -> None:
        """Free what departed subscribers left; call about every second.

        ZeroMQ does so only when it is asked something, and there may be no event for weeks.
        """
        self._publisher.getsockopt(zmq.EVENTS)

    def reset(self) -> None:
        """Close the socket with everything in it, and open it again under its name."""
        self._door.close()
        self._publisher = rebound(self._path, self._publisher, self._bind)

    def close(self) -> None:
        """Close it, and discard what was not read."""
        self._door.close()
        self._publisher.close()

    def _bind(self) -> zmq.Socket[bytes]:
        publisher = self._context.socket(zmq.PUB)
        publisher.setsockopt(zmq.LINGER, 0)
        publisher.setsockopt(zmq.MAXMSGSIZE, _SUBSCRIPTION_LIMIT_BYTES)
        publisher.setsockopt(zmq.RCVHWM, _SUBSCRIPTIONS_AT_ONCE)
        self._door = Doorkeeper(publisher, self._path, share=16, limit=1024)
        publisher.bind(f"ipc://{self._path}")
        return publisher
