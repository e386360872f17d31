"""Small ONNX models, made from a seed: what tests of onnxruntime load, with inputs to run them on.

``SAMPLES`` has one of each kind that a runtime treats differently: layouts that are packed,
quantised weights, sub-graphs, other types than tensors, overridable initializers. Weights depend on
the seed only, so that a test may have a model that no other test has had prepared.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

__all__ = ["SAMPLES", "Graph", "Sample", "sample", "save", "save_external", "weights"]

FLOAT, INT64, BOOL, STRING = (
    TensorProto.FLOAT,
    TensorProto.INT64,
    TensorProto.BOOL,
    TensorProto.STRING,
)
IR_VERSION = 10


@dataclass(frozen=True)
class Sample:
    """A model and what to feed it; ``feeds`` may have several sets, run one after another."""

    model: onnx.ModelProto
    feeds: tuple[dict[str, Any], ...]

    @property
    def content(self) -> bytes:
        """The serialised model."""
        content: bytes = self.model.SerializeToString(deterministic=True)
        return content


def weights(seed: int, name: str, *shape: int, dtype: Any = np.float32) -> Any:
    """Normal numbers of standard deviation 0.1 that depend on the seed and the name only."""
    state = np.random.RandomState(zlib.crc32(f"{seed} {name}".encode()))
    if np.issubdtype(dtype, np.integer):
        limits = np.iinfo(dtype)
        low, high = max(limits.min, -100), min(limits.max, 100)
        return state.randint(low, high, shape).astype(dtype)
    return (state.standard_normal(shape) * 0.1).astype(dtype)


@dataclass
class Graph:
    """A graph that is built node by node; results get names of their own."""

    name: str = "graph"
    seed: int = 1
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    initializers: list[onnx.TensorProto] = field(default_factory=list)
    inputs: list[onnx.ValueInfoProto] = field(default_factory=list)
    outputs: list[onnx.ValueInfoProto] = field(default_factory=list)

    def input(self, name: str, shape: Sequence[Any] | None, dtype: int = FLOAT) -> str:
        """A graph input."""
        self.inputs.append(helper.make_tensor_value_info(name, dtype, shape))
        return name

    def output(self, value: str, shape: Sequence[Any] | None, dtype: int = FLOAT) -> None:
        """A graph output with the name of a value."""
        self.outputs.append(helper.make_tensor_value_info(value, dtype, shape))

    def constant(self, name: str, value: Any) -> str:
        """An initializer of this value (array, or a finished TensorProto)."""
        if not isinstance(value, onnx.TensorProto):
            value = numpy_helper.from_array(np.asarray(value), name)
        self.initializers.append(value)
        return name

    def weight(self, name: str, *shape: int, dtype: Any = np.float32) -> str:
        """An initializer of :func:`weights`."""
        return self.constant(name, weights(self.seed, f"{self.name}.{name}", *shape, dtype=dtype))

    def node(self, operator: str, *inputs: str, **attributes: Any) -> str:
        """A node with one output, or with ``outputs``. The (first) output."""
        number = len(self.nodes)
        outputs = attributes.pop("outputs", None) or [f"{operator}_{number}"]
        attributes.setdefault("name", f"node_{number}_{operator}")
        self.nodes.append(helper.make_node(operator, list(inputs), outputs, **attributes))
        first: str = outputs[0]
        return first

    def finish(self) -> onnx.GraphProto:
        """The graph."""
        return helper.make_graph(
            self.nodes, self.name, self.inputs, self.outputs, self.initializers
        )

    def model(
        self, *, opset: int = 21, domains: Sequence[tuple[str, int]] = (), **fields: Any
    ) -> onnx.ModelProto:
        """A model of the graph."""
        fields.setdefault("ir_version", IR_VERSION)
        opsets = [helper.make_opsetid("", opset)]
        opsets += [helper.make_opsetid(domain, version) for domain, version in domains]
        model: onnx.ModelProto = helper.make_model(
            self.finish(), opset_imports=opsets, producer_name="tests", **fields
        )
        return model


# --- files ----------------------------------------------------------------------------------------


def save(value: Sample | onnx.ModelProto) -> Callable[[Path], None]:
    """A writer of the model's file."""
    model = value.model if isinstance(value, Sample) else value
    return lambda path: Path(path).write_bytes(model.SerializeToString(deterministic=True)) and None


def save_external(value: Sample, location: str = "weights.bin", *, size_threshold: int = 0) -> Any:
    """A writer of the model's file with its weights in a file beside it, or below it."""

    def write(path: Path) -> None:
        model = onnx.ModelProto()
        model.CopyFrom(value.model)
        data = Path(path).parent / location
        data.parent.mkdir(parents=True, exist_ok=True)
        data.unlink(missing_ok=True)
        onnx.save(
            model,
            str(path),
            save_as_external_data=True,
            location=location,
            size_threshold=size_threshold,
        )

    return write


# --- networks -------------------------------------------------------------------------------------


def images(seed: int, *shape: int) -> Any:
    """Inputs of a network: like weights, larger."""
    return weights(seed, "input", *shape) * np.float32(10)


def perceptron(seed: int = 1, *, width: int = 256, **fields: Any) -> Sample:
    """MatMul, Gemm and a Gather: weights that are packed and weights that are not."""
    graph = Graph("perceptron", seed)
    graph.input("x", ["batch", 64])
    graph.input("ids", ["batch"], INT64)
    hidden = graph.node("MatMul", "x", graph.weight("first", 64, width))
    hidden = graph.node("Relu", graph.node("Add", hidden, graph.weight("bias", width)))
    rows = graph.node("Gather", graph.weight("table", 512, width), "ids")
    hidden = graph.node("Add", hidden, rows)
    last = graph.weight("last", width, 10)
    graph.node("Gemm", hidden, last, graph.weight("last_bias", 10), outputs=["y"])
    graph.output("y", ["batch", 10])
    feeds = tuple(
        {"x": images(seed + size, size, 64), "ids": np.arange(size, dtype=np.int64) * 7 % 512}
        for size in (1, 3)
    )
    return Sample(graph.model(**fields), feeds)


def recogniser(seed: int = 1) -> Sample:
    """A small reader of text lines: convolutions, a depthwise one, batch norm, an LSTM."""
    graph = Graph("recogniser", seed)
    value = graph.input("x", ["batch", 1, 16, "width"])
    for number, (channels, count) in enumerate([(1, 16), (16, 24), (24, 32)]):
        kernel = graph.weight(f"kernel{number}", count, channels, 3, 3)
        value = graph.node("Conv", value, kernel, pads=[1, 1, 1, 1])
        value = graph.node("BatchNormalization", value, *_norm(graph, f"norm{number}", count))
        value = graph.node("HardSwish" if number else "Relu", value)
        depthwise = graph.weight(f"depthwise{number}", count, 1, 3, 3)
        value = graph.node("Conv", value, depthwise, pads=[1, 1, 1, 1], group=count)
    value = graph.node("MaxPool", value, kernel_shape=[2, 2], strides=[2, 2])
    value = graph.node("ReduceMean", value, graph.constant("axes", np.array([2])), keepdims=0)
    value = graph.node("Transpose", value, perm=[2, 0, 1])
    steps = graph.node(
        "LSTM",
        value,
        graph.weight("w", 2, 4 * 32, 32),
        graph.weight("r", 2, 4 * 32, 32),
        graph.weight("b", 2, 8 * 32),
        hidden_size=32,
        direction="bidirectional",
    )
    steps = graph.node("Transpose", steps, perm=[0, 2, 1, 3])
    steps = graph.node("Reshape", steps, graph.constant("shape", np.array([0, 0, 64])))
    steps = graph.node("MatMul", steps, graph.weight("head", 64, 97))
    graph.node("Softmax", steps, axis=2, outputs=["y"])
    graph.output("y", None)
    feeds = tuple({"x": images(seed, 2, 1, 16, width)} for width in (32, 48))
    return Sample(graph.model(), feeds)


def _norm(graph: Graph, name: str, count: int) -> list[str]:
    scale, bias, mean = (graph.weight(f"{name}.{part}", count) for part in ("s", "b", "m"))
    variance = np.abs(weights(graph.seed, f"{name}.v", count)) + np.float32(0.5)
    return [scale, bias, mean, graph.constant(f"{name}.v", variance)]


def transformer(seed: int = 1) -> Sample:
    """One block of attention with tied embeddings: what the optimiser fuses."""
    graph = Graph("transformer", seed)
    ids = graph.input("ids", ["batch", "sequence"], INT64)
    table = graph.weight("table", 300, 64)
    value = _normed(graph, graph.node("Gather", table, ids), "norm0")
    value = _normed(graph, graph.node("Add", value, _attention(graph, value)), "norm1")
    hidden = graph.node("MatMul", value, graph.weight("up", 64, 128))
    hidden = graph.node("Add", hidden, graph.weight("up_bias", 128))
    hidden = graph.node("MatMul", _gelu(graph, hidden), graph.weight("down", 128, 64))
    value = _normed(graph, graph.node("Add", value, hidden), "norm2")
    tied = graph.node("Transpose", table, perm=[1, 0])
    graph.node("MatMul", value, tied, outputs=["y"])
    graph.output("y", ["batch", "sequence", 300])
    feeds = tuple({"ids": np.arange(2 * n).reshape(2, n) * 13 % 300} for n in (3, 8))
    return Sample(graph.model(), feeds)


def _normed(graph: Graph, value: str, name: str) -> str:
    scale = graph.constant(f"{name}.scale", np.ones(64, np.float32))
    return graph.node("LayerNormalization", value, scale, graph.weight(f"{name}.bias", 64))


def _attention(graph: Graph, value: str) -> str:
    shape = graph.constant("split", np.array([0, 0, 4, 16]))
    parts = []
    for part, order in (("query", [0, 2, 1, 3]), ("key", [0, 2, 3, 1]), ("value", [0, 2, 1, 3])):
        each = graph.node("MatMul", value, graph.weight(part, 64, 64))
        each = graph.node("Add", each, graph.weight(f"{part}_bias", 64))
        parts.append(graph.node("Transpose", graph.node("Reshape", each, shape), perm=order))
    scores = graph.node("MatMul", parts[0], parts[1])
    scores = graph.node("Div", scores, graph.constant("root", np.array(4, np.float32)))
    mixed = graph.node("MatMul", graph.node("Softmax", scores, axis=-1), parts[2])
    mixed = graph.node("Transpose", mixed, perm=[0, 2, 1, 3])
    mixed = graph.node("Reshape", mixed, graph.constant("join", np.array([0, 0, 64])))
    return graph.node("MatMul", mixed, graph.weight("project", 64, 64))


def _gelu(graph: Graph, value: str) -> str:
    root, one, half = (
        graph.constant(name, np.array(number, np.float32))
        for name, number in (("sqrt2", 1.4142135), ("one", 1), ("half", 0.5))
    )
    error = graph.node("Erf", graph.node("Div", value, root))
    return graph.node("Mul", graph.node("Mul", value, graph.node("Add", error, one)), half)


def sample(name: str, seed: int = 1) -> Sample:
    """The model of this kind."""
    return SAMPLES[name](seed)


SAMPLES: dict[str, Callable[[int], Sample]] = {
    "perceptron": perceptron,
    "recogniser": recogniser,
    "transformer": transformer,
}
"""Makers by kind; :mod:`onnx_kinds` adds those of fewer users."""
