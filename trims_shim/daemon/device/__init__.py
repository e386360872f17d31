"""Tiers in device memory: their loads, and the uploader, the process that fills the memory."""
