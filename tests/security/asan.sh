#!/usr/bin/env bash
# The C parts under AddressSanitizer and UBSan: builds them into build/asan and runs the tests that reach them there.
# Usage: tests/security/asan.sh [tests/FILE.py ... and pytest's arguments; default: a choice of some minutes]
# Fails if a test does, or if any process, a child of a test included, wrote a report of the sanitizers.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-$PWD/.venv/bin/python}
out=$PWD/build/asan
flags="-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -g -O1"

rm -rf "$out"
mkdir -p "$out"
CUDATOOL_PURE=1 CFLAGS="$flags" LDFLAGS="$flags" "$python" setup.py -q build --build-lib "$out" --build-temp "$out/objects" \
    >"$out/build.log" 2>&1 || { cat "$out/build.log"; exit 1; }

# libasan comes before everything else; without libstdc++ beside it, it does not find what LLVM throws exceptions with.
LD_PRELOAD="$(${CC:-cc} -print-file-name=libasan.so) $(${CC:-cc} -print-file-name=libstdc++.so)"
# Python and LLVM keep memory to the end; kernels that fault do so in a handler of the software device.
export ASAN_OPTIONS="detect_leaks=0:allow_user_segv_handler=1:log_path=$out/report"
export UBSAN_OPTIONS="print_stacktrace=1:abort_on_error=1"  # writes to stderr, whatever log_path says
export LD_PRELOAD CUDATOOL_DEVICE=sim CUDATOOL_CACHE_DIR="$out/cache" PYTHONPATH="$out"

# NVRTC opens its other half beside itself, which it cannot where dlopen is ASan's.
LD_LIBRARY_PATH=$("$python" -c 'import os, nvidia; print(*(os.path.join(p, "cu13/lib") for p in nvidia.__path__), sep=":")')
export LD_LIBRARY_PATH

# From that folder, so that Python finds the package there first.
cd "$out"
"$python" -c "import cudatool.runtime._native as n; assert n.__file__.startswith('$out'), n.__file__"
[ $# -gt 0 ] || set -- \
    tests/sim/jit/test_device_printf.py tests/sim/jit/test_texture_observation.py tests/sim/test_driver_textures.py \
    tests/sim/test_driver_errors.py tests/sim/test_libcuda_symbols.py tests/sim/test_nvjitlink.py \
    tests/runtime/test_kernels.py tests/runtime/test_arrays.py tests/runtime/test_bad_arguments.py \
    tests/sim/test_launches.py tests/sim/jit/test_footprint_maps.py \
    tests/trace/test_emit.py tests/trace/test_sweep.py tests/trace/test_rows.py tests/collect/test_torch_snapshot_hostile.py \
    tests/collect/test_cupti_native.py
paths=()
for argument; do
    case $argument in tests/*) paths+=("../../$argument") ;; *) paths+=("$argument") ;; esac
done
status=0
"$python" -m pytest -q -c ../../pyproject.toml --rootdir ../.. -p no:cacheprovider --capture=sys "${paths[@]}" \
    2> >(tee stderr.log >&2) || status=$?
grep -q "runtime error:" stderr.log && status=1
for report in report.*; do
    [ -e "$report" ] || continue
    echo "== $report"
    head -40 "$report"
    status=1
done
[ "$status" -ne 0 ] || echo "AddressSanitizer and UBSan: nothing found"
exit "$status"
