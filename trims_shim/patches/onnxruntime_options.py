"""onnxruntime.SessionOptions: calls that set what cannot be read back are recorded.

Methods of the compiled class are wrapped in place; the class object stays. What is recorded, and
why, is in :mod:`.onnxruntime_records`. All methods without a recorder of their own are wrapped as
ones that cannot be replayed, so that objects on which they were called are not served. Which there
are depends on the version of onnxruntime.
"""

from __future__ import annotations

from trims_shim.patches import onnxruntime_records as records
from trims_shim.patches.points import PatchPoint

__all__ = ["POINTS"]


_RECORDED: tuple[PatchPoint, ...] = (
    PatchPoint(
        "onnxruntime.capi._pybind_state:SessionOptions.__init__", "1.19+", records.recording_new
    ),
    PatchPoint(
        "onnxruntime.capi._pybind_state:SessionOptions.add_session_config_entry",
        "1.19+",
        records.recording_entry,
    ),
    PatchPoint(
        "onnxruntime.capi._pybind_state:SessionOptions.add_free_dimension_override_by_name",
        "1.19+",
        records.recording_dimension("name"),
    ),
    PatchPoint(
        "onnxruntime.capi._pybind_state:SessionOptions.add_free_dimension_override_by_denotation",
        "1.19+",
        records.recording_dimension("denotation"),
    ),
)


def _others() -> tuple[PatchPoint, ...]:
    recorded = {point.target.rpartition(".")[2] for point in _RECORDED}
    return tuple(
        _RECORDED[0]._replace(
            target=f"onnxruntime.capi._pybind_state:SessionOptions.{name}",
            wrap=records.recording_other,
        )
        for name in records.changing_methods()
        if name not in recorded
    )


POINTS: tuple[PatchPoint, ...] = (*_RECORDED, *_others())
