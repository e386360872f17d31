"""What goes first; that candidates come by their last use is checked with the store."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trims_shim.config import EVICTIONS
from trims_shim.daemon.eviction import Candidate, EvictionPolicy, eviction_policy


def candidate(digest: str, *, opens: int = 1, load_ns: int = 100, **figures: int) -> Candidate:
    return Candidate(
        digest,
        figures.get("resident_bytes", 100),
        loaded_ns=figures.get("loaded_ns", 0),
        used_ns=figures.get("used_ns", 0),
        opens=opens,
        load_ns=load_ns,
    )


def use(policy: EvictionPolicy, image: Candidate, times: int = 1) -> None:
    for _ in range(times):
        image.opens += 1
        policy.used(image)


def order(policy: EvictionPolicy, images: Sequence[Candidate]) -> str:
    return "".join(each.digest for each in policy.rank(iter(images)))


@given(st.permutations("abcdef"))
def test_least_recently_used_takes_them_as_they_come(uses: list[str]) -> None:
    candidates = [candidate(digest, used_ns=used_ns) for used_ns, digest in enumerate(uses)]
    assert order(eviction_policy("lru", 1), candidates) == "".join(uses)


@given(st.permutations("abcdef"))
def test_fifo_takes_them_in_the_order_of_their_loads(loads: list[str]) -> None:
    candidates = [candidate(each, loaded_ns=loads.index(each)) for each in "abcdef"]
    assert order(eviction_policy("fifo", 1), candidates) == "".join(loads)


def test_lfu_takes_what_was_opened_least_often_and_then_least_recently() -> None:
    candidates = [
        candidate(digest, opens=int(opens)) for digest, opens in zip("abcd", "3212", strict=True)
    ]
    assert order(eviction_policy("lfu", 1), candidates) == "cbda"


def test_never_keeps_everything() -> None:
    assert order(eviction_policy("never", 1), [candidate("a")]) == ""


@pytest.mark.parametrize("name", ["gdsf", "lrfu"])
class TestForgetting:
    """What both policies that count uses and forget them have in common."""

    def test_frequency_counts(self, name: str) -> None:
        policy = eviction_policy(name, 1000)
        often, seldom = candidate("a", opens=0), candidate("b", opens=0)
        use(policy, often, 3)
        use(policy, seldom, 2)
        assert order(policy, [often, seldom]) == "ba"

    def test_what_was_only_loaded_for_later_counts_as_used(self, name: str) -> None:
        policy = eviction_policy(name, 1000)
        warmed, used = candidate("a", opens=0), candidate("b", opens=0)
        policy.used(warmed)
        use(policy, used)
        assert order(policy, [warmed, used]) == "ab"

    def test_what_was_popular_goes_at_last(self, name: str) -> None:
        """Others come and go, each opened twice; an old favourite does not stay for ever."""
        policy = eviction_policy(name, 300)
        favourite = candidate("a", opens=0)
        use(policy, favourite, 10)
        for number in range(40):
            new = candidate(f"{number}", opens=0)
            use(policy, new, 2)
            first, second = policy.rank([favourite, new])
            policy.gone(first)
            if first is favourite:
                break
            assert second is favourite
        else:
            pytest.fail("it stayed")
        assert number > 3

    def test_nothing_is_divided_by_zero(self, name: str) -> None:
        policy = eviction_policy(name, 0)
        image = candidate("a", opens=0, load_ns=0, resident_bytes=0)
        use(policy, image)
        policy.gone(image)
        use(policy, image)
        assert order(policy, [image]) == "a"


def test_gdsf_keeps_what_takes_long_to_load_for_its_size() -> None:
    policy = eviction_policy("gdsf", 1000)
    images = [
        candidate("a", opens=0, load_ns=300, resident_bytes=100),
        candidate("b", opens=0, load_ns=300, resident_bytes=200),
        candidate("c", opens=0, load_ns=100, resident_bytes=100),
    ]
    for image in images:
        use(policy, image)
    assert order(policy, images) == "cba"


def test_gdsf_weighs_what_was_only_loaded_for_later_as_if_it_was_opened_once() -> None:
    policy = eviction_policy("gdsf", 1000)
    slow, quick = candidate("a", opens=0, load_ns=300), candidate("b", opens=0)
    for image in (slow, quick):
        policy.used(image)
    assert order(policy, [slow, quick]) == "ba"


def test_gdsf_is_not_set_back_by_what_was_leased_while_others_went() -> None:
    policy = eviction_policy("gdsf", 1000)
    leased, gone, before, after = (candidate(each, opens=0) for each in "abcd")
    use(policy, leased)
    use(policy, gone, 5)
    policy.gone(gone)
    use(policy, before)
    policy.gone(leased)
    use(policy, after, 2)
    assert order(policy, [after, before]) == "cd"


def test_lrfu_remembers_the_uses_of_what_has_gone() -> None:
    policy = eviction_policy("lrfu", 1000)
    known, new = candidate("a", opens=0), candidate("b", opens=0)
    use(policy, known, 3)
    policy.gone(known)
    known = candidate("a", opens=0)
    use(policy, known)
    use(policy, new, 2)
    assert order(policy, [known, new]) == "ba"


def test_a_turnover_is_of_the_budget_that_is_now() -> None:
    policy = eviction_policy("lrfu", 1)
    policy.resized(10_000)
    often, last = candidate("a", opens=0), candidate("b", opens=0)
    use(policy, often, 2)
    policy.gone(candidate("other"))  # A hundredth of the budget.
    use(policy, last)
    assert order(policy, [often, last]) == "ba"


@given(st.lists(st.sampled_from("abc"), max_size=30))
def test_a_use_counts_half_after_a_turnover(uses: list[str]) -> None:
    """Against the definition: the sum over uses of 2 to the power of minus the age."""
    policy = eviction_policy("lrfu", 400)
    images = {each: candidate(each, opens=0) for each in "abc"}
    seen: list[tuple[str, int]] = []
    for moment, digest in enumerate(uses):
        use(policy, images[digest])
        policy.gone(candidate("other"))  # A quarter of the budget.
        seen.append((digest, moment))

    def value(digest: str) -> float:
        return sum(2.0 ** ((at - len(uses)) / 4) for each, at in seen if each == digest)

    values = [value(each.digest) for each in policy.rank(images.values())]
    assert values == pytest.approx(sorted(values))


def test_there_is_a_policy_for_each_value_of_the_setting() -> None:
    for name in EVICTIONS:
        assert order(eviction_policy(name, 1), [candidate("a")]) in ("a", "")
