"""The batches of prompts that a generating model is given, in one form: padded in front."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from trims_shim.batching.padding import Padded

__all__ = ["PromptBatch", "prompts_of"]


class PromptBatch(NamedTuple):
    """``[batch, columns]``, as many columns as the longest has tokens."""

    tokens: Any
    lengths: Any
    """``[batch]``"""
    budgets: Any
    """``[batch]``: how many tokens may be generated."""


def prompts_of(batch: Any, *, max_new_tokens: int, pad_token_id: int, device: Any) -> PromptBatch:
    """What a collate has made of prompts: a list of them, or padded, a mapping, or a tensor.

    Raises ValueError for a prompt without tokens, or that asks for none.
    """
    import torch

    if isinstance(batch, list):
        tokens, lengths, asked = _listed(batch, pad_token_id, device)
    else:
        tokens, lengths, asked = _padded(batch, device)
    if asked is None:
        budgets = torch.full_like(lengths, max_new_tokens)
    else:
        budgets = asked.clamp(max=max_new_tokens)
    if not bool(((lengths > 0) & (budgets > 0)).all()):
        raise ValueError("a prompt needs at least one token, and has to ask for at least one")
    return PromptBatch(tokens[:, tokens.shape[1] - int(lengths.max()) :], lengths, budgets)


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
    # Those that do not ask get as many as there may be.
    most = torch.iinfo(torch.int64).max
    asked = [most if asked is None else asked for _, asked in rows]
    return padded, lengths, torch.tensor(asked, device=device)


def _row(prompt: Any, device: Any) -> tuple[Any, int | None]:
    if not isinstance(prompt, Mapping):
        return _tensor(prompt, device), None
    tokens, mask, asked = _parts(prompt)
    tokens = _tensor(tokens, device)
    if mask is not None:
        tokens = tokens[_tensor(mask, device) != 0]
    return tokens, None if asked is None else int(asked)


def _padded(batch: Any, device: Any) -> tuple[Any, Any, Any]:
    """Padded anywhere -> padded in front."""
    import torch

    tokens, mask, asked = _parts(batch)
    tokens = _tensor(tokens, device)
    if mask is None:
        lengths = torch.full((len(tokens),), tokens.shape[1], device=device)
    else:
        mask = _tensor(mask, device) != 0
        lengths = mask.sum(1)
        # Stable: padding first, the rest in its order.
        tokens = tokens.gather(1, mask.to(torch.int8).argsort(dim=1, stable=True))
    return tokens, lengths, None if asked is None else _tensor(asked, device).reshape(-1)


def _parts(batch: Any) -> tuple[Any, Any, Any]:
    if isinstance(batch, Padded):
        return batch.values, batch.mask, None
    if isinstance(batch, Mapping):
        return batch["input_ids"], batch.get("attention_mask"), batch.get("max_new_tokens")
    return batch, None, None


def _tensor(values: Any, device: Any) -> Any:
    import torch

    return torch.as_tensor(values, dtype=torch.int64, device=device)
