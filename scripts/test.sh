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
find csrc src tests -type f -regex '.*\.\(c\|cpp\|h\|hpp\|cu\|cuh\)' -print0 |
    xargs -0 clang-format --dry-run --Werror

announce "pytest, two tests at a time"
# One thread each: two processes of two threads would wait for each other most of the time.
OMP_NUM_THREADS=1 pytest --numprocesses 2 --dist worksteal

announce "native tests with AddressSanitizer and UndefinedBehaviorSanitizer, on every instruction set of this machine"
# Reports go straight to the screen (--capture=sys): pytest could not show them any more.
OMP_NUM_THREADS=1 scripts/sanitized.sh address,undefined pytest --numprocesses 2 --dist worksteal --capture=sys \
    tests/test_native.py tests/test_engine.py tests/test_engine_cache.py tests/test_engine_live.py \
    tests/test_engine_sequences.py tests/test_engine_sampling.py \
    -k "not missing_library and not forked_child"

announce "the engine without Python, still the same calls (tests/native/check.cpp)"
c++ -std=c++17 -fsyntax-only -Icsrc tests/native/check.cpp

announce "fuzz: spoilt packed folders and odd prompts, with the same library"
scripts/sanitized.sh address,undefined python scripts/fuzz.py --kinds engine --rounds 1000 --seconds 20

announce "fuzz: spoilt models of every kind through every command"
python scripts/fuzz.py --rounds 1000 --seconds 30

announce "all checks passed"
