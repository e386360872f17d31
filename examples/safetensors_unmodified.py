"""A safetensors program that has never heard of trims: whole files, and single tensors of a file.

    python examples/safetensors_unmodified.py      # safetensors' own loader
    trims run examples/safetensors_unmodified.py   # through the cache; run it twice

The first run makes a file of about 130 MB in the temp directory and keeps it there. Every run
prints how long loading took and a checksum of the weights, which never changes.
"""

import os
import tempfile
import time
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

FILE = Path(tempfile.gettempdir()) / f"trims-example-layers-{os.getuid()}.safetensors"
LAYERS, WIDTH = 8, 2048


def main() -> None:
    """Load the whole file, then one tensor of it, and report."""
    if not FILE.exists():
        generator = torch.Generator().manual_seed(0)
        names = (f"layer.{number}.weight" for number in range(LAYERS))
        state = {name: torch.rand(WIDTH, WIDTH, generator=generator) for name in names}
        unfinished = FILE.with_suffix(f".{os.getpid()}")
        save_file(state, unfinished)
        unfinished.rename(FILE)

    start = time.perf_counter()
    state = load_file(FILE)
    loaded = time.perf_counter()
    total = sum(tensor.sum(dtype=torch.float64).item() for tensor in state.values())
    summed = time.perf_counter()
    with safe_open(FILE, framework="pt") as file:
        last = file.get_tensor(f"layer.{LAYERS - 1}.weight")
    picked = time.perf_counter()

    print(f"file             {FILE.stat().st_size / 1e6:8.0f} MB, {len(state)} tensors")
    print(f"load_file        {(loaded - start) * 1e3:8.1f} ms")
    print(f"read all         {(summed - loaded) * 1e3:8.1f} ms")
    print(f"one get_tensor   {(picked - summed) * 1e3:8.1f} ms")
    print(f"same tensor      {torch.equal(last, state[f'layer.{LAYERS - 1}.weight'])}")
    print(f"sum of weights   {total!r}")


if __name__ == "__main__":
    main()
