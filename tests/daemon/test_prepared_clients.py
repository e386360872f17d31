"""Answers of prepared models: each is one packet of the handover socket, whatever is in it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from prepared_models import RECIPE

from trims_shim import config
from trims_shim.daemon.prepared.clients import (
    EarlyRequests,
    flight_of,
    hit_reply,
    refusal_reply,
)
from trims_shim.daemon.prepared.directory import PreparedSettings
from trims_shim.daemon.prepared.files import Published
from trims_shim.daemon.prepared.values import Grant
from trims_shim.errors import TooManyRequests
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


def test_what_is_asked_for_is_kept_as_little() -> None:
    """Found: refusals of thousands of long requests took hundreds of megabytes of the daemon."""
    recipe = RECIPE._replace(build="\U0001f600" * 15000 + "\ud800")
    asked = messages.OpenPreparedRequest(1, "/m.onnx", "", recipe, "/site/onnxruntime")
    flight = flight_of(asked, LARGEST, "/")
    assert len(repr(flight)) < 200
    others = (
        flight_of(asked, LARGEST, "/other"),
        flight_of(asked, LARGEST._replace(inode=1), "/"),
        flight_of(asked._replace(package=""), LARGEST, "/"),
        flight_of(asked._replace(recipe=RECIPE), LARGEST, "/"),
        flight_of(asked._replace(path=""), LARGEST, "/"),
        flight_of(asked._replace(digest="a" * 64), None, "/"),
        flight_of(asked._replace(digest="b" * 64), None, "/"),
    )
    assert len({flight, *others}) == 8
    assert flight_of(asked._replace(ticket=2), LARGEST, "/") == flight


def test_what_came_too_early_is_bounded_for_each_session() -> None:
    front: Any = SimpleNamespace(
        sessions=SimpleNamespace(limits=SimpleNamespace(requests=1)),
        serve=lambda request, work: work(),
    )
    early, done = EarlyRequests(front), list[int]()
    asked: list[Any] = [SimpleNamespace(session=SimpleNamespace(number=n)) for n in (1, 2)]
    for each in asked:
        early.put(each, lambda number=each.session.number: done.append(number))  # type: ignore[misc]
        with pytest.raises(TooManyRequests):
            early.put(each, done.clear)
    early.serve()
    assert done == [1, 2]
