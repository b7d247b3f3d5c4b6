"""Memory as the system counts it: an engine from its import to its last drop, and `otaro generate --memory` at limits.

    python bench/memory.py PACKED [--limits 400MB,450MB,500MB] [--json bench/memory.json]

Each part runs in a process of its own. `resident` is VmRSS of /proc/self/status, `peak` VmHWM; `counted` is what
`Engine.memory` says, or the command. All in bytes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ENGINE = """
import itertools, json, sys

def take(stage):
    status = dict(line.split(":") for line in open("/proc/self/status") if line.startswith("Vm"))
    resident, peak = (1024 * int(status[name].split()[0]) for name in ("VmRSS", "VmHWM"))
    print(json.dumps({"stage": stage, "resident": resident, "peak": peak, "counted": engine and engine.memory}))

engine = None
take("Python")
import otaro
otaro.Engine
take("imported")
engine = otaro.Engine(sys.argv[1], threads=2)
take("loaded")
text = engine.tokens([1, 2, 3], max_new_tokens=1100)
next(text)
take("first token")
list(itertools.islice(text, 1021))
take("1024 tokens")
text.close()
next(engine.tokens([1, 2, 3], max_new_tokens=8))
take("a new text")
for width in ("E5M7", "E5M6", "E5M5", "E5M4", "E5M3"):
    engine.drop_to(width)
    take(f"dropped to {width}")
engine.tokenizer
take("with the tokenizer")
"""
COMMAND = """
import re, sys
from otaro.cli import main

code = main(["generate", sys.argv[1], "--prompt", "Why is the sky blue?", "--memory", sys.argv[2], "--threads", "2"])
peak = 1024 * int(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1])
print(f"\\n{code} {peak}", file=sys.stderr)
"""


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=True)


def generate(folder: Path, limit: str) -> dict[str, Any]:
    *said, last = run(COMMAND, str(folder), limit).stderr.strip().splitlines()
    code, peak = map(int, last.split())
    return {"limit": limit, "code": code, "peak": peak, "said": said[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packed", type=Path)
    parser.add_argument("--limits", default="120MB,400MB,420MB,440MB,460MB,480MB,500MB")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    stages = [json.loads(line) for line in run(ENGINE, str(arguments.packed)).stdout.splitlines()]
    for stage in stages:
        counted = {name: round(size / 1e6, 1) for name, size in (stage["counted"] or {}).items()}
        print(f"{stage['stage']:20s} {stage['resident'] / 1e6:7.1f} MB, at most {stage['peak'] / 1e6:7.1f}  {counted}")
    limits = [generate(arguments.packed, limit) for limit in arguments.limits.split(",")]
    for limit in limits:
        print(f"{limit['limit']:>8s}: peak {limit['peak'] / 1e6:.1f} MB, {limit['said']}")
    if arguments.json is not None:
        from otaro.bench.machine import describe

        machine = {key: value for key, value in describe(2, 0).items() if key != "read_bytes_per_second"}
        figures = {"folder": arguments.packed.name, "machine": machine, "engine": stages, "generate": limits}
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
