"""Generation token by token as a staged model: prefill, and a loop of decoder steps.

Callers give prompts, and get the tokens that follow, the likeliest or drawn (:mod:`.sampling`). A
request joins the loop between two steps, after the stages before it have read its prompt (the
prefill), and leaves with its last token. So a short answer does not wait for a long one, and a new
request waits for one step instead of for all other answers.

A model is here a :class:`Decoder`: :class:`.transformers_decoder.TransformersDecoder` makes one of
transformers' causal language models; write your own decoder as one. Rows end at the same column,
prompts are padded in front (:mod:`.key_values`). Nested tensors would save that padding, but few
attention kernels take them together with a cache.

Source of the scheduling: iteration-level scheduling of Orca (OSDI'22), here with meta-operations of
DVABatch (ATC'22).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from trims_shim.batching.staged.activations import EarlyExit, Stepped
from trims_shim.batching.staged.decoding.key_values import GrowingCache, KeyValues, gather
from trims_shim.batching.staged.decoding.prompts import Prompts, prompts_of
from trims_shim.batching.staged.decoding.sampling import Chance, Sampling, chosen
from trims_shim.batching.staged.decoding.transformers_decoder import (
    TransformersDecoder,
    refuse_training,
)
from trims_shim.batching.staged.model import Loop, Stage, StagedModel
from trims_shim.batching.torch_settings import torch_in_this_thread
from trims_shim.checks import whole
from trims_shim.diagnostics import pass_on
from trims_shim.errors import StagingError

__all__ = ["Decoder", "generation"]


class Decoder(Protocol):
    """A causal language model, as :func:`generation` calls it."""

    def __call__(self, tokens: Any, positions: Any, mask: Any, cache: GrowingCache) -> Any:
        """The scores of the token after the last of ``tokens``, ``[batch, vocabulary]``.

        ``tokens`` and their ``positions`` are ``[batch, tokens]`` int64. ``mask`` is ``[batch, past
        + tokens]`` boolean, false for padding, which no token may attend to; nor may a token attend
        to later ones. The results at padding do not matter. Each layer gives its new keys and
        values to ``cache.update(keys, values, layer)`` and attends to what that returns.
        """


@dataclass(frozen=True, slots=True)
class _Decoding:
    """The activation between two steps."""

    tokens: Any
    """``[batch]``: chosen last, and not read yet."""
    lengths: Any
    """``[batch]``: how many tokens were read."""
    budgets: Any
    """``[batch]``: how many more may be generated."""
    is_new: Any
    """``[batch]``: whether the first token was not handed out yet."""
    chances: list[Chance | None]
    """How each row draws its tokens."""
    past: KeyValues


def generation(
    model: Any,
    *,
    max_new_tokens: int,
    eos_token_id: int | Collection[int] | None = None,
    pad_token_id: int = 0,
    prefill_stages: int = 1,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    name: str = "",
) -> StagedModel:
    """A causal language model as a staged model that generates.

    ``model`` is one of transformers, or a :class:`Decoder`. ``eos_token_id``: one or several tokens
    that end an answer, and are its last; None for those of the model's generation config, and
    ``()`` for none. ``pad_token_id`` is any token; it is never attended to.

    An item is a prompt: a tensor ``[tokens]``, a list of tokens, or a mapping of ``input_ids`` and,
    if wanted, ``attention_mask`` and a smaller ``max_new_tokens``. Prompts are collated as a list
    (``collate="list"``), or padded in any way (``collate=Pad(...)``). The answer is a tensor of the
    new tokens, on the model's device; callers that stream get one tensor of the first two tokens,
    and then one of each further token.

    Tokens are the likeliest ones. With a ``temperature`` above 0 they are drawn from the ``top_k``
    likeliest (0: all), and of these from the likeliest that together have ``top_p`` of the
    probability. A mapping may have its own values of these, and a ``seed``. With a seed its answer
    is that of ``torch.manual_seed(seed)`` and ``model.generate(do_sample=True, ...)``, whatever
    else is in the batch.

    With several ``prefill_stages`` prompts are read in so many parts, and prompts that come a bit
    later may join them between two parts. With a second device (``devices=2``) other requests take
    their steps meanwhile; with one device prompts go first.

    Raises TypeError for tokens that are no numbers, ValueError for counts below 1 and impossible
    sampling, and StagingError for models that cannot be run so: encoder-decoders, those without a
    cache of keys and values, modules in training mode, and with several ``prefill_stages`` those
    whose tokens attend to later ones.
    """
    whole("max_new_tokens", max_new_tokens)
    whole("prefill_stages", prefill_stages)
    pad_token_id = _token("pad_token_id", pad_token_id)
    decoder, ends = _decoder_of(model)
    if prefill_stages > 1 and not getattr(decoder, "is_causal", True):
        raise StagingError(
            f"{type(model).__name__} lets tokens attend to later ones, so its prompts cannot be "
            "read in parts; make it with is_decoder=True, or without prefill_stages"
        )
    if eos_token_id is not None:
        found = eos_token_id if isinstance(eos_token_id, Iterable) else (eos_token_id,)
        ends = tuple(_token("eos_token_id", each) for each in found)
    sampling = Sampling(temperature, top_k, top_p)
    generator = _Generator(decoder, ends, max_new_tokens, pad_token_id, sampling)
    loop = Loop(generator.step, join=_join, take=_take, result=_answer)
    stages: list[Stage] = [*generator.prefill(prefill_stages), loop]
    name = name or getattr(model, "__name__", type(model).__name__)
    return StagedModel(stages, name=name)


def _token(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}; it has to be the number of a token") from None


def _decoder_of(model: Any) -> tuple[Decoder, tuple[int, ...]]:
    if hasattr(model, "generation_config"):
        decoder = TransformersDecoder(model)
        return decoder, decoder.eos_token_ids
    if not callable(model):
        raise TypeError(f"a {type(model).__name__} is no decoder: it is not callable")
    refuse_training(model)
    return model, ()


@dataclass(frozen=True)
class _Generator:
    """Makes the stages, and is what they share."""

    decoder: Decoder
    ends: tuple[int, ...]
    max_new_tokens: int
    pad_token_id: int
    sampling: Sampling

    def prefill(self, count: int) -> list[Stage]:
        """The stages before the loop."""
        reading = [functools.partial(self._read, part=part, parts=count) for part in range(count)]
        return [functools.partial(self._begin, read=reading[0]), *reading[1:]]

    def _begin(self, batch: Any, *, read: Stage) -> Any:
        """The first stage: takes a batch as it was collated."""
        prompts = prompts_of(
            batch,
            max_new_tokens=self.max_new_tokens,
            pad_token_id=self.pad_token_id,
            device=getattr(self.decoder, "device", None),
            sampling=self.sampling,
        )
        longest = getattr(self.decoder, "longest", None)
        # The last token is not read.
        if longest is not None and bool((prompts.lengths + prompts.budgets - 1 > longest).any()):
            raise ValueError(
                f"a prompt and its new tokens are more than {longest} together, and beyond that "
                "the attention of this model depends on the longest in the batch, or its own cache "
                "forgets; ask for fewer max_new_tokens, or call model.generate for it"
            )
        return read(prompts)

    def _read(self, prompts: Prompts, *, part: int, parts: int) -> Any:
        """Read one part of the columns; after the last part choose the first token."""
        torch = torch_in_this_thread()
        columns = prompts.tokens.shape[1]
        start, end = columns * part // parts, columns * (part + 1) // parts
        if start == end:
            return prompts
        with torch.inference_mode():
            numbers = torch.arange(end, device=prompts.lengths.device)
            positions = numbers - (columns - prompts.lengths)[:, None]
            is_own = positions >= 0
            cache = GrowingCache(prompts.past, padding=~is_own[:, start:])
            scores = self.decoder(
                prompts.tokens[:, start:end], positions[:, start:].clamp(min=0), is_own, cache
            )
            if end < columns:
                return replace(prompts, past=cache.grown())
            return self._first(prompts, chosen(scores, prompts.chances), cache.grown())

    def _first(self, prompts: Prompts, tokens: Any, past: KeyValues) -> Any:
        import torch

        budgets = prompts.budgets - 1
        is_last = self._is_last(tokens, budgets)
        is_new = torch.ones_like(is_last)
        state = _Decoding(tokens, prompts.lengths, budgets, is_new, prompts.chances, past)
        finished: list[bool] = is_last.tolist()
        if not any(finished):
            return state
        going = [row for row, is_finished in enumerate(finished) if not is_finished]
        with torch.inference_mode(mode=False):
            results = list(tokens[is_last].split(1))
        return EarlyExit(finished, results, _take(state, going) if going else None)

    def step(self, state: _Decoding) -> Stepped:
        """One more token for each row, or the error that is raised for it alone."""
        import torch

        found = _apart(functools.partial(self._next, state), list(range(len(state.chances))))
        failed = {rows[0]: each for rows, each in found if isinstance(each, Exception)}
        if len(failed) == len(found):
            raise found[0][1]
        with torch.inference_mode():
            scores, past = found[0][1] if len(found) == 1 else _together(found, state.past)
            tokens, budgets = chosen(scores, state.chances, failed), state.budgets - 1
            is_last = self._is_last(tokens, budgets)
            is_old = torch.zeros_like(is_last)
            after = _Decoding(tokens, state.lengths + 1, budgets, is_old, state.chances, past)
            # One copy to the host for both.
            finished, is_new = torch.stack([is_last, state.is_new]).tolist()
        two = torch.stack([state.tokens, tokens], 1)  # no inference mode: callers may write to them
        pieces = [both if first else both[1:] for both, first in zip(two, is_new, strict=True)]
        for row, error in failed.items():
            pieces[row], finished[row] = error, True
        return Stepped(after, pieces, finished)

    def _next(self, state: _Decoding, rows: list[int]) -> tuple[Any, KeyValues]:
        """The scores of the next token of these rows, and their keys and values so far.

        If these are not all rows, the last one is repeated: some decoders take one batch size only.
        """
        torch = torch_in_this_thread()
        state = _take(state, rows + rows[-1:] * (len(state.chances) - len(rows)))
        with torch.inference_mode():
            columns = state.past.length + 1
            numbers = torch.arange(columns, device=state.lengths.device)
            cache = GrowingCache(state.past)
            scores = self.decoder(
                state.tokens[:, None],
                state.lengths[:, None],
                numbers >= (columns - state.lengths - 1)[:, None],
                cache,
            )
            return scores, cache.grown()

    def _is_last(self, tokens: Any, budgets: Any) -> Any:
        is_last = budgets <= 0
        for end in self.ends:  # few, and a tensor of them would be copied to the device
            is_last = is_last | (tokens == end)
        return is_last


_Found = tuple[list[int], Any]
"""Rows, and what the decoder returned for them, or raised for a single one."""


def _apart(run: Callable[[list[int]], Any], rows: list[int]) -> list[_Found]:
    """Run all rows at once; where that fails, halves, until a row that fails is alone.

    A row fails, for example, at the end of the model's positions. Otherwise its whole batch would
    begin anew, which requests that have streamed some of their tokens cannot.
    """
    try:
        return [(rows, run(rows))]
    except Exception as error:
        pass_on(error)  # a time limit of the thread is no fault of a row
        if len(rows) == 1:
            return [(rows, error)]
    middle = len(rows) // 2
    return _apart(run, rows[:middle]) + _apart(run, rows[middle:])


def _together(found: Sequence[_Found], before: KeyValues) -> tuple[Any, KeyValues]:
    """The scores, and keys and values, of all rows; failed rows keep their old keys and values."""
    import torch

    (some, _), *_ = (each for _, each in found if not isinstance(each, Exception))
    scores, pasts = [], []
    for rows, each in found:
        if isinstance(each, Exception):
            scores.append(torch.zeros_like(some[:1]))
            pasts.append((before, torch.tensor(rows, device=some.device)))
        else:
            scores.append(each[0][: len(rows)])
            pasts.append((each[1], torch.arange(len(rows), device=some.device)))
    return torch.cat(scores), gather(pasts, before.length + 1)


def _join(states: Sequence[_Decoding]) -> _Decoding:
    import torch

    length = max(state.past.length for state in states)
    with torch.inference_mode():
        return _Decoding(
            tokens=torch.cat([state.tokens for state in states]),
            lengths=torch.cat([state.lengths for state in states]),
            budgets=torch.cat([state.budgets for state in states]),
            is_new=torch.cat([state.is_new for state in states]),
            chances=[chance for state in states for chance in state.chances],
            past=gather([(state.past, None) for state in states], length),
        )


def _take(state: _Decoding, rows: Sequence[int]) -> _Decoding:
    import torch

    if list(rows) == list(range(len(state.tokens))):
        return state
    with torch.inference_mode():
        numbers = torch.tensor(rows, device=state.tokens.device)
        lengths = state.lengths[numbers]
        return _Decoding(
            tokens=state.tokens[numbers],
            lengths=lengths,
            budgets=state.budgets[numbers],
            is_new=state.is_new[numbers],
            chances=[state.chances[row] for row in rows],
            past=gather([(state.past, numbers)], int(lengths.max())),
        )


def _answer(pieces: list[Any]) -> Any:
    import torch

    return torch.cat(pieces)
