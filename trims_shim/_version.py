"""The version, in a file that both the package and its metadata read."""

__version__ = "0.1.0"
