#!/usr/bin/env bash
# Runs tests of the copy engine and the emulated driver, both built with gcc's sanitizers, in copies
# of the working tree. By hand, where `make setup` was run; takes about ten minutes.
#   scripts/sanitize.sh [address|thread]... [-- ARGUMENTS OF pytest]
# Without a name: both, undefined behaviour with `address`. Ends with status 1 if a test failed or
# anything was reported.
set -euo pipefail
root="$(cd "$(dirname "$0")/.." && pwd)"
python="${PYTHON:-$root/.venv/bin/python}"
kinds=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    case "$1" in
    address | thread) kinds+=("$1") ;;
    *)
        sed -n '2,6p' "$0" | cut -c3- >&2
        exit 2
        ;;
    esac
    shift
done
[ $# -eq 0 ] || shift
[ ${#kinds[@]} -gt 0 ] || kinds=(address thread)
arguments=("$@")
# Not those that build either library anew, nor those of the C library's malloc, which is replaced,
# nor one of a gap in the memory of a forked child, where the sanitizer of threads may have its own.
[ ${#arguments[@]} -gt 0 ] || arguments=(tests/native tests/memory tests/emulated_cuda
    --ignore tests/native/test_build.py --ignore tests/emulated_cuda/test_building.py
    --ignore tests/memory/test_heap.py
    --deselect tests/emulated_cuda/test_sharing.py::TestDeath::test_a_fork_inherits_no_mapping)
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

# Makes a copy of the tree, with the engine, and the compiler that the emulator is built with.
build() {
    local kind="$1" tree="$work/$1" flags headers suffix
    flags=("-fsanitize=$kind" -fno-omit-frame-pointer -g -O1)
    # Beside that of addresses, this sanitizer only writes to stderr: the process has to end.
    [ "$kind" = thread ] || flags+=(-fsanitize=undefined -fno-sanitize-recover=undefined)
    mkdir -p "$tree"
    (cd "$root" && tar c --exclude='*.so' native tests trims_shim ./*.py ./*.toml) | tar x -C "$tree"
    suffix="$("$python" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')"
    headers="$("$python" -c '
import pybind11, sysconfig
print(sysconfig.get_path("include"), pybind11.get_include(), sep=":")')"
    CPLUS_INCLUDE_PATH="$headers" g++ -std=c++17 -shared -fPIC -fvisibility=hidden -pthread \
        "${flags[@]}" "$tree"/native/*.cpp -ldl -o "$tree/trims_shim/_native$suffix"
    # What the sanitizer offers is preloaded, and need not be found by the linker.
    printf '#!/bin/sh\nexec gcc "$@" %s -Wl,-z,undefs\n' "${flags[*]}" > "$work/cc-$kind"
    chmod +x "$work/cc-$kind"
}

# Reports of children, too, are in $work/report-$kind.*.
run() {
    local kind="$1" tree="$work/$1" options preload
    export CC="$work/cc-$kind" TMPDIR="$work" PYTHONPATH="$tree" PYTHONMALLOC=malloc
    # First: a shell does not start with the sanitizer of threads preloaded.
    (cd "$tree/tests" && "$python" -c 'import emulated_cuda; emulated_cuda.build()')
    # Memory of threads that have ended is used again, unseen by the sanitizer; and tests look into
    # device memory while a copy runs.
    printf 'race:_dl_deallocate_tls\nrace:PyBytes_FromStringAndSize\n' > "$work/suppressions"
    # Some tests want a child to end by SIGSEGV.
    options="log_path=$work/report-$kind:handle_segv=0:handle_sigbus=0"
    preload="$(gcc -print-file-name=libtsan.so)"
    [ "$kind" = thread ] ||
        preload="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so)"
    (cd "$tree" && setarch -R env "LD_PRELOAD=$preload" UBSAN_OPTIONS=print_stacktrace=1 \
        "ASAN_OPTIONS=$options:detect_leaks=0:allocator_may_return_null=1" \
        "TSAN_OPTIONS=$options:exitcode=0:suppressions=$work/suppressions:print_suppressions=0" \
        "$python" -m pytest -q "${arguments[@]}") || status=1
    if compgen -G "$work/report-$kind.*" > "$work/reports"; then
        xargs cat < "$work/reports"
        status=1
    fi
}

status=0
for kind in "${kinds[@]}"; do
    echo "== $kind"
    build "$kind"
    run "$kind"
done
exit "$status"
