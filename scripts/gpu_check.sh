#!/usr/bin/env bash
# Checks and measures the device tier on a machine with a GPU, unattended and without network.
#   scripts/gpu_check.sh [--wheels DIR] [--output DIR] [--steps LIST] [--budget-s N] [--dry-run]
#                        [-- ARGUMENTS OF benchmarks.gpu]
#   --wheels DIR   wheels to install where the machine lacks them (scripts/gpu_wheels.sh fetches them)
#   --output DIR   where the results go: docs/results, but for a dry run a new temporary directory
#   --steps LIST   some of environment,native,tests,mps,onnxruntime,benchmarks,flex,staged; environment
#                  is always made; onnxruntime runs only if onnxruntime-gpu is installed. No default
#                  are mps (loads below NVIDIA's multi-process service, if it is installed), flex
#                  (benchmarks.batching_flex_overhead), and staged (benchmarks.staged_serving), which
#                  takes all the time left
#   --budget-s N   seconds for everything (540)
#   --dry-run      the same steps on an emulated device with small sizes: checks this script, and
#                  measures nothing
# Every step has a time limit, and its results are in the output as soon as it ends. A run that is
# killed leaves what it had in a hidden folder of the output. Ends with status 1 if a step failed, 2
# if it cannot begin.
# Where benchmarks follow, tests are cut off after 220 s; one after another, without pytest-xdist,
# all of them take some six minutes. A quarter of an hour is best used by two runs:
#   scripts/gpu_check.sh --wheels W --output A --steps native,tests,mps,onnxruntime,flex --budget-s 400
#   scripts/gpu_check.sh --wheels W --output B --steps native,benchmarks --budget-s 400
#                        -- --only cold --models decoder-7b gpt2 bert-base vit-b16
set -uo pipefail
root="$(cd "$(dirname "$0")/.." && pwd)"
wheels="" output="" dry_run="" budget_s=540 steps="environment,native,tests,onnxruntime,benchmarks"

usage() {
    sed -n '2,22p' "$root/scripts/gpu_check.sh" | cut -c3- >&2
    exit 2
}

fail() {
    echo "gpu_check: $*" >&2
    exit 2
}

while [ $# -gt 0 ]; do
    case "$1" in
        --wheels | --output | --steps | --budget-s) [ $# -ge 2 ] || fail "$1 needs a value" ;;&
        --wheels) wheels="$2" && shift 2 ;;
        --output) output="$2" && shift 2 ;;
        --steps) steps="$2" && shift 2 ;;
        --budget-s) budget_s="$2" && shift 2 ;;
        --dry-run) dry_run=1 && shift ;;
        --) shift && break ;;
        *) usage ;;
    esac
done
[[ "$budget_s" =~ ^[0-9]+$ ]] || fail "--budget-s takes a whole number of seconds"
for step in ${steps//,/ }; do
    case "$step" in
        environment | native | tests | mps | onnxruntime | benchmarks | flex | staged) ;;
        *) fail "there is no step $step: environment, native, tests, mps, onnxruntime, benchmarks," \
            "flex, staged" ;;
    esac
done
[ -z "$wheels" ] || [ -d "$wheels" ] || fail "$wheels is not a directory"
if [ -z "$output" ]; then
    output="$root/docs/results"
    [ -z "$dry_run" ] || output="$(mktemp -d /tmp/gpu-dry-run-XXXXXX)"
fi
mkdir -p "$output" && output="$(cd "$output" && pwd)" || fail "$output cannot be written"

work="$(mktemp -d "$output/.gpu-check-XXXXXX")"
environment="$(mktemp -d /tmp/gpu-check-XXXXXX)"
emulated="" running=""
machine_python="${PYTHON:-python3}"
python="$environment/bin/python"
name="gpu" && [ -z "$dry_run" ] || name="gpu-dry-run"
export PYTHONPATH="$root" PYTHONUNBUFFERED=1
export GPU_CHECK_RECORD="$work/experiments.jsonl" GPU_CHECK_TESTS="$work/tests.jsonl"
failed=0

finish() {
    [ -z "$running" ] || note "$running" 0 143
    rm -rf "$work" "$environment" ${emulated:+"$emulated"}
}
trap finish EXIT

left_s() { echo $((budget_s - SECONDS)); }

has_step() { [[ ",$steps," == *",$1,"* ]]; }

# run NAME LIMIT_S COMMAND...: keep and show the command's output, note its status and time.
run() {
    local step="$1" limit_s="$2" began=$SECONDS status
    shift 2
    local left=$(($(left_s) - 10))
    [ "$limit_s" -le "$left" ] || limit_s="$left"
    if [ "$limit_s" -lt 5 ]; then
        note "$step" 0 -1
        return 1
    fi
    echo "== $step (at most $limit_s s, $(left_s) s left)"
    # SIGINT first, so that the command writes its results so far. No pipe: a process that is left
    # behind with an end of the pipe would block the script.
    running="$step"
    timeout --signal=INT --kill-after=10 "$limit_s" "$@" > >(tee "$work/$step.log") 2>&1
    status=$?
    running=""
    sleep 0.2
    note "$step" $((SECONDS - began)) "$status"
    return "$status"
}

note() {
    printf '{"step": "%s", "seconds": %d, "status": %d}\n' "$1" "$2" "$3" >>"$work/steps.jsonl"
    [ "$3" -eq 0 ] || failed=1
    "$python" "$root/scripts/gpu_report.py" "$work" "$output/$name-check.json" ||
        echo "gpu_check: no report" >&2
}

# Make an interpreter that sees the wheels and, after them, the machine's packages (its torch). The
# path file works even if the machine's python is itself a virtual environment.
make_environment() {
    "$machine_python" -m venv --without-pip "$environment" || make_by_hand || return 1
    local site
    site="$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" || return 1
    "$machine_python" - >"$site/machine.pth" <<'EOF' || return 1
import site, sysconfig
paths = dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib"),
                       *site.getsitepackages()])
for path in paths:
    print(f"import site; site.addsitedir({path!r})")
EOF
    if [ -n "$wheels" ]; then
        "$python" "$root/scripts/gpu_report.py" --missing "$wheels" >"$work/missing" || return 1
        if [ -s "$work/missing" ]; then
            xargs -d '\n' "$machine_python" -m pip install --quiet --disable-pip-version-check \
                --no-index --no-deps --no-compile --no-cache-dir --target "$site" \
                <"$work/missing" || return 1
        fi
    fi
    "$python" "$root/scripts/gpu_report.py" --imports || return 1
}

# Do the work of the module venv, for an interpreter without it.
make_by_hand() {
    "$machine_python" - "$environment" <<'EOF'
import os, pathlib, sys
base = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
root = pathlib.Path(sys.argv[1])
version = f"{sys.version_info.major}.{sys.version_info.minor}"
(root / "lib" / f"python{version}" / "site-packages").mkdir(parents=True, exist_ok=True)
(root / "bin").mkdir(exist_ok=True)
(root / "bin" / "python").symlink_to(base)
(root / "pyvenv.cfg").write_text(f"home = {os.path.dirname(base)}\nversion = {version}\n")
EOF
}

check_device() {
    "$python" - <<'EOF'
import sys
sys.path.insert(0, "tests")
from gpu.rawcuda import why_no_device
sys.exit(why_no_device() or 0)
EOF
}

# The package has 255 MB, so it is optional.
has_onnxruntime() {
    "$python" - <<'EOF' 2>/dev/null
import sys
import onnxruntime
sys.exit("CUDAExecutionProvider" not in onnxruntime.get_available_providers())
EOF
}

emulate() {
    local base=/dev/shm
    [ -w "$base" ] || base=/tmp
    emulated="$(mktemp -d "$base/gpu-dry-run-XXXXXX")"
    "$python" - "$emulated" >"$work/emulated.sh" <<'EOF' || fail "the emulated device cannot be built"
import shlex, sys
sys.path.insert(0, "tests")
import emulated_cuda
for name, value in emulated_cuda.environment(sys.argv[1], memory_bytes=2 << 30).items():
    print(f"export {name}={shlex.quote(value)}")
EOF
}

cd "$root" || fail "there is no $root"
if ! make_environment >"$work/environment.log" 2>&1; then
    cat "$work/environment.log" >&2
    fail "the environment cannot be made; carry what is missing with --wheels DIR"
fi
cat "$work/environment.log"
if [ -n "$dry_run" ]; then
    echo "DRY RUN on an emulated device: nothing that follows is a measurement"
    emulate
else
    check_device || fail "there is no CUDA device here; --dry-run tries the script out"
    export GPU_CHECK_REQUIRED=1
    nvidia-smi >"$work/nvidia-smi.log" 2>&1
fi
note environment "$SECONDS" 0

# To setup.py the extension is optional, so it ends well without one: what follows would then test
# and measure copies in Python.
if has_step native; then
    # shellcheck disable=SC2016
    run native 90 bash -c '"$0" setup.py --quiet build_ext --inplace && "$0" -c "$1"' "$python" "
import sys
from trims_shim.memory.copying import engine
sys.exit(engine() != 'native' and 'no copy engine: is there a compiler, and pybind11?')"
fi

# Most tests run beside one another, where pytest-xdist is installed. Those that watch how much of the
# device's memory is free run alone, after them.
if has_step tests || has_step mps; then
    limit_s=220 each_s=100
    has_step benchmarks || limit_s="$budget_s"
    variables=(PYTEST_DISABLE_PLUGIN_AUTOLOAD=1)
    # A dry run occupies no device, and its processor may be busy: it may take longer.
    [ -z "$dry_run" ] || limit_s=$((budget_s * 2 / 3)) each_s=300
    [ -z "$dry_run" ] || variables+=("GPU_CHECK_EMULATED=$emulated")
    check=("$python" -m pytest -p pytest_timeout --timeout "$each_s" -m gpu -v)
    beside=()
    processes=$(($(nproc) / 2))
    if [ "$processes" -gt 1 ] && "$python" -c "import xdist" 2>/dev/null; then
        beside=(-p xdist -n "$((processes < 8 ? processes : 8))" --dist worksteal)
    fi
fi

if has_step tests; then
    watching=(tests/gpu/test_gpu_namespaces.py tests/gpu/test_gpu_memory.py)
    began=$SECONDS
    run tests "$limit_s" env "${variables[@]}" "${check[@]}" "${beside[@]}" --maxfail 40 tests/gpu \
        --ignore tests/gpu/test_gpu_onnxruntime.py "${watching[@]/#/--ignore=}"
    run memory $((limit_s - SECONDS + began)) env "${variables[@]}" "${check[@]}" "${watching[@]}"
fi

# The outcomes are not noted, because they would replace those of the same tests without it.
if has_step mps; then
    if [ -n "$dry_run" ] || command -v nvidia-cuda-mps-control >/dev/null; then
        service="$(mktemp -d /tmp/gpu-mps-XXXXXX)"
        variables+=("CUDA_MPS_PIPE_DIRECTORY=$service" "CUDA_MPS_LOG_DIRECTORY=$service")
        [ -n "$dry_run" ] || env "${variables[@]}" nvidia-cuda-mps-control -d
        run mps 150 env "${variables[@]}" GPU_CHECK_TESTS="" GPU_CHECK_RECORD="" \
            "${check[@]}" "${beside[@]}" tests/gpu/test_gpu_torch.py
        [ -n "$dry_run" ] || env "${variables[@]}" nvidia-cuda-mps-control <<<"quit"
        cat "$service"/server.log 2>/dev/null | tail -20
        rm -rf "$service"
    else
        echo "the multi-process service is not installed: loads below it are not checked"
    fi
fi

if has_step onnxruntime && [ -z "$dry_run" ]; then
    if has_onnxruntime; then
        PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 run onnxruntime 150 \
            "$python" -m pytest -p pytest_timeout --timeout 120 -m gpu -v --maxfail 5 \
            tests/gpu/test_gpu_onnxruntime.py
    else
        echo "onnxruntime-gpu is not installed: its sessions are not checked"
    fi
fi

if has_step benchmarks; then
    arguments=(--output "$output" --name "$name")
    [ -z "$dry_run" ] || arguments+=(--trial)
    spare_s=$(($(left_s) - 30))
    if [ -n "$dry_run" ]; then
        # shellcheck disable=SC1091
        . "$work/emulated.sh"
    fi
    run benchmarks "$(left_s)" "$python" -m benchmarks.gpu "${arguments[@]}" \
        --budget-s "$spare_s" "$@"
fi

if has_step flex; then
    arguments=(--output "$output" --name "$name-flex-overhead")
    [ -n "$dry_run" ] || arguments+=(--device cuda:0)
    run flex 120 "$python" -m benchmarks.batching_flex_overhead "${arguments[@]}"
fi

# Models in stages: measured, simulated with the measurements, and served. A dry run uses the
# processor, because torch has no device there.
if has_step staged; then
    arguments=(--output "$output" --name "$name-staged-serving")
    measured=(--out "$output/$name-stages")
    simulated=(--out "$output/$name-stages" --sections latencies peaks --seeds 1 --scenes)
    if [ -n "$dry_run" ]; then
        arguments+=(--quick --models vgg --loads low --sides immediate dvabatch)
        measured+=(--models vgg --sizes 1 2 --repeats 1)
        simulated+=(--quick)
    else
        arguments+=(--device cuda)
        measured+=(--device cuda)
    fi
    mkdir -p "$output/$name-stages"
    if run staged-measured 120 "$python" -m benchmarks.staged_measuring "${measured[@]}"; then
        run staged-simulated 90 "$python" -m benchmarks.staged_policies "${simulated[@]}" \
            --device wide --profile "$output/$name-stages"/staged_profile_*.json
    fi
    spare_s=$(($(left_s) - 40))
    run staged "$(left_s)" "$python" -m benchmarks.staged_serving "${arguments[@]}" \
        --minutes "$(awk "BEGIN { print $spare_s / 60 }")"
fi
echo "results: $output/$name-check.json"
exit "$failed"
