"""ONNX models for the tests of their readers: written by hand field by field, or by onnxruntime."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import onnx
import onnxruntime

from trims_shim.formats.onnx import OnnxModel
from trims_shim.formats.protobuf import delimited, encode_field, encode_varint, varint
from trims_shim.specs import Span

__all__ = [
    "attribute",
    "entry",
    "external",
    "facts_by_onnx",
    "facts_of",
    "graph",
    "model",
    "node",
    "save_optimised",
    "session",
    "size_by_onnx",
    "tensor",
]


def _number(field: int, value: int) -> bytes:
    return encode_varint(varint(field)) + encode_varint(value & (1 << 64) - 1)


def _text(field: int, value: str | bytes) -> bytes:
    return encode_field(delimited(field), value.encode() if isinstance(value, str) else value)


def model(*parts: bytes, ir_version: int = 10) -> bytes:
    """A ModelProto; of ``parts``, graphs are finished fields, as :func:`graph` makes them."""
    opset = _text(8, _text(1, "") + _number(2, 21))
    return _number(1, ir_version) + opset + b"".join(parts)


def graph(*parts: bytes, field: int = 7) -> bytes:
    """A GraphProto as field 7 of a model (6 of an attribute) from nodes and initializers."""
    return encode_field(delimited(field), b"".join(parts))


def node(operator: str | bytes, *attributes: bytes, domain: str = "", field: int = 1) -> bytes:
    """A NodeProto as field 1 of a graph (7 of a function)."""
    content = _text(4, operator) + b"".join(attributes) + (_text(7, domain) if domain else b"")
    return encode_field(delimited(field), content)


def attribute(*parts: bytes, field: int = 5) -> bytes:
    """An AttributeProto as field 5 of a node, from fields such as a tensor or a graph."""
    return encode_field(delimited(field), _text(1, "value") + b"".join(parts))


def entry(key: str, value: str | bytes) -> bytes:
    """One pair of ``external_data``."""
    return _text(13, _text(1, key) + _text(2, value))


def external(location: str = "data", *, offset: int = 0, length: int = 4) -> bytes:
    """``external_data`` and ``data_location`` as onnxruntime writes them."""
    parts = entry("location", location) + entry("offset", str(offset))
    return parts + entry("length", str(length)) + _number(14, 1)


def tensor(
    *parts: bytes,
    name: str | bytes = "w",
    dtype: int = 1,
    shape: tuple[int, ...] = (1,),
    field: int = 5,
) -> bytes:
    """A TensorProto as field 5 of a graph or an attribute."""
    content = b"".join(_number(1, count) for count in shape) + _number(2, dtype)
    return encode_field(delimited(field), content + _text(8, name) + b"".join(parts))


# --- the same from the onnx package ---------------------------------------------------------------

Facts = tuple[set[tuple[str, str]], list[str], list[str]]


def facts_of(found: OnnxModel, content: bytes) -> Facts:
    """A model as read here, in a form that can be compared; embedded data is shown."""
    tensors = []
    for each in found.tensors:
        data: Any = each.span
        if data is not None and not each.location:
            data = content[data.offset_bytes : data.end_bytes]
        tensors.append(repr((each.name, each.dtype, each.shape, each.location, data)))
    return set(found.operators), sorted(tensors), list(found.locations)


def facts_by_onnx(content: bytes) -> Facts:
    """What the onnx package finds in a model; raises DecodeError where it refuses the file."""
    proto = onnx.ModelProto.FromString(content)
    found = _Facts()
    found.graph(proto.graph)
    for training in proto.training_info:
        found.graph(training.initialization)
        found.graph(training.algorithm)
    for function in proto.functions:
        found.nodes(function.node)
        found.attributes(function.attribute_proto)
    return found.operators, sorted(map(repr, found.tensors)), sorted(found.locations)


class _Facts:
    def __init__(self) -> None:
        self.operators: set[tuple[str, str]] = set()
        self.tensors: list[tuple[Any, ...]] = []
        self.locations: set[str] = set()

    def graph(self, proto: onnx.GraphProto) -> None:
        self.nodes(proto.node)
        for each in proto.initializer:
            self.tensor(each, is_in_graph=True)
        for sparse in proto.sparse_initializer:
            self.sparse(sparse, is_in_graph=True)

    def nodes(self, nodes: Any) -> None:
        for each in nodes:
            self.operators.add((each.domain, each.op_type))
            self.attributes(each.attribute)

    def attributes(self, attributes: Any) -> None:
        for each in attributes:
            for tensor in [*([each.t] if each.HasField("t") else []), *each.tensors]:
                self.tensor(tensor, is_in_graph=False)
            for graph in [*([each.g] if each.HasField("g") else []), *each.graphs]:
                self.graph(graph)
            sparse = [each.sparse_tensor] if each.HasField("sparse_tensor") else []
            for one in [*sparse, *each.sparse_tensors]:
                self.sparse(one, is_in_graph=False)

    def sparse(self, proto: onnx.SparseTensorProto, *, is_in_graph: bool) -> None:
        for name in ("values", "indices"):
            if proto.HasField(name):
                self.tensor(getattr(proto, name), is_in_graph=is_in_graph)

    def tensor(self, proto: onnx.TensorProto, *, is_in_graph: bool) -> None:
        location, data = "", None
        if proto.data_location == onnx.TensorProto.EXTERNAL:
            entries = {each.key: each.value for each in proto.external_data}
            location = entries["location"]
            self.locations.add(location)
            size = int(entries.get("length", "0")) or size_by_onnx(proto.data_type, proto.dims)
            data = None if size is None else Span(int(entries.get("offset", "0")), size)
        elif not is_in_graph:
            return
        elif proto.HasField("raw_data"):
            data = proto.raw_data
        self.tensors.append((proto.name, proto.data_type, tuple(proto.dims), location, data))


def size_by_onnx(dtype: int, shape: Iterable[int]) -> int | None:
    """Packed bytes of a tensor, by the names of the onnx package's dtypes."""
    names = {value: name for name, value in onnx.TensorProto.DataType.items()}
    name = names.get(dtype, "UNDEFINED")
    if name in ("UNDEFINED", "STRING"):
        return None
    narrow = re.search(r"(?:INT|FLOAT)([246])(?:E|$)", name)
    whole = onnx.helper.tensor_dtype_to_np_dtype(dtype).itemsize * 8
    return -(-math.prod(shape) * (int(narrow[1]) if narrow else whole) // 8)


# --- onnxruntime ----------------------------------------------------------------------------------


def session(path: Path | str, *, level: str = "ORT_ENABLE_ALL", **entries: str) -> Any:
    """A session on the CPU; ``entries`` are config entries with ``__`` for each dot."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    for key, value in entries.items():
        options.add_session_config_entry(key.replace("__", "."), value)
    return onnxruntime.InferenceSession(
        os.fspath(path), options, providers=["CPUExecutionProvider"]
    )


def save_optimised(source: Path, directory: Path) -> tuple[Path, Path]:
    """(model, data) as onnxruntime saves them, with what kernels packed."""
    target, data = directory / "optimised.onnx", directory / "optimised.data"
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    options.optimized_model_filepath = os.fspath(target)
    for key, value in (
        ("session.optimized_model_external_initializers_file_name", data.name),
        ("session.optimized_model_external_initializers_min_size_in_bytes", "64"),
        ("session.save_external_prepacked_constant_initializers", "1"),
    ):
        options.add_session_config_entry(key, value)
    onnxruntime.InferenceSession(os.fspath(source), options, providers=["CPUExecutionProvider"])
    return target, data
