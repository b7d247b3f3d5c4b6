#!/bin/sh
# All that only a GPU can show: python and git are all it needs besides the package. A part that fails or takes too long
# does not keep the others from running, and each part's figures are in OUT as soon as they are there.
#
#     scripts/gpu.sh OUT [PART …]
#
# Parts, in the order in which they run when none is named, with the most seconds each may take:
#
#     step      350   an update of each method against fp16's, in the shape of SmolLM2
#     step-1b   350   the same in the shape of Llama-3.2-1B
#     tune      300   the command `otaro tune`, 400 updates by fp16 and by tiers                      MODEL, TRAIN
#     wikitext  590   the recipe on WikiText-2 beside averaged baselines; RUNS and SEEDS name others   MODEL, TRAIN, TEST
#     compile    60   the engine's kernels
#     tests     300   everything marked `gpu`
#     products  200   products with packed weights against cuBLAS
#     table2    180   the engine in the shape of Llama-3-8B
#     smollm2    90   and in that of SmolLM2
#     engine    150   the engine on a packed folder                                                   FOLDER, TOKENS
#
# Some read from the environment what stands at the end of the line, and are left out where it is not set: MODEL (what
# `otaro tune` takes), TRAIN and TEST (WikiText-2 files, or token ids as .npy), FOLDER (a packed model), TOKENS (.npy).
set -u
out=${1:?where to write}
shift
cd "$(dirname "$0")/.." || exit 1
mkdir -p "$out"
PYTHONPATH="src:.${PYTHONPATH:+:$PYTHONPATH}"
PYTHONUNBUFFERED=1
export PYTHONPATH PYTHONUNBUFFERED
parts=${*:-step step-1b tune wikitext compile tests products table2 smollm2 engine}

run() {
    limit=$1
    shift
    timeout "$limit" "$@" 2>&1 | tee -a "$out/$part.txt" | tail -n 40
}

tune() {
    rm -rf "$out/tuned"
    # shellcheck disable=SC2016
    run 150 sh -c 'time python -m otaro tune "$@"' tune "$MODEL" "$out/tuned" --data "$TRAIN" --steps 400 \
        --batch-size 16 --bf16 "$@"
    cp "$out/tuned/tune.json" "$out/tune-$2.json"
    rm -rf "$out/tuned"
}

for part in $parts; do
    echo "== $part"
    case $part in
    step) run 350 python bench/tune_step.py --method tiers,bps --rounds 3 --json "$out/tune_step.json" ;;
    step-1b)
        run 350 python bench/tune_step.py --shape llama-1b --method tiers,bps --rounds 2 --json "$out/tune_step.json"
        ;;
    tune)
        [ -n "${MODEL:-}" ] && [ -n "${TRAIN:-}" ] || continue
        tune --method fp16
        tune --method tiers
        ;;
    wikitext)
        [ -n "${MODEL:-}" ] && [ -n "${TRAIN:-}" ] && [ -n "${TEST:-}" ] || continue
        runs=${RUNS:-tiers,fp16+averaged,fixed-E5M3+averaged,fixed-E5M4+averaged}
        run 590 python -m experiments.wikitext.run --model "$MODEL" --train "$TRAIN" --test "$TEST" --runs "$runs" \
            --seeds "${SEEDS:-0,1,2}" --out "$out/wikitext"
        ;;
    compile) run 60 python -c "from experiments.table2.models import compile_kernels; compile_kernels(0)" ;;
    tests)
        run 300 python -m pytest -m gpu -q -p no:cacheprovider tests/test_tune_gpu.py tests/test_engine_cuda_gpu.py \
            tests/test_cuda_gpu.py
        ;;
    products) run 200 python bench/gpu_matvec.py --seconds 120 --json "$out/gpu_matvec.json" ;;
    table2) run 180 python -m experiments.table2.run --json "$out/table2.json" ;;
    smollm2) run 90 python -m experiments.table2.run --shape smollm2-135m --tokens 200 --json "$out/smollm2.json" ;;
    engine)
        [ -n "${FOLDER:-}" ] || continue
        run 150 python bench/gpu_engine.py "$FOLDER" ${TOKENS:+--tokens "$TOKENS"} --json "$out/engine.json"
        ;;
    *) echo "there is no part $part" >&2 && exit 2 ;;
    esac
done
