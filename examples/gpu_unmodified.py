"""A torch program for a GPU that has never heard of trims. Without a GPU it runs on the CPU.

    python examples/gpu_unmodified.py            # torch's own loader
    trims run examples/gpu_unmodified.py         # through the cache; in two terminals at once

The first run makes a checkpoint of about 130 MB in the temp directory and keeps it there. A run
prints how long its weights took to get onto the device, what torch's allocator holds for them (with
the cache on a GPU: next to nothing, the weights are shared), and a checksum of the model's answer,
which does not depend on how they were loaded.
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


def held_bytes(device: torch.device) -> int:
    """What torch's allocator has given out on the device."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def main() -> None:
    """Load, answer, report."""
    if not CHECKPOINT.exists():
        torch.manual_seed(0)
        unfinished = CHECKPOINT.with_suffix(f".{os.getpid()}")
        torch.save(build().state_dict(), unfinished)
        unfinished.rename(CHECKPOINT)

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with torch.device("meta"):
        model = build()
    torch.zeros(1, device=device)  # the context is not what is timed
    start = time.perf_counter()
    state = torch.load(CHECKPOINT, map_location=device)
    model.load_state_dict(state, assign=True)
    if device.type == "cuda":
        torch.cuda.synchronize()
    ready = time.perf_counter()
    held = held_bytes(device)

    with torch.no_grad():
        answer = model(torch.linspace(0, 1, WIDTH, device=device)).cpu()
    checksum = hashlib.sha256(answer.numpy().tobytes()).hexdigest()[:16]
    print(f"device           {device}")
    print(f"checkpoint       {CHECKPOINT.stat().st_size / 1e6:8.0f} MB")
    print(f"weights there    {(ready - start) * 1e3:8.1f} ms")
    print(f"torch holds      {held / 1e6:8.0f} MB of device memory")
    print(f"answer           {checksum}")


if __name__ == "__main__":
    main()
