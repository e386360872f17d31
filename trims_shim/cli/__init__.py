"""The command ``trims``; see :mod:`trims_shim.cli.main`."""
