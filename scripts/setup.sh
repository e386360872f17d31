#!/usr/bin/env bash
# Makes the virtual environment with this package, torch and the development tools.
# Torch is installed first and by itself, so that no dependency pulls another build of it.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-python3}"
venv="${VENV:-.venv}"
if ! "$python" -c 'import venv, ensurepip' 2>/dev/null; then
    echo "$python has no venv module; installing it" >&2
    if command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
        apt-get update -qq && apt-get install -y -qq python3-venv
    else
        echo "install the venv module of $python (Debian: apt-get install python3-venv)" >&2
        exit 1
    fi
fi
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
export PIP_DISABLE_PIP_VERSION_CHECK=1
"$venv/bin/python" -m pip install --quiet "${TORCH:-torch==2.13.0}" numpy
"$venv/bin/python" -m pip install --quiet --editable '.[torch,dev]'
