"""A model with a tensor in every place where there can be one, by the onnx package."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

__all__ = ["everything", "floats", "outside"]


def floats(name: str, *shape: int) -> TensorProto:
    """A tensor of random numbers, the same in every process."""
    state = np.random.RandomState(0)
    return numpy_helper.from_array(state.standard_normal(shape).astype(np.float32), name)


def outside(tensor: TensorProto, location: str, **entries: Any) -> TensorProto:
    """The tensor with its data in a file."""
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in {"location": location, **entries}.items():
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def _sparse(name: str, location: str = "") -> onnx.SparseTensorProto:
    values, indices = floats(name, 2), numpy_helper.from_array(np.array([1, 3]), f"{name}_at")
    if location:
        values = outside(values, location, offset=8, length=8)
        indices = outside(indices, location, offset=16, length=16)
    return helper.make_sparse_tensor(values, indices, [4])


def everything() -> onnx.ModelProto:
    """A model with a tensor in every place where there can be one."""
    inner = helper.make_graph(
        [helper.make_node("Constant", [], ["c"], value=outside(floats("deep", 4), "deep.bin"))],
        "inner",
        [],
        [helper.make_tensor_value_info("c", TensorProto.FLOAT, [4])],
        [floats("inner_weight", 5), outside(floats("inner_outside", 3), "data", length=12)],
    )
    nodes = [
        helper.make_node("If", ["cond"], ["y"], then_branch=inner, else_branch=inner),
        helper.make_node("Custom", [], ["z"], domain="com.example", graphs=[inner, inner]),
        helper.make_node("Constant", [], ["k"], value=floats("constant", 40)),
        helper.make_node("Constant", [], ["s"], sparse_value=_sparse("sparse_constant")),
        helper.make_node("Constant", [], ["t"], sparse_value=_sparse("outside_sparse", "sparse")),
        helper.make_node(
            "Custom",
            [],
            ["l"],
            domain="a.b",
            tensors=[floats("x", 1), outside(floats("y", 1), "l")],
        ),
    ]
    typed = helper.make_tensor("typed", TensorProto.INT64, [3], [1, 2, 300])
    strings = helper.make_tensor("strings", TensorProto.STRING, [2], [b"a", b"b"])
    graph = helper.make_graph(
        nodes,
        "main",
        [helper.make_tensor_value_info("cond", TensorProto.BOOL, [])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [4])],
        [floats("w", 2, 3), typed, strings, floats("scalar"), floats("none", 0, 2)],
        sparse_initializer=[_sparse("sparse"), _sparse("far", "sparse")],
        value_info=[helper.make_tensor_value_info("k", TensorProto.FLOAT, [40])],
        doc_string="doc",
    )
    function = helper.make_function(
        "com.example",
        "Twice",
        ["a"],
        ["b"],
        [
            helper.make_node("Add", ["a", "k"], ["b"]),
            helper.make_node("Constant", [], ["k"], value=outside(floats("of_function", 1), "fun")),
        ],
        [helper.make_opsetid("", 21)],
        attribute_protos=[helper.make_attribute("d", outside(floats("default", 1), "default"))],
    )
    made = helper.make_model(
        graph,
        functions=[function],
        opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid("com.example", 1)],
        ir_version=10,
    )
    made.training_info.add().algorithm.CopyFrom(
        helper.make_graph([], "train", [], [], [outside(floats("moment", 2), "train")])
    )
    made.metadata_props.add(key="k", value="v")
    return made
