"""Tests of the command ``trims``."""
