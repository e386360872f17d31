"""Staged profiles as files: what is read is what was written, and nothing else is taken for one."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trims_shim.batching.staged.profiles.profile_files import (
    SavedStages,
    load_saved_stages,
    save_staged_profile,
    staged_profile,
)
from trims_shim.errors import CorruptFile, FormatError, TruncatedFile, UnsupportedFormat

SHORT = ({1: 1e6, 8: 2e6}, {1: 2e6, 8: 16e6})
LONG = ({1: 20e6, 8: 24e6}, {1: 9e6, 4: 40e6, 8: 80e6})
ONE = SavedStages({None: LONG}, 16, stages=("embed", "head"), name="app:model", note="by hand")
TWO = SavedStages({16: SHORT, 64: LONG}, 8, stages=("embed", "head"), machine="this one")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "profile.json"


@pytest.mark.parametrize(
    "saved",
    [ONE, TWO, dataclasses.replace(ONE, stages=()), dataclasses.replace(ONE, width=0.5)],
)
def test_what_is_written_is_read(saved: SavedStages, path: Path) -> None:
    save_staged_profile(path, saved)
    found = load_saved_stages(path)
    assert dataclasses.replace(found, stages=saved.stages) == saved
    assert found.stages == (saved.stages or ("", ""))
    assert found.profile == staged_profile(
        LONG, max_batch_size=saved.max_batch_size, width=saved.width
    )
    assert os.listdir(path.parent) == [path.name]
    (path.parent / "any").touch()
    assert path.stat().st_mode == (path.parent / "any").stat().st_mode


def test_profiles_of_stages_lie_on_lines_and_have_preferred_sizes() -> None:
    profile = ONE.profile
    assert profile.max_batch_size == 16
    assert profile.stage_ns(1, 2) == pytest.approx(9e6 + 31e6 / 3, abs=1)
    assert profile.stage_ns(0, 16) == 48e6
    assert profile.latency_ns(8) == 104e6
    assert profile.preferred == (8, 1)


def test_a_length_has_the_profile_of_the_next_one_that_was_measured() -> None:
    short = staged_profile(SHORT, max_batch_size=8)
    assert TWO.lengths == [16, 64]
    assert TWO.profile_for(1) == TWO.profile_for(16) == short
    assert TWO.profile_for(17) == TWO.profile_for(64) == TWO.profile_for(65) == TWO.profile
    assert TWO.profile != short
    assert ONE.lengths == []
    assert ONE.profile_for(3) == ONE.profile


def test_readers_see_what_follows_from_the_latencies(path: Path) -> None:
    save_staged_profile(path, TWO)
    fields = json.loads(path.read_text())
    assert fields["diversity"] == {"operators": True, "load": False, "inputs": True}
    assert [stage["preferred"] for stage in fields["inputs"][1]["stages"]] == [8, 1]
    # It is not believed: who changes latencies need not know what follows from them.
    fields["inputs"][1]["stages"][0]["preferred"] = 3
    fields["diversity"]["operators"] = False
    path.write_text(json.dumps(fields))
    assert load_saved_stages(path) == TWO
    assert load_saved_stages(path).diversity.operators


STAGE = {"latencies_ns": {"1": 5}}
GOOD = {"format": "trims staged profile", "version": 1, "max_batch_size": 2}


def inputs(*found: Any) -> dict[str, Any]:
    return {**GOOD, "inputs": list(found)}


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        ("", TruncatedFile, "`trims stage profile` makes one"),
        ("{", CorruptFile, "is not a staged profile"),
        ({**GOOD, "format": "trims latency profile"}, CorruptFile, "is not a staged profile"),
        ({**GOOD, "version": 2}, UnsupportedFormat, "version 2"),
        (GOOD, CorruptFile, "no inputs"),
        (inputs(), CorruptFile, "no inputs"),
        (inputs(3), CorruptFile, "inputs that are no objects"),
        (inputs({}), CorruptFile, "no stages"),
        (inputs({"stages": {}}), CorruptFile, "no stages"),
        (inputs({"stages": [3]}), CorruptFile, "stages that are no objects"),
        (inputs({"stages": [{}]}), CorruptFile, "no latencies"),
        (inputs({"stages": [{"latencies_ns": {"0": 1}}]}), CorruptFile, "batch of '0'"),
        (inputs({"stages": [{"latencies_ns": {"1": -1}}]}), CorruptFile, "latency of -1 ns"),
        (inputs({"stages": [STAGE], "length": 0}), CorruptFile, "length of 0"),
        (inputs({"stages": [STAGE], "length": "7"}), CorruptFile, "length of 7"),
        (inputs({"stages": [STAGE]}, {"stages": [STAGE]}), CorruptFile, "the same length"),
        (inputs({"stages": [STAGE]}, {"stages": [STAGE], "length": 2}), CorruptFile, "same length"),
        (
            inputs({"stages": [STAGE], "length": 3}, {"stages": [STAGE], "length": 2}),
            CorruptFile,
            "do not ascend",
        ),
        (
            inputs({"stages": [STAGE], "length": 2}, {"stages": [STAGE] * 2, "length": 3}),
            CorruptFile,
            "different numbers of stages",
        ),
        ({**inputs({"stages": [STAGE]}), "max_batch_size": 0}, CorruptFile, "max_batch_size"),
        ({**inputs({"stages": [STAGE]}), "width": 1.5}, CorruptFile, "width of 1.5"),
        ({**inputs({"stages": [STAGE]}), "width": True}, CorruptFile, "width of True"),
        ({**inputs({"stages": [STAGE] * 99}), "max_batch_size": 65536}, CorruptFile, "too much"),
    ],
)
def test_anything_else_is_refused_by_name(
    path: Path, content: Any, error: type[FormatError], message: str
) -> None:
    path.write_text(content if isinstance(content, str) else json.dumps(content), "latin-1")
    with pytest.raises(error, match=message) as raised:
        load_saved_stages(path)
    assert str(path) in str(raised.value)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
places = st.sampled_from(["max_batch_size", "width", "inputs", "length", "stages", "latencies_ns"])


@given(values, places)
def test_no_value_breaks_the_reader(tmp_path_factory: Any, value: Any, place: str) -> None:
    """Whatever is in place of one field, it is read, or is a FormatError."""
    stage: dict[str, Any] = {"latencies_ns": {"1": 5}}
    item: dict[str, Any] = {"length": 3, "stages": [stage]}
    fields: dict[str, Any] = inputs(item)
    (stage if place in stage else item if place in item else fields)[place] = value
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_text(json.dumps(fields))
    with contextlib.suppress(FormatError):
        assert load_saved_stages(path).profile.max_batch_size >= 1
