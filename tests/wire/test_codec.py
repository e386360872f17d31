"""Whatever arrives becomes a message of the protocol or a WireError, never anything else."""

from __future__ import annotations

import tracemalloc
import typing
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trims_shim.errors import MalformedMessage, MessageTooLarge, UnknownMessage, WireError
from trims_shim.wire import admin, codec, messages
from trims_shim.wire.codec import Envelope
from wire.samples import KINDS, is_optional, sample

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=8,
)


def as_map(message: Any) -> dict[str, Any]:
    body: dict[str, Any] = msgpack.unpackb(codec.encode(message))
    return body


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
class TestEveryMessage:
    def test_round_trip(self, kind: Any) -> None:
        message = sample(kind)
        found = codec.decode(codec.encode(message))
        assert (type(found), found) == (kind, message)

    def test_round_trip_in_an_envelope(self, kind: Any) -> None:
        names = set(typing.get_type_hints(kind))
        if kind is messages.Welcome:  # travels by handover only
            assert "token" in names
            return
        assert not names & {"id", "token", "verb"}, "the envelope uses these names"
        envelope = Envelope(7, b"t" * 16, sample(kind))
        assert codec.decode_envelope(codec.encode_envelope(envelope)) == envelope

    def test_a_field_of_a_newer_peer_is_ignored(self, kind: Any) -> None:
        body = {**as_map(sample(kind)), "from_the_future": {"a": [1, None]}}
        assert codec.decode(msgpack.packb(body)) == sample(kind)

    def test_a_missing_field_is_refused_unless_it_has_a_default(self, kind: Any) -> None:
        for name in kind._fields:
            body = as_map(sample(kind))
            del body[name]
            data = msgpack.packb(body)
            if name in kind._field_defaults:
                assert isinstance(codec.decode(data), kind)
            else:
                with pytest.raises(MalformedMessage):
                    codec.decode(data)

    def test_a_field_of_another_type_is_refused(self, kind: Any) -> None:
        for name, hint in typing.get_type_hints(kind).items():
            for wrong in (None, [[1]], {"a": None}, {1: 2}):
                if wrong is None and is_optional(hint):
                    continue
                body = {**as_map(sample(kind)), name: wrong}
                with pytest.raises(MalformedMessage):
                    codec.decode(msgpack.packb(body))


@pytest.mark.parametrize("value", [True, 1.0, "1", b"1", None, [1]])
def test_only_integers_are_integers(value: object) -> None:
    data = msgpack.packb({"verb": "FileOffer", "ticket": value})
    with pytest.raises(MalformedMessage, match=r"FileOffer\.ticket"):
        codec.decode(data)


def test_an_image_on_the_host_comes_without_a_device_grant() -> None:
    body = as_map(sample(messages.OpenImageReply))
    for nothing in ({"device": None}, {}):
        reply = {name: value for name, value in body.items() if name != "device"} | nothing
        assert codec.decode(msgpack.packb(reply)).device is None
    plain = sample(messages.OpenImageReply)._replace(device=None)
    assert codec.decode(codec.encode(plain)) == plain


@pytest.mark.parametrize(
    "damage",
    [
        {"allocations": [1, "2"]},
        {"allocations": {}},
        {"handles": ["text"]},
        {"layout": 7},
        {"backend": None},
    ],
    ids=str,
)
def test_a_damaged_device_grant_is_refused(damage: dict[str, Any]) -> None:
    body = as_map(sample(messages.OpenImageReply))
    body["device"] |= damage
    with pytest.raises(MalformedMessage):
        codec.decode(msgpack.packb(body))


def test_an_integer_is_a_float_where_one_is_expected() -> None:
    body = {**as_map(sample(admin.GetStatusReply)), "idle_exit_s": 3}
    decoded = codec.decode(msgpack.packb(body))
    assert type(decoded.idle_exit_s) is float


def test_a_pair_has_two_items() -> None:
    pair: Any = tuple[str, int]
    assert codec.checked(pair, ["a", 1]) == ("a", 1)
    for value in ([], ["a"], ["a", 1, 1], [1, "a"], ["a", "a"]):
        with pytest.raises(MalformedMessage):
            codec.checked(pair, value)


def test_an_integer_has_64_bits() -> None:
    """Maps that were read elsewhere may hold larger ones, and could not be sent on."""
    for value in (-(1 << 63), (1 << 64) - 1):
        assert codec.checked(int, value) == value
    for value in (-(1 << 63) - 1, 1 << 64):
        with pytest.raises(MalformedMessage, match="64 bits"):
            codec.checked(int, value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_float_is_finite(value: float) -> None:
    """Found: `trims status` failed with an error of Python's."""
    message = sample(admin.GetStatusReply)._replace(idle_exit_s=value)
    with pytest.raises(MalformedMessage, match="idle_exit_s"):
        codec.decode(codec.encode(message))


@pytest.mark.parametrize("verb", ["Nothing", "Any", "dataclass", "", 7, None, ["Hello"], b"Hello"])
def test_unknown_verbs_are_refused(verb: object) -> None:
    with pytest.raises(UnknownMessage):
        codec.decode(msgpack.packb({"verb": verb, "protocol": 1}))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x93\x01\x02\x03",
        b"\xa5Hello",
        b"\x81\xa4verb",
        b"\xdf\xff\xff\xff\xff",
        b"\x81\x01\x02",
        b"\x81\xa4verb\xa5\xff\xfe\xfd\xfc\xfb",
        b"\xc7\x01\x05a",
        msgpack.packb({"verb": "Hello"}) + b"\x00",
    ],
    ids=[
        "empty",
        "reserved byte",
        "list",
        "text",
        "truncated",
        "four thousand million entries",
        "integer as key",
        "text that is not UTF-8",
        "extension",
        "trailing byte",
    ],
)
def test_not_a_message(data: bytes) -> None:
    with pytest.raises(MalformedMessage):
        codec.decode(data)


@pytest.mark.parametrize("depth", [10, 1000, 4000])
def test_deep_nesting(depth: int) -> None:
    with pytest.raises(WireError):
        codec.decode(b"\x91" * depth)
    with pytest.raises(WireError):
        codec.decode(b"\x82\xa4verb\xa9FileOffer\xa6ticket" + b"\x91" * depth + b"\x01")
    with pytest.raises(WireError):  # msgpack nests as deep as repr() cannot
        codec.decode(b"\x81\xa4verb" + b"\x91" * depth + b"\x01")


@pytest.mark.parametrize("size_bytes", [4096, 1 << 20])
def test_arrays_that_claim_more_than_there_is_take_no_room(size_bytes: int) -> None:
    """Found: a packet of 4 KiB took 32 MB for a moment, and fifty times as long as any other."""
    depth = 700
    claim = b"\xdd" + (size_bytes - 5 * depth).to_bytes(4, "big")
    data = (claim * depth).ljust(size_bytes, b"\xc0")
    tracemalloc.start()
    try:
        with pytest.raises(MalformedMessage):
            codec.decode(data, limit_bytes=size_bytes)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 3 * size_bytes + (1 << 16)


def test_the_length_limit_is_exact() -> None:
    message = messages.Goodbye("x" * 100)
    data = codec.encode(message)
    assert codec.decode(data, limit_bytes=len(data)) == message
    with pytest.raises(MessageTooLarge, match=str(len(data))):
        codec.decode(data, limit_bytes=len(data) - 1)


def test_the_length_limit_of_control_messages() -> None:
    data = codec.encode_envelope(Envelope(1, b"", messages.ErrorReply("NoSpace", "x" * (1 << 20))))
    with pytest.raises(MessageTooLarge):
        codec.decode_envelope(data)


@pytest.mark.parametrize("request_id", [None, "1", 1.0, True])
def test_an_envelope_needs_a_number(request_id: object) -> None:
    body = {"verb": "GetStatusRequest", "id": request_id, "token": b""}
    with pytest.raises(MalformedMessage):
        codec.decode_envelope(msgpack.packb(body))


@pytest.mark.parametrize("token", [None, "text", b"x" * 65, 3])
def test_an_envelope_needs_a_short_token(token: object) -> None:
    body = {"verb": "GetStatusRequest", "id": 1, "token": token}
    with pytest.raises(MalformedMessage):
        codec.decode_envelope(msgpack.packb(body))


def test_the_longest_token() -> None:
    body = {"verb": "GetStatusRequest", "id": 1, "token": b"x" * 64}
    assert codec.decode_envelope(msgpack.packb(body)).token == b"x" * 64


def test_a_reply_needs_no_token() -> None:
    body = {"verb": "StopDaemonReply", "pid": 5, "id": 1}
    assert codec.decode_envelope(msgpack.packb(body)).token == b""


def test_a_path_that_is_not_utf8_arrives_as_escapes() -> None:
    name = b"/models/\xff\xfe.pt".decode("utf-8", "surrogateescape")
    decoded = codec.decode(codec.encode(messages.FileOffer(1, "host", name)))
    assert decoded.name == r"/models/\udcff\udcfe.pt"


def test_the_messages_of_a_load_can_be_inspected_beforehand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known: dict[Any, Any] = {}
    monkeypatch.setattr(codec, "_FIELDS", known)
    codec.prepare()
    loads = {kind for kind in KINDS if kind.__module__ == messages.__name__}
    assert loads <= known.keys() < set(KINDS)


def test_memoryviews_are_decoded() -> None:
    data = codec.encode_envelope(Envelope(1, b"t", admin.GetStatusRequest()))
    assert codec.decode_envelope(memoryview(data)).message == admin.GetStatusRequest()


@given(st.binary(max_size=200))
def test_arbitrary_bytes(data: bytes) -> None:
    for decode in (codec.decode, codec.decode_envelope):
        with pytest.raises(WireError):
            decode(data)


@given(st.sampled_from(KINDS), st.data())
def test_damaged_messages(kind: type, data: st.DataObject) -> None:
    message = bytearray(codec.encode_envelope(Envelope(3, b"token", sample(kind))))
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(message) - 1))
        message[position] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(message)))
    for damaged in (bytes(message), bytes(message[:cut])):
        for decode in (codec.decode, codec.decode_envelope):
            check_decodes_or_refuses(decode, damaged)


@given(st.sampled_from(KINDS), st.dictionaries(st.text(max_size=6), VALUES, max_size=4), st.data())
def test_maps_with_arbitrary_values(kind: Any, extra: dict[str, Any], data: st.DataObject) -> None:
    body = {**as_map(sample(kind)), **extra}
    for name in kind._fields:
        if data.draw(st.booleans()):
            body[name] = data.draw(VALUES)
    body["verb"] = kind.__name__
    check_decodes_or_refuses(codec.decode, msgpack.packb(body))


def check_decodes_or_refuses(decode: Any, data: bytes) -> None:
    try:
        decoded = decode(data)
    except WireError:
        return
    message = decoded.message if isinstance(decoded, Envelope) else decoded
    assert type(message) in KINDS
    # What was let in has the declared types, or it would not come back the same.
    again = codec.decode(codec.encode(message))
    assert repr(again) == repr(message)
