"""What tests of prepared ONNX models do with a world: models, sessions, what the daemon keeps."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

import onnx_models
from harness import Child, World, wait_until

from trims_shim.wire import admin

__all__ = [
    "SESSIONS",
    "MakeWorld",
    "directory",
    "entries",
    "evict",
    "expected",
    "model",
    "prepare",
    "preparers",
    "rows",
    "sessions",
    "settled",
    "wait_for_preparer",
]

MakeWorld = Callable[..., World]
SESSIONS = """
import hashlib, numpy, onnxruntime
FEED = {"x": numpy.linspace(-1, 1, 128, dtype=numpy.float32).reshape(2, 64),
        "ids": numpy.array([1, 5])}
def create(model):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(model, options)
def bits(session):
    return hashlib.sha256(session.run(None, FEED)[0].tobytes()).hexdigest()[:16]
def counted():
    now = trims_shim.stats()
    return [now.served, now.fallbacks]
"""
"""Defines create(), bits() and counted() in a script of a world."""

_LOOP = (
    SESSIONS
    + """
kept = {}
for command, *rest in iter(hear, None):
    before = trims_shim.stats().served
    if command == "create":
        kept[len(kept)] = session = create(rest[0])
        say([bits(session), trims_shim.stats().served - before])
    elif command == "run":
        say([bits(session) for session in kept.values()])
    elif command == "drop":
        kept.clear(); session = None
        import gc; gc.collect()
        say()
    elif command == "fallbacks":
        say(trims_shim.stats().fallbacks)
"""
)


def model(world: World, seed: int = 1, *, width: int = 256, name: str = "") -> str:
    """A model file of about ``width`` * 3 KiB."""
    path = os.path.join(world.root, name or f"model-{seed}.onnx")
    with open(path + ".new", "wb") as file:
        file.write(onnx_models.perceptron(seed, width=width).content)
    os.rename(path + ".new", path)
    return path


def expected(world: World, *paths: str) -> list[str]:
    """What each model computes, without the shim."""
    said: list[str] = world.run(
        SESSIONS + f"say([bits(create(path)) for path in {list(paths)!r}])\n", enabled="0"
    )
    return said


class Sessions:
    """A client process that makes sessions and keeps them."""

    def __init__(self, child: Child) -> None:
        self.child = child

    def create(self, path: str) -> tuple[str, bool]:
        """(what the session computes, whether it was made from a prepared model)."""
        bits, served = self._ask("create", path)
        return bits, served > 0

    def run(self) -> list[str]:
        """What each session that was made computes now."""
        answer: list[str] = self._ask("run")
        return answer

    def drop(self) -> None:
        """Forget them all."""
        self._ask("drop")

    def fallbacks(self) -> dict[str, int]:
        """Sessions that onnxruntime made by itself, by reason."""
        answer: dict[str, int] = self._ask("fallbacks")
        return answer

    def _ask(self, *command: str) -> Any:
        self.child.say(command)
        return self.child.hear()


def sessions(world: World, *, prefix: tuple[str, ...] = (), **settings: str) -> Sessions:
    """A new client process."""
    return Sessions(world.spawn(_LOOP, prefix=prefix, **settings))


def rows(world: World) -> tuple[admin.PreparedStatus, ...]:
    """What the daemon says of prepared models."""
    return world.status().prepared


def settled(world: World) -> dict[str, int]:
    """How many models are there, by state or reason, once nothing is being prepared."""

    def answer() -> dict[str, int] | None:
        found: dict[str, int] = {}
        for row in rows(world):
            if row.state == "preparing":
                return None
            state = row.reason or row.state
            found[state] = found.get(state, 0) + 1
        return found or None

    counts: dict[str, int] = wait_until(answer, "nothing is being prepared", timeout_s=60)
    return counts


def prepare(world: World, *paths: str) -> None:
    """Have these models prepared, one after the other, by a client of their own."""
    client = sessions(world)
    for path in paths:
        client.create(path)
        settled(world)
    client.child.kill()


def directory(world: World) -> str:
    """Where the daemon keeps prepared models."""
    return os.path.join(world.settings["cache_dir"], "prepared")


def entries(world: World) -> list[str]:
    """Names in that directory, without what is on its way in or out."""
    with contextlib.suppress(FileNotFoundError):
        return sorted(name for name in os.listdir(directory(world)) if name[0] != ".")
    return []


def evict(world: World, text: str = "") -> admin.EvictPreparedReply:
    """Have prepared models forgotten: one, or all."""
    connection = world.connection()
    try:
        reply: admin.EvictPreparedReply = connection.request(admin.EvictPreparedRequest(text))
        return reply
    finally:
        connection.close()


def preparers(world: World) -> list[int]:
    """Live preparer processes."""
    return world.running("daemon.preparer.main")


def wait_for_preparer(world: World) -> int:
    """The process id of a preparer, as soon as there is one."""
    found: list[int] = wait_until(lambda: preparers(world), "a preparer starts", interval_s=0.001)
    return found[0]
