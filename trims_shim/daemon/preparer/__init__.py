"""The preparer: a process that makes one prepared ONNX model with the client's onnxruntime."""
