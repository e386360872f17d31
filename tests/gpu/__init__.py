"""Tests that need a GPU; see conftest.py for when they are skipped, and scripts/gpu_check.sh."""
