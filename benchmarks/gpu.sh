#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Everything for one GPU, within ten minutes, without a network: the GPU's tests, then benchmarks/gpu.py.
#
#     benchmarks/gpu.sh [--wheels FOLDER] [--quick] [further arguments of gpu.py]
#
# The machine has Python, PyTorch and Triton. FOLDER holds wheels of what it lacks, one version of each, installed
# beside them into a folder of this run. Where a network is, from the root of the repository:
#     pip wheel -q --no-deps -w FOLDER . deepspeed==0.19.8
#     pip download -q --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux2014_x86_64 \
#         -d FOLDER einops hjson msgpack ninja packaging psutil py-cpuinfo pydantic pydantic-core annotated-types \
#         typing-inspection typing-extensions tqdm numpy pytest pluggy iniconfig pygments hypothesis sortedcontainers
# A part that fails says so, and the others go on; the exit code is then not zero.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

wheels="" arguments=() device=cuda
while [ $# -gt 0 ]; do
    case "$1" in
    --wheels) wheels="$2"; shift 2 ;;
    --device) device="$2"; arguments+=("$1" "$2"); shift 2 ;;
    *) arguments+=("$1"); shift ;;
    esac
done

if [ -n "$wheels" ]; then
    site="$(mktemp -d)"
    trap 'rm -rf "$site"' EXIT
    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" "$wheels"/*.whl || exit 1
    export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
fi

failed=()
begin=$SECONDS
if [ "$device" = cuda ]; then
    echo "== tests on the GPU"
    timeout 180 python3 -m pytest -q -p no:cacheprovider -m gpu tests/unit/ops/muon/zero/test_gpu.py \
        tests/unit/ops/muon/kernels/test_gpu_kernels.py || failed+=("tests")
fi
echo "== measurements"
timeout $((580 - SECONDS + begin)) python3 benchmarks/gpu.py "${arguments[@]}" || failed+=("gpu.py")

echo "== $((SECONDS - begin)) s; failed: ${failed[*]:-nothing}"
[ ${#failed[@]} -eq 0 ]
