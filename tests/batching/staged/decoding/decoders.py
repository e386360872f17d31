"""Small causal language models: one written by hand, and what it answers without a cache."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from trims_shim.batching.staged.decoding.key_values import NOTHING_SEEN, GrowingCache

__all__ = ["LONGEST", "VOCABULARY", "HandWritten", "without_cache"]

VOCABULARY = 23
LONGEST = 64
_WIDTH, _HEADS, _LAYERS = 16, 2, 2


class HandWritten(nn.Module):
    """A decoder as a user of :func:`generation` writes one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.tokens = nn.Embedding(VOCABULARY, _WIDTH)
        self.positions = nn.Embedding(LONGEST, _WIDTH)
        self.mixed = nn.ModuleList(nn.Linear(_WIDTH, 3 * _WIDTH) for _ in range(_LAYERS))
        self.scores = nn.Linear(_WIDTH, VOCABULARY)
        self.double().eval()
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.6)

    @property
    def device(self) -> torch.device:
        """Where prompts are to be."""
        return self.scores.weight.device

    def forward(
        self, tokens: Tensor, positions: Tensor, mask: Tensor, cache: GrowingCache
    ) -> Tensor:
        """See Decoder."""
        x = self.tokens(tokens) + self.positions(positions)
        seen = _seen(tokens.shape[1], mask)
        for number, layer in enumerate(self.mixed):
            queries, keys, values = (_heads(each) for each in layer(x).chunk(3, dim=-1))
            keys, values = cache.update(keys, values, number)
            weights = queries @ keys.transpose(-1, -2) / math.sqrt(keys.shape[-1])
            # NaN for padding, which attends to nothing.
            weights = weights.masked_fill(~seen, -math.inf).softmax(-1)
            x = x + (weights @ values).transpose(1, 2).flatten(2)
        scores: Tensor = self.scores(x[:, -1])
        return scores


def _seen(count: int, mask: Tensor) -> Tensor:
    """``[batch, 1, tokens, past + tokens]``: what each token may attend to."""
    columns = mask.shape[1]
    is_before = mask.new_ones(count, columns).tril(columns - count)
    return (mask[:, None, :] & is_before)[:, None]


def _heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (_HEADS, -1)).transpose(1, 2)


def without_cache(
    decoder: Any, prompt: Tensor, count: int, ends: tuple[int, ...] = ()
) -> list[int]:
    """Greedy, each token from all those before it, by itself."""
    tokens = prompt.tolist()
    for _ in range(count):
        row = torch.tensor([tokens])
        positions = torch.arange(len(tokens))[None]
        mask = torch.ones_like(row, dtype=torch.bool)
        with torch.inference_mode():
            scores = decoder(row, positions, mask, GrowingCache(NOTHING_SEEN))
        tokens.append(int(scores.argmax()))
        if tokens[-1] in ends:
            break
    return tokens[len(prompt) :]
