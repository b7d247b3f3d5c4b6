#!/usr/bin/env bash
# Everything CI checks: lint, types, tests, on the installed wheel. OTARO_VENV names another virtual environment than .venv.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

install ".[dev]"

announce "ruff check"
ruff check

announce "ruff format --check"
ruff format --check

announce "mypy"
mypy

announce "clang-format --dry-run --Werror"
find csrc -type f \( -name '*.c' -o -name '*.cpp' -o -name '*.h' -o -name '*.hpp' \) -print0 |
    xargs -0 clang-format --dry-run --Werror

announce "pytest"
pytest

announce "all checks passed"
