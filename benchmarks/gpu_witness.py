"""The location and the bytes of a model's weights, without asking the product.

Owns the two checks that every sample must pass: the share of the bytes that torch's own allocator
does not hold, and one number for all weights.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from benchmarks.process_memory import areas, areas_holding, is_segment

if TYPE_CHECKING:
    import torch

__all__ = ["shared_fraction", "weights_sum"]


def _private_ranges(device: str) -> list[tuple[int, int]]:
    """Address ranges of device memory that torch's allocator reports as its own."""
    import torch

    snapshot: Callable[[], list[dict[str, Any]]] = torch.cuda.memory_snapshot
    segments = snapshot() if device == "cuda" else []
    return [(s["address"], s["address"] + s["total_size"]) for s in segments]


def shared_fraction(tensors: Iterable[torch.Tensor], path: str, device: str) -> float:
    """The share of the weights' bytes that torch's allocator does not hold.

    On the CPU: the share that lies in a shared segment, as the kernel reports it.
    """
    ranges = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors if t.nbytes]
    total = sum(end - start for start, end in ranges)
    if device == "cpu":
        held = areas_holding(areas("self"), ranges)
        return sum(inside for area, inside in held if is_segment(area, path)) / total
    owned = _private_ranges(device)
    private = sum(e - s for s, e in ranges if any(low <= s < high for low, high in owned))
    return 1 - private / total


def weights_sum(state: Mapping[str, torch.Tensor]) -> int:
    """One number for all weights: equal for equal bytes in equal tensors."""
    import torch

    sums = []
    for name in sorted(state):
        data = state[name].detach().contiguous().reshape(-1).view(torch.uint8)
        if data.storage_offset() % 8:
            data = data.clone()
        cut = data.numel() // 8 * 8
        words = data[:cut].view(torch.int64).sum().item() if cut else 0
        sums.append(f"{name}={words},{data[cut:].sum().item()}")
    return zlib.crc32(";".join(sums).encode())
