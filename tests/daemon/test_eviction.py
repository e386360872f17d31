"""What goes first; that candidates come by their last use is checked with the store."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trims_shim.daemon.eviction import Candidate, LeastRecentlyUsed


def candidate(digest: str, used_ns: int) -> Candidate:
    return Candidate(digest, 1, loaded_ns=0, used_ns=used_ns, opens=1, load_ns=1)


@given(st.permutations("abcdef"))
def test_least_recently_used_takes_them_as_they_come(uses: list[str]) -> None:
    candidates = [candidate(digest, used_ns) for used_ns, digest in enumerate(uses)]
    assert list(LeastRecentlyUsed().rank(iter(candidates), 100)) == candidates
