"""Reference models of trl whose weights are shared. With the real library where it is installed;
the stand-in writes as trl 1.16 does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import devices as emulation
import pytest
import torch
from devices import share, shared
from torch import nn

from trims_shim.patches import trl_reference

SIDE = 256


class SyncRefModelCallback:
    @staticmethod
    def _sync_target_model(model: nn.Module, target_model: nn.Module, alpha: float) -> None:
        for target, ours in zip(target_model.parameters(), model.parameters(), strict=True):
            target.data.mul_(1.0 - alpha).add_(ours.data, alpha=alpha)


@pytest.fixture
def callback(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The class."""
    module = emulation.library(monkeypatch, "trl.trainer.callbacks", SyncRefModelCallback)
    points = *emulation.OF_LOADING, *trl_reference.POINTS
    with emulation.emulated(monkeypatch, *points):
        yield module.SyncRefModelCallback


def test_a_reference_model_that_follows_the_policy(callback: Any, tmp_path: Path) -> None:
    policy, reference = nn.Linear(SIDE, SIDE), nn.Linear(SIDE, SIDE)
    share(reference, tmp_path)
    expected = reference.weight.detach() * 0.5 + policy.weight.detach() * 0.5
    callback._sync_target_model(policy, reference, 0.5)
    assert torch.equal(reference.weight, expected)
    assert not shared(reference.weight)


def test_a_teacher_that_follows_the_student(callback: Any, tmp_path: Path) -> None:
    class SyncTeacher(callback):  # type: ignore[misc]
        """Inherits the function, as that of trl's experimental trainers."""

    student, teacher = nn.Linear(SIDE, SIDE), nn.Linear(SIDE, SIDE)
    share(teacher, tmp_path)
    SyncTeacher._sync_target_model(model=student, target_model=teacher, alpha=1.0)
    assert torch.equal(teacher.weight, student.weight)
