"""Fixtures: the checkpoint is written once, the encoder is loaded afresh for every test."""

from pathlib import Path

import encoder as model
import pytest


@pytest.fixture(scope="session")
def checkpoint() -> Path:
    """The trained weights."""
    model.write_checkpoint()
    return model.CHECKPOINT


@pytest.fixture
def encoder(checkpoint: Path) -> model.Encoder:
    """An encoder of this test's own: tests may change its weights."""
    return model.load(checkpoint)
