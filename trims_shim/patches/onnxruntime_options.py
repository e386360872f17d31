"""onnxruntime.SessionOptions: calls that set what cannot be read back are recorded.

Methods of the compiled class are wrapped in place; the class object stays. What is recorded, and
why, is in :mod:`.onnxruntime_records`. Methods that this file does not know yet are wrapped as ones
that cannot be replayed, so that objects on which they were called are not served.

One literal point for each method, because `trims info` reads them without importing onnxruntime.
"""

from __future__ import annotations

import dataclasses

from trims_shim.patches import onnxruntime_records as records
from trims_shim.patches.points import PatchPoint

__all__ = ["POINTS"]


_KNOWN: tuple[PatchPoint, ...] = (  # onnxruntime 1.19 to 1.32
    PatchPoint(
        name="onnxruntime.SessionOptions.__init__",
        target="onnxruntime.capi._pybind_state:SessionOptions.__init__",
        supported="1.19 and newer",
        wrap=records.recording_new,
    ),
    PatchPoint(
        name="onnxruntime.SessionOptions.add_session_config_entry",
        target="onnxruntime.capi._pybind_state:SessionOptions.add_session_config_entry",
        supported="1.19 and newer",
        wrap=records.recording_entry,
    ),
    PatchPoint(
        name="onnxruntime.SessionOptions.add_free_dimension_override_by_name",
        target="onnxruntime.capi._pybind_state:SessionOptions.add_free_dimension_override_by_name",
        supported="1.19 and newer",
        wrap=records.recording_dimension("name"),
    ),
    PatchPoint(
        name="onnxruntime.SessionOptions.add_free_dimension_override_by_denotation",
        target="onnxruntime.capi._pybind_state:SessionOptions.add_free_dimension_override_by_denotation",
        supported="1.19 and newer",
        wrap=records.recording_dimension("denotation"),
    ),
    PatchPoint(
        name="onnxruntime.SessionOptions.add_external_initializers",
        target="onnxruntime.capi._pybind_state:SessionOptions.add_external_initializers",
        supported="1.19 and newer",
        wrap=records.recording_other,
    ),
    PatchPoint(
        name="onnxruntime.SessionOptions.add_external_initializers_from_files_in_memory",
        target="onnxruntime.capi._pybind_state:SessionOptions.add_external_initializers_from_files_in_memory",
        supported="1.19 and newer",
        wrap=records.recording_other,
    ),
    PatchPoint(
        name="onnxruntime.SessionOptions.add_initializer",
        target="onnxruntime.capi._pybind_state:SessionOptions.add_initializer",
        supported="1.19 and newer",
        wrap=records.recording_other,
    ),
    PatchPoint(
        name="onnxruntime.SessionOptions.add_provider",
        target="onnxruntime.capi._pybind_state:SessionOptions.add_provider",
        supported="1.19 and newer",
        wrap=records.recording_other,
    ),
    PatchPoint(
        name="onnxruntime.SessionOptions.add_provider_for_devices",
        target="onnxruntime.capi._pybind_state:SessionOptions.add_provider_for_devices",
        supported="1.19 and newer",
        wrap=records.recording_other,
    ),
    PatchPoint(
        name="onnxruntime.SessionOptions.clear_ep_context_data_read_func",
        target="onnxruntime.capi._pybind_state:SessionOptions.clear_ep_context_data_read_func",
        supported="1.19 and newer",
        wrap=records.recording_other,
    ),
    PatchPoint(
        name="onnxruntime.SessionOptions.register_custom_ops_library",
        target="onnxruntime.capi._pybind_state:SessionOptions.register_custom_ops_library",
        supported="1.19 and newer",
        wrap=records.recording_other,
    ),
    PatchPoint(
        name="onnxruntime.SessionOptions.set_ep_context_data_read_func",
        target="onnxruntime.capi._pybind_state:SessionOptions.set_ep_context_data_read_func",
        supported="1.19 and newer",
        wrap=records.recording_other,
    ),
    PatchPoint(
        name="onnxruntime.SessionOptions.set_load_cancellation_flag",
        target="onnxruntime.capi._pybind_state:SessionOptions.set_load_cancellation_flag",
        supported="1.19 and newer",
        wrap=records.recording_other,
    ),
    PatchPoint(
        name="onnxruntime.SessionOptions.set_provider_selection_policy",
        target="onnxruntime.capi._pybind_state:SessionOptions.set_provider_selection_policy",
        supported="1.19 and newer",
        wrap=records.recording_other,
    ),
    PatchPoint(
        name="onnxruntime.SessionOptions.set_provider_selection_policy_delegate",
        target="onnxruntime.capi._pybind_state:SessionOptions.set_provider_selection_policy_delegate",
        supported="1.19 and newer",
        wrap=records.recording_other,
    ),
)


def _unknown() -> tuple[PatchPoint, ...]:
    """Points for methods of a newer onnxruntime."""
    known = {point.target.rpartition(".")[2] for point in _KNOWN}
    return tuple(
        dataclasses.replace(
            _KNOWN[-1],
            name=f"onnxruntime.SessionOptions.{name}",
            target=f"onnxruntime.capi._pybind_state:SessionOptions.{name}",
        )
        for name in records.changing_methods()
        if name not in known
    )


POINTS: tuple[PatchPoint, ...] = (*_KNOWN, *_unknown())
