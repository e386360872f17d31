"""Weights without a framework: open a model, look at its records, use them as numpy or torch views.

    python examples/numpy_records.py

The views are mapped, not copied: opening takes about as long for a large model as for a small one,
and the memory behind them is shared with every other process that has the model open. Writes to a
view are allowed, and private to this handle.
"""

import os
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

import trims_shim

FILE = Path(tempfile.gettempdir()) / f"trims-example-records-{os.getuid()}.safetensors"
LAYERS, WIDTH = 8, 2048


def main() -> None:
    """Open, list, compute, write privately."""
    if not FILE.exists():
        generator = torch.Generator().manual_seed(0)
        names = (f"layer.{number}.weight" for number in range(LAYERS))
        state = {name: torch.rand(WIDTH, WIDTH, generator=generator) for name in names}
        unfinished = FILE.with_suffix(f".{os.getpid()}")
        save_file(state, unfinished)
        unfinished.rename(FILE)
    trims_shim.warm(FILE)

    start = time.perf_counter()
    with trims_shim.open(FILE) as model:
        opened = time.perf_counter()
        print(f"opened {len(model.records)} records in {(opened - start) * 1e3:.1f} ms")
        for record in model.records.values():
            weights = model.numpy(record.name)
            print(
                f"{record.name:16} {record.dtype:4} {record.shape!s:13} mean {weights.mean():.4f}"
            )

        name = next(iter(model.records))
        vector = torch.ones(WIDTH)
        from_torch = (model.torch(name) @ vector).numpy()
        from_numpy = model.numpy(name) @ vector.numpy()
        print("numpy and torch agree:", np.allclose(from_torch, from_numpy, rtol=1e-3))

        model.numpy(name)[:] = 0
        with trims_shim.open(FILE) as again:
            print("a write stays private:", bool(again.numpy(name).any()))


if __name__ == "__main__":
    main()
