"""The events socket against subscribers: what they hear, and what they may leave behind."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from trims_shim.daemon.events import EventSocket
from trims_shim.daemon.values import Announce
from trims_shim.wire import codec

PATIENCE_MS = 60_000
EVENT = Announce("loaded", "a" * 64, 7)


class World:
    """An events socket, and those who listen to it."""

    def __init__(self, directory: str) -> None:
        self.path = os.path.join(directory, "events.sock")
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.events = EventSocket(self.context, self.path)
        self.subscribers: list[zmq.Socket[bytes]] = []

    def subscriber(self, topic: bytes = b"image.") -> zmq.Socket[bytes]:
        subscriber = self.context.socket(zmq.SUB)
        subscriber.connect(f"ipc://{self.path}")
        subscriber.subscribe(topic)
        self.subscribers.append(subscriber)
        return subscriber

    def heard(self, subscriber: zmq.Socket[bytes]) -> list[bytes]:
        """What a subscriber hears, once it is there."""
        end_s = time.monotonic() + PATIENCE_MS / 1000
        while time.monotonic() < end_s:
            self.events.publish(EVENT)
            if subscriber.poll(10):
                return subscriber.recv_multipart()
        raise AssertionError("nothing was heard")

    def close(self) -> None:
        for each in self.subscribers:
            each.close(linger=0)
        self.events.close()
        self.context.term()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(str(tmp_path))
    yield made
    made.close()


def test_who_listens_hears_what_becomes_of_images(world: World) -> None:
    topic, body = world.heard(world.subscriber())
    assert topic == b"image.loaded"
    message = codec.decode(body)
    assert (message.event, message.digest, message.size_bytes) == ("loaded", "a" * 64, 7)


def test_a_long_topic_ends_the_connection(world: World) -> None:
    greedy = world.subscriber()
    world.heard(greedy)
    monitor = greedy.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    world.subscribers.append(monitor)
    greedy.subscribe(b"x" * 1000)
    assert monitor.poll(PATIENCE_MS)
    world.heard(world.subscriber())


def test_after_a_reset_subscribers_come_back(world: World) -> None:
    listening = world.subscriber()
    world.heard(listening)
    os.chmod(world.path, 0o660)
    world.events.reset()
    while listening.poll(100):
        listening.recv_multipart()
    assert world.heard(listening)[0] == b"image.loaded"
    assert world.heard(world.subscriber())[0] == b"image.loaded"
    assert stat.S_IMODE(os.stat(world.path).st_mode) == 0o660
