#!/usr/bin/env bash
# The whole check on a machine with an NVIDIA GPU. Everything cudatool needs must be importable by $PYTHON (default:
# python3) except cudatool itself, which is built from this checkout.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}

site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
"$python" -m pip install --quiet --no-deps --no-build-isolation --no-index --target "$site" .
export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}" CUDATOOL_DEVICE=cuda
cd tests  # so that the installed package is tested, not the checkout

"$python" -m cudatool devices
# The tests of the rooms that use a device, on the GPU; then what only a GPU can show; then the samples on both
# devices, compared.
# JOBS processes share the GPU, except for tests that need all of its memory. RESULTS is a folder for JUnit files;
# PARTS=together leaves out the tests that need the GPU alone.
rooms=$(dirname $(grep -l "^from on_device" -- */conftest.py))
run() {
    name=$1 && shift
    "$python" -m pytest -q -c ../pyproject.toml --rootdir .. -p no:cacheprovider -p no:randomly -p no:benchmark \
        ${RESULTS:+--junitxml "$RESULTS/$name.xml"} $rooms gpu "$@"
}
status=0
for part in ${PARTS:-together alone}; do
    case $part in
    together) run together -m "not whole_device" -n "${JOBS:-8}" "$@" || status=$? ;;
    alone) run alone -m whole_device "$@" || status=$? ;;
    *) echo "PARTS: together, alone, not $part" >&2; exit 2 ;;
    esac
done
exit $status
