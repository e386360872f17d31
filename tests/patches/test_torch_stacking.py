"""Stacks of tensors of one image: the bytes that torch's stack has, in memory of an image."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from images import cached, image_of, make_variants

from trims_shim import diagnostics
from trims_shim.errors import MemoryFailure
from trims_shim.memory import pages
from trims_shim.patches import torch_mappings, torch_stacking
from trims_shim.patches.torch_stacking import are_alike, stacked
from trims_shim.specs import PIECES_LIMIT, Variant

ROWS, COLUMNS, COUNT = 64, 96, 5


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Variant]:
    diagnostics.reset_after_fork()
    return make_variants(monkeypatch)


def tensors(shift: int = 0, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    torch.manual_seed(1)
    state = {str(n): torch.randn(ROWS, COLUMNS).to(dtype) for n in range(COUNT)}
    return list(cached({**state, "other": torch.zeros(9)}, shift=shift).values())[:COUNT]


def stack_of(parts: list[torch.Tensor]) -> torch.Tensor | None:
    return stacked(parts, (len(parts), *parts[0].shape))


def elided() -> int:
    return diagnostics.stats().events.get("elided:stack", 0)


@pytest.mark.parametrize("shift", [0, 8, 7])
@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (4, 0, 2)])
@pytest.mark.parametrize("is_told", [True, False], ids=["told", "blind"])
def test_a_stack(
    shift: int, order: tuple[int, ...], is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_told:
        monkeypatch.setattr(pages, "_PAGEMAP", "/proc/self/there-is-no-such-file")
    parts = tensors(shift)
    chosen = [parts[number] for number in order]
    first, second = stack_of(chosen), stack_of(chosen)
    expected = torch.stack(chosen)
    for ours in (first, second):
        assert ours is not None
        assert torch.equal(ours, expected)
        assert (ours.stride(), ours.dtype) == (expected.stride(), expected.dtype)
        assert (ours._version, ours.is_leaf, ours.requires_grad) == (0, True, False)
        assert ours.data_ptr() % torch_mappings.ALIGNMENT_BYTES == 0
    assert first is not None
    first.fill_(7)
    assert torch.equal(second, expected)
    assert torch.equal(parts[0], tensors(shift)[0])
    assert image_of(second) is not None
    assert elided() == 2
    assert diagnostics.stats().events["elided_bytes:stack"] == 2 * expected.nbytes


def test_as_many_as_an_offer_can_name_all_the_file() -> None:
    parts = list(
        cached({str(n): torch.full((16,), float(n)) for n in range(PIECES_LIMIT)}).values()
    )
    ours = stack_of(parts)
    assert ours is not None
    assert torch.equal(ours, torch.stack(parts))


REFUSED: dict[str, Callable[[list[torch.Tensor]], list[torch.Tensor]]] = {
    "of two files": lambda parts: [*parts[:2], tensors()[2]],
    "not of a file": lambda parts: [*parts[:2], parts[2].clone()],
    "more than the file": lambda parts: parts * 3,
    "too many": lambda parts: [each[:1, :1] for each in parts] * 300,
    "of another image's variant": lambda _: _stacked_twice(),
}


def _stacked_twice() -> list[torch.Tensor]:
    stack = stack_of(tensors())
    assert stack is not None
    image = image_of(stack)
    assert image is not None
    image.original = object()  # type: ignore[assignment]
    return list(stack.unbind())


@pytest.mark.parametrize("change", REFUSED.values(), ids=REFUSED)
def test_others_are_torchs(
    change: Callable[[list[torch.Tensor]], list[torch.Tensor]], asked: list[Variant]
) -> None:
    parts = change(tensors())
    asked.clear()
    before = elided()
    assert stack_of(parts) is None
    assert (asked, elided()) == ([], before)


def test_what_was_written(asked: list[Variant]) -> None:
    parts = tensors()
    parts[3][0, 0] = 5
    assert stack_of(parts) is None
    assert elided() == 0


def test_small_stacks(monkeypatch: pytest.MonkeyPatch, asked: list[Variant]) -> None:
    parts = tensors()
    size = sum(each.nbytes for each in parts)
    monkeypatch.setattr(torch_stacking, "_MIN_SIZE_BYTES", size + 1)
    assert stack_of(parts) is None
    assert asked == []
    monkeypatch.setattr(torch_stacking, "_MIN_SIZE_BYTES", size)
    assert stack_of(parts) is not None


def test_until_there_is_an_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_stacking, "variant_image", lambda *_: None)
    assert stack_of(tensors()) is None
    assert diagnostics.stats().events == {}


def test_who_watches_sees_torchs_stack(asked: list[Variant]) -> None:
    parts = tensors()
    with torch.overrides.BaseTorchFunctionMode():
        assert stack_of(parts) is None
    with torch.inference_mode():
        assert stack_of(parts) is None
    assert asked == []


def test_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Any:
        raise MemoryFailure("no")

    monkeypatch.setattr(torch_mappings.FreshMappings, "take", fail)
    assert stack_of(tensors()) is None
    assert diagnostics.stats().events["elision_error:MemoryFailure"] == 1


@pytest.mark.parametrize(
    ("other", "is_alike"),
    [
        (torch.ones(2, 3), True),
        (torch.ones(3, 2), False),
        (torch.ones(2, 3, dtype=torch.float16), False),
        (torch.ones(3, 2).mT, False),
        (torch.ones(2, 3, device="meta"), False),
        (torch.ones(2, 3).to_sparse(), False),
        (torch.ones(2, 3).to_mkldnn(), False),
        (torch.nn.Parameter(torch.ones(2, 3)), False),
        (torch.ones(2, 3).requires_grad_(), False),
        (torch._neg_view(torch.ones(2, 3)), False),
        (torch.inference_mode()(torch.ones)(2, 3), False),
        ("a text", False),
    ],
)
def test_what_is_alike(other: Any, is_alike: bool) -> None:
    assert are_alike([torch.ones(2, 3), other]) is is_alike
    assert are_alike([torch.ones(2, 3)])
    assert not are_alike([torch.ones(1, dtype=torch.complex64).conj()])
