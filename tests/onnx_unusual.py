"""Unusual ONNX models for :mod:`onnx_models`, and contents that are no models at all."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import helper, numpy_helper
from onnx_models import FLOAT, INT64, SAMPLES, Graph, Sample, images, weights

__all__ = ["BROKEN"]


def random(seed: int = 1) -> Sample:
    """Random numbers of a fixed seed, added to a product."""
    graph = Graph("random", seed)
    graph.input("x", [2, 64])
    product = graph.node("MatMul", "x", graph.weight("w", 64, 32))
    noise = graph.node("RandomNormal", shape=[2, 32], seed=3.0)
    like = graph.node("RandomUniformLike", product, seed=4.0)
    graph.node("Add", graph.node("Add", product, noise), like, outputs=["y"])
    graph.output("y", [2, 32])
    feeds = {"x": images(seed, 2, 64)}
    return Sample(graph.model(), (feeds, feeds))


def metadata(seed: int = 1) -> Sample:
    """Everything a model can say of itself."""
    graph = Graph("the graph's \N{SNOWMAN} name", seed)
    graph.input("x", ["batch", 64])
    graph.inputs[0].doc_string = "what goes in"
    graph.node("MatMul", "x", graph.weight("w", 64, 64), outputs=["y"], doc_string="a node")
    graph.output("y", ["batch", 64])
    model = graph.model(
        doc_string="what the model is", domain="org.example", model_version=(1 << 40) + 7
    )
    model.producer_version = "3.2"
    model.graph.doc_string = "what the graph is"
    helper.set_model_props(
        model, {"names": "{0: 'cat', 1: 'dog'}", "empty": "", "\u00e9": "\u00e8"}
    )
    return Sample(model, ({"x": images(seed, 2, 64)},))


def overridable(seed: int = 1) -> Sample:
    """An initializer that is an input as well: it can be given another value in a run."""
    graph = Graph("overridable", seed)
    graph.input("x", ["batch", 64])
    graph.input("w", [64, 48])
    graph.weight("w", 64, 48)
    product = graph.node("MatMul", "x", "w")
    graph.node("MatMul", product, graph.weight("fixed", 48, 16), outputs=["y"])
    graph.output("y", ["batch", 16])
    x = images(seed, 2, 64)
    feeds = ({"x": x}, {"x": x, "w": weights(seed + 1, "w", 64, 48)}, {"x": x})
    return Sample(graph.model(), feeds)


def old(seed: int = 1) -> Sample:
    """IR version 3: every initializer has to be an input as well, also what is fused away."""
    graph = Graph("old", seed)
    graph.input("x", [2, 3, 8, 8])
    value = graph.node("Conv", "x", graph.weight("kernel", 16, 3, 3, 3), pads=[1, 1, 1, 1])
    names = [graph.weight(name, 16) for name in ("scale", "shift", "mean")]
    names.append(graph.constant("variance", np.abs(weights(seed, "variance", 16)) + np.float32(1)))
    value = graph.node("Relu", graph.node("BatchNormalization", value, *names))
    value = graph.node("Flatten", graph.node("GlobalAveragePool", value))
    graph.node("Gemm", value, graph.weight("w", 16, 48), graph.weight("b", 48), outputs=["y"])
    graph.output("y", [2, 48])
    for each in graph.initializers:
        graph.input(each.name, list(each.dims))
    return Sample(graph.model(opset=9, ir_version=3), ({"x": images(seed, 2, 3, 8, 8)},))


def unused(seed: int = 1) -> Sample:
    """An initializer and a node that nothing uses: onnxruntime warns of the first."""
    graph = Graph("unused", seed)
    graph.input("x", ["batch", 64])
    graph.weight("nobody", 64, 64)
    graph.node("Relu", "x")
    graph.node("MatMul", "x", graph.weight("w", 64, 64), outputs=["y"])
    graph.output("y", ["batch", 64])
    return Sample(graph.model(), ({"x": images(seed, 2, 64)},))


def constants(seed: int = 1) -> Sample:
    """Weights in Constant nodes and what the optimiser can work out beforehand."""
    graph = Graph("constants", seed)
    graph.input("x", ["batch", 64])
    tensor = numpy_helper.from_array(weights(seed, "w", 64, 64), "inside")
    w = graph.node("Constant", value=tensor)
    two = graph.node("Constant", value_float=2.0)
    folded = graph.node("Mul", graph.node("Transpose", w, perm=[1, 0]), two)
    shape = graph.constant("shape", np.array([64, 8]))
    filled = graph.node(
        "ConstantOfShape", shape, value=helper.make_tensor("value", FLOAT, [1], [0.25])
    )
    product = graph.node("MatMul", "x", folded)
    graph.node("MatMul", graph.node("Dropout", product), filled, outputs=["y"])
    graph.output("y", ["batch", 8])
    return Sample(graph.model(), ({"x": images(seed, 2, 64)},))


def sparse(seed: int = 1) -> Sample:
    """A sparse initializer."""
    graph = Graph("sparse", seed)
    graph.input("x", ["batch", 64])
    values = numpy_helper.from_array(weights(seed, "values", 100), "w")
    places = numpy_helper.from_array(np.arange(100, dtype=np.int64) * 37, "places")
    graph.node("MatMul", "x", "w", outputs=["y"])
    graph.output("y", ["batch", 64])
    model = graph.model()
    sparse_tensor = helper.make_sparse_tensor(values, places, [64, 64])
    model.graph.sparse_initializer.append(sparse_tensor)
    return Sample(model, ({"x": images(seed, 2, 64)},))


def straight_through(seed: int = 1) -> Sample:
    """Outputs that are an initializer, and inputs that come out again."""
    graph = Graph("straight_through", seed)
    graph.input("x", ["batch", 64])
    graph.weight("w", 64, 64)
    graph.output("w", [64, 64])
    graph.node("Identity", "x", outputs=["same"])
    graph.output("same", ["batch", 64])
    graph.node("Identity", "w", outputs=["copy"])
    graph.output("copy", [64, 64])
    return Sample(graph.model(), ({"x": images(seed, 2, 64)},))


def weightless(seed: int = 1) -> Sample:
    """No weights at all, and nodes without names."""
    graph = Graph("weightless", seed)
    graph.input("x", ["batch", 64])
    graph.node("Relu", graph.node("Neg", "x", name=""), name="", outputs=["y"])
    graph.output("y", ["batch", 64])
    return Sample(graph.model(), ({"x": images(seed, 2, 64)},))


def dimensions(seed: int = 1) -> Sample:
    """Dimensions with names and denotations, for overrides."""
    graph = Graph("dimensions", seed)
    graph.input("x", ["batch", "features"])
    graph.inputs[0].type.tensor_type.shape.dim[0].denotation = "DATA_BATCH"
    shape = graph.node("Shape", "x")
    graph.node("MatMul", "x", graph.weight("w", 64, 48), outputs=["y"])
    graph.node("Identity", shape, outputs=["shape"])
    graph.output("y", ["batch", 48])
    graph.output("shape", [2], INT64)
    return Sample(graph.model(), ({"x": images(seed, 3, 64)},))


SAMPLES.update(
    {
        maker.__name__: maker
        for maker in (
            random,
            metadata,
            overridable,
            old,
            unused,
            constants,
            sparse,
            straight_through,
            weightless,
            dimensions,
        )
    }
)


# --- models that onnxruntime refuses --------------------------------------------------------------


def _refused(operator: str, *, domain: str = "", opset: int = 21, **attributes: Any) -> bytes:
    graph = Graph("refused")
    graph.input("x", ["batch", 64])
    product = graph.node("MatMul", "x", graph.weight("w", 64, 64))
    graph.node(operator, product, domain=domain, outputs=["y"], **attributes)
    graph.output("y", None)
    domains = [(domain, 1)] if domain else []
    return bytes(graph.model(opset=opset, domains=domains).SerializeToString(deterministic=True))


def _wrong_shapes() -> bytes:
    graph = Graph("wrong_shapes")
    graph.input("x", ["batch", 64])
    graph.node("MatMul", "x", graph.weight("w", 63, 64), outputs=["y"])
    graph.output("y", None)
    return bytes(graph.model().SerializeToString(deterministic=True))


def _short_data() -> bytes:
    model = SAMPLES["perceptron"](1).model
    model.graph.initializer[0].raw_data = model.graph.initializer[0].raw_data[:-4]
    return bytes(model.SerializeToString(deterministic=True))


def _cycle() -> bytes:
    model = SAMPLES["perceptron"](1).model
    model.graph.node[0].input[0] = model.graph.node[2].output[0]
    return bytes(model.SerializeToString(deterministic=True))


def _future_ir() -> bytes:
    model = SAMPLES["perceptron"](1).model
    model.ir_version = 999
    return bytes(model.SerializeToString(deterministic=True))


def _no_opset() -> bytes:
    model = SAMPLES["perceptron"](1).model
    del model.opset_import[:]
    return bytes(model.SerializeToString(deterministic=True))


BROKEN = {
    "empty": lambda: b"",
    "zeros": lambda: bytes(300_000),
    "text": lambda: b"version https://git-lfs.github.com/spec/v1\n" * 5000,
    "truncated": lambda: SAMPLES["perceptron"](1).content[:200_000],
    "without_the_end": lambda: SAMPLES["perceptron"](1).content[:-5],
    "more_after_the_end": lambda: SAMPLES["perceptron"](1).content + b"\xff" * 40,
    "unknown_operator": lambda: _refused("NoSuchOperator"),
    "unknown_domain": lambda: _refused("Thing", domain="org.example"),
    "future_opset": lambda: _refused("Relu", opset=999),
    "future_ir": _future_ir,
    "no_opset": _no_opset,
    "wrong_shapes": _wrong_shapes,
    "short_data": _short_data,
    "cycle": _cycle,
    "ep_context": lambda: _refused(
        "EPContext",
        domain="com.microsoft",
        embed_mode=1,
        ep_cache_context=b"compiled",
        main_context=1,
        source="OtherEP",
    ),
}
"""Contents of files that cannot be loaded, by what is wrong with them."""
