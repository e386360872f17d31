"""Each test has a world of its own; what it leaves behind fails it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import numpy
import pytest
from harness import World, close_worlds
from safetensors.numpy import save_file


@pytest.fixture
def make_world() -> Iterator[Callable[..., World]]:
    """Worlds with settings; each is closed, and nothing of it may be left."""
    worlds: list[World] = []

    def make(**settings: str) -> World:
        worlds.append(World(**settings))
        return worlds[-1]

    yield make
    close_worlds(worlds)


@pytest.fixture
def world(make_world: Callable[..., World]) -> World:
    """A world with the settings most tests use."""
    return make_world()


@pytest.fixture
def running(world: World) -> World:
    """A world whose daemon runs."""
    world.start()
    return world


@pytest.fixture
def model_file(world: World) -> str:
    """A model of one float64 tensor, ``weight``: 0, 1, 2... 2**19 - 1. Patches of all libraries ask
    for a file in one way, and what loads this one need not import torch.
    """
    path = os.path.join(world.root, "model.safetensors")
    save_file({"weight": numpy.arange(1 << 19, dtype=numpy.float64)}, path)
    return path


@pytest.fixture
def make_device_world(
    make_emulated_environment: Callable[..., dict[str, str]], make_world: Callable[..., World]
) -> Callable[..., World]:
    """Worlds on an emulated machine, whose settings are ``machine``; it has to be empty at the end.

    No head-room is kept unless a test asks for it.
    """

    def make(machine: dict[str, object] | None = None, **settings: str) -> World:
        variables = make_emulated_environment(**(machine or {}))
        world = make_world(**{"device_headroom_bytes": "0", "device_bytes": "100%", **settings})
        world.variables = variables
        return world

    return make


# --- prepared ONNX models -------------------------------------------------------------------------


@pytest.fixture
def make_prepared_world(make_world: Callable[..., World]) -> Callable[..., World]:
    """Worlds with settings whose daemon prepares every model, however small."""

    def make(**settings: str) -> World:
        world = make_world(
            min_bytes="1", prepare_anyway_bytes="0", prepare_priority="normal", **settings
        )
        world.settings["cache_dir"] = os.path.join(world.root, "cache")
        return world

    return make


@pytest.fixture
def prepared_world(make_prepared_world: Callable[..., World]) -> World:
    """A world whose daemon prepares every model, with the settings most tests use."""
    return make_prepared_world()
