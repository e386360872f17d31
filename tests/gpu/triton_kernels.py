"""A Triton kernel that reads shared weights; imported only where Triton is."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["scaled"]


@triton.jit
def _scale(source, target, factor, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(source + offsets, mask=offsets < size)
    tl.store(target + offsets, values * factor, mask=offsets < size)


def scaled(tensor: torch.Tensor, factor: float) -> list[float]:
    """The first elements and the sum of ``tensor * factor``, worked out by the kernel."""
    target = torch.empty_like(tensor)
    size, block = tensor.numel(), 1024
    _scale[(triton.cdiv(size, block),)](tensor, target, factor, size, BLOCK=block)
    expected = tensor * factor
    assert torch.equal(target, expected)
    return [float(value) for value in target.flatten()[:4]]
