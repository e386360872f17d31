"""Small networks of which onnxruntime packs weights, each in another way: for the re-layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

__all__ = ["NETWORKS"]

_STATE = np.random.RandomState(7)


def _weight(name: str, *shape: int, dtype: Any = np.float32, scale: float = 0.1) -> TensorProto:
    values = _STATE.standard_normal(shape) * scale
    return numpy_helper.from_array(values.astype(dtype), name)


def _model(nodes: list[Any], weights: list[Any], shape: list[int], **fields: Any) -> bytes:
    """A model from x of this shape to y."""
    made = helper.make_graph(
        nodes,
        "main",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        weights,
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    content: bytes = helper.make_model(
        made, opset_imports=opsets, ir_version=10, **fields
    ).SerializeToString()
    return content


def _matmul() -> bytes:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("MatMul", ["h", "v"], ["g"]),
        helper.make_node("MatMul", ["g", "odd"], ["y"]),
    ]
    weights = [_weight("w", 64, 300), _weight("v", 300, 77), _weight("odd", 77, 5)]
    return _model(nodes, weights, [3, 64])


def _gemm() -> bytes:
    nodes = [
        helper.make_node("Gemm", ["x", "w", "b"], ["h"], transB=1),
        helper.make_node("Gemm", ["h", "v"], ["y"], alpha=0.5),
    ]
    return _model(nodes, [_weight("w", 33, 64), _weight("b", 33), _weight("v", 33, 17)], [3, 64])


def _conv() -> bytes:
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["h"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["h"], ["g"]),
        helper.make_node("Conv", ["g", "d"], ["f"], group=24),
        helper.make_node("ConvTranspose", ["f", "t"], ["y"]),
    ]
    weights = [
        _weight("w", 24, 3, 3, 3),
        _weight("b", 24),
        _weight("d", 24, 1, 3, 3),
        _weight("t", 24, 7, 2, 2),
    ]
    return _model(nodes, weights, [2, 3, 16, 16])


def _quantised() -> bytes:
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]),
        helper.make_node("MatMulInteger", ["q", "w", "z", "wz"], ["i"]),
        helper.make_node("Cast", ["i"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["s", "ws"], ["t"]),
        helper.make_node("Mul", ["f", "t"], ["h"]),
        helper.make_node("DequantizeLinear", ["v", "ws", "wz"], ["vf"]),
        helper.make_node("QuantizeLinear", ["h", "hs", "hz"], ["hq"]),
        helper.make_node("DequantizeLinear", ["hq", "hs", "hz"], ["hf"]),
        helper.make_node("MatMul", ["hf", "vf"], ["y"]),
    ]
    weights = [
        _weight("w", 64, 50, dtype=np.int8, scale=40),
        _weight("v", 50, 21, dtype=np.int8, scale=40),
        numpy_helper.from_array(np.float32(0.01), "ws"),
        numpy_helper.from_array(np.int8(0), "wz"),
        numpy_helper.from_array(np.float32(0.02), "hs"),
        numpy_helper.from_array(np.uint8(128), "hz"),
    ]
    return _model(nodes, weights, [3, 64])


def _quantised_conv() -> bytes:
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "xs", "xz"], ["q"]),
        helper.make_node("QLinearConv", ["q", "xs", "xz", "w", "ws", "wz", "xs", "xz"], ["h"]),
        helper.make_node("DequantizeLinear", ["h", "xs", "xz"], ["y"]),
    ]
    weights = [
        _weight("w", 24, 3, 3, 3, dtype=np.int8, scale=40),
        numpy_helper.from_array(np.float32(0.05), "xs"),
        numpy_helper.from_array(np.uint8(128), "xz"),
        numpy_helper.from_array(np.full(24, 0.01, np.float32), "ws"),
        numpy_helper.from_array(np.zeros(24, np.int8), "wz"),
    ]
    return _model(nodes, weights, [2, 3, 16, 16])


def _four_bits() -> bytes:
    packed = _STATE.randint(0, 255, (48, 4, 16)).astype(np.uint8)
    nodes = [
        helper.make_node(
            "MatMulNBits", ["x", "w", "s"], ["y"], domain="com.microsoft", K=128, N=48, bits=4,
            block_size=32, accuracy_level=4,
        )
    ]  # fmt: skip
    weights = [numpy_helper.from_array(packed, "w"), _weight("s", 48 * 4)]
    return _model(nodes, weights, [3, 128])


def _recurrent() -> bytes:
    nodes = []
    weights = []
    for kind, gates in (("LSTM", 4), ("GRU", 3)):
        names = [f"{kind}_w", f"{kind}_r", f"{kind}_b"]
        shapes = [(2, gates * 20, 20), (2, gates * 20, 20), (2, gates * 40)]
        weights += [_weight(name, *shape) for name, shape in zip(names, shapes, strict=True)]
        nodes.append(
            helper.make_node(
                kind, ["x", *names], [f"{kind}_y"], hidden_size=20, direction="bidirectional"
            )
        )
    nodes.append(helper.make_node("Add", ["LSTM_y", "GRU_y"], ["y"]))
    return _model(nodes, weights, [7, 2, 20])


def _branches() -> bytes:
    def branch(name: str) -> onnx.GraphProto:
        inner = helper.make_graph(
            [helper.make_node("MatMul", ["x", "same"], ["deep"])],
            "deeper",
            [],
            [helper.make_tensor_value_info("deep", TensorProto.FLOAT, None)],
            [_weight("same", 64, 40)],
        )
        return helper.make_graph(
            [
                helper.make_node("MatMul", ["x", "same"], [f"{name}_h"]),
                helper.make_node("If", ["c"], [f"{name}_i"], then_branch=inner, else_branch=inner),
                helper.make_node("Add", [f"{name}_h", f"{name}_i"], [name]),
            ],
            name,
            [],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, None)],
            [_weight("same", 64, 40)],
        )

    nodes = [
        helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0),
        helper.make_node("Greater", ["sum", "zero"], ["c"]),
        helper.make_node("If", ["c"], ["h"], then_branch=branch("a"), else_branch=branch("b")),
        helper.make_node("MatMul", ["h", "same"], ["y"]),
    ]
    zero = numpy_helper.from_array(np.float32(0), "zero")
    return _model(nodes, [zero, _weight("same", 40, 24)], [3, 64])


def _loop() -> bytes:
    body = helper.make_graph(
        [
            helper.make_node("MatMul", ["value", "step"], ["next"]),
            helper.make_node("MatMul", ["next", "outer"], ["out"]),
            helper.make_node("Identity", ["go"], ["go_on"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("number", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("value", TensorProto.FLOAT, None),
        ],
        [
            helper.make_tensor_value_info("go_on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("out", TensorProto.FLOAT, None),
        ],
        [_weight("step", 64, 64)],
    )
    nodes = [helper.make_node("Loop", ["count", "", "x"], ["y"], body=body)]
    count = numpy_helper.from_array(np.int64(3), "count")
    return _model(nodes, [count, _weight("outer", 64, 64)], [3, 64])


def _many_sizes() -> bytes:
    """Spans on both sides of every limit, and a table that no kernel packs."""
    nodes = [
        helper.make_node("Gather", ["table", "rows"], ["t"]),
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Add", ["h", "t"], ["y"]),
    ]
    rows = numpy_helper.from_array(np.array([0, 50, 63]), "rows")
    return _model(nodes, [_weight("table", 64, 257), rows, _weight("w", 64, 257)], [3, 64])


NETWORKS: dict[str, Callable[[], bytes]] = {
    function.__name__[1:]: function
    for function in (
        _matmul, _gemm, _conv, _quantised, _quantised_conv, _four_bits, _recurrent, _branches,
        _loop, _many_sizes,
    )
}  # fmt: skip
"""Makers of the serialised models, by kind; each has an input x and an output y."""
