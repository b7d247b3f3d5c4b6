#!/usr/bin/env bash
# scripts/sanitized.sh SANITIZERS COMMAND...: runs a command (of python) on a native core built with these sanitizers,
# "address,undefined" or "thread". The first thing they find ends the program with a report and an exit code that is not 0.
set -euo pipefail

sanitizers="$1"
shift
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
build="${OTARO_SANITIZED_BUILD:-$root/build}/sanitized-${sanitizers/,/-}"
cmake -S "$root" -B "$build" -G Ninja "-DOTARO_SANITIZE=$sanitizers" --log-level=WARNING
cmake --build "$build" -- --quiet

# Python itself is not instrumented, so the runtime must be there before the library is loaded.
library="$build/libotaro_core.so"
compiler="$(sed -n 's/^CMAKE_CXX_COMPILER:[^=]*=//p' "$build/CMakeCache.txt")"
runtime="$(ldd "$library" | awk '/lib(clang_rt\.)?[at]san/ { print $1; exit }')"
if [[ -z "$runtime" ]]; then
    echo "$library carries no sanitizer runtime: $compiler must link it as a shared library" >&2
    exit 1
fi
echo "   $library with $("$compiler" -print-file-name="$runtime")"
# Nor does it load the C++ library, without which AddressSanitizer cannot let an exception pass.
standard="$(ldd "$library" | awk '/libstdc\+\+|libc\+\+\./ { print $3; exit }')"
export OTARO_NATIVE_LIBRARY="$library"
export ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1:max_allocation_size_mb=2048
export UBSAN_OPTIONS=print_stacktrace=1 TSAN_OPTIONS=halt_on_error=1
LD_PRELOAD="$("$compiler" -print-file-name="$runtime") $standard" exec "$@"
