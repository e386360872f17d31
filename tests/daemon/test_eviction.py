"""LRU against the definition: no other order has an older use before a younger one."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trims_shim.daemon.eviction import Candidate, LeastRecentlyUsed, policy_named
from trims_shim.errors import ConfigError


def candidate(digest: str, used_ns: int) -> Candidate:
    return Candidate(digest, 1, loaded_ns=0, used_ns=used_ns, opens=1, load_ns=1)


@given(st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 3), max_size=5))
def test_least_recently_used_is_the_smallest_of_all_orders(uses: dict[str, int]) -> None:
    candidates = [candidate(digest, used_ns) for digest, used_ns in uses.items()]
    best = min(itertools.permutations((uses[digest], digest) for digest in uses))
    assert LeastRecentlyUsed().rank(candidates, 100) == [digest for _, digest in best]


@given(st.permutations([candidate(name, 5) for name in "abcd"]))
def test_the_order_of_equals_is_reproducible(candidates: list[Candidate]) -> None:
    assert LeastRecentlyUsed().rank(candidates, 100) == list("abcd")


def test_policies_by_name() -> None:
    assert isinstance(policy_named("lru"), LeastRecentlyUsed)
    with pytest.raises(ConfigError, match="known: lru"):
        policy_named("random")


def test_every_policy_of_the_setting_exists() -> None:
    from trims_shim.config import EVICTION_POLICIES

    assert [policy_named(name).name for name in EVICTION_POLICIES] == list(EVICTION_POLICIES)
