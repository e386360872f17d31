"""An ONNX model for a machine that has onnxruntime and need not have the onnx package."""

from __future__ import annotations

import array
import random
from collections.abc import Iterable

from trims_shim.formats.protobuf import delimited, encode_field, encode_varint, varint

__all__ = ["LAYERS", "ROWS", "WIDTH", "write_dense"]

LAYERS, WIDTH, ROWS = 8, 2048, 8192
"""ROWS x WIDTH of an embedding, then LAYERS matrices with a bias each: 192 MiB."""
_BLOCK = 65_537
"""Values that repeat, by a prime: no two rows are equal."""
_FLOAT, _INT64 = 1, 7
_IR_VERSION, _OPSET = 9, 17


def _number(field: int, value: int) -> bytes:
    return encode_varint(varint(field)) + encode_varint(value)


def _text(field: int, text: str) -> bytes:
    return encode_field(delimited(field), text.encode())


def _message(field: int, *parts: bytes) -> bytes:
    return encode_field(delimited(field), b"".join(parts))


def _tensor(name: str, generator: random.Random, *shape: int) -> bytes:
    """GraphProto.initializer: floats of few digits around zero."""
    count = 1
    for each in shape:
        count *= each
    block = array.array("f", ((generator.getrandbits(12) - 2048) / 65536 for _ in range(_BLOCK)))
    data = (block.tobytes() * (count // _BLOCK + 1))[: 4 * count]
    dims = (_number(1, each) for each in shape)
    return _message(5, *dims, _number(2, _FLOAT), _text(8, name), _message(9, data))


def _node(operator: str, inputs: Iterable[str], output: str) -> bytes:
    names = (_text(1, each) for each in inputs)
    return _message(1, *names, _text(2, output), _text(3, f"n_{output}"), _text(4, operator))


def _value(field: int, name: str, dtype: int, *dimensions: str | int) -> bytes:
    dims = (
        _message(1, _number(1, each) if isinstance(each, int) else _text(2, each))
        for each in dimensions
    )
    tensor_type = _message(1, _number(1, dtype), _message(2, *dims))
    return _message(field, _text(1, name), _message(2, tensor_type))


def write_dense(path: str, *, seed: int = 1) -> str:
    """Input ``ids`` ``[batch]`` of int64 below ROWS, output ``y`` ``[batch, WIDTH]``; the path."""
    generator = random.Random(seed)
    nodes = [_node("Gather", ["table", "ids"], "v0")]
    tensors = [_tensor("table", generator, ROWS, WIDTH)]
    for layer in range(LAYERS):
        tensors.append(_tensor(f"weight{layer}", generator, WIDTH, WIDTH))
        tensors.append(_tensor(f"bias{layer}", generator, WIDTH))
        nodes.append(_node("MatMul", [f"v{layer}", f"weight{layer}"], f"m{layer}"))
        nodes.append(_node("Add", [f"m{layer}", f"bias{layer}"], f"a{layer}"))
        last = "y" if layer == LAYERS - 1 else f"v{layer + 1}"
        nodes.append(_node("Tanh", [f"a{layer}"], last))
    graph = _message(
        7,
        *nodes,
        _text(2, "dense"),
        *tensors,
        _value(11, "ids", _INT64, "batch"),
        _value(12, "y", _FLOAT, "batch", WIDTH),
    )
    opset = _message(8, _text(1, ""), _number(2, _OPSET))
    with open(path, "wb") as file:
        file.write(_number(1, _IR_VERSION) + opset + graph)
    return path
