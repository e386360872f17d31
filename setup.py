"""Builds the optional native extension; all metadata is in pyproject.toml."""

from setuptools import setup

setup()
