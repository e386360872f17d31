"""transformers' causal language models as decoders whose cache is ours."""

from __future__ import annotations

import functools
import inspect
import logging
from typing import Any

from trims_shim.batching.staged.decoding.key_values import GrowingCache
from trims_shim.errors import StagingError

__all__ = ["TransformersDecoder", "refuse_training"]

_logger = logging.getLogger(__name__)

_CACHE_NAMES = ("cache", "past_key_values")
"""The name of the models' parameter from transformers 5.24 on, and before."""
_OTHER_CACHE = frozenset(["flaubert", "xlm"])
"""Types of models whose ``cache`` is another: a dictionary of tensors."""
_ATTENTION = frozenset(["full_attention", "sliding_attention", "chunked_attention"])
"""Types of layers that need no more than keys and values of all tokens."""
_RELATIVE = frozenset(["bloom", "mpt"])
"""Types of models that take no positions, and need none: they look at distances only."""
_WINDOW_OF_CACHE = frozenset(["moshi"])
"""Types of models that leave old tokens out because their own cache forgets them, not by a mask."""
_IMAGE_IN_CACHE = frozenset(["git"])
"""Types of models that widen the mask of a step by an image, also where there is none."""
_CAUSAL_IF_PADDED = frozenset(["gemma"])
"""Types of models that are causal by their mask, which torch's attention gets only with padding."""
_OTHER_SCORES = (
    "repetition_penalty",
    "encoder_repetition_penalty",
    "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size",
    "min_length",
    "min_new_tokens",
    "bad_words_ids",
    "suppress_tokens",
    "begin_suppress_tokens",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "sequence_bias",
    "exponential_decay_length_penalty",
    "guidance_scale",
    "watermarking_config",
    "num_beams",
    "stop_strings",
)
"""Settings of a generation config that make other tokens the likeliest ones, or end answers.

Those of encoders are heeded for decoders, too, whose prompt then counts as what an encoder read.
"""
_FACTORS = frozenset(
    ["repetition_penalty", "encoder_repetition_penalty", "guidance_scale", "num_beams"]
)
"""Those that change nothing as 1. Others change nothing as 0 or empty, and tokens only as None."""


class TransformersDecoder:
    """A :class:`.generating.Decoder` of a causal language model.

    Raises StagingError for encoder-decoders, models without a cache, models that keep something
    else than keys and values of all tokens (state-space and other recurrent ones), models that
    number tokens by their columns (Bart's and others that are decoders of a pair), models whose
    mask has columns of an image (GIT), models that are causal only where something is padded
    (PaliGemma, without the types of its tokens), models that read a cache of their own (Dory, where
    only its last loop writes), and models in training mode.
    """

    def __init__(self, model: Any) -> None:
        refuse_training(model)
        name = type(model).__name__
        if model.config.is_encoder_decoder:
            raise StagingError(
                f"{name} is an encoder-decoder, which `generation` cannot run; "
                "write a StagedModel of its encoder and a Loop of your own"
            )
        layers = getattr(model.config.get_text_config(), "layer_types", None) or ()
        if getattr(model, "_is_stateful", False) or not _ATTENTION.issuperset(layers):
            raise StagingError(
                f"{name} keeps a state instead of the keys and values of all tokens, and rows of "
                "different lengths cannot be joined; batch whole generations with `batched`"
            )
        accepted = inspect.signature(model.forward).parameters
        self._cache_name = next((each for each in _CACHE_NAMES if each in accepted), "")
        if not self._cache_name or model.config.model_type in _OTHER_CACHE:
            raise StagingError(f"{name} takes no `past_key_values`; it cannot go on from a cache")
        self.longest = _longest(model.config.get_text_config())
        """How many tokens a row may have; None for no limit of ours."""
        self.is_causal = _is_causal(model)
        """Whether no token attends to later ones, so that prompts may be read in parts."""
        self._model = model
        self._takes_positions = "position_ids" in accepted
        if not self._takes_positions and model.config.model_type not in _RELATIVE:
            raise StagingError(
                f"{name} takes no `position_ids`: an answer would depend on the padding that its "
                "prompt gets beside longer ones; batch whole generations with `batched`"
            )
        if model.config.model_type in _IMAGE_IN_CACHE:
            raise StagingError(
                f"{name} widens the mask of a step by the columns of an image: an answer would "
                "depend on longer prompts beside its own; batch whole generations with `batched`"
            )
        text = model.config.get_text_config()
        if text.model_type in _CAUSAL_IF_PADDED and _is_both_ways(text):
            raise StagingError(
                f"{name} lets tokens attend to later ones only where nothing is padded: an answer "
                "would depend on longer prompts beside its own; batch whole generations with "
                "`batched`"
            )
        if getattr(text, "recurrent_kv_cache_mode", None) == "last_loop":
            raise StagingError(
                f"{name} reads keys and values from its own cache, past ours "
                "(recurrent_kv_cache_mode='last_loop'); batch whole generations with `batched`"
            )
        self._keeps = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        _warn_of_other_scores(name, model.generation_config)

    @property
    def device(self) -> Any:
        """The device on which tokens have to be."""
        return self._model.device

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The ends of an answer in the generation config."""
        ends = self._model.generation_config.eos_token_id
        if ends is None:
            return ()
        return (ends,) if isinstance(ends, int) else tuple(ends)

    def __call__(self, tokens: Any, positions: Any, mask: Any, cache: GrowingCache) -> Any:
        """See :class:`~trims_shim.batching.staged.decoding.generating.Decoder`."""
        given = {"position_ids": positions} if self._takes_positions else {}
        outputs = self._model(
            input_ids=tokens,
            attention_mask=mask.long(),
            use_cache=True,
            **{self._cache_name: _cache_class()(cache)},
            **given,
            **self._keeps,
        )
        return outputs.logits[:, -1]


def _longest(config: Any) -> int | None:
    """The length beyond which a row's answer would not be the model's for that row alone.

    Beyond it, some rotary embeddings change to suit the longest row of a batch, in place, as a
    buffer of the model (transformers.modeling_rope_utils.dynamic_rope_update). A row's answer would
    depend on the other rows of its batch, and on batches that run at the same time. Or the model's
    own cache begins to forget. Or queries are scaled by their column (Llama4TextAttention). None if
    there is no such length.
    """
    if config.model_type in _WINDOW_OF_CACHE:
        window: int = config.sliding_window
        return window
    given = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    # One set of parameters for all layers, or one for each type of layer.
    kinds = [each for each in given.values() if isinstance(each, dict)] or [given]
    limits: list[int] = []
    for each in kinds:
        kind = each.get("rope_type") or each.get("type") or ""
        if kind == "longrope":
            own = each.get("original_max_position_embeddings")
            limits.append(own or config.original_max_position_embeddings)
        elif "dynamic" in kind:
            limits.append(config.max_position_embeddings)
    # Layers without rotary embeddings scale; those in the first columns, by 1.
    if getattr(config, "attn_temperature_tuning", False) and not all(config.no_rope_layers):
        limits.append(config.floor_scale - 1)
    return min(limits, default=None)


def _warn_of_other_scores(name: str, config: Any) -> None:
    found = {each: getattr(config, each, None) for each in _OTHER_SCORES}
    asked = [f"{each}={value}" for each, value in found.items() if _is_heeded(each, value)]
    if asked:
        _logger.warning(
            "the generation config of %s has %s, which model.generate heeds and `generation` does "
            "not: its tokens will be others",
            name,
            ", ".join(asked),
        )


def _is_heeded(name: str, value: Any) -> bool:
    if name.endswith("_token_id"):
        return value is not None
    return bool(value) and not (value == 1 and name in _FACTORS)


def _is_causal(model: Any) -> bool:
    """False for an encoder, such as BertLMHeadModel's without ``is_decoder=True``.

    Or for a decoder whose configuration makes it one: ``is_causal`` of all models, by their masks,
    or ``use_bidirectional_attention`` of Gemma's.
    """
    config = model.config.get_text_config()
    if _is_both_ways(config) or getattr(config, "is_causal", None) is False:
        return False

    def said(name: str) -> set[Any]:
        return {getattr(each, name) for each in model.modules() if hasattr(each, name)}

    # Encoders of other inputs, such as images, do not read the tokens.
    return True in said("is_causal") or said("is_decoder") != {False}


def _is_both_ways(config: Any) -> bool:
    return getattr(config, "use_bidirectional_attention", None) in (True, "all")


def refuse_training(model: Any) -> None:
    """Raise StagingError in training mode: dropout would make answers depend on chance."""
    if getattr(model, "training", False):
        raise StagingError(f"{type(model).__name__} is in training mode; call its eval() first")


@functools.cache
def _cache_class() -> Any:
    from transformers.cache_utils import Cache, DynamicLayer

    class Forwarding(Cache):  # type: ignore[misc]
        """Keeps every token; models with sliding windows leave old ones out by a mask."""

        def __init__(self, cache: GrowingCache) -> None:
            super().__init__(layer_class_to_replicate=DynamicLayer)
            self._cache = cache

        def update(
            self, key_states: Any, value_states: Any, layer_idx: int, *_: Any, **__: Any
        ) -> tuple[Any, Any]:
            return self._cache.update(key_states, value_states, layer_idx)

        def get_seq_length(self, layer_idx: int = 0) -> int:
            return self._cache.length_of(layer_idx)

        def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
            return self._cache.length_of(layer_idx) + query_length, 0

    return Forwarding
