#!/usr/bin/env bash
# Fetches the packages that scripts/gpu_check.sh may find missing on a machine without network.
#   scripts/gpu_wheels.sh DIR [PACKAGE...]
# PYTHON_VERSION is that of the machine with the GPU. onnxruntime-gpu is fetched only if it is named:
# it has 255 MB, without the CUDA 13 and cuDNN 9 that it needs; scripts/slim_onnxruntime.py makes that 30.
set -euo pipefail
if [ $# -lt 1 ] || [ "${1:0:1}" = "-" ]; then
    sed -n '2,5p' "$0" | cut -c3- >&2
    exit 2
fi
directory="$1"
shift
packages=("$@")
[ ${#packages[@]} -gt 0 ] || packages=(
    pyzmq msgpack blake3 nvidia-ml-py fastsafetensors pybind11
    pytest pytest-timeout pytest-xdist execnet hypothesis
    pluggy iniconfig packaging pygments sortedcontainers
    rich markdown-it-py mdurl
    peft accelerate psutil
)
# pip takes wheels of exactly the platforms named.
platforms=()
for version in 2_34 2_31 2_28 2_27 2_26 2_24 2_17 2_12 2_5; do
    platforms+=(--platform "manylinux_${version}_x86_64")
done
platforms+=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64)
"${PYTHON:-python3}" -m pip download --quiet --disable-pip-version-check --no-deps \
    --only-binary=:all: --implementation cp --python-version "${PYTHON_VERSION:-3.12}" \
    "${platforms[@]}" --dest "$directory" "${packages[@]}"
ls -l "$directory"
