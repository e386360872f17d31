"""Which tensors get widened memory instead of a conversion, and until when."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from images import cached, image_of, make_variants, needs_extension
from torch.utils._python_dispatch import TorchDispatchMode

from trims_shim import diagnostics
from trims_shim.patches.torch_widening import Widening

pytestmark = needs_extension

SIDE = 256  # 128 KiB in float16


@pytest.fixture
def widening(monkeypatch: pytest.MonkeyPatch) -> Iterator[Widening]:
    make_variants(monkeypatch)
    diagnostics.reset_after_fork()
    widening = Widening("test", lambda *_: True)
    yield widening
    widening.end()
    assert not any(name.startswith("elision_error") for name in diagnostics.stats().events)


@pytest.fixture
def loaded() -> torch.Tensor:
    return cached({"weight": torch.randn(SIDE, SIDE).half()})["weight"]


def test_each_gets_memory_of_its_own_and_is_counted(
    widening: Widening, loaded: torch.Tensor
) -> None:
    halves = [widening.widened(half) for half in loaded.split(SIDE // 2)]
    assert widening.widened(loaded) is None, "the memory is given away"
    for half, expected in zip(halves, loaded.float().split(SIDE // 2), strict=True):
        assert half is not None
        assert torch.equal(half, expected)
        assert image_of(half) is not None
    widening.end()
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
    change: Callable[[torch.Tensor], torch.Tensor], widening: Widening, loaded: torch.Tensor
) -> None:
    assert widening.widened(change(loaded)) is None


def test_who_watches_sees_the_conversion(widening: Widening, loaded: torch.Tensor) -> None:
    with TorchDispatchMode():
        assert widening.widened(loaded) is None
    assert widening.widened(loaded) is not None


@pytest.mark.parametrize("is_used", [True, False])
def test_what_is_asked_for_after_the_end(
    is_used: bool, widening: Widening, loaded: torch.Tensor
) -> None:
    """By a thread of transformers that is late."""
    first, second = loaded.split(SIDE // 2)
    assert not is_used or widening.widened(first) is not None
    widening.end()
    assert widening.widened(second) is None
