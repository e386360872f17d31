"""diffusers' Shap-E: the renderer's network becomes private before a result is decoded.

Each decoding writes the weights that the latents stand for into that network. Source: diffusers
0.42, ``ShapERenderer`` in diffusers/pipelines/shap_e/renderer.py.
"""

from __future__ import annotations

from trims_shim.patches.points import PatchPoint
from trims_shim.patches.torch_device import DevicePoint
from trims_shim.patches.torch_unshare import writing_module

__all__ = ["POINTS"]


_wrap = writing_module("decode", lambda renderer: renderer.mlp)

POINTS: tuple[PatchPoint, ...] = (
    DevicePoint("diffusers.pipelines.shap_e.renderer:ShapERenderer.decode_to_image", "0.42", _wrap),
    DevicePoint("diffusers.pipelines.shap_e.renderer:ShapERenderer.decode_to_mesh", "0.42", _wrap),
)
