"""Make a small wheel of onnxruntime-gpu, for a machine to which little can be carried.

    pip download --no-deps onnxruntime-gpu && pip install zstandard
    python scripts/slim_onnxruntime.py onnxruntime_gpu-*.whl WHEELS --architecture 90

Keeps the device code of one architecture (90: H100, H200) without the kernels of language models,
and leaves out TensorRT and the tools: about 30 MB in place of 250. Enough for the models of
tests/gpu; a kernel that is missing is an error of CUDA where it is launched.
"""

from __future__ import annotations

import argparse
import re
import struct
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

PROVIDER = "onnxruntime/capi/libonnxruntime_providers_cuda.so"
LEFT_OUT = re.compile(r"onnxruntime/(transformers|quantization|tools)/|providers_tensorrt")
LANGUAGE_MODELS = re.compile(
    rb"flash|cutlass|moe|attention|llm|beam|logits|fpA|rnn|quant|nbits|4bit|EmptyKernel",
    re.IGNORECASE,
)
FAT_BINARY = b"\x50\xed\x55\xba"
"""How each container of device code begins (fatbinary_section.h of the CUDA toolkit)."""
ZSTD = b"\x28\xb5\x2f\xfd"
KIND_ELF = 2


def device_codes(library: bytes) -> Iterator[tuple[int, int, int, int, int]]:
    """Each piece of device code: its kind, architecture, offset, bytes, and those uncompressed."""
    position = library.find(FAT_BINARY)
    while position >= 0:
        header_bytes, content_bytes = struct.unpack_from("<HQ", library, position + 6)
        offset = position + header_bytes
        end = offset + content_bytes
        if end > len(library) or header_bytes != 16:  # by chance the same four bytes
            position = library.find(FAT_BINARY, position + 4)
            continue
        while offset < end:
            kind, _, header_bytes, size = struct.unpack_from("<HHIQ", library, offset)
            (architecture,) = struct.unpack_from("<I", library, offset + 28)
            (whole,) = struct.unpack_from("<Q", library, offset + 56)
            yield kind, architecture, offset + header_bytes, size, whole
            offset += header_bytes + size
        position = library.find(FAT_BINARY, end)


def is_of_language_models(code: bytes, whole: int) -> bool:
    """Whether all kernels in a piece of device code are."""
    if code.startswith(ZSTD):
        import zstandard

        code = zstandard.ZstdDecompressor().decompress(code, max_output_size=whole)
    kernels = set(re.findall(rb"\.text\.([\w.$]+)", code))
    return bool(kernels) and all(LANGUAGE_MODELS.search(kernel) for kernel in kernels)


def slim(library: bytes, architecture: int) -> bytes:
    """The library with zeros in place of what is not kept, which compress to nothing."""
    found = bytearray(library)
    for kind, own, offset, size, whole in device_codes(library):
        code = library[offset : offset + size]
        if kind != KIND_ELF or own != architecture or is_of_language_models(code, whole):
            found[offset : offset + size] = bytes(size)
    return bytes(found)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheel", type=Path)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--architecture", type=int, default=90)
    options = parser.parse_args()
    target = options.directory / options.wheel.name
    if target.exists():
        sys.exit(f"{target} is there already")
    with (
        zipfile.ZipFile(options.wheel) as given,
        zipfile.ZipFile(target, "x", zipfile.ZIP_LZMA) as made,
    ):
        for entry in given.infolist():
            if LEFT_OUT.search(entry.filename):
                continue
            content = given.read(entry)
            if entry.filename == PROVIDER:
                content = slim(content, options.architecture)
            entry.compress_type = zipfile.ZIP_LZMA
            made.writestr(entry, content)
    print(f"{target}: {target.stat().st_size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
