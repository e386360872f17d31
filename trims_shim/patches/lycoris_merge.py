"""lycoris: merging an adapter copies into the base weight in place, so it becomes private first.

``merge_to``, ``onfly_merge`` and ``onfly_restore`` of a network call those of its modules. The
adapters of full matrices add the base weight to their own when they are applied. Source:
lycoris-lora 4.1.3, ``LycorisBaseModule`` in lycoris/modules/base.py, ``FullModule`` in full.py.
"""

from __future__ import annotations

from trims_shim.patches.points import PatchPoint
from trims_shim.patches.torch_device import DevicePoint
from trims_shim.patches.torch_unshare import writing_module

__all__ = ["POINTS"]


_wrap = writing_module("merge", lambda adapter: adapter.org_module[0])
_wrap_apply = writing_module("merge")

POINTS: tuple[PatchPoint, ...] = (
    DevicePoint("lycoris.modules.base:LycorisBaseModule.merge_to", "4.1.3", _wrap),
    DevicePoint("lycoris.modules.base:LycorisBaseModule.onfly_merge", "4.1.3", _wrap),
    DevicePoint("lycoris.modules.base:LycorisBaseModule.onfly_restore", "4.1.3", _wrap),
    DevicePoint("lycoris.modules.full:FullModule.apply_to", "4.1.3", _wrap_apply),
)
