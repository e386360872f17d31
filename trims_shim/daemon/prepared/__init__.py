"""Prepared ONNX models, in the daemon: which exist, who leases them, and who has more made."""
