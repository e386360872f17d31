"""diffusers' Shap-E: the renderer's network becomes private before a result is decoded.

Each decoding writes the weights that the latents stand for into that network. Source: diffusers
0.42, ``ShapERenderer`` in diffusers/pipelines/shap_e/renderer.py.
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
    def decode(self: Any, *args: Any, **kwargs: Any) -> Any:
        unshare_module(self.mlp, "decode")
        return original(self, *args, **kwargs)

    return decode


POINTS: tuple[PatchPoint, ...] = (
    DevicePoint("diffusers.pipelines.shap_e.renderer:ShapERenderer.decode_to_image", "0.42", _wrap),
    DevicePoint("diffusers.pipelines.shap_e.renderer:ShapERenderer.decode_to_mesh", "0.42", _wrap),
)
