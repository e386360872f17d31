"""What a client makes of the daemon's answers about prepared models."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import zmq
from harness import World, close_worlds

from trims_shim import config, diagnostics
from trims_shim.client.cache import Cache
from trims_shim.client.connection import Connection
from trims_shim.client.prepared import PreparedModel, prepared_model
from trims_shim.errors import (
    DaemonTimeout,
    DaemonUnavailable,
    MalformedMessage,
    NotServed,
    TrimsError,
    WireError,
)
from trims_shim.specs import Identity
from trims_shim.wire import messages
from trims_shim.wire.messages import OpenPreparedReply

RECIPE = messages.SessionRecipe("1.31.1", "build", (("CPUExecutionProvider",),), "ORT_ENABLE_ALL")


@pytest.fixture
def reply(tmp_path: Path) -> OpenPreparedReply:
    """A hit on two files."""
    model, weights = tmp_path / "model.onnx", tmp_path / "weights.bin"
    model.write_bytes(b"model")
    weights.write_bytes(b"the weights")
    return OpenPreparedReply(
        "hit",
        lease=7,
        key="abc",
        model=str(model),
        model_identity=identity(model),
        weights=str(weights),
        weights_identity=identity(weights),
    )


def identity(path: Path) -> Identity:
    status = path.stat()
    return Identity.from_stat(status)


class Released:
    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> None:
        self.times += 1


def take(
    reply: OpenPreparedReply, directory: str | Path = "/nowhere"
) -> tuple[PreparedModel | TrimsError, int]:
    released = Released()
    try:
        model = prepared_model(reply, name="m.onnx", release=released, directory=str(directory))
        return model, released.times
    except TrimsError as error:
        return error, released.times


def test_a_hit(reply: OpenPreparedReply) -> None:
    model, released = take(reply)
    assert isinstance(model, PreparedModel)
    assert (model.path, model.key, model.size_bytes) == (reply.model, "abc", 16)
    assert released == 0


def test_a_hit_without_weights(reply: OpenPreparedReply) -> None:
    model, _ = take(reply._replace(weights="", weights_identity=None))
    assert isinstance(model, PreparedModel)
    assert model.size_bytes == 5


def test_a_hit_whose_files_have_another_name_here(reply: OpenPreparedReply, tmp_path: Path) -> None:
    """In another container than the daemon's."""
    there = reply._replace(
        model=f"/there/{tmp_path.name}/model.onnx", weights=f"/there/{tmp_path.name}/weights.bin"
    )
    model, released = take(there, tmp_path.parent)
    assert isinstance(model, PreparedModel)
    assert (model.path, released) == (reply.model, 0)
    model.check()
    Path(reply.weights).write_bytes(b"other weights")
    with pytest.raises(NotServed, match="is not the file"):
        model.check()
    error, released = take(there, tmp_path)
    assert isinstance(error, NotServed)
    assert (error.reason, released) == ("prepared_changed", 1)


@pytest.mark.parametrize("field", ["device", "inode", "size_bytes", "mtime_ns", "ctime_ns"])
@pytest.mark.parametrize("file", ["model_identity", "weights_identity"])
def test_files_that_are_not_those_that_were_verified(
    reply: OpenPreparedReply, file: str, field: str
) -> None:
    was = getattr(reply, file)
    changed: Any = {file: was._replace(**{field: getattr(was, field) + 1})}
    error, released = take(reply._replace(**changed))
    assert isinstance(error, NotServed)
    assert (error.reason, released) == ("prepared_changed", 1)


@pytest.mark.parametrize("file", ["model", "weights"])
def test_files_that_are_gone_or_links(reply: OpenPreparedReply, file: str) -> None:
    path = Path(getattr(reply, file))
    moved = path.rename(path.with_suffix(".moved"))
    error, released = take(reply)
    assert isinstance(error, NotServed)
    assert (error.reason, released) == ("prepared_changed", 1)
    path.symlink_to(moved)
    error, released = take(reply)
    assert isinstance(error, NotServed)
    assert (error.reason, released) == ("prepared_changed", 1)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (OpenPreparedReply("preparing"), "preparing"),
        (OpenPreparedReply("unknown"), "unknown"),
        (OpenPreparedReply("refused", reason="outputs_differ", message="y"), "outputs_differ"),
        (OpenPreparedReply("refused", reason="file_changed", message="y"), "model_changed"),
        (OpenPreparedReply("refused"), "refused"),
    ],
)
def test_no_hit(answer: OpenPreparedReply, reason: str) -> None:
    error, released = take(answer)
    assert isinstance(error, NotServed)
    assert (error.reason, released) == (reason, 0)
    assert "m.onnx" in str(error)


@pytest.mark.parametrize(
    "change",
    [
        {"outcome": "perhaps"},
        {"model": "relative"},
        {"model": "/a\0b"},
        {"model_identity": None},
        {"weights": "/a\0b"},
    ],
)
def test_answers_that_make_no_sense(reply: OpenPreparedReply, change: Any) -> None:
    error, _ = take(reply._replace(**change))
    assert isinstance(error, WireError)


# --- through the cache ----------------------------------------------------------------------------


class Line:
    def __init__(self, answer: Callable[[Any], Any]) -> None:
        self.welcome = messages.Welcome(messages.PROTOCOL_VERSION, "1", 1, "i", b"t")
        self.answer = answer
        self.asked: list[tuple[Any, int | None]] = []
        self.shown: list[os.stat_result | None] = []
        self.externals: list[dict[str, int]] = []
        self.released: list[int] = []
        self.is_open = True

    def open_prepared(
        self,
        request: Any,
        *,
        descriptor: int | None = None,
        directory: int | None = None,
        externals: Mapping[str, int] | None = None,
    ) -> Any:
        self.asked.append((request, descriptor))
        self.shown.append(None if directory is None else os.fstat(directory))
        self.externals.append(dict(externals or {}))
        return self.answer(request)

    def release(self, lease: int) -> None:
        self.released.append(lease)

    def withdraw(self) -> bool:
        return False

    def is_alive(self) -> bool:
        return self.is_open

    def is_replaced(self) -> bool:
        return False

    def close(self) -> None:
        self.is_open = False


class Dialled:
    def __init__(self, *answers: Any, **settings: str) -> None:
        self.answers = list(answers)
        self.lines: list[Line] = []
        dial: Any = self.dial
        self.cache = Cache(config.load({}, autostart="0", **settings), dial=dial)

    def dial(self) -> Line:
        self.lines.append(Line(self.answer))
        return self.lines[-1]

    def answer(self, _: Any) -> Any:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def open(self, **keywords: Any) -> PreparedModel:
        return self.cache.open_prepared(
            RECIPE, package="/onnxruntime", search_path=("/a",), **keywords
        )


def test_what_is_asked(reply: OpenPreparedReply, tmp_path: Path) -> None:
    dialled = Dialled(reply, reply)
    before = diagnostics.stats().hits
    descriptor = os.open(reply.model, os.O_RDONLY)
    try:
        dialled.open(descriptor=descriptor, path="/m.onnx")
        os.fstat(descriptor)
    finally:
        os.close(descriptor)
    dialled.open(digest="d" * 64)
    (line,) = dialled.lines
    request = messages.OpenPreparedRequest(0, "/m.onnx", "", RECIPE, "/onnxruntime", ("/a",))
    assert line.asked == [
        (request, descriptor),
        (request._replace(path="", digest="d" * 64), None),
    ]
    assert diagnostics.stats().hits == before + 2


def test_in_another_container_the_directory_is_shown(
    reply: OpenPreparedReply, tmp_path: Path, no_leak: None
) -> None:
    refusal = OpenPreparedReply("refused", reason="other_namespace", message="a container")
    dialled = Dialled(refusal, refusal, reply, reply, cache_dir=str(tmp_path / "cache"))
    with pytest.raises(NotServed) as caught:
        dialled.open(digest="d")  # there is none to be shown
    assert caught.value.reason == "other_namespace"
    directory = tmp_path / "cache" / "prepared"
    directory.mkdir(parents=True)
    dialled.open(digest="d", externals=lambda: nullcontext({"w.bin": 7}))
    dialled.open(digest="d")
    (line,) = dialled.lines
    assert line.shown[:2] == [None, None]
    for each in line.shown[2:]:
        assert each is not None
        assert os.path.samestat(each, directory.stat())
    assert len(line.shown) == 4
    assert line.externals == [{}, {}, {"w.bin": 7}, {}]


def test_a_relative_directory_where_the_working_directory_is_gone(
    reply: OpenPreparedReply, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found: an internal error."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert Dialled(reply, cache_dir="here").open(digest="d").path == reply.model


def test_a_lease_is_given_back_over_its_own_connection(reply: OpenPreparedReply) -> None:
    dialled = Dialled(reply, reply._replace(lease=8))
    one = dialled.open(digest="d")
    dialled.lines[0].is_open = False
    two = dialled.open(digest="d")
    two.release()
    one.release()
    assert [line.released for line in dialled.lines] == [[7], [8]]


def test_no_hit_keeps_the_connection_and_its_leases(reply: OpenPreparedReply) -> None:
    changed = reply._replace(model_identity=reply.model_identity._replace(inode=0))
    dialled = Dialled(OpenPreparedReply("preparing"), changed, reply)
    for reason in ("preparing", "prepared_changed"):
        with pytest.raises(NotServed) as caught:
            dialled.open(digest="d")
        assert caught.value.reason == reason
    model = dialled.open(digest="d")
    assert len(dialled.lines) == 1
    assert dialled.lines[0].is_open
    assert dialled.lines[0].released == [7]
    del model  # the end of the last reference gives the lease up, too
    assert dialled.lines[0].released == [7, 7]


def test_an_answer_that_may_still_come_costs_the_connection() -> None:
    dialled = Dialled(DaemonTimeout("slow"))
    with pytest.raises(DaemonTimeout):
        dialled.open(digest="d")
    assert not dialled.lines[0].is_open


def test_a_daemon_that_went_away() -> None:
    dialled = Dialled(DaemonUnavailable("gone"))
    with pytest.raises(DaemonUnavailable):
        dialled.open(digest="d")


# --- a real daemon --------------------------------------------------------------------------------


@pytest.fixture
def connection() -> Iterator[Connection]:
    world = World()
    world.settings["cache_dir"] = os.path.join(world.root, "cache")
    world.start()
    connection = world.connection()
    yield connection
    connection.close()
    close_worlds([world])


def asked(**fields: Any) -> messages.OpenPreparedRequest:
    return messages.OpenPreparedRequest(
        **{"ticket": 0, "path": "", "digest": "d" * 64, "recipe": RECIPE, "package": "/p", **fields}
    )


def test_a_packet_is_enough(connection: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    """ZeroMQ and its threads are left alone, unless the request is too long for a packet."""
    made: list[Any] = []

    def context(**arguments: Any) -> Any:
        made.append(original(**arguments))
        return made[-1]

    original = zmq.Context
    monkeypatch.setattr(zmq, "Context", context)
    assert connection.open_prepared(asked()).outcome == "unknown"
    assert not made
    long = asked(digest="e" * 64, search_path=("/" + "a" * messages.HANDOVER_PACKET_LIMIT_BYTES,))
    assert connection.open_prepared(long).outcome == "unknown"
    assert [each.closed for each in made] == [True]


@pytest.mark.parametrize("is_long", [False, True])
def test_errors_come_either_way(connection: Connection, is_long: bool) -> None:
    path = ("/a" * messages.HANDOVER_PACKET_LIMIT_BYTES,) if is_long else ()
    for _ in range(2):
        with pytest.raises(MalformedMessage, match="not the absolute path"):
            connection.open_prepared(asked(path="relative", search_path=path))
    assert connection.open_prepared(asked()).outcome == "unknown"
