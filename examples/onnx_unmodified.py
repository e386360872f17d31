"""An onnxruntime program that has never heard of trims.

    python examples/onnx_unmodified.py             # onnxruntime alone
    trims run examples/onnx_unmodified.py          # through the cache; run it again after a moment

The first run makes a model of about 130 MB in the temp directory (this needs the package onnx) and
keeps it there. With trims the first session is created the ordinary way, while the model is being
prepared for all that follow. Every run prints how long the session took and a checksum of the
model's answer, which never changes.
"""

import hashlib
import os
import tempfile
import time
from pathlib import Path

import numpy as np
import onnxruntime

MODEL = Path(tempfile.gettempdir()) / f"trims-example-perceptron-{os.getuid()}.onnx"
LAYERS, WIDTH = 8, 2048


def make() -> None:
    """Write a perceptron that is large enough for the time of its session to be felt."""
    from onnx import TensorProto, helper, numpy_helper, save

    random = np.random.RandomState(0)
    nodes, weights, value = [], [], "x"
    for layer in range(LAYERS):
        matrix = (random.standard_normal((WIDTH, WIDTH)) * WIDTH**-0.5).astype(np.float32)
        weights.append(numpy_helper.from_array(matrix, f"weight{layer}"))
        nodes.append(helper.make_node("MatMul", [value, f"weight{layer}"], [f"product{layer}"]))
        nodes.append(helper.make_node("Relu", [f"product{layer}"], [f"layer{layer}"]))
        value = f"layer{layer}"
    shape = [1, WIDTH]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)]
    outputs = [helper.make_tensor_value_info(value, TensorProto.FLOAT, shape)]
    graph = helper.make_graph(nodes, "perceptron", inputs, outputs, weights)
    opset = [helper.make_opsetid("", 17)]
    unfinished = MODEL.with_suffix(f".{os.getpid()}")
    save(helper.make_model(graph, opset_imports=opset, ir_version=9), unfinished)
    unfinished.rename(MODEL)


def main() -> None:
    """Create a session, ask it, report."""
    if not MODEL.exists():
        make()

    start = time.perf_counter()
    session = onnxruntime.InferenceSession(MODEL, providers=["CPUExecutionProvider"])
    ready = time.perf_counter()

    question = np.linspace(0, 1, WIDTH, dtype=np.float32).reshape(1, WIDTH)
    (answer,) = session.run(None, {"x": question})
    checksum = hashlib.sha256(answer.tobytes()).hexdigest()[:16]
    print(f"model             {MODEL.stat().st_size / 1e6:8.0f} MB")
    print(f"InferenceSession  {(ready - start) * 1e3:8.1f} ms")
    print(f"answer            {checksum}")


if __name__ == "__main__":
    main()
