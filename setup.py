"""The copy engine in native/, which may fail to build; all metadata is in pyproject.toml.

Without a compiler, or without pybind11, the package installs all the same and copies in Python.
"""

from pathlib import Path

from setuptools import Extension, setup

NATIVE = Path("native")


def extensions() -> list[Extension]:
    try:
        from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
    except ImportError:
        return []
    ParallelCompile().install()
    engine = Pybind11Extension(
        "trims_shim._native",
        sorted(map(str, NATIVE.glob("*.cpp"))),
        depends=sorted(map(str, NATIVE.glob("*.hpp"))),
        cxx_std=17,
        extra_compile_args=["-O2", "-Wall", "-Wextra", "-pthread"],
        extra_link_args=["-pthread"],
        libraries=["dl"],
        optional=True,
    )
    return [engine]


setup(ext_modules=extensions())
