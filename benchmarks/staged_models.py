"""Models in stages that really run, for the serving benchmark: one for each kind of diversity.

========  =====================  ===============================================================
name      diversity              what differs
========  =====================  ===============================================================
bert      of inputs              lengths, drawn from a log-normal distribution (:data:`LENGTHS`)
u-net     of operators           deep layers have few pixels and many weights, which batches
                                 share; outer ones have many pixels and gain nothing
vgg       of load                dense layers of many weights after convolutions: any batch gains
========  =====================  ===============================================================

Weights are random, because no time depends on them. Sizes are such that one item takes some
milliseconds, on one thread of a processor or on a GPU.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.models import BertLayer
from trims_shim.batching import Pad
from trims_shim.batching.staged.model import StagedModel

__all__ = ["LENGTHS", "MODELS", "Served", "make_served"]

LENGTHS = {"median": 24, "sigma": 0.7, "least": 4, "most": 128}
"""Tokens of a request: log-normal, cut off. GLUE's sentences have about this spread."""
_VOCABULARY = 30_522
_ITEMS = 512


@dataclass(frozen=True)
class Served:
    """A model, its requests, and how they become batches."""

    name: str
    stages: Sequence[Callable[..., Any]]
    items: Sequence[Any]
    """Request ``n`` has item ``n`` modulo their number. On the device; equal in all processes."""
    collate: Any
    """Pads to the longest item of the batch, as in the paper."""
    examples: Sequence[int]
    """Numbers of items; where lengths differ, the middle one of each class of lengths."""

    def item(self, number: int) -> Any:
        """The item of a request."""
        return self.items[number % len(self.items)]

    def whole(self, batch: Any) -> Any:
        """All stages in one call."""
        for stage in self.stages:
            batch = stage(batch)
        return batch

    def staged(self, stages: int | None = None) -> StagedModel:
        """The model in its stages, or in one."""
        return StagedModel([self.whole] if stages == 1 else self.stages, name=self.name)


@dataclass(frozen=True, slots=True)
class _Size:
    """The size of a model on a device."""

    width: int
    depth: int
    side: int = 0


def make_served(name: str, device: str = "cpu") -> Served:
    """Make one of :data:`MODELS`, with equal weights in every process; ``device`` is torch's."""
    torch.manual_seed(0)
    kind, _, _ = device.partition(":")
    maker, sizes = _MAKERS[name]
    served = maker(name, sizes[kind], device)
    return replace(served, stages=_merged(served.stages, _STAGES_ON[kind]))


def _merged(stages: Sequence[Callable[..., Any]], count: int) -> list[Callable[..., Any]]:
    """Merge neighbours in equal groups, so that ``count`` are left."""
    size = len(stages) // count
    return [_in_turn(stages[first : first + size]) for first in range(0, len(stages), size)]


def _in_turn(stages: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
    def run(value: Any) -> Any:
        for stage in stages:
            value = stage(value)
        return value

    return run


def _stage(device: str, *modules: nn.Module) -> Callable[..., Any]:
    module = nn.Sequential(*modules).to(device).eval()

    def run(value: Any) -> Any:
        with torch.no_grad():
            return module(value)

    return run


# --- of inputs ------------------------------------------------------------------------------------


class _Embed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(_VOCABULARY, width)
        self.places = nn.Embedding(LENGTHS["most"], width)

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Token numbers ``[batch, tokens]`` -> ``[batch, tokens, width]``, and the mask."""
        ids, mask = batch["ids"], batch["attention_mask"]
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        return x, mask[:, None, None, :].bool()


class _Encoder(nn.Module):
    """Layers of ``BertLayer``, with a mask."""

    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(BertLayer(width, heads) for _ in range(layers))

    def forward(self, value: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """``[batch, tokens, width]`` and ``[batch, 1, 1, tokens]`` -> the same shapes."""
        x, mask = value
        for layer in self.layers:
            attention: Any = layer.attention
            mixed = self._attend(attention["self"], x, mask)
            x = attention["output"](mixed, x)
            x = layer.output(F.gelu(layer.intermediate["dense"](x)), x)
        return x, mask

    @staticmethod
    def _attend(projections: Any, x: Tensor, mask: Tensor) -> Tensor:
        heads = projections.heads
        q, k, v = (p(x).unflatten(-1, (heads, -1)).transpose(1, 2) for p in projections.children())
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return mixed.transpose(1, 2).flatten(-2)


class _Pool(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, width)

    def forward(self, value: tuple[Tensor, Tensor]) -> Tensor:
        """The state of the first token, ``[batch, width]``."""
        pooled: Tensor = torch.tanh(self.dense(value[0][:, 0]))
        return pooled


def _length(number: int) -> int:
    drawn = random.Random(number).lognormvariate(math.log(LENGTHS["median"]), LENGTHS["sigma"])
    return min(max(LENGTHS["least"], round(drawn)), int(LENGTHS["most"]))


def _bert(name: str, size: _Size, device: str) -> Served:
    encoders = [
        _Encoder(size.width, size.width // 64, size.depth // _STAGES) for _ in range(_STAGES)
    ]
    stages = [_stage(device, each) for each in encoders[1:-1]]
    stages.insert(0, _stage(device, _Embed(size.width), encoders[0]))
    stages.append(_stage(device, encoders[-1], _Pool(size.width)))

    items = [
        {"ids": torch.randint(_VOCABULARY, (_length(number),)).to(device)}
        for number in range(_ITEMS)
    ]
    collate, classes = Pad(), defaultdict[Hashable, list[int]](list)
    for number in sorted(range(_ITEMS), key=_length):
        classes[collate.with_classes().key(items[number])].append(number)
    examples = [numbers[len(numbers) // 2] for numbers in classes.values()]
    return Served(name, stages, items, collate, examples)


# --- of operators ---------------------------------------------------------------------------------


def _convs(inputs: int, outputs: int) -> list[nn.Module]:
    return [
        nn.Conv2d(inputs, outputs, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1),
        nn.ReLU(),
    ]


class _Down(nn.Module):
    """Also returns its feature maps, for the other end of the U."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.convs = nn.Sequential(*_convs(inputs, outputs))

    def forward(self, value: Any) -> tuple[Tensor, ...]:
        """``[batch, inputs, h, w]`` -> ``[batch, outputs, h / 2, w / 2]``, and the kept maps."""
        x, *kept = value if isinstance(value, tuple) else (value,)
        y = self.convs(x)
        return (F.max_pool2d(y, 2), *kept, y)


class _Up(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.widen = nn.ConvTranspose2d(inputs, outputs, 2, stride=2)
        self.convs = nn.Sequential(*_convs(2 * outputs, outputs))

    def forward(self, value: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The reverse of :class:`_Down`."""
        x, *kept = value
        skipped = kept.pop()
        return (self.convs(torch.cat([self.widen(x), skipped], dim=1)), *kept)


class _Bottom(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.convs = nn.Sequential(*_convs(inputs, outputs))

    def forward(self, value: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The first of them, ``[batch, inputs, h, w]`` -> ``[batch, outputs, h, w]``."""
        x, *kept = value
        return (self.convs(x), *kept)


class _Mask(nn.Module):
    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, 1, 1)

    def forward(self, value: tuple[Tensor, ...]) -> Tensor:
        """``[batch, 1, h, w]``."""
        mask: Tensor = self.conv(value[0])
        return mask


def _unet(name: str, size: _Size, device: str) -> Served:
    widths = [size.width << level for level in range(size.depth + 1)]
    downs = [_Down(a, b) for a, b in zip([3, *widths], widths[:-1], strict=False)]
    ups = [_Up(b, a) for a, b in reversed(list(itertools.pairwise(widths)))]
    half = size.depth // 2
    stages = [
        _stage(device, *downs[:half]),
        _stage(device, *downs[half:]),
        _stage(device, _Bottom(widths[-2], widths[-1]), *ups[: size.depth - half]),
        _stage(device, *ups[size.depth - half :], _Mask(widths[0])),
    ]
    return Served(name, stages, _pictures(size.side, device), "auto", [0])


def _pictures(side: int, device: str) -> list[Tensor]:
    return [torch.rand(3, side, side).to(device) for _ in range(16)]


# --- of load --------------------------------------------------------------------------------------


def _vgg(name: str, size: _Size, device: str) -> Served:
    """Levels of convolutions, each with half the side and twice the width; three dense layers."""
    widths = [size.width << level for level in range(size.depth)]
    levels = [
        nn.Sequential(*_convs(a, b), nn.MaxPool2d(2))
        for a, b in zip([3, *widths], widths, strict=False)
    ]
    hidden = 32 * size.width
    flat = widths[-1] * (size.side >> size.depth) ** 2
    stages = [
        _stage(device, *levels[:-1]),
        _stage(device, levels[-1], nn.Flatten()),
        _stage(device, nn.Linear(flat, hidden), nn.ReLU()),
        _stage(device, nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1000)),
    ]
    return Served(name, stages, _pictures(size.side, device), "auto", [0])


_STAGES = 4
_STAGES_ON = {"cpu": 2, "cuda": 4}
"""Few, because a border takes some 60 µs, which would matter in stages of one millisecond."""
_MAKERS: dict[str, tuple[Callable[[str, _Size, str], Served], dict[str, _Size]]] = {
    "bert": (_bert, {"cpu": _Size(256, 4), "cuda": _Size(1024, 24)}),
    "u-net": (_unet, {"cpu": _Size(12, 4, 80), "cuda": _Size(64, 4, 256)}),
    "vgg": (_vgg, {"cpu": _Size(48, 3, 40), "cuda": _Size(64, 5, 224)}),
}
MODELS = tuple(_MAKERS)
