"""Small models of five kinds as stages, and what they answer when nobody shares a batch with them.

Whether a row of a batch has the very bits that it has alone is up to the kernels. In float64 on a
processor those of torch 2.13 with MKL keep it for convolutions, normalisation, softmax, attention
and matrix products of four rows and more; not for products of fewer rows (other kernels are chosen
for one, two and three) and not for GELU and sigmoid, whose vector code and scalar code differ in
the last bit. So models come in two kinds:

*exact* (float64)
    Weights are multiples of 1/64, and so are activations: they are rounded after every function
    that is not a sum of products. Sums are then exact in any order, whatever kernel computes them,
    and a row has the same bits in every batch.
*plain* (float64, float32)
    Nothing is rounded; rows agree within :attr:`Subject.tolerance`.

A row that gets into another's place differs in far more than the last bit in both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trims_shim.batching.collating.collate import CollateSpec, collate_of
from trims_shim.batching.collating.padding import Pad
from trims_shim.batching.staged.activations import EarlyExit, Shared, Stepped
from trims_shim.batching.staged.model import Loop, StagedModel

__all__ = ["KINDS", "Subject", "make_subject"]

_STEPS = 64
"""Of the grid of exact models. Products of two have 12 fractional bits: sums of thousands of them
are exact in the 53 bits of a float64."""
_WIDTH, _HEADS, _LAYERS = 16, 2, 3
_TOKENS = 50
_LONGEST = 8
_MOST_NEW = 5
_END = 3
_EASY = (-0.4, 0.0, 0.4)
"""How dark a picture has to be to be answered after each stage but the last."""


@dataclass(frozen=True)
class Subject:
    """A model in stages, and items for it."""

    name: str
    model: StagedModel
    item: Callable[[int], Any]
    """The item of this number, always the same."""
    collate: CollateSpec
    tolerance: float
    """By how much rows may differ from those of a batch of one, of their largest; 0: not at all."""

    def alone(self, number: int) -> Any:
        """What the item of this number is answered by itself."""
        collate, item = collate_of(self.collate), self.item(number)
        value = collate.join([item])
        for stage in self.model.stages:
            if isinstance(stage, Loop):
                return _looped(stage, value)
            value = stage(value)
            if isinstance(value, EarlyExit):
                if value.finished[0]:
                    value = value.results
                    break
                value = value.rest
        return collate.split(value, [item])[0]

    def assert_equal(self, found: Any, expected: Any) -> None:
        """Raises AssertionError where an answer is not what it has to be."""
        if isinstance(expected, dict):
            assert set(found) == set(expected)
            for name, each in expected.items():
                self.assert_equal(found[name], each)
        elif not isinstance(expected, Tensor):
            assert found == expected, self.name
        else:
            assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
            if self.tolerance:
                scale = max(1.0, float(expected.abs().max()))
                torch.testing.assert_close(found, expected, rtol=0, atol=self.tolerance * scale)
            else:
                assert torch.equal(found, expected), (self.name, found - expected)


def make_subject(
    kind: str,
    *,
    dtype: torch.dtype = torch.float64,
    is_exact: bool = True,
    device: str = "cpu",
) -> Subject:
    """One of :data:`KINDS`; its items are on the device."""
    if is_exact and dtype != torch.float64:
        raise ValueError("sums are exact in float64 only")
    torch.manual_seed(sum(map(ord, kind)))
    stages, item, collate = KINDS[kind](dtype, _on_grid if is_exact else _as_it_is)
    for stage in stages:
        module = stage.step if isinstance(stage, Loop) else stage
        _prepare(module, dtype, device, is_exact=is_exact)
    tolerance = 0.0 if is_exact else 1e-12 if dtype == torch.float64 else 1e-4
    model = StagedModel([_without_gradients(stage) for stage in stages], name=kind)
    return Subject(
        f"{kind}, {dtype}", model, lambda number: _moved(item(number), device), collate, tolerance
    )


def _moved(item: Any, device: str) -> Any:
    if isinstance(item, dict):
        return {name: each.to(device) for name, each in item.items()}
    return item.to(device)


def _prepare(module: nn.Module, dtype: torch.dtype, device: str, *, is_exact: bool) -> None:
    module.to(dtype).eval()
    with torch.no_grad():  # on the processor: a device draws other numbers
        for each in module.modules():
            if isinstance(each, nn.BatchNorm2d):  # as after training
                each.running_mean.uniform_(-0.3, 0.3)
                each.running_var.uniform_(0.5, 2.0)
        for parameter in module.parameters():
            if is_exact:
                parameter.copy_(_on_grid(parameter))
    module.to(device)


def _on_grid(x: Tensor) -> Tensor:
    return torch.round(x * _STEPS) / _STEPS


def _as_it_is(x: Tensor) -> Tensor:
    return x


def _without_gradients(stage: Any) -> Any:
    if isinstance(stage, Loop):
        return Loop(_without_gradients(stage.step), result=stage.result)

    def run(value: Any) -> Any:
        with torch.no_grad():
            return stage(value)

    return run


def _looped(loop: Loop, state: Any) -> Any:
    pieces = []
    while True:
        stepped = loop(state)
        pieces.append(stepped.pieces[0])
        if stepped.finished[0]:
            return loop.result(pieces)
        state = stepped.state


def _randoms(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


Settle = Callable[[Tensor], Tensor]
Parts = tuple[list[Any], Callable[[int], Any], CollateSpec]


# --- an encoder: padded items, a mask, and a bias that all rows share -----------------------------


class _Attention(nn.Module):
    def __init__(self, settle: Settle) -> None:
        super().__init__()
        self.qkv = nn.Linear(_WIDTH, 3 * _WIDTH)
        self.out = nn.Linear(_WIDTH, _WIDTH)
        self.settle = settle

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """``[batch, tokens, width]``, what is added to scores -> ``[batch, tokens, width]``."""
        q, k, v = self.heads(x)
        return self.attend(q, k, v, bias)

    def heads(self, x: Tensor) -> tuple[Tensor, ...]:
        """Three of ``[batch, heads, tokens, width of a head]``."""
        whole = self.settle(self.qkv(x))
        return tuple(
            part.unflatten(-1, (_HEADS, -1)).transpose(1, 2) for part in whole.chunk(3, dim=-1)
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        """Attention and the projection after it."""
        scores = q @ k.transpose(-1, -2) / 4 + bias
        mixed = self.settle(self.settle(scores.softmax(-1)) @ v)
        return self.settle(self.out(mixed.transpose(1, 2).flatten(-2)))


class _Layer(nn.Module):
    def __init__(self, settle: Settle) -> None:
        super().__init__()
        self.attention = _Attention(settle)
        self.wide = nn.Linear(_WIDTH, 2 * _WIDTH)
        self.narrow = nn.Linear(2 * _WIDTH, _WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(_WIDTH) for _ in range(2))
        self.settle = settle

    def after(self, x: Tensor, mixed: Tensor) -> Tensor:
        """What follows attention."""
        x = self.settle(self.norms[0](x + mixed))
        wide = self.settle(F.gelu(self.settle(self.wide(x))))
        return self.settle(self.norms[1](x + self.settle(self.narrow(wide))))


class _EncoderLayer(_Layer):
    def forward(self, state: dict[str, Any]) -> dict[str, Any]:
        x, mask, bias = state["x"], state["mask"], state["bias"].value
        unseen = x.new_zeros(mask.shape).masked_fill(mask == 0, -torch.inf)
        x = self.after(x, self.attention(x, bias + unseen[:, None, None, :]))
        return {**state, "x": x}


class _Embedding(nn.Module):
    def __init__(self, settle: Settle) -> None:
        super().__init__()
        self.tokens = nn.Embedding(_TOKENS, _WIDTH)
        self.near = nn.Parameter(torch.randn(_HEADS, 2 * _LONGEST))
        self.settle = settle

    def forward(self, batch: Any) -> dict[str, Any]:
        ids = batch["ids"]
        places = torch.arange(ids.shape[1], device=ids.device)
        bias = self.near[:, places[:, None] - places[None, :] + _LONGEST]
        x = self.settle(self.tokens(ids))
        return {"x": x, "mask": batch["attention_mask"], "bias": Shared(bias)}


class _Pooler(nn.Module):
    def __init__(self, settle: Settle) -> None:
        super().__init__()
        self.dense = nn.Linear(_WIDTH, _WIDTH)
        self.settle = settle

    def forward(self, state: dict[str, Any]) -> Tensor:
        return self.settle(torch.tanh(self.dense(state["x"][:, 0])))


def _ids(number: int) -> Tensor:
    length = 1 + number * 5 % _LONGEST
    return torch.randint(_TOKENS, (length,), generator=_randoms(number))


def _bert(dtype: torch.dtype, settle: Settle) -> Parts:
    stages = [_Embedding(settle), *(_EncoderLayer(settle) for _ in range(_LAYERS)), _Pooler(settle)]
    return stages, lambda number: {"ids": _ids(number)}, Pad(buckets=(4, _LONGEST))


def _ragged(dtype: torch.dtype, settle: Settle) -> Parts:
    """The encoder, padded to the longest of each batch: late entrants may be of another length."""
    stages, item, _ = _bert(dtype, settle)
    return stages, item, Pad()


# --- pictures -------------------------------------------------------------------------------------


def _picture(dtype: torch.dtype, channels: int, side: int) -> Callable[[int], Tensor]:
    def item(number: int) -> Tensor:
        # Of some colour each, or else their means would be nearly the same.
        randoms, shape = _randoms(number), (channels, side, side)
        colour = torch.randint(-_STEPS, _STEPS + 1, (channels, 1, 1), generator=randoms)
        noise = torch.randint(-_STEPS, _STEPS + 1, shape, generator=randoms)
        return (2 * colour + noise).to(dtype) / _STEPS

    return item


class _Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, settle: Settle) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            [
                nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
                nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            ]
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(outputs) for _ in range(2))
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride)
        self.settle = settle

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.settle(self.norms[0](self.settle(self.convs[0](x)))))
        y = self.settle(self.norms[1](self.settle(self.convs[1](y))))
        return F.relu(y + self.settle(self.shortcut(x)))


class _Head(nn.Module):
    def __init__(self, inputs: int, outputs: int, settle: Settle) -> None:
        super().__init__()
        self.dense = nn.Linear(inputs, outputs)
        self.settle = settle

    def forward(self, x: Tensor) -> Tensor:
        return self.settle(self.dense(self.settle(x.mean((2, 3)))))


def _resnet(dtype: torch.dtype, settle: Settle) -> Parts:
    stages = [
        _Residual(3, 8, 1, settle),
        _Residual(8, 16, 2, settle),
        _Residual(16, 16, 2, settle),
        _Head(16, 10, settle),
    ]
    return stages, _picture(dtype, 3, 12), "auto"


class _Down(nn.Module):
    """Hands what it got on as well, for the other end of the U."""

    def __init__(self, inputs: int, outputs: int, settle: Settle) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.settle = settle

    def forward(self, value: Any) -> tuple[Tensor, ...]:
        x, *kept = value if isinstance(value, tuple) else (value,)
        y = F.relu(self.settle(self.conv(x)))
        return (F.max_pool2d(y, 2), *kept, y)


class _Up(nn.Module):
    def __init__(self, inputs: int, skipped: int, outputs: int, settle: Settle) -> None:
        super().__init__()
        self.widen = nn.ConvTranspose2d(inputs, outputs, 2, stride=2)
        self.conv = nn.Conv2d(outputs + skipped, outputs, 3, padding=1)
        self.settle = settle

    def forward(self, value: tuple[Tensor, ...]) -> Any:
        x, *kept = value
        wide = torch.cat([self.settle(self.widen(x)), kept.pop()], dim=1)
        y = F.relu(self.settle(self.conv(wide)))
        return (y, *kept) if kept else y


def _unet(dtype: torch.dtype, settle: Settle) -> Parts:
    stages = [_Down(2, 6, settle), _Down(6, 8, settle), _Up(8, 8, 6, settle), _Up(6, 6, 2, settle)]
    return stages, _picture(dtype, 2, 8), "auto"


# --- early exit -----------------------------------------------------------------------------------


class _Exit(nn.Module):
    """A block with a classifier; dark pictures are easy, and go no further."""

    def __init__(self, depth: int, settle: Settle) -> None:
        super().__init__()
        self.block = _Residual(4, 4, 1, settle)
        self.classify = _Head(4, 5, settle)
        self.depth = depth
        self.settle = settle

    def forward(self, value: Any) -> Any:
        x, light = value if self.depth else (value, self.settle(value.mean((1, 2, 3))))
        x = self.block(x)
        finished = light < _EASY[self.depth]
        if not finished.any():
            return x, light
        results = self.results(x[finished])
        return EarlyExit(finished.tolist(), results, (x[~finished], light[~finished]))

    def results(self, x: Tensor) -> dict[str, Tensor]:
        """As of the last stage."""
        return {"scores": self.classify(x), "depth": x.new_full((len(x),), self.depth)}


class _LastExit(_Exit):
    def forward(self, value: Any) -> Any:
        return self.results(self.block(value[0]))


def _early_exit(dtype: torch.dtype, settle: Settle) -> Parts:
    stages = [*(_Exit(depth, settle) for depth in range(3)), _LastExit(3, settle)]
    return stages, _picture(dtype, 4, 6), "auto"


# --- a decoder: a loop whose rows end when they like ----------------------------------------------


class _Prompt(nn.Module):
    def __init__(self, embedding: nn.ModuleList, settle: Settle) -> None:
        super().__init__()
        self.embedding = embedding
        self.settle = settle

    def forward(self, batch: Any) -> dict[str, Tensor]:
        ids, length = batch["ids"], batch["attention_mask"].sum(1)
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.settle(self.embedding[0](ids) + self.embedding[1](places))
        empty = x.new_zeros(len(ids), 0, 2, _HEADS, _LONGEST + _MOST_NEW, _WIDTH // _HEADS)
        return {"x": x, "length": length, "left": batch["new"], "cache": empty}


class _PromptLayer(nn.Module):
    """A layer for the whole prompt, and the beginning of its cache."""

    def __init__(self, layer: _Layer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        x, cache = state["x"], state["cache"]
        tokens = x.shape[1]
        q, k, v = self.layer.attention.heads(x)
        causal = x.new_full((tokens, tokens), -torch.inf).triu(1)
        x = self.layer.after(x, self.layer.attention.attend(q, k, v, causal))
        mine = cache.new_zeros(len(x), 1, *cache.shape[2:])
        mine[:, 0, :, :, :tokens] = torch.stack([k, v], dim=1)
        return {**state, "x": x, "cache": torch.cat([cache, mine], dim=1)}


class _PromptEnd(nn.Module):
    """Each row's last own token is what its first step begins with."""

    def forward(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        x, length = state["x"], state["length"]
        rows = torch.arange(len(x), device=x.device)
        return {**state, "x": x[rows, length - 1]}


class _Step(nn.Module):
    """From each row's last activation its next token, and that token's activation."""

    def __init__(self, embedding: nn.ModuleList, layers: list[_Layer], settle: Settle) -> None:
        super().__init__()
        self.embedding = embedding
        self.layers = nn.ModuleList(layers)
        self.choose = nn.Linear(_WIDTH, _TOKENS)
        self.settle = settle

    def forward(self, state: dict[str, Tensor]) -> Stepped:
        tokens = self.choose(state["x"]).argmax(1)
        length, left = state["length"], state["left"] - 1
        finished = (tokens == _END) | (left <= 0)
        x = self.settle(self.embedding[0](tokens) + self.embedding[1](length))
        cache = state["cache"].clone()
        for number, layer in enumerate(self.layers):
            x = self._layer(layer, x, cache[:, number], length)
        state = {"x": x, "length": length + 1, "left": left, "cache": cache}
        return Stepped(state, tokens, finished.tolist())

    def _layer(self, layer: Any, x: Tensor, cache: Tensor, length: Tensor) -> Tensor:
        rows = torch.arange(len(x), device=x.device)
        q, k, v = layer.attention.heads(x[:, None])
        cache[rows, 0, :, length] = k[:, :, 0]
        cache[rows, 1, :, length] = v[:, :, 0]
        places = torch.arange(cache.shape[3], device=x.device)
        unseen = x.new_zeros(len(x), len(places))
        unseen = unseen.masked_fill(places[None, :] > length[:, None], -torch.inf)
        mixed = layer.attention.attend(q, cache[:, 0], cache[:, 1], unseen[:, None, None, :])
        after: Tensor = layer.after(x[:, None], mixed)[:, 0]
        return after


def _prompt(number: int) -> dict[str, Any]:
    return {"ids": _ids(number), "new": torch.tensor(1 + number * 3 % _MOST_NEW)}


def _gpt(dtype: torch.dtype, settle: Settle) -> Parts:
    embedding = nn.ModuleList(
        [nn.Embedding(_TOKENS, _WIDTH), nn.Embedding(_LONGEST + _MOST_NEW, _WIDTH)]
    )
    layers = [_Layer(settle) for _ in range(2)]
    step = _Step(embedding, layers, settle)
    loop = Loop(step, result=lambda pieces: [int(token) for token in pieces])
    stages = [_Prompt(embedding, settle), *map(_PromptLayer, layers), _PromptEnd(), loop]
    return stages, _prompt, Pad(buckets=(_LONGEST,), fields=("ids",))


KINDS: dict[str, Callable[[torch.dtype, Settle], Parts]] = {
    "bert": _bert,
    "ragged bert": _ragged,
    "resnet": _resnet,
    "u-net": _unet,
    "early exit": _early_exit,
    "gpt": _gpt,
}
"""Each makes its stages, the function that makes its items, and their collate."""
