"""Small whole models in plain torch, to be cut into stages."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["DecoderStack", "Encoder", "Recurrent", "UNet", "join_and_take"]

from trims_shim.batching.staged.flow import join, rows_of, take
from trims_shim.batching.staged.model import StagedModel
from trims_shim.batching.staged.slicing.examples import Example

WIDTH, HEADS, TOKENS = 16, 2, 50


class Layer(nn.Module):
    """Self-attention and a linear layer, each with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        rows, length, _ = x.shape
        split = [
            each.view(rows, length, HEADS, -1).transpose(1, 2) for each in self.qkv(x).chunk(3, -1)
        ]
        seen = nn.functional.scaled_dot_product_attention(*split, attn_mask=mask)
        return self.norm(x + self.drop(self.out(seen.transpose(1, 2).reshape(x.shape))))


class Encoder(nn.Module):
    """``ids``, ``mask``: ``[batch, tokens]`` -> ``[batch, width]``; like BERT."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, WIDTH)
        self.places = nn.Parameter(torch.randn(1, 32, WIDTH))
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
        rows, length = ids.shape
        x = self.tokens(ids) + self.places[:, :length]
        if mask is not None:
            # Of a stride of 0, as transformers' masks are.
            mask = mask.bool()[:, None, None, :].expand(rows, 1, length, length)
        for layer in self.layers:
            x = layer(x, mask=mask)
        return {"pooled": torch.tanh(self.head(x[:, 0])), "first": x[:, 0]}


class DecoderStack(nn.Module):
    """As older decoders: blocks return tuples, and get a mask of no batch and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(_TupleBlock() for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first = self.embed(x)
        length = x.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
        hidden = first
        for number, block in enumerate(self.blocks):
            hidden = block(hidden, causal, layer=number, first=first)[0]
        return hidden.mean(1), first


class _TupleBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def forward(self, x: Tensor, mask: Tensor, *, layer: int, first: Tensor) -> tuple[Tensor, None]:
        return self.layer(x, mask) + layer * first, None


class UNet(nn.Module):
    """``[batch, 3, height, width]`` -> ``[batch, 4, height, width]``, with skips."""

    def __init__(self) -> None:
        super().__init__()
        self.down = _convolution(3, 6)
        self.deep = _convolution(6, 8)
        self.up = _convolution(14, 6)
        self.out = _convolution(6, 4)
        self.pool = nn.MaxPool2d(2)
        self.wide = nn.Upsample(scale_factor=2)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down(x)
        deep = self.wide(self.deep(self.pool(skip)))
        return self.out(self.up(torch.cat([deep, skip], 1)))


def _convolution(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
    )


class Recurrent(nn.Module):
    """``[batch, tokens, 4]`` -> ``[batch, 3]``: has activations with the batch as second axis."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(4, 8, 2, batch_first=True)
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        _, (hidden, _) = self.cells(x)
        return self.out(torch.relu(hidden[-1]))


def join_and_take(model: StagedModel, one: Example, other: Example) -> tuple[object, object]:
    """Two batches on their way, joined and taken apart again at every border."""
    values = [model.stages[0](*one.batch()), model.stages[0](*other.batch())]
    for stage in model.stages[1:]:
        sizes = [rows_of(each) or 0 for each in values]
        assert sizes == [one.rows, other.rows]
        joined = join(values)
        values = [
            stage(take(joined, range(sizes[0]))),
            stage(take(joined, range(sizes[0], sum(sizes)))),
        ]
    return values[0], values[1]
