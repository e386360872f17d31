"""Which conversions of numbers the daemon makes with torch's own bits.

Those to float32 are exact. Others round, to the nearest and to even where two are as near, which
torch does everywhere but for what a processor does by itself: so it is tried, once in each process.
"""

from __future__ import annotations

import functools
from array import array

import torch

from trims_shim.patches.torch_modes import unseen
from trims_shim.specs import Conversion

__all__ = ["conversion_of", "dtype_name"]

_ROUNDED = {
    0x3F800000: (0x3C00, 0x3F80),  # 1
    0x80000000: (0x8000, 0x8000),  # -0
    0x3F801000: (0x3C00, 0x3F80),  # 1 + 2^-11, between two of float16
    0x3F803000: (0x3C02, 0x3F80),
    0x3F808000: (0x3C04, 0x3F80),  # 1 + 2^-8, between two of bfloat16
    0x3F818000: (0x3C0C, 0x3F82),
    0x3F808001: (0x3C04, 0x3F81),
    0xBF9FFFFF: (0xBD00, 0xBFA0),
    0x387FC000: (0x03FF, 0x3880),  # subnormal in float16
    0x387FE000: (0x0400, 0x3880),
    0xB3800000: (0x8001, 0xB380),  # -2^-24, the smallest
    0x33000000: (0x0000, 0x3300),  # half of it
    0x33000001: (0x0001, 0x3300),
    0x00400000: (0x0000, 0x0040),  # subnormal in the others
    0x00018000: (0x0000, 0x0002),
    0x807FFFFF: (0x8000, 0x8080),
    0x477FEFFF: (0x7BFF, 0x4780),  # the largest of float16
    0x477FF000: (0x7C00, 0x4780),
    0x7F7FFFFF: (0x7C00, 0x7F80),  # the largest
    0xFF800000: (0xFC00, 0xFF80),  # -infinity
}
"""Bits of float32, and of what the daemon makes of them: float16 and bfloat16."""


@functools.cache
def conversion_of(source: torch.dtype, target: torch.dtype) -> Conversion | None:
    """Return the conversion that a copy between these makes; None if the daemon makes none."""
    conversion = Conversion(dtype_name(source), dtype_name(target))
    if not conversion.is_possible:
        return None
    return conversion if target is torch.float32 or _rounds_as_the_daemon(target) else None


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype, without that of torch."""
    return str(dtype).removeprefix("torch.")


def _rounds_as_the_daemon(target: torch.dtype) -> bool:
    """Whether float32 becomes a dtype of 16 bits here as it does in images."""
    column = 0 if target is torch.float16 else 1
    # An odd number of times: torch converts some together, and the rest one by one.
    numbers = [*_ROUNDED] * 7
    expected = [rounded[column] for rounded in _ROUNDED.values()] * 7
    with unseen():
        source = torch.frombuffer(array("I", numbers), dtype=torch.float32)
        rounded = source.to(target).view(torch.int16).tolist()
    return [each & 0xFFFF for each in rounded] == expected
