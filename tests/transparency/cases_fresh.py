"""Orders of imports, in interpreters that have imported neither torch nor safetensors before."""

from __future__ import annotations

import sys
from pathlib import Path

from .registry import Work, case


def _make(work: Work) -> tuple[Path, Path]:
    import torch
    from safetensors.torch import save_file

    from .payloads import saved, state

    tensors = work.file("model.safetensors", lambda path: save_file(state(), path))
    assert torch
    return work.file("model.pt", saved(state())), tensors


@case(early=False, served=True)
def names_imported_before_the_shim(work: Work) -> object:
    """``from torch import load`` and the like keep working when the shim comes later."""
    from safetensors import safe_open
    from safetensors.torch import load_file
    from torch import load
    from torch.nn import Linear
    from torch.serialization import load as other

    model, tensors = _make(work)
    before = load(model)
    work.enable_shim()
    module = Linear(80, 1024, bias=False)
    module.load_state_dict({"weight": load(model)["bulk"]})
    with safe_open(tensors, "pt") as file:
        opened = file.get_tensor("bulk")
    return [before, load(model), other(model), load_file(tensors), opened, module]


@case(served=True)
def names_imported_after_the_shim(work: Work) -> object:
    import safetensors

    loaded_early = "torch" in sys.modules
    from safetensors.torch import load_file
    from torch import load

    model, tensors = _make(work)
    with safetensors.safe_open(tensors, "pt") as file:
        return [loaded_early, load(model), load_file(tensors), file.get_tensor("bulk")]
