"""Bring the batches of prompts for a generating model into one form: padded in front."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trims_shim.batching.collating.padding import Padded
from trims_shim.batching.staged.decoding.key_values import NOTHING_SEEN, KeyValues
from trims_shim.batching.staged.decoding.sampling import GREEDY, Chance, Sampling, chance_of
from trims_shim.suggestions import did_you_mean

__all__ = ["Prompts", "prompts_of"]


_WISHES = ("temperature", "top_k", "top_p", "seed")
_KEYS = ("input_ids", "attention_mask", "max_new_tokens", *_WISHES)


@dataclass(frozen=True, slots=True)
class Prompts:
    """The activation between two stages of the prefill."""

    tokens: Any
    """``[batch, columns]``, padded in front: as many columns as the longest prompt has tokens."""
    lengths: Any
    """``[batch]``, of the prompts."""
    budgets: Any
    """``[batch]``: how many tokens may be generated."""
    chances: list[Chance | None]
    """How the tokens of each are drawn; None for the likeliest."""
    past: KeyValues = NOTHING_SEEN


def prompts_of(
    batch: Any,
    *,
    max_new_tokens: int,
    pad_token_id: int,
    device: Any,
    sampling: Sampling = GREEDY,
) -> Prompts:
    """Convert collated prompts: a list of them, a :class:`Padded`, a mapping, or a tensor.

    ``sampling`` is for prompts that do not ask for their own. Raises ValueError for a prompt that
    has no tokens, has more than one axis, asks for no new tokens, or has a key of another name or
    a mask of another shape, and for impossible sampling; TypeError for tokens, or a number of
    new ones, that are no whole numbers.
    """
    import torch

    if isinstance(batch, list):
        tokens, lengths, asked = _listed(batch, pad_token_id, device)
        wishes = [_wishes(each) for each in batch]
    else:
        tokens, lengths, asked = _padded(batch, device)
        wishes = _wishes_of_rows(batch, len(lengths))
    chances = [chance_of(each, sampling, device) for each in wishes]
    if asked is None:
        budgets = torch.full_like(lengths, max_new_tokens)
    else:
        budgets = asked.clamp(max=max_new_tokens)
    if not bool(((lengths > 0) & (budgets > 0)).all()):
        raise ValueError("a prompt needs at least one token, and has to ask for at least one")
    tokens = tokens[:, tokens.shape[1] - int(lengths.max()) :]
    return Prompts(tokens, lengths, budgets, chances)


def _listed(batch: list[Any], pad_token_id: int, device: Any) -> tuple[Any, Any, Any]:
    import torch

    rows = [_row(each, device) for each in batch]
    lengths = torch.tensor([len(tokens) for tokens, _ in rows], device=device)
    columns = int(lengths.max())
    padded = torch.full((len(rows), columns), pad_token_id, device=device)
    for row, (tokens, _) in enumerate(rows):
        padded[row, columns - len(tokens) :] = tokens
    if all(asked is None for _, asked in rows):
        return padded, lengths, None
    # Prompts that do not ask get as many as there may be.
    most = torch.iinfo(torch.int64).max
    asked = [most if asked is None else asked for _, asked in rows]
    return padded, lengths, torch.tensor(asked, device=device)


def _row(prompt: Any, device: Any) -> tuple[Any, int | None]:
    if not isinstance(prompt, Mapping):
        return _tokens(prompt, device, axes=1), None
    tokens, mask, asked = _parts(prompt)
    tokens = _tokens(tokens, device, axes=1)
    if mask is not None:
        tokens = tokens[_mask(mask, tokens)]
    return tokens, None if asked is None else int(_budgets(asked, "cpu"))


def _padded(batch: Any, device: Any) -> tuple[Any, Any, Any]:
    """Padded anywhere -> padded in front."""
    import torch

    tokens, mask, asked = _parts(batch)
    tokens = _tokens(tokens, device, axes=2)
    if mask is None:
        lengths = torch.full((len(tokens),), tokens.shape[1], device=device)
    else:
        mask = _mask(mask, tokens)
        lengths = mask.sum(1)
        # Stable: padding first, the rest in its order.
        tokens = tokens.gather(1, mask.to(torch.int8).argsort(dim=1, stable=True))
    return tokens, lengths, None if asked is None else _budgets(asked, device).reshape(-1)


def _wishes(prompt: Any) -> dict[str, Any]:
    """What a prompt says of sampling, as numbers."""
    if not isinstance(prompt, Mapping):
        return {}
    return {name: _number(prompt[name]) for name in _WISHES if prompt.get(name) is not None}


def _wishes_of_rows(batch: Any, count: int) -> list[dict[str, Any]]:
    if not isinstance(batch, Mapping):
        return [{}] * count
    columns = {name: batch[name] for name in _WISHES if batch.get(name) is not None}
    return [
        _wishes({name: values[row] for name, values in columns.items()}) for row in range(count)
    ]


def _number(value: Any) -> Any:
    """A plain number, also of an array without axes."""
    return value.item() if hasattr(value, "item") else value


def _parts(batch: Any) -> tuple[Any, Any, Any]:
    if isinstance(batch, Padded):
        return batch.values, batch.mask, None
    if isinstance(batch, Mapping):
        if "input_ids" not in batch:
            raise ValueError(f"a prompt has to have input_ids, and this one has {list(batch)}")
        for key in batch:
            if key not in _KEYS:
                meant = did_you_mean(str(key), _KEYS)
                raise ValueError(f"a prompt may have {', '.join(_KEYS)}, and no {key!r}{meant}")
        return batch["input_ids"], batch.get("attention_mask"), batch.get("max_new_tokens")
    return batch, None, None


def _budgets(values: Any, device: Any) -> Any:
    import torch

    found = torch.as_tensor(values, device=device)
    if found.is_floating_point():
        raise TypeError(f"max_new_tokens is {values!r}; it has to be a whole number")
    return found.to(torch.int64)


def _mask(values: Any, tokens: Any) -> Any:
    import torch

    found = torch.as_tensor(values, dtype=torch.int64, device=tokens.device) != 0
    if found.shape != tokens.shape:
        raise ValueError(
            f"attention_mask is {list(found.shape)}, and input_ids is {list(tokens.shape)}"
        )
    return found


def _tokens(values: Any, device: Any, *, axes: int) -> Any:
    import torch

    if isinstance(values, str):
        raise TypeError("a prompt is the ids of tokens, not text; a tokenizer makes them")
    found = torch.as_tensor(values, device=device)
    if found.dim() != axes:
        raise ValueError(
            f"a prompt is a row of token ids, and here is a tensor {list(found.shape)}; of what a "
            "tokenizer returns as [1, tokens], give the row"
        )
    if found.is_floating_point() and found.numel():  # an empty list becomes floating-point
        raise TypeError(f"token ids are whole numbers, and here are some of {found.dtype}")
    return found.to(torch.int64)
