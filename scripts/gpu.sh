#!/bin/sh
# All that only a GPU can show, in one go: python and git are all it needs besides the package. A part that fails or takes
# too long does not keep the others from running, and each part's figures are in OUT as soon as they are there.
#
#     scripts/gpu.sh OUT [PACKED_FOLDER [TOKENS.npy]]
#
# Longest times, in seconds: 20 for compiling, 240 for tests, 180 and 90 for shapes with random weights, 150 for a folder.
set -u
out=${1:?where to write}
folder=${2:-}
tokens=${3:-}
cd "$(dirname "$0")/.." || exit 1
mkdir -p "$out"
PYTHONPATH="src:.${PYTHONPATH:+:$PYTHONPATH}"
PYTHONUNBUFFERED=1
export PYTHONPATH PYTHONUNBUFFERED

part() {
    name=$1 limit=$2
    shift 2
    echo "== $name"
    timeout "$limit" "$@" 2>&1 | tee "$out/$name.txt" | tail -n 40
}

part compile 60 python -c "from experiments.table2.models import compile_kernels; compile_kernels(0)"
part tests 240 python -m pytest -m gpu -q -p no:cacheprovider tests/test_engine_cuda_gpu.py tests/test_cuda_gpu.py
part table2 180 python -m experiments.table2.run --json "$out/table2.json"
part smollm2 90 python -m experiments.table2.run --shape smollm2-135m --tokens 200 --json "$out/smollm2.json"
if [ -n "$folder" ]; then
    part engine 150 python bench/gpu_engine.py "$folder" ${tokens:+--tokens "$tokens"} --json "$out/engine.json"
fi
