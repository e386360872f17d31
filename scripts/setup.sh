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
# Each of these steps is quiet for a minute or more.
echo "installing ${TORCH:-torch==2.13.0} into $venv; this takes a while" >&2
# An old pip, which many Pythons bring, takes twice as long. One that was interrupted has none yet.
"$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$python" -m venv --upgrade-deps "$venv"
export PIP_DISABLE_PIP_VERSION_CHECK=1
install() { "$venv/bin/python" -m pip install --quiet --no-compile "$@"; }

install "${TORCH:-torch==2.13.0}" numpy
# Meanwhile, and not by pip, which compiles one file after the other. Most of what comes later is
# never imported; the rest is compiled when it is. Some files are no Python of this version.
"$venv/bin/python" -m compileall -qq -j 0 "$venv"/lib/python*/site-packages || true &
echo "installing this package and the development tools" >&2
# setuptools warns of every editable installation, whatever its layout.
PYTHONWARNINGS="ignore:Editable installation" install --editable '.[torch,dev]'
wait
