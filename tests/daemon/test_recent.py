"""What was put last stays; what was put long ago goes when there is too much."""

from __future__ import annotations

from trims_shim.daemon.recent import Recent


def test_the_oldest_of_too_many_goes() -> None:
    table: Recent[str, int] = Recent(2)
    gone = [table.put(key, number) for number, key in enumerate("abc")]
    assert list(table.items()) == [("b", 1), ("c", 2)]
    assert gone == [None, None, "a"]


def test_what_is_put_again_is_the_newest() -> None:
    table: Recent[str, int] = Recent(2)
    for number, key in enumerate("abac"):
        table.put(key, number)
    assert list(table.items()) == [("a", 2), ("c", 3)]
