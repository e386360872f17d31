"""Ways to get a model onto a device, as programs do it, ready to be timed.

Each way does the untimed preparation (imports, a model without weights) and returns a function that
loads and returns the model. ``device`` is ``cuda``, or ``cpu`` in a trial run.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

__all__ = ["WAYS", "start", "wait"]


def start(device: str) -> None:
    """Create the context; this is not timed."""
    import torch

    torch.zeros(1, device=device)
    wait(device)


def wait(device: str) -> None:
    """Wait until the device has finished."""
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


Load = Callable[[], "nn.Module"]


def _by_torch_load(name: str, path: str, device: str) -> Load:
    import torch

    from benchmarks.gpu_models import empty_model

    model = empty_model(name, device)

    def load() -> nn.Module:
        model.load_state_dict(torch.load(path, map_location=device))
        return model

    return load


def _by_moving(name: str, path: str, device: str) -> Load:
    import torch

    from benchmarks.gpu_models import empty_model

    model = empty_model(name, "meta")

    def load() -> nn.Module:
        model.load_state_dict(torch.load(path, mmap=True), assign=True)
        return model.to(device)

    return load


def _by_safetensors(name: str, path: str, device: str) -> Load:
    from safetensors.torch import load_file

    from benchmarks.gpu_models import empty_model

    model = empty_model(name, device)

    def load() -> nn.Module:
        model.load_state_dict(load_file(path, device=device))
        return model

    return load


def _by_fastsafetensors(name: str, path: str, device: str) -> Load:
    fastsafe_open = importlib.import_module("fastsafetensors").fastsafe_open

    from benchmarks.gpu_models import empty_model

    model = empty_model(name, device)

    def load() -> nn.Module:
        with fastsafe_open(filenames=[path], nogds=True, device=f"{device}:0") as file:
            names = file.keys()
            model.load_state_dict({name: file.get_tensor(name) for name in names})
            wait(device)
        return model

    return load


def _by_being_there(name: str, path: str, device: str) -> Load:
    """The ideal: this process already has the weights."""
    from safetensors.torch import load_file

    from benchmarks.gpu_models import empty_model

    model = empty_model(name, "meta")
    state = load_file(path, device=device)

    def load() -> nn.Module:
        model.load_state_dict(state, assign=True)
        return model

    return load


WAYS: dict[str, Callable[[str, str, str], Load]] = {
    "torch": _by_torch_load,
    "torch-mmap-to": _by_moving,
    "safetensors": _by_safetensors,
    "fastsafetensors": _by_fastsafetensors,
    "resident": _by_being_there,
}
