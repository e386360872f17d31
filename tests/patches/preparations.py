"""Stands in for the daemon where sessions ask for prepared models: the real preparer, in process.

A model is prepared by the very request that asks for it; the answer is still ``preparing``, as a
daemon's is, and the next request for the same content and recipe is a hit.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import onnxruntime  # noqa: F401  its import applies patch files, which must be whole then
import pytest
from blake3 import blake3

from trims_shim import config, diagnostics, patches
from trims_shim.client import cache as caches
from trims_shim.client.cache import Cache
from trims_shim.daemon.preparer import main as preparer
from trims_shim.daemon.preparer import verifying
from trims_shim.errors import DaemonUnavailable
from trims_shim.patches import onnxruntime_options, onnxruntime_session
from trims_shim.patches.points import AppliedPatch, PatchState, apply, undo
from trims_shim.specs import Identity
from trims_shim.wire import duties, messages
from trims_shim.wire.messages import OpenPreparedReply, OpenPreparedRequest

WELCOME = messages.Welcome(messages.PROTOCOL_VERSION, "1", 1, "i", b"t")
POINTS = (*onnxruntime_options.POINTS, *onnxruntime_session.POINTS)


class Preparations:
    """What the daemon would have; lines to it are given out by :meth:`dial`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.requests: list[OpenPreparedRequest] = []
        self.made: dict[tuple[str, messages.SessionRecipe], Path] = {}
        self.refused: dict[tuple[str, messages.SessionRecipe], OpenPreparedReply] = {}
        self.leases: set[int] = set()
        self.answers: list[OpenPreparedReply | Exception] = []
        """What the next requests get, instead of the truth."""
        self.is_away = False
        self._leased = 0
        self._pid = os.getpid()

    def dial(self) -> Line:
        """A new line."""
        if self.is_away:
            raise DaemonUnavailable("nobody is there")
        return Line(self)

    def open(self, request: OpenPreparedRequest, descriptor: int | None) -> OpenPreparedReply:
        """The daemon's answer."""
        self.requests.append(request)
        if self.answers:
            answer = self.answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer
        digest = request.digest if descriptor is None else digest_of(descriptor)
        assert request.digest in ("", digest)
        key = (digest, request.recipe)
        if key in self.made:
            return self._hit(self.made[key])
        if key in self.refused:
            return self.refused[key]
        if descriptor is None:
            return OpenPreparedReply("unknown")
        self._prepare(request, descriptor, key)
        return OpenPreparedReply("preparing")

    def _hit(self, directory: Path) -> OpenPreparedReply:
        self._leased += 1
        self.leases.add(self._leased)
        model, weights = directory / "model.onnx", directory / "weights.bin"
        return OpenPreparedReply(
            "hit",
            lease=self._leased,
            key=directory.name,
            model=str(model),
            model_identity=identity(model),
            weights=str(weights),
            weights_identity=identity(weights),
        )

    def _prepare(self, request: OpenPreparedRequest, descriptor: int, key: Any) -> None:
        directory = self.directory / f"entry-{len(self.made) + len(self.refused)}"
        directory.mkdir(parents=True)
        reply = preparer.prepare(
            duties.PrepareRequest(
                messages.PROTOCOL_VERSION,
                descriptor,
                request.path,
                request.recipe,
                request.package,
                str(directory),
            ),
            lambda hashed: True,
        )
        assert reply is not None
        if reply.reason:
            self.refused[key] = OpenPreparedReply(
                "refused", reason=reply.reason, message=reply.message
            )
        else:
            self.made[key] = directory


class Line:
    """In the place of a connection."""

    def __init__(self, preparations: Preparations) -> None:
        self.welcome = WELCOME
        self.preparations = preparations
        self.pid = os.getpid()

    def open_prepared(
        self,
        request: OpenPreparedRequest,
        *,
        descriptor: int | None = None,
        directory: int | None = None,
        externals: Mapping[str, int] | None = None,
    ) -> OpenPreparedReply:
        return self.preparations.open(request, descriptor)

    def release(self, lease: int) -> None:
        if self.pid == os.getpid():
            self.preparations.leases.discard(lease)

    def open_image(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("nobody asked for an image")

    def request(self, message: Any) -> Any:
        raise AssertionError(f"nobody asked {message}")

    def report(self, counters: dict[str, int]) -> None: ...
    def check_protocol(self) -> None: ...
    def close(self) -> None: ...

    def is_alive(self) -> bool:
        return True

    def is_replaced(self) -> bool:
        return False

    def withdraw(self) -> bool:
        return False


def digest_of(descriptor: int) -> str:
    """Of an open file."""
    content = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    digest: str = blake3(content).hexdigest()
    return digest


def identity(path: Path) -> Identity:
    """Of a file, as the daemon tells it."""
    status = path.stat()
    return Identity.from_stat(status)


def apply_points() -> Callable[[], None]:
    """Apply all points, in the place of those that an import applied; what undoes that."""
    libraries = config.PATCHABLE_LIBRARIES if patches.requested() else ()
    patches.disable()
    done = [apply(point) for point in POINTS]
    problems = [f"{each.point.target}: {each.reason}" for each in done if not _is_fine(each)]
    assert not problems, problems

    def undo_points() -> None:
        for patch in reversed(done):
            undo(patch)
        if libraries:
            patches.enable(libraries)

    return undo_points


def _is_fine(patch: AppliedPatch) -> bool:
    # Some methods came with later versions.
    is_missing = patch.state is PatchState.SKIPPED and "not found" in patch.reason
    return patch.state is PatchState.APPLIED or is_missing


def patched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **settings: str
) -> Iterator[Preparations]:
    """Patches in place, on a daemon that is none; for a fixture."""
    preparations = Preparations(tmp_path / "prepared")
    # Small models are quick to create either way, and are served here all the same.
    monkeypatch.setattr(verifying, "_SHARED_ANYWAY_BYTES", 0)
    before = caches.exchange(
        Cache(
            config.load({}, **{"min_bytes": "1", "strict": "1", "autostart": "0", **settings}),
            dial=preparations.dial,
        )
    )
    diagnostics.reset_after_fork()
    diagnostics._warned.clear()
    undo_points = apply_points()
    monkeypatch.setattr(patches, "_is_enabled", True)
    try:
        yield preparations
    finally:
        undo_points()
        caches.exchange(before)
