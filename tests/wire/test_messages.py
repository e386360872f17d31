"""Golden bytes: peers of one protocol version read each other, whatever their package version."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trims_shim.specs import PIECES_LIMIT, Variant
from trims_shim.wire import codec, duties, messages
from wire.samples import KINDS, sample

GOLDEN = Path(__file__).parent / "golden" / f"protocol_{messages.PROTOCOL_VERSION}.json"
ADVICE = (
    "an older peer would misread this: raise PROTOCOL_VERSION in trims_shim/wire/messages.py, and "
    "write the new file with `PYTHONPATH=tests python -m wire.test_messages`"
)
NEVER_CHANGE = ("Hello", "Welcome", "DrainRequest", "Goodbye")


def golden() -> dict[str, str]:
    assert GOLDEN.exists(), (
        f"{GOLDEN} is missing; write it with `PYTHONPATH=tests python -m wire.test_messages`"
    )
    loaded: dict[str, str] = json.loads(GOLDEN.read_text())
    return loaded


def encoded() -> dict[str, str]:
    return {kind.__name__: codec.encode(sample(kind)).hex() for kind in KINDS}


def test_the_page_is_about_this_version() -> None:
    page = Path(__file__).parents[2] / "docs" / "protocol.md"
    assert f"\nVersion {messages.PROTOCOL_VERSION}. " in page.read_text()


def test_there_is_a_golden_file_for_this_version() -> None:
    assert sorted(golden()) == sorted(encoded()), f"messages came or went; {ADVICE}"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_encoding_is_the_golden_one(kind: type) -> None:
    assert encoded()[kind.__name__] == golden()[kind.__name__], ADVICE


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_golden_bytes_are_understood(kind: type) -> None:
    data = bytes.fromhex(golden()[kind.__name__])
    assert codec.decode(data) == sample(kind)


def test_messages_of_the_handshake_are_those_of_the_first_release() -> None:
    """Versions that cannot talk part company with these; they must not change, ever."""
    first = json.loads((GOLDEN.parent / "handshake.json").read_text())
    assert {name: encoded()[name] for name in NEVER_CHANGE} == first


LARGEST = 1 << 62
ALLOCATIONS_OF_A_TERABYTE = (4 << 30,) * 256
LONGEST = (
    messages.FileOffer(
        LARGEST,
        "GPU-" + "f" * 36,
        "ü" * (messages.NAME_LIMIT_BYTES // 2),
        Variant(63, "bfloat16", LARGEST, (LARGEST,) * PIECES_LIMIT),
    ),
    messages.Goodbye("ü" * 500),
    messages.SegmentGrant(LARGEST, LARGEST, LARGEST),
    duties.PlanUploadRequest(LARGEST, LARGEST, LARGEST, True, "ü" * 1000),
    duties.PlanUploadReply(LARGEST, LARGEST, "f" * 60),
    duties.UploadRequest(LARGEST, ALLOCATIONS_OF_A_TERABYTE),
    duties.DownloadRequest(LARGEST, LARGEST, ALLOCATIONS_OF_A_TERABYTE),
    duties.UploadFailed(LARGEST, "UnsupportedFormat", "ü" * 1000),
)


@pytest.mark.parametrize("longest", LONGEST, ids=lambda message: type(message).__name__)
def test_the_longest_handover_packets_fit(longest: object) -> None:
    assert len(codec.encode(longest)) < messages.HANDOVER_PACKET_LIMIT_BYTES


def test_the_longest_grant_of_device_memory_fits() -> None:
    grant = messages.DeviceGrant("ipc", "f" * 60, ALLOCATIONS_OF_A_TERABYTE, (b"h" * 64,) * 256)
    reply = messages.OpenImageReply(LARGEST, "d" * 64, LARGEST, "joined", True, grant)
    data = codec.encode_envelope(codec.Envelope(LARGEST, b"t" * 16, reply))
    assert len(data) < messages.CONTROL_MESSAGE_LIMIT_BYTES
    assert codec.decode_envelope(data).message == reply


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(encoded(), indent=1) + "\n")
