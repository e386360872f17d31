"""Prepared ONNX models in the daemon: which exist, who leases them, and how more are made."""
