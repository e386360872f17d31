"""For tools that call it; all metadata is in pyproject.toml."""

from setuptools import setup

setup()
