"""Prepared models without onnxruntime, for tests: who makes them, of files of any content."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

from blake3 import blake3

from trims_shim.daemon.prepared.preparing import Order
from trims_shim.specs import Identity
from trims_shim.wire import duties
from trims_shim.wire.duties import ExternalFile, PrepareReply
from trims_shim.wire.messages import SessionRecipe

RECIPE = SessionRecipe(
    runtime="1.31.1",
    build="git-0000000; 123; 456",
    providers=(("CPUExecutionProvider",),),
    level="ORT_ENABLE_ALL",
)


def digest_of(data: bytes) -> str:
    digest: str = blake3(data).hexdigest()
    return digest


def identity_of(path: str | Path) -> Identity:
    status = os.stat(path)
    return Identity.from_stat(status)


class FakePreparer:
    """In the place of :class:`trims_shim.daemon.prepared.preparing.Preparer`.

    ``externals`` are locations of weights beside the model. While ``gate`` is cleared a preparation
    waits before it hashes. ``reply`` is what it says in the end.
    """

    def __init__(self) -> None:
        self.orders: list[Order] = []
        self.verdicts: list[bool] = []
        self.externals: tuple[str, ...] = ()
        self.gate = threading.Event()
        self.gate.set()
        self.reply = PrepareReply(probe="equal")
        self.weights: bytes | None = b"packed weights"
        self.on_made: Callable[[Order], None] = lambda order: None
        self.is_closed = False
        self.timeout_s = 1e6
        self.given_up = 0

    def run(
        self, order: Order, decide: Callable[[duties.SourceHashed], bool]
    ) -> PrepareReply | None:
        self.orders.append(order)
        while not self.gate.wait(0.01):
            if self.is_closed:
                return PrepareReply(reason="stopping", is_lasting=False)
        request = order.request
        model = os.pread(request.source, 1 << 30, 0)
        offered = None if request.externals is None else dict(request.externals)
        if offered is not None and not offered.keys() >= set(self.externals):
            return PrepareReply(reason="external_missing", is_lasting=False)
        directory = os.path.dirname(request.path)
        hashed = duties.SourceHashed(
            digest_of(model),
            tuple(
                _external(directory, each) if offered is None else _offered(each, offered[each])
                for each in self.externals
            ),
        )
        self.verdicts.append(decide(hashed))
        if not self.verdicts[-1]:
            return None
        if not self.reply.reason:
            Path(request.directory, "model.onnx").write_bytes(b"prepared " + model)
            if self.weights is not None:
                Path(request.directory, "weights.bin").write_bytes(self.weights)
        self.on_made(order)
        return self.reply

    def give_up(self) -> None:
        self.given_up += 1

    def close(self) -> None:
        self.is_closed = True


def _offered(location: str, descriptor: int) -> ExternalFile:
    path = f"/proc/self/fd/{descriptor}"
    return ExternalFile(location, path, digest_of(Path(path).read_bytes()), identity_of(path))


def _external(directory: str, location: str) -> ExternalFile:
    path = os.path.join(directory, location)
    return ExternalFile(location, path, digest_of(Path(path).read_bytes()), identity_of(path))
