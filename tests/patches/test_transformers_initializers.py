"""transformers initialises weights that are shared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import devices as emulation
import pytest
import torch
from devices import shared

from trims_shim.patches import torch_load, transformers_initializers

initialization = pytest.importorskip("transformers.initialization")

SIDE = 256
FILLINGS: dict[str, Callable[[torch.Tensor], object]] = {
    "copied": lambda weight: initialization.copy_(weight, torch.full_like(weight, 2)),
    # In a type that torch has no decomposition for, which is then copied from one that it has.
    "orthogonal": lambda weight: initialization.orthogonal_(weight, gain=2),
}


@pytest.fixture
def weight(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[torch.Tensor]:
    points = *torch_load.POINTS[:2], *transformers_initializers.POINTS
    with emulation.emulated(monkeypatch, *points):
        torch.save({"weight": torch.ones(SIDE, SIDE, dtype=torch.half)}, tmp_path / "model.pt")
        weight = torch.load(tmp_path / "model.pt", map_location="cuda")["weight"]
        assert shared(weight)
        yield weight


@pytest.mark.parametrize("fill", FILLINGS.values(), ids=FILLINGS)
def test_what_is_filled_becomes_private(
    weight: torch.Tensor, fill: Callable[[torch.Tensor], object]
) -> None:
    plain = torch.ones(SIDE, SIDE, dtype=torch.half)
    for each in (plain, weight):
        torch.manual_seed(0)
        fill(each)
    assert torch.equal(weight, plain)
    assert not shared(weight)


@pytest.mark.parametrize("fill", FILLINGS.values(), ids=FILLINGS)
def test_what_transformers_has_loaded_stays_shared(
    weight: torch.Tensor, fill: Callable[[torch.Tensor], object]
) -> None:
    weight._is_hf_initialized = True  # type: ignore[attr-defined]
    fill(weight)
    assert bool(weight.eq(1).all())
    assert shared(weight)
