"""A wrong option is refused where it is given, by its name; none of them hangs or fails a call."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.batching.waiting import LONG_S, Gate
from trims_shim.batching import Batcher, FlexBatcher, LatencyProfile, Pad
from trims_shim.batching.policies import POLICIES
from trims_shim.batching.staged import StagedModel, generation

NAN, INFINITY = float("nan"), float("inf")
PROFILE = LatencyProfile.linear(1, 1, max_batch_size=2)


def same(items: Any) -> Any:
    return items


def batcher(**options: Any) -> Batcher:
    return Batcher(same, collate="list", **options)


def staged(**options: Any) -> Batcher:
    return Batcher(StagedModel([same, same]), collate="list", **options)


def flex(**options: Any) -> FlexBatcher:
    return FlexBatcher({"a": same}, **options)


def window(wait_ms: Any) -> Any:
    return POLICIES["window"](PROFILE, max_batch_size=2, wait_ms=wait_ms)


def linear(**options: Any) -> LatencyProfile:
    return LatencyProfile.linear(**{"alpha_ms": 1, "beta_ms": 1, "max_batch_size": 2, **options})


def makes_nothing(profile: LatencyProfile, *, max_batch_size: int) -> None:
    """As where a return was forgotten."""


generates = functools.partial(generation, same, max_new_tokens=3)


@pytest.mark.parametrize(
    ("make", "option", "values"),
    [
        (batcher, "slo_ms", ["5", [], b"x", NAN, 0, True]),
        (batcher, "max_batch_size", [True, "4", 1.5]),
        (batcher, "batch_sizes", [4, "4", [], [1.5], [True], None.__class__]),
        (batcher, "weight", ["len", 3]),
        (batcher, "max_batch_weight", ["5", NAN, 0]),
        (batcher, "devices", [1.5, 0, 1 << 80, True, ["cpu"]]),
        (batcher, "max_active", [2]),
        (batcher, "name", [5, b"x"]),
        (batcher, "profile", [5, [1.0]]),
        (batcher, "policy", ["nexus", 5, makes_nothing]),
        (batcher, "clock_ns", [time.monotonic, object]),
        (staged, "devices", ["cuda:0", 1.5, []]),
        (staged, "buffer_pairs", ["2", 1.5, 0, None]),
        (staged, "max_active", ["2", 1.5, NAN, 0]),
        (linear, "alpha_ms", ["1", None, NAN, -1, INFINITY]),
        (linear, "beta_ms", ["1", None, NAN, -1, 10**400]),
        (linear, "max_batch_size", ["1", 1.5, 0, 1 << 80]),
        (staged, "profile", [5, []]),
        (flex, "devices", ["cuda:0", 1.5, [], -1]),
        (flex, "preemption_factor", ["3", NAN]),
        (flex, "margin_ms", ["3", NAN, INFINITY, -1, None]),
        (Pad, "buckets", [4, "ab", [1.5], [], [0]]),
        (Pad, "multiple", [1.5, NAN, "2", 0]),
        (flex, "name", [5, b"x"]),
        (flex, "profiles", [5, [PROFILE], PROFILE, {"b": PROFILE}]),
        (Pad, "axis", ["0", 1.5, None, -1]),
        (Pad, "fields", ["input_ids", 1, True]),
        (Pad, "unpad", ["logits", 1]),
        (Pad, "mask", [["mask"], 1]),
        (Pad, "value", [None, b"0", [0], {"a": None}]),
        (functools.partial(StagedModel, [same]), "profile", [PROFILE, 5]),
        (functools.partial(StagedModel, [same]), "name", [None, 5]),
        (window, "wait_ms", ["3", NAN, INFINITY, -1, None]),
        (functools.partial(generation, same), "max_new_tokens", ["3", 1.5, INFINITY, 0]),
        (generates, "eos_token_id", ["</s>", 1.5, ["</s>"]]),
        (generates, "pad_token_id", [None, "<pad>"]),
    ],
)
def test_a_wrong_option_is_named(make: Callable[..., Any], option: str, values: list[Any]) -> None:
    more = {"weight": {"max_batch_weight": 5}, "max_batch_weight": {"weight": len}}
    for value in values:
        with pytest.raises((TypeError, ValueError), match=option):
            make(**{option: value}, **more.get(option, {}))


@pytest.mark.parametrize("value", ["5", [], NAN])
def test_a_wrong_deadline_is_named(value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="deadline_ms"):
        batcher()(1, deadline_ms=value)


@pytest.mark.parametrize("way", ["drain", "close"])
def test_a_wrong_time_to_wait_is_named(way: str) -> None:
    for value in ("5", [], NAN):
        with pytest.raises((TypeError, ValueError), match="timeout_s"):
            getattr(batcher(), way)(timeout_s=value)
    gate = Gate()
    waits = Batcher(gate, policy="immediate")
    future = waits.submit(1)
    gate.wait_entered()
    opening = threading.Timer(0.01, gate.open)
    opening.start()
    getattr(waits, way)(timeout_s=INFINITY)
    opening.join()
    assert future.result(0) == 1


def test_wrong_bounds_of_warming_are_named() -> None:
    for option, values in (("repeats", ["3", 0, 1.5]), ("limit_s", ["3", None, NAN])):
        for value in values:
            with pytest.raises((TypeError, ValueError), match=option):
                batcher().warm(1, **{option: value})
    assert batcher().warm(1, repeats=1, limit_s=INFINITY).max_batch_size == 32


def test_a_number_of_numpy_is_a_multiple() -> None:
    pads = Batcher(lambda batch: list(batch.values), collate=Pad(multiple=np.int64(3)))  # type: ignore[arg-type]
    assert pads(np.ones(2)).tolist() == [1, 1, 0]


def test_lists_of_text_are_padded_with_text() -> None:
    pads = Batcher(lambda batch: list(batch.values), collate=Pad("", multiple=2))  # type: ignore[arg-type]
    assert pads(["one"]) == ["one", ""]


def test_a_device_of_torch_is_its_name() -> None:
    torch = pytest.importorskip("torch")
    assert flex(devices=[torch.device("cpu")])("a", 1) == 1


def test_models_have_names() -> None:
    with pytest.raises(TypeError, match="mapping of models by name"):
        FlexBatcher([same])  # type: ignore[arg-type]


def test_one_item_is_not_several_arguments() -> None:
    import numpy

    with pytest.raises(ValueError, match="collate is for 2 arguments, and there are 1"):
        Batcher(same, collate=["stack", "stack"])(numpy.zeros(2))
    with pytest.raises(TypeError, match="type ndarray, not a mapping"):
        Batcher(same, collate={"a": "stack"})(numpy.zeros(2))


def test_profiles_are_finite() -> None:
    with pytest.raises(ValueError, match="not positive and finite"):
        LatencyProfile([INFINITY])


def test_numbers_of_numpy_may_be_small() -> None:
    """A product with another number has their type, and would be beyond it."""
    with batcher(slo_ms=np.int32(5000)) as made:
        assert made.slo_ms == 5000
        assert made.submit(1, deadline_ms=np.int16(5000)).result(LONG_S) == 1
    assert window(np.int32(5000))._wait_ns == 5_000_000_000
