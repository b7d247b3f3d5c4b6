"""Feeds otaro files that are not what they should be: whatever comes, it must answer or say one clear sentence.

    python scripts/fuzz.py --rounds 20000 --seconds 7200 [--seed 1] [--kinds engine,pack]
    python scripts/fuzz.py --only 4711                       # that round alone, with its traceback
    scripts/sanitized.sh address,undefined python scripts/fuzz.py --rounds 2000

A round takes one of a few tiny models (a packed folder, an ordinary one, a GGUF file), spoils some of its files
(settings, headers, weights, sizes, tokenizers, chat templates), and runs a command or the engine on it, with a prompt
and settings that may be odd too. In most rounds checksums are not looked at, so that what was spoilt gets through to
the native code: whoever can alter a file can sign it anew. What a round must not do: raise anything but a sentence,
write anything else to stdout or stderr, leave files behind, take more than SECONDS of processor time or MEMORY above
what the process had at its start, when it had run every kind of round on models as they should be.

The rounds run in a child process. When it crashes or hangs, the parent names the round and starts a new child behind
it. A round depends on nothing but the seed, its number and the kinds.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import os
import random
import resource
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import BinaryIO
from unittest import mock

from fuzzing.models import copy_model, make_models
from fuzzing.rounds import KINDS, choose_kind, one_round
from fuzzing.spoil import clock

SECONDS = 5.0
MEMORY = 500_000_000
HANGS_AFTER = 60
ADDRESSES = 12 << 30
ROUNDS_OF_A_CHILD = 500
RESTART = 75
"""What a child exits with that wants another one in its place: a tokenizer is still busy with a text it was given."""
USED = ("bench.measure", "evaluate.command", "evaluate.divergence", "export", "tune.command", "tune.trainer")


def sanitized() -> bool:
    return "asan" in os.environ.get("LD_PRELOAD", "")


# ---- the child ------------------------------------------------------------------------------------------------------


class Measure:
    """Processor time and memory of one round."""

    def __init__(self) -> None:
        self._start = self._resident()

    @staticmethod
    def _resident(field: str = "VmRSS:") -> int:
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.split(field)[1].split()[0])

    def begin(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the most memory it had begins anew with what it has
        self._before, self._spoiling = os.times(), clock.seconds

    def broken(self) -> str | None:
        """What a round took too much of."""
        used = [now - before for now, before in zip(os.times()[:4], self._before[:4], strict=True)]
        seconds = sum(used) - (clock.seconds - self._spoiling)
        memory = self._resident("VmHWM:") - self._start
        if seconds > SECONDS * (4 if sanitized() else 1):
            return f"BROKE slow: {seconds:.1f} s"
        if memory > MEMORY * (4 if sanitized() else 1):
            return f"BROKE large: {memory / 1e6:.0f} MB"
        return None


def warm_up(place: Path, kinds: list[str]) -> None:
    """Every kind on models as they should be: what stays in memory from then on is not the rounds' to answer for."""
    with mock.patch("fuzzing.rounds.spoil_folder"), mock.patch("fuzzing.rounds.spoil_file"):
        for kind in set(kinds) - {"engine"}:
            for number in range(4):
                one_round(kind, place, random.Random(f"{kind} {number}"))


def child(place: Path, seed: int, numbers: range, kinds: list[str]) -> None:
    """Runs rounds and tells the outcome of each in a line."""
    import numpy

    if not (place / "text.txt").exists():
        make_models(place)
    for name in USED if set(kinds) - {"engine"} else ():  # what rounds would import is not theirs to answer for
        importlib.import_module(f"otaro.{name}")
    from transformers.utils import logging

    from otaro.cli import quieten_libraries

    quieten_libraries()
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    numpy.seterr(all="ignore")
    outcomes = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever writes there, Rust code past Python too, is noise
    if not sanitized():  # whose shadow takes terabytes of addresses
        resource.setrlimit(resource.RLIMIT_AS, (ADDRESSES, ADDRESSES))
    faulthandler.enable()
    copy_model(place, "packed", "llama")
    warm_up(place, kinds)
    measure = Measure()
    said = os.fstat(2).st_size
    for number in numbers:
        faulthandler.dump_traceback_later(HANGS_AFTER, exit=True)
        chance = random.Random(f"{seed} {number}")
        kind = choose_kind(chance, kinds)
        measure.begin()
        trace = ""
        try:
            outcome = one_round(kind, place, chance)
        except BaseException as error:
            trace = traceback.format_exc()
            outcome = f"BROKE {type(error).__name__}"
        outcome = measure.broken() or outcome
        if os.fstat(2).st_size != said:
            outcome = "BROKE noise" if not outcome.startswith("BROKE") else outcome
        os.write(2, trace.encode(errors="replace"))
        said = os.fstat(2).st_size
        print(number, f"{kind}: {outcome}", file=outcomes, flush=True)
        if any(thread.name == "otaro tokenizer" for thread in threading.enumerate()):
            os._exit(RESTART)


# ---- the parent -----------------------------------------------------------------------------------------------------


class Parent:
    """Starts children one after another, and counts."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._end = options.first + options.rounds
        self._start = time.monotonic()
        self.outcomes: Counter[str] = Counter()
        self.broken: list[int] = []

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start

    def run(self, place: Path) -> None:
        number = self._options.first
        while number < self._end and self.seconds < self._options.seconds:
            until = min(self._end, number + ROUNDS_OF_A_CHILD)
            command = [sys.executable, __file__, "--child", str(place), "--seed", str(self._options.seed)]
            command += ["--first", str(number), "--rounds", str(until - number), "--kinds", self._options.kinds]
            with (place / "stderr").open("wb") as written, (place / "stderr").open("rb") as errors:
                number, code = self._watch(command, written, errors, number)
                if code not in (0, -15, RESTART):
                    self._note(number, f"CRASHED {code}", errors)
                    number += 1

    def _watch(self, command: list[str], written: BinaryIO, errors: BinaryIO, number: int) -> tuple[int, int]:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=written, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                told, outcome = line.strip().split(maxsplit=1)
                assert int(told) == number, f"round {number} was to come, not {line}"
                self._note(number, outcome, errors)
                number += 1
                if number % 1000 == 0:
                    print(f"{number} rounds, {self.seconds:.0f} s", flush=True)
                if self.seconds > self._options.seconds:
                    process.terminate()
                    break
        return number, process.returncode

    def _note(self, number: int, outcome: str, errors: BinaryIO) -> None:
        self.outcomes[outcome] += 1
        if "BROKE" in outcome or "CRASHED" in outcome:
            self.broken.append(number)
            trace = errors.read().decode(errors="replace")  # from where the last one ended
            print(f"round {number}: {outcome}\n{trace[-3000:]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10**9)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"of {', '.join(KINDS)}")
    parser.add_argument("--first", type=int, default=0, help="the number of the first round")
    parser.add_argument("--only", type=int, help="the number of one round to run")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only is not None:
        options.first, options.rounds = options.only, 1
    if options.child is not None:
        numbers = range(options.first, options.first + options.rounds)
        child(options.child, options.seed, numbers, options.kinds.split(","))
        return
    parent = Parent(options)
    memory = Path("/dev/shm")  # files in memory where there is such a thing
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        parent.run(Path(name))
    for outcome, count in sorted(parent.outcomes.items()):
        print(f"{count:7} {outcome}")
    print(f"{sum(parent.outcomes.values())} rounds in {parent.seconds:.0f} s, seed {options.seed}")
    if parent.broken:
        again = f"--only {parent.broken[0]} --seed {options.seed} --kinds {options.kinds}"
        raise SystemExit(f"{len(parent.broken)} rounds broke; {again} runs the first again")
    print("nothing broke")


if __name__ == "__main__":
    main()
