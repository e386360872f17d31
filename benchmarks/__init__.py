"""Benchmarks: run them with ``python -m benchmarks.host`` and ``python -m benchmarks.segments``."""
