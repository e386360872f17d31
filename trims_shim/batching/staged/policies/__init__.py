"""Policies for staged models, one small file each."""
