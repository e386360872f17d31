"""Answers of prepared models: each is one packet of the handover socket, whatever is in it."""

from __future__ import annotations

import pytest

from trims_shim import config
from trims_shim.daemon.prepared.clients import hit_reply, refusal_reply
from trims_shim.daemon.prepared.directory import PreparedSettings
from trims_shim.daemon.prepared.files import Published
from trims_shim.daemon.prepared.values import Grant
from trims_shim.specs import Identity
from trims_shim.wire import codec, messages

LIMIT = messages.HANDOVER_PACKET_LIMIT_BYTES
LARGEST = Identity(*[(1 << 63) - 1] * 5)


@pytest.mark.parametrize("letter", ["m", "\u00e9", "\u6a21", "\U0001f600"])
def test_a_refusal(letter: str) -> None:
    reply = refusal_reply("preparer_not_started", letter * 9000)
    assert len(codec.encode(reply)) <= LIMIT
    assert reply.message.startswith(letter * 100)


def test_a_hit_in_the_longest_directory() -> None:
    settings = PreparedSettings.of(config.load({}, cache_dir="/" + "x" * 1490))
    assert settings.problem == ""
    place = f"{settings.directory}/{'a' * 64}"
    published = Published(
        None,  # type: ignore[arg-type]
        f"{place}/model.onnx",
        LARGEST,
        f"{place}/weights.bin",
        LARGEST,
        0,
    )
    assert len(codec.encode(hit_reply(Grant(1 << 62, "a" * 64), published))) <= LIMIT
