"""diffusers' textual inversion: the encoder's embeddings become private before tokens are added.

``load_textual_inversion`` writes into them; they are new only where there was no room for the
tokens. It looks at the encoder it is given, or its own, here first. Source: diffusers 0.42,
``TextualInversionLoaderMixin`` in diffusers/loaders/textual_inversion.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from trims_shim.patches.points import PatchPoint
from trims_shim.patches.torch_device import DevicePoint
from trims_shim.patches.torch_unshare import unshare_module

__all__ = ["POINTS"]


def _wrap(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _check_text_inv_inputs(self: Any, tokenizer: Any, text_encoder: Any, *rest: Any) -> Any:
        result = original(self, tokenizer, text_encoder, *rest)  # raises where one is missing
        unshare_module(text_encoder.get_input_embeddings(), "inversion")
        return result

    return _check_text_inv_inputs


POINTS: tuple[PatchPoint, ...] = (
    DevicePoint(
        "diffusers.loaders.textual_inversion:TextualInversionLoaderMixin._check_text_inv_inputs",
        "0.42",
        _wrap,
    ),
)
