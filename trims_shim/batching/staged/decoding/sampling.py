"""Which token comes next: the likeliest, or one that is drawn, row by row.

Scores are processed as by transformers' ``TemperatureLogitsWarper``, ``TopKLogitsWarper`` and
``TopPLogitsWarper``, in their order, and drawn from with ``torch.multinomial``. Each row has random
numbers of its own, so what it draws does not depend on the other rows of its step: with a seed, it
is what ``torch.manual_seed(seed)`` and ``model.generate(do_sample=True)`` draw for it alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trims_shim.diagnostics import pass_on

__all__ = ["GREEDY", "Chance", "Sampling", "chance_of", "chosen", "processed"]

_LARGEST_SEED = (1 << 63) - 1
_FIELDS = ("temperature", "top_k", "top_p")


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. Raises ValueError for impossible values."""

    temperature: float = 0.0
    """Scores are divided by it; 0: always the likeliest token."""
    top_k: int = 0
    """A token is drawn from so many of the likeliest; 0: from all."""
    top_p: float = 1.0
    """It is drawn from the likeliest that together have this probability; 1: from all."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}; it is a number from 0 on")
        if self.top_k < 0 or self.top_k != int(self.top_k):
            raise ValueError(f"top_k is {self.top_k}; it is a whole number from 0 on")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it is a share above 0, up to 1")


GREEDY = Sampling()


class Chance:
    """How one row draws, and from which random numbers. Changes with each draw."""

    __slots__ = ("generator", "sampling")

    def __init__(self, sampling: Sampling, generator: Any) -> None:
        self.sampling = sampling
        self.generator = generator


def chance_of(asked: Mapping[str, Any], default: Sampling, device: Any) -> Chance | None:
    """The chance of a prompt that asks for this; None for one that takes the likeliest tokens.

    ``asked`` has any of ``temperature``, ``top_k``, ``top_p`` and ``seed``, as numbers. Without a
    seed, one is drawn from torch's own generator. Raises ValueError.
    """
    import torch

    own = {name: asked[name] for name in _FIELDS if name in asked}
    sampling = default
    if own:
        known = {name: getattr(default, name) for name in _FIELDS}
        sampling = Sampling(**(known | own))
    if not sampling.temperature:
        if own and "temperature" not in own:
            raise ValueError(f"a prompt asks for {', '.join(own)}, and for no temperature")
        return None
    seed = asked.get("seed")
    if seed is None:
        seed = int(torch.randint(_LARGEST_SEED, ()))
    generator = torch.Generator(device="cpu" if device is None else device)
    return Chance(sampling, generator.manual_seed(int(seed)))


def chosen(
    scores: Any, chances: Sequence[Chance | None], failed: dict[int, Exception] | None = None
) -> Any:
    """The next token of each row, ``[batch]``, from scores ``[batch, vocabulary]``.

    A row of scores that are no numbers, as of a model that overflows, cannot be drawn from: torch
    raises RuntimeError. With ``failed``, the errors are put there by row instead.
    """
    import torch

    tokens = scores.argmax(-1)
    groups: dict[Sampling, list[int]] = {}
    for row, chance in enumerate(chances):
        if chance is not None:
            groups.setdefault(chance.sampling, []).append(row)
    for sampling, rows in groups.items():
        likely = processed(scores[rows].float(), sampling).softmax(-1)
        # A row that was repeated to fill a batch up has the same scores, and draws once.
        drawn: dict[Chance | None, Any] = {}
        for row, of_row in zip(rows, likely.split(1), strict=True):
            chance = chances[row]
            if chance not in drawn:
                assert chance is not None
                try:
                    drawn[chance] = torch.multinomial(of_row, 1, generator=chance.generator)[0, 0]
                except Exception as error:
                    pass_on(error)
                    if failed is None:
                        raise
                    failed[row] = error
                    continue
            tokens[row] = drawn[chance]
    return tokens


def processed(scores: Any, sampling: Sampling) -> Any:
    """Scores ``[batch, vocabulary]`` of tokens that may be drawn; -inf for all others."""
    scores = scores / sampling.temperature
    if sampling.top_k:
        count = min(int(sampling.top_k), scores.shape[-1])
        scores = scores.masked_fill(scores < scores.topk(count)[0][..., -1:], float("-inf"))
    if sampling.top_p < 1:
        ascending, order = scores.sort(descending=False)
        is_out = ascending.softmax(-1).cumsum(-1) <= 1 - sampling.top_p
        is_out[..., -1:] = False
        scores = scores.masked_fill(is_out.scatter(1, order, is_out), float("-inf"))
    return scores
