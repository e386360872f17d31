"""Averages of ema-pytorch whose parameters, or those of their model, are shared. With the real
library where it is installed; the stand-in writes as ema-pytorch 0.8 does."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import devices as emulation
import pytest
import torch
from devices import share, shared
from torch import nn
from torch.utils import _pytree

from trims_shim.patches import ema_pytorch_average

SIDE = 256


def _lerp(target: nn.Module, source: nn.Module, weight: float) -> None:
    for ours, theirs in zip(target.parameters(), source.parameters(), strict=True):
        ours.data.lerp_(theirs.data, weight)


class _Average(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.ema_model = model, copy.deepcopy(model)

    def update_moving_average(
        self, ma_model: nn.Module, current_model: nn.Module, current_decay: float = 0.0
    ) -> None:
        _lerp(ma_model, current_model, 1.0 - current_decay)

    def copy_params_from_model_to_ema(self) -> None:
        _lerp(self.ema_model, self.model, 1.0)

    def copy_params_from_ema_to_model(self) -> None:
        _lerp(self.model, self.ema_model, 1.0)


class EMA(_Average):
    pass


class KarrasEMA(_Average):
    def __init__(self, model: nn.Module, gamma: float) -> None:
        super().__init__(model)


class EMAPytree(nn.Module):
    def __init__(self, pytree: Any, ema_pytree: Any) -> None:
        super().__init__()
        self.pytree, self.ema_pytree = pytree, ema_pytree

    def copy_params_from_pytree_to_ema(self) -> None:
        for name, each in self.ema_pytree.items():
            each.data.copy_(self.pytree[name])

    def update_moving_average(
        self, ma_pytree: Any, current_pytree: Any, current_decay: float
    ) -> None:
        for name, each in ma_pytree.items():
            each.data.lerp_(current_pytree[name], 1.0 - current_decay)


@pytest.fixture
def applied(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any, Any]]:
    """The library's modules, patched."""
    modules = (
        emulation.library(monkeypatch, "ema_pytorch.ema_pytorch", EMA),
        emulation.library(monkeypatch, "ema_pytorch.post_hoc_ema", KarrasEMA),
        emulation.library(monkeypatch, "ema_pytorch.ema_pytree_pytorch", EMAPytree),
    )
    points = *emulation.OF_LOADING, *ema_pytorch_average.POINTS
    with emulation.emulated(monkeypatch, *points):
        yield modules


@pytest.fixture(params=["EMA", "KarrasEMA"])
def average_of(request: pytest.FixtureRequest, applied: tuple[Any, Any, Any]) -> Any:
    """Makes the average of a model."""
    plain, karras, _ = applied
    return plain.EMA if request.param == "EMA" else functools.partial(karras.KarrasEMA, gamma=1.0)


def test_an_average_that_is_resumed(average_of: Any, tmp_path: Path) -> None:
    average = average_of(nn.Linear(SIDE, SIDE))
    average.ema_model.reset_parameters()
    share(average.ema_model, tmp_path)
    # A KarrasEMA takes its decay from the number of its steps: 0 at first.
    options = {"current_decay": 0.5} if type(average).__name__ == "EMA" else {}
    weight = 1.0 - options.get("current_decay", 0.0)
    expected = average.ema_model.weight.lerp(average.model.weight, weight)
    average.update_moving_average(average.ema_model, average.model, **options)
    assert torch.equal(average.ema_model.weight, expected)


def test_an_average_that_begins_anew(average_of: Any, tmp_path: Path) -> None:
    average = average_of(nn.Linear(SIDE, SIDE))
    average.ema_model.reset_parameters()
    share(average.ema_model, tmp_path)
    average.copy_params_from_model_to_ema()
    assert torch.equal(average.ema_model.weight, average.model.weight)


def test_averages_for_the_model(average_of: Any, tmp_path: Path) -> None:
    average = average_of(nn.Linear(SIDE, SIDE))
    average.model.reset_parameters()
    share(average.model, tmp_path)
    average.copy_params_from_ema_to_model()
    assert torch.equal(average.model.weight, average.ema_model.weight)
    assert not shared(average.model.weight)


def test_averages_of_tensors_in_a_dictionary(applied: tuple[Any, Any, Any], tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(SIDE, SIDE)}, tmp_path / "average.pt")
    for update in ("update_moving_average", "copy_params_from_pytree_to_ema"):
        resumed = torch.load(tmp_path / "average.pt", map_location="cuda")
        assert shared(resumed["weight"])
        average = applied[2].EMAPytree({"weight": torch.full((SIDE, SIDE), 3.0)}, resumed)
        if update == "update_moving_average":
            average.update_moving_average(average.ema_pytree, average.pytree, 0.5)
            assert resumed["weight"].unique().tolist() == [2.0]
        else:
            average.copy_params_from_pytree_to_ema()
            assert resumed["weight"].unique().tolist() == [3.0]


class Container:
    """Counts how often it is looked through."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        self.items = tensors.items
        self.looks = 0

    def flat(self) -> tuple[list[torch.Tensor], None]:
        self.looks += 1
        return [each for _, each in self.items()], None


def test_only_the_library_looks_through_containers_where_nothing_is_shared(
    applied: tuple[Any, Any, Any],
) -> None:
    _pytree.register_pytree_node(Container, Container.flat, lambda *_: Container())
    tree = Container(weight=torch.ones(SIDE))
    average = applied[2].EMAPytree({"weight": torch.zeros(SIDE)}, tree)

    def looks(method: Any, *args: Any) -> int:
        before = tree.looks
        method(average, *args)
        return tree.looks - before

    ours = type(average)
    update = ours.update_moving_average, tree, average.pytree, 0.5
    copy_to = (ours.copy_params_from_pytree_to_ema,)
    for method, *args in (update, copy_to):
        assert looks(method, *args) == looks(method.__wrapped__, *args)
