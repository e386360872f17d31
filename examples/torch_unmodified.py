"""A torch program that has never heard of trims.

    python examples/torch_unmodified.py            # torch's own loader
    trims run examples/torch_unmodified.py         # through the cache; run it twice

The first run makes a checkpoint of about 130 MB in the temp directory and keeps it there. Every run
prints how long its weights took and a checksum of the model's answer, which never changes.
"""

import hashlib
import os
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

CHECKPOINT = Path(tempfile.gettempdir()) / f"trims-example-perceptron-{os.getuid()}.pt"
LAYERS, WIDTH = 8, 2048


def build() -> nn.Module:
    """A perceptron that is large enough for its load time to be felt."""
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*layers).eval()


def main() -> None:
    """Load, answer, report."""
    if not CHECKPOINT.exists():
        torch.manual_seed(0)
        unfinished = CHECKPOINT.with_suffix(f".{os.getpid()}")
        torch.save(build().state_dict(), unfinished)
        unfinished.rename(CHECKPOINT)

    model = build()
    start = time.perf_counter()
    state = torch.load(CHECKPOINT)
    loaded = time.perf_counter()
    model.load_state_dict(state)
    ready = time.perf_counter()

    with torch.no_grad():
        answer = model(torch.linspace(0, 1, WIDTH))
    checksum = hashlib.sha256(answer.numpy().tobytes()).hexdigest()[:16]
    print(f"checkpoint       {CHECKPOINT.stat().st_size / 1e6:8.0f} MB")
    print(f"torch.load       {(loaded - start) * 1e3:8.1f} ms")
    print(f"load_state_dict  {(ready - loaded) * 1e3:8.1f} ms")
    print(f"answer           {checksum}")


if __name__ == "__main__":
    main()
