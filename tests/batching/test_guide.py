"""docs/batching.md names what there is, and all of it."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

from trims_shim.batching import Batcher, FlexBatcher, LatencyProfile, Pad, exit_point
from trims_shim.batching.collating.collate import collate_of
from trims_shim.batching.policies import POLICIES
from trims_shim.batching.protocol import Request
from trims_shim.batching.rules import Rule

GUIDE = (Path(__file__).resolve().parents[2] / "docs" / "batching.md").read_text()
SECTIONS = dict(
    re.findall(r"^##+ ([^\n]+)\n(.*?)(?=^##|\Z)", GUIDE, flags=re.MULTILINE | re.DOTALL)
)
OPTIONS = set(inspect.signature(Batcher.__init__).parameters) - {"self", "function", "clock_ns"}


def first_column(section: str) -> list[str]:
    return re.findall(r"^\| `\"?([a-z_]+)\"?` \|", SECTIONS[section], flags=re.MULTILINE)


def test_every_policy_is_explained() -> None:
    assert sorted(first_column("Policies")) == sorted(POLICIES)


def test_every_option_of_a_policy_is_named() -> None:
    for name, make in POLICIES.items():
        options = set(inspect.signature(make).parameters) - {"profile", "max_batch_size"}
        text = SECTIONS["Policies"].partition("Options:")[2]
        assert sorted(each for each in options if f"`{each}`" not in text) == [], name


def test_a_margin_changes_what_the_policies_do_of_which_the_guide_says_so() -> None:
    """Found: `immediate` was among them, which takes a margin and does not look at it."""
    told = re.search(r"`margin_ms`, kept .* of all but ([^;]*);", SECTIONS["Policies"])
    assert told
    without = set(re.findall(r"`(\w+)`", told[1]))
    assert {name for name, make in POLICIES.items() if not heeds_margin(make)} == without


def heeds_margin(make: Callable[..., Rule]) -> bool:
    if "margin_ms" not in inspect.signature(make).parameters:
        return False
    profile = LatencyProfile.linear(1, 10, max_batch_size=4)
    outcomes = []
    for margin_ms in (0, 30):
        rule = make(profile, max_batch_size=4, margin_ms=margin_ms)
        rule.queue.add(Request(0, 0, 20_000_000))
        outcomes.append((rule.choose(0), rule.wake_ns, len(rule.take_drops())))
    return outcomes[0] != outcomes[1]


def test_every_named_collate_is_explained() -> None:
    for name in first_column("Items"):
        collate_of(name)
    assert set(first_column("Items")) == {"auto", "list", "stack", "concatenate"}


def test_every_option_is_explained() -> None:
    assert sorted(option for option in OPTIONS if f"`{option}" not in GUIDE) == []


def test_options_in_code_exist() -> None:
    used = re.findall(r"(?:batched|Batcher)\(([^)]*)\)", GUIDE)
    names = {name for arguments in used for name in re.findall(r"(\w+)=", arguments)}
    assert names
    assert names - OPTIONS - {field.name for field in fields(Pad)} == set()


def test_methods_in_the_text_exist() -> None:
    methods = set(re.findall(r"`(?:batcher\.)?(\w+)\(\)`", GUIDE)) | set(
        re.findall(r"classify\.(\w+)\(", GUIDE)
    )
    assert {"stats", "drain", "submit"} <= methods
    others = {"batch", "unbatch", "exit_point"}  # LitServe's, and a function
    assert sorted(each for each in methods - others if not hasattr(FlexBatcher, each)) == []


def test_several_models_as_the_guide_has_it() -> None:
    used = re.findall(r"FlexBatcher\((.*)\)$", GUIDE, flags=re.MULTILINE)
    names = set(re.findall(r"(\w+)=", " ".join(used))) | {"devices", "preemption_factor"}
    assert "slo_ms" in names
    assert names <= set(inspect.signature(FlexBatcher.__init__).parameters)
    assert callable(exit_point)
    with FlexBatcher({"one": [abs_of_each], "two": [abs_of_each, abs_of_each]}) as batcher:
        assert batcher("two", -3) == 3
        assert batcher.preemption_stats().preemptions == 0


def abs_of_each(numbers: list[int]) -> list[int]:
    return [abs(number) for number in numbers]


def test_figures_of_preemption_are_those_of_the_results() -> None:
    """Found: a goodput and a cost of exit points that no result has."""
    results = Path(__file__).resolve().parents[2] / "docs" / "results"
    cells = json.loads((results / "batching_flex.json").read_text())["cells"]
    found = {
        each["system"]: f"{each['goodput']:.3f}"[1:]
        for each in cells
        if each["setting"] == "heavy SLOs, 8 devices, CV 4, load 0.6"
    }
    section = " ".join(SECTIONS["Several models on one device"].split())
    without, with_it = found["Flex, ours, no preemption"], found["Flex, ours"]
    assert f"goodput is {without} without it and {with_it} with it" in section
    overhead = json.loads((results / "batching_flex_overhead.json").read_text())
    assert f"one costs {overhead['exit_point_us']:.1f} µs" in section
