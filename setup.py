"""The copy engine in native/, which may fail to build; all metadata is in pyproject.toml.

Without a compiler, or without pybind11, the package installs all the same and copies in Python.
"""

from multiprocessing.pool import ThreadPool
from pathlib import Path

from setuptools import Extension, setup

NATIVE = Path("native")


def extensions() -> list[Extension]:
    try:
        from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
    except ImportError:
        return []
    if can_compile_in_parallel():
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


def can_compile_in_parallel() -> bool:
    """Whether a pool of threads works: its locks need /dev/shm, which a chroot may lack.

    An error of the pool is none of the compiler, so it would end the installation.
    """
    try:
        ThreadPool(1).terminate()
    except (ImportError, OSError):
        return False
    return True


setup(ext_modules=extensions())
