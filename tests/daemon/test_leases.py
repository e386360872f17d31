"""Leases end one by one, with their session, or with what they are of; nobody ends another's."""

from __future__ import annotations

import itertools

from trims_shim.daemon.leases import Leases


def test_a_lease_is_given_up_once_and_by_its_session_only() -> None:
    leases: Leases[str] = Leases(itertools.count(1))
    first, second = leases.grant(1, "a"), leases.grant(2, "a")
    assert leases.release(2, first) is None
    assert leases.release(1, first) == "a"
    assert leases.release(1, first) is None
    assert (len(leases), leases.of("a"), leases.of_session(1)) == (1, 1, 0)
    assert leases.release(2, second) == "a"
    assert leases.release(1, 99) is None


def test_a_session_ends_with_all_it_has() -> None:
    leases: Leases[str] = Leases(itertools.count(1))
    for key in ("a", "b", "a"):
        leases.grant(1, key)
    leases.grant(2, "a")
    assert sorted(leases.close_session(1)) == ["a", "a", "b"]
    assert leases.close_session(1) == []
    assert (len(leases), leases.of("a"), leases.of("b")) == (1, 1, 0)


def test_what_is_lost_is_nobodys() -> None:
    leases: Leases[str] = Leases(itertools.count(1))
    lost, kept = leases.grant(1, "a"), leases.grant(1, "b")
    leases.forget("a")
    leases.forget("a")
    assert leases.release(1, lost) is None
    assert leases.close_session(1) == ["b"]
    assert kept != lost


def test_nothing_is_left_behind() -> None:
    leases: Leases[int] = Leases(itertools.count(1))
    for session in range(3):
        for key in range(3):
            leases.release(session, leases.grant(session, key))
            leases.grant(session, key)
    for number in range(3):
        leases.forget(number)
        leases.close_session(number)
    assert (leases._held, leases._by_session, leases._by_key) == ({}, {}, {})
