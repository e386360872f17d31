"""Cutting models into stages: by their graph, at their blocks, or in ONNX."""
