#!/usr/bin/env bash
# Makes the virtual environment of benchmarks.batching_peers and benchmarks.batching_overhead:
#   benchmarks/peers/setup.sh [DIRECTORY]          (default: .venv-peers)
# Torch serves only as a model. It comes from the environment of `make setup` (VENV, default .venv) if
# that has it, else from TORCH. The package itself is not installed: run with PYTHONPATH at the root
# of the repository, as `python -m` from there does.
set -euo pipefail
cd "$(dirname "$0")/../.."
python="${PYTHON:-python3}"
project="${VENV:-.venv}"
directory="${1:-.venv-peers}"
export PIP_DISABLE_PIP_VERSION_CHECK=1
find_packages='import sysconfig, torch; print(sysconfig.get_path("purelib"))'
if packages="$("$project/bin/python" -c "$find_packages" 2>/dev/null)"; then
    python="$project/bin/python" # packages with native code fit only the version they are for
fi
"$directory/bin/python" -m pip --version >/dev/null 2>&1 || "$python" -m venv "$directory"
"$directory/bin/python" -m pip install --quiet --requirement benchmarks/peers/requirements.txt
if [ -n "$packages" ]; then
    # Read after this environment's own packages.
    own="$("$directory/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    echo "$packages" >"$own/zz_project.pth"
else
    "$directory/bin/python" -m pip install --quiet "${TORCH:-torch==2.13.0}"
fi
echo "now: $directory/bin/python -m benchmarks.batching_peers --help"
