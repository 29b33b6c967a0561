#!/usr/bin/env bash
# The GPU tests and benchmarks on a bare CUDA machine, with a bundle of Transformer Engine and megatron-core:
#
#   tools/run_gpu_suite.sh BUNDLE.tar.xz OUT [GROUP ...]
#
# BUNDLE  a tar.xz with a folder `site` in it that goes first on PYTHONPATH; its extension must fit the machine's python
#         and torch. "none" where Transformer Engine is installed.
# OUT     a folder for logs, JUnit files and figures.
# GROUP   of contract wrappers training between graphs recompute parallel rehearse benchmarks; all of them without.
#
# The test groups run at the same time, one process each: they are bound by the host. The benchmarks run alone after
# them. Ends with a table of what passed, and with 1 where something failed.
set -uo pipefail
cd "$(dirname "$0")/.."
bundle=$1 out=$2
shift 2
groups=("$@")
[ ${#groups[@]} -gt 0 ] || groups=(contract wrappers training between graphs recompute parallel rehearse benchmarks)
limit=${QUANT_STATE_GROUP_LIMIT_S:-540}
python=${PYTHON:-python3}
mkdir -p "$out"
out=$(cd "$out" && pwd)
if [ "$bundle" != none ]; then
    site=${TMPDIR:-/tmp}/quant_state_site
    [ -d "$site/site" ] || { mkdir -p "$site" && tar -xJf "$bundle" -C "$site"; } || exit 2
    export PYTHONPATH=$site/site:$PWD
else
    export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
fi
# Where a kernel has a deterministic variant, take it: the tests compare bytes.
export NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 CUBLAS_WORKSPACE_CONFIG=:4096:8 CUDA_DEVICE_MAX_CONNECTIONS=1
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}

declare -A tests=(
    [contract]=tests/unit_tests/reference
    [wrappers]=tests/unit_tests/determinism
    [training]=tests/gpu/test_training.py
    [between]=tests/gpu/test_between_steps.py
    [graphs]=tests/gpu/test_cuda_graphs.py
    [recompute]=tests/gpu/test_recompute.py
    [parallel]=tests/gpu/test_parallel.py
    [rehearse]=tests/gpu/test_rehearse.py
)
status=0
pids=()
for group in "${groups[@]}"; do
    [ "$group" != benchmarks ] || continue
    [ -n "${tests[$group]:-}" ] || { echo "no group $group" >&2; exit 2; }
    timeout -k 10 "$limit" "$python" -m pytest "${tests[$group]}" -m gpu -q -p no:cacheprovider --durations=8 \
        --junitxml "$out/$group.xml" > "$out/$group.log" 2>&1 &
    pids+=($!)
done
for pid in "${pids[@]:+${pids[@]}}"; do
    wait "$pid" || status=1
done
for group in "${groups[@]}"; do
    [ "$group" = benchmarks ] || continue
    timeout -k 10 "$limit" "$python" tools/benchmark_gpu.py --json "$out/benchmark_gpu.json" 2>&1 | tee "$out/benchmarks.log" ||
        status=1
done
"$python" tools/gpu_table.py "$out" "${groups[@]}" || status=1
exit "$status"
