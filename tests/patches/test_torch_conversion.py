"""Which tensors get converted memory instead of a conversion, and until when."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from images import cached, image_of, make_variants, needs_extension
from torch.utils._python_dispatch import TorchDispatchMode

from trims_shim import diagnostics
from trims_shim.patches.torch_conversion import Conversions

pytestmark = needs_extension

SIDE = 256  # 128 KiB in float16


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> Iterator[Conversions]:
    make_variants(monkeypatch)
    diagnostics.reset_after_fork()
    conversions = Conversions(torch.float32, "test", lambda *_: True)
    yield conversions
    conversions.end()
    assert not any(name.startswith("elision_error") for name in diagnostics.stats().events)


@pytest.fixture
def loaded() -> torch.Tensor:
    return cached({"weight": torch.randn(SIDE, SIDE).half()})["weight"]


def test_each_gets_memory_of_its_own_and_is_counted(
    conversions: Conversions, loaded: torch.Tensor
) -> None:
    halves = [conversions.converted(half) for half in loaded.split(SIDE // 2)]
    assert conversions.converted(loaded) is None, "the memory is given away"
    for half, expected in zip(halves, loaded.float().split(SIDE // 2), strict=True):
        assert half is not None
        assert torch.equal(half, expected)
        assert image_of(half) is not None
    conversions.end()
    events = diagnostics.stats().events
    assert events["elided:test"] == 2
    assert events["elided_bytes:test"] == 4 * loaded.numel()


class Special(torch.Tensor):
    pass


OTHERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a subclass": lambda loaded: loaded.as_subclass(Special),
    "recorded by autograd": lambda loaded: loaded.requires_grad_(),
    "transposed": lambda loaded: loaded.t(),
    "negated": torch._neg_view,
    "small": lambda loaded: loaded[: SIDE // 2 - 1],
    "other numbers": lambda loaded: loaded.view(torch.int16),
    "in other memory": torch.clone,
    "sparse": torch.Tensor.to_sparse,
}


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS)
def test_others_are_converted_by_torch(
    change: Callable[[torch.Tensor], torch.Tensor], conversions: Conversions, loaded: torch.Tensor
) -> None:
    assert conversions.converted(change(loaded)) is None


def test_who_watches_sees_the_conversion(conversions: Conversions, loaded: torch.Tensor) -> None:
    with TorchDispatchMode():
        assert conversions.converted(loaded) is None
    assert conversions.converted(loaded) is not None


@pytest.mark.parametrize("is_used", [True, False])
def test_what_is_asked_for_after_the_end(
    is_used: bool, conversions: Conversions, loaded: torch.Tensor
) -> None:
    """By a thread of transformers that is late."""
    first, second = loaded.split(SIDE // 2)
    assert not is_used or conversions.converted(first) is not None
    conversions.end()
    assert conversions.converted(second) is None
