#!/usr/bin/env bash
# The demo: install the project, then `otaro demo` with the arguments given. OTARO_VENV names another virtual environment than .venv.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

install "."

announce "otaro demo"
cd "$caller"
otaro demo "$@"
