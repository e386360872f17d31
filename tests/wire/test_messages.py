"""Golden bytes: peers of one protocol version read each other, whatever their package version."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trims_shim.wire import codec, messages
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


def test_there_is_a_golden_file_for_this_version() -> None:
    assert sorted(golden()) == sorted(encoded()), f"messages came or went; {ADVICE}"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_encoding_is_the_golden_one(kind: type) -> None:
    assert encoded()[kind.__name__] == golden()[kind.__name__], ADVICE


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_golden_bytes_are_understood(kind: type) -> None:
    data = bytes.fromhex(golden()[kind.__name__])
    assert codec.decode(data) == sample(kind)


def test_messages_of_the_handshake_are_those_of_version_1() -> None:
    """Versions that cannot talk part company with these; they must not change, ever."""
    first = json.loads((GOLDEN.parent / "protocol_1.json").read_text())
    for name in NEVER_CHANGE:
        assert codec.decode(bytes.fromhex(first[name])) == sample(getattr(messages, name))
        assert encoded()[name] == first[name]


def test_the_longest_handover_packet_fits() -> None:
    longest = messages.Goodbye("ü" * 500)
    assert len(codec.encode(longest)) < messages.HANDOVER_PACKET_LIMIT_BYTES


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(encoded(), indent=1) + "\n")
