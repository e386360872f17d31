"""What a program can see of an onnxruntime session, as plain data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import onnx_kinds
import onnxruntime
from onnx_models import Sample, save

from .registry import Work, attempt

__all__ = ["CPU", "described", "made", "model_file", "opened", "options", "options_seen", "ran"]

CPU = ["CPUExecutionProvider"]

_OPTIONS = (
    "enable_cpu_mem_arena",
    "enable_mem_pattern",
    "enable_mem_reuse",
    "enable_profiling",
    "execution_mode",
    "execution_order",
    "graph_optimization_level",
    "inter_op_num_threads",
    "intra_op_num_threads",
    "log_severity_level",
    "log_verbosity_level",
    "logid",
    "optimized_model_filepath",
    "profile_file_prefix",
    "use_deterministic_compute",
    "use_per_session_threads",
)
_META = (
    "custom_metadata_map",
    "description",
    "domain",
    "graph_description",
    "graph_name",
    "producer_name",
    "version",
)


def made(kind: str = "perceptron", seed: int = 1) -> Sample:
    """A model of :mod:`onnx_models` or :mod:`onnx_kinds`."""
    return onnx_kinds.sample(kind, seed)


def model_file(work: Work, sample: Sample, name: str = "model.onnx") -> Path:
    """The model's file in the case's directory, there since the first run."""
    return work.file(name, save(sample))


def options(**attributes: Any) -> onnxruntime.SessionOptions:
    """SessionOptions with one thread and these attributes."""
    made_options = onnxruntime.SessionOptions()
    made_options.intra_op_num_threads = 1
    for name, value in attributes.items():
        setattr(made_options, name, value)
    return made_options


def options_seen(session_options: Any, entries: Iterable[str] = ()) -> dict[str, object]:
    """What can be read of SessionOptions."""
    seen: dict[str, object] = {name: _plain(getattr(session_options, name)) for name in _OPTIONS}
    seen["has_providers"] = session_options.has_providers()
    for key in (*entries, "session.disable_prepacking", "session.load_model_format"):
        seen[key] = attempt(session_options.get_session_config_entry, key)
    return seen


def _plain(value: Any) -> object:
    return value if isinstance(value, (bool, int, float, str)) else str(value)


def _arguments(values: Iterable[Any]) -> list[object]:
    return [[value.name, value.type, list(value.shape)] for value in values]


def _memory(values: Iterable[Any]) -> list[object]:
    return [[value.name, value.device_id, str(value.mem_type)] for value in values]


def described(session: Any, entries: Iterable[str] = ()) -> dict[str, object]:
    """Everything the session says of itself, without running it."""
    meta = session.get_modelmeta()
    given = session._model_bytes
    return {
        "type": str(type(session)),
        "attributes": sorted(vars(session)),
        "inputs": _arguments(session.get_inputs()),
        "outputs": _arguments(session.get_outputs()),
        "overridable": _arguments(session.get_overridable_initializers()),
        "meta": {name: getattr(meta, name) for name in _META},
        "providers": list(session.get_providers()),
        "provider_options": session.get_provider_options(),
        "fallback": [session._fallback_providers, session._enable_fallback],
        "options": options_seen(session.get_session_options(), entries),
        "path": session._model_path,
        "bytes": None if given is None else [type(given).__name__, len(given)],
        "memory": [
            _memory(session.get_input_memory_infos()),
            _memory(session.get_output_memory_infos()),
        ],
        "devices": len(session.get_input_epdevices()),
        "tuning": session.get_tuning_results(),
    }


def ran(session: Any, feeds: Iterable[Mapping[str, Any]]) -> list[object]:
    """All outputs for each set of inputs."""
    return [session.run(None, dict(feed)) for feed in feeds]


def opened(
    sample: Sample,
    path_or_bytes: Any,
    *arguments: Any,
    entries: Iterable[str] = (),
    **keywords: Any,
) -> dict[str, object]:
    """A session, made with these arguments: what it says and what it computes."""
    session = onnxruntime.InferenceSession(path_or_bytes, *arguments, **keywords)
    return described(session, entries) | {"results": ran(session, sample.feeds)}
