"""Feeds the engine broken packed folders and odd prompts: whatever comes, it must answer or say one clear sentence.

    python scripts/fuzz_engine.py --rounds 100000 --seconds 1800 [--seed 1]
    python scripts/fuzz_engine.py --only 4711                # that round alone, with its traceback
    scripts/sanitized.sh address,undefined python scripts/fuzz_engine.py --rounds 2000

A round takes one of a few tiny packed models, spoils some of its files (settings, headers, planes, sizes, whole files),
opens it and runs a prompt that may be odd too, with odd settings, while widths come and go. In most rounds checksums
are not looked at, so that what was spoilt gets through to the native code: whoever can alter a file can sign it anew.

The rounds run in a child process. When it crashes, or a round takes too long or too much memory, the parent names the
round and starts a new child behind it. A round depends on nothing but the seed and its number.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import math
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROUND_SECONDS = 60
MEMORY = 12 << 30
WIDTHS = ("E5M8", "E5M7", "E5M6", "E5M5", "E5M4", "E5M3")
ODD: tuple[Any, ...] = (
    *(0, 1, 2, 3, -1, -(2**31), 2**31 - 1, 2**31, 2**32, 2**53, 2**62, 2**63, 10**30),
    *(0.0, 0.5, -1.5, 1e-45, 1e38, 1e308, math.nan, math.inf, -math.inf),
    *(
        None,
        True,
        False,
        "",
        "x",
        "7",
        "\0",
        "\x1b[2J\n",
        "é" * 300,
        "../../etc/passwd",
        "E5M3",
        "E5M9",
        "U8",
        "F64",
        "BF16",
    ),
    *("[" * 10000, "9" * 5000),
    *([], [0], [1, 2, 3], [[]], {}, {"a": 1}, {"rope_type": "yarn", "factor": 0}),
)
MOST = 40  # tokens of the context the models were made for
VOCABULARY = 40


# ---- the models -----------------------------------------------------------------------------------------------------


def make_models(place: Path) -> None:
    """Packed models as small as it gets, of the kinds that run through different code."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    import otaro
    from otaro.sefp import Format

    logging.disable_progress_bar()
    sizes: dict[str, Any] = {
        **{"vocab_size": VOCABULARY, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 1},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": MOST},
        **{"bos_token_id": None, "eos_token_id": None, "pad_token_id": None},
    }
    llama3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    llama3["original_max_position_embeddings"] = 16
    kinds: dict[str, tuple[str, dict[str, Any], Format]] = {
        "llama": ("llama", {"attention_bias": True, "mlp_bias": True}, Format()),
        "llama3": ("llama", {"rope_parameters": llama3, "tie_word_embeddings": True}, Format(group_size=32)),
        "mistral": ("mistral", {"sliding_window": 5, "head_dim": 20}, Format(group_size=256)),
        "qwen3": ("qwen3", {"head_dim": 16, "num_hidden_layers": 2}, Format(polarity=True)),
    }
    for name, (kind, options, format) in kinds.items():
        torch.manual_seed(0)
        config = AutoConfig.for_model(kind, **{**sizes, **options})
        AutoModelForCausalLM.from_config(config).save_pretrained(place / "source")
        otaro.pack(place / "source", place / name, format=format)
        shutil.rmtree(place / "source")


# ---- spoiling -------------------------------------------------------------------------------------------------------


def spoil_value(value: Any, chance: random.Random) -> Any:
    """The same JSON with one thing in it replaced, taken away, doubled or moved by a little."""
    if isinstance(value, dict) and value and chance.random() < 0.9:
        key = chance.choice(sorted(value))
        if chance.random() < 0.15:
            return {name: entry for name, entry in value.items() if name != key}
        if chance.random() < 0.1:
            return {**value, key: value[chance.choice(sorted(value))]}
        return {**value, key: spoil_value(value[key], chance)}
    if isinstance(value, list) and value and chance.random() < 0.8:
        place = chance.randrange(len(value))
        if chance.random() < 0.2:
            return value[:place] + value[place:][chance.choice((0, 1)) :] + value[:1]
        return [spoil_value(entry, chance) if i == place else entry for i, entry in enumerate(value)]
    if isinstance(value, str) and value[:2] in ('{"', "[[") and chance.random() < 0.9:  # JSON in metadata
        return json.dumps(spoil_value(json.loads(value), chance))
    if type(value) is int and chance.random() < 0.6:
        return chance.choice((value + 1, value - 1, 2 * value, value // 2, -value, value << 32, value + 2**32))
    return chance.choice(ODD)


def spoil_header(data: bytes, chance: random.Random) -> bytes:
    """A safetensors file with another header, its data as they were."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    if chance.random() < 0.4:
        header["__metadata__"] = spoil_value(header["__metadata__"], chance)
    elif chance.random() < 0.3:  # tensors that fit, but are not what they were
        one, two = (chance.choice(sorted(header)) for _ in range(2))
        header[one], header[two] = header[two], header[one]
    else:
        header = spoil_value(header, chance)
    text = json.dumps(header).encode()
    said = len(text) if chance.random() < 0.9 else chance.choice((0, 1, len(text) - 1, len(text) + 1, 2**63, 10**8))
    return said.to_bytes(8, "little") + text + data[8 + length :]


def spoil_bytes(data: bytes, chance: random.Random) -> bytes:
    """Some bytes changed, or a stretch of them: in the plane of a file rather than in its header, most of the time."""
    if not data:
        return b"\0"
    changed = bytearray(data)
    header = 8 + int.from_bytes(data[:8], "little") if chance.random() < 0.8 else 0
    first = header if header < len(data) else 0
    for _ in range(chance.choice((1, 1, 2, 8, 64))):
        start = chance.randrange(first, len(data))
        stretch = changed[start : start + chance.choice((1, 2, 4, 4, 64))]
        filled = chance.choice((0x00, 0x7F, 0x80, 0xFF, None))
        changed[start : start + len(stretch)] = (
            chance.randbytes(len(stretch)) if filled is None else bytes([filled]) * len(stretch)
        )
    return bytes(changed)


def spoil_size(data: bytes, chance: random.Random) -> bytes:
    cut = chance.randrange(len(data) + 1)
    deep = b"[" * 10000
    ways = (data[:cut], data[:cut], b"", data + data[:cut], data + b"\0", data[: cut // 64], data[cut:], deep)
    return chance.choice(ways)


def spoil_file(path: Path, chance: random.Random) -> None:
    data = path.read_bytes()
    kind = chance.random()
    if kind < 0.03:
        path.unlink()
    elif kind < 0.04:
        path.unlink()
        path.mkdir()
    elif kind < 0.05:
        shutil.copyfile(chance.choice(sorted(path.parent.glob("*.safetensors"))), f"{path}.new")
        Path(f"{path}.new").replace(path)
    elif kind < 0.15:
        path.write_bytes(spoil_size(data, chance))
    elif kind < 0.55:
        path.write_bytes(spoil_bytes(data, chance))
    elif path.suffix == ".json":
        path.write_text(json.dumps(spoil_value(json.loads(data), chance)))
    else:
        path.write_bytes(spoil_header(data, chance))


def spoil_folder(folder: Path, chance: random.Random) -> set[Path]:
    """Spoils some files, mostly one; those that are not what they were."""
    targets = set()
    names = sorted(path.name for path in folder.iterdir() if path.suffix in (".json", ".safetensors"))
    for _ in range(chance.choice((0, 1, 1, 1, 1, 1, 2, 3))):
        # The settings and the first file decide most.
        target = folder / chance.choice((*names, *["config.json"] * 4, *["model-m3.safetensors"] * 4))
        targets.add(target)
        with contextlib.suppress(Exception):
            spoil_file(target, chance)  # what is spoilt already may not be understood a second time
    return targets


def restore(target: Path, original: Path) -> None:
    if target.is_dir():
        target.rmdir()
    shutil.copyfile(original, target)


# ---- running --------------------------------------------------------------------------------------------------------


def odd_sampling(chance: random.Random) -> dict[str, Any]:
    usual: dict[str, tuple[Any, ...]] = {
        "temperature": (0.0, 0.0, 1.0, 1e-300, 1e300),
        "top_k": (0, 1, 3, VOCABULARY, 10**9),
        "top_p": (1.0, 0.5, 1e-300),
        "min_p": (0.0, 0.5, 1.0),
        "repetition_penalty": (1.0, 1.3, 1e-300, 1e300),
    }
    settings = {name: chance.choice(values) for name, values in usual.items() if chance.random() < 0.5}
    if chance.random() < 0.1:
        settings[chance.choice(sorted(usual))] = chance.choice((-1, math.nan, math.inf, 2, 0))
    return {**settings, "seed": 1}


def odd_prompt(chance: random.Random) -> list[int]:
    prompt = [chance.randrange(VOCABULARY) for _ in range(chance.choice((0, 1, 2, 7, 16, 17, 30, MOST, 3 * MOST)))]
    if prompt and chance.random() < 0.1:
        prompt[chance.randrange(len(prompt))] = chance.choice((-1, VOCABULARY, 2**31, -(2**31) - 1, 2**63))
    return prompt


def run_prompt(engine: Any, chance: random.Random) -> None:
    from otaro.engine.sampling import Sampling

    def width() -> str | None:
        return chance.choice((None, *WIDTHS))

    names = ("model.embed_tokens", "model.layers.*", "model.layers.0", "lm_head", "*", "nothing", "[")
    overrides = {chance.choice(names): engine.weights.precision} if chance.random() < 0.2 else None
    tokens = engine.tokens(
        odd_prompt(chance),
        max_new_tokens=chance.choice((1, 2, 5, 9, 9, MOST, 0, -1, 10**20)),
        sampling=Sampling(**odd_sampling(chance)),
        prefill=width() if chance.random() < 0.3 else None,
        draft=width() if chance.random() < 0.4 else None,
        overrides=overrides,
        end=[chance.randrange(VOCABULARY)],
        reuse=chance.random() < 0.5,
    )
    for token in tokens:
        assert 0 <= token < engine.weights.model.shape.vocabulary
        event = chance.random()
        if event < 0.1:
            engine.precision = chance.choice(WIDTHS)
        elif event < 0.15:
            engine.drop_to(chance.choice(WIDTHS))
        elif event < 0.2:
            engine.raise_to(chance.choice(WIDTHS))
        elif event < 0.22:
            tokens.close()


def run_folder(folder: Path, chance: random.Random) -> None:
    from otaro.engine.engine import Engine
    from otaro.engine.native import Session
    from otaro.errors import OtaroError
    from otaro.ops import cpu
    from otaro.precision import Precision

    engine = Engine(
        folder,
        chance.choice((None, *WIDTHS, *["E5M3"] * 4)),
        threads=chance.choice((1, 1, 1, 2)),
        context=chance.choice((None, *[MOST] * 8, 16, 16, 1, 0, 10**9)),
        progressive=chance.random() < 0.1,
    )
    cache = chance.choice((None, None, *Precision))
    engine._session = Session(engine.weights.model, engine.context, isa=chance.choice(cpu.isas()), cache=cache)
    for _ in range(chance.choice((1, 1, 2, 3))):
        try:
            run_prompt(engine, chance)
        except OtaroError as error:
            check_sentence(error)
    engine.finish_loading()


def check_sentence(error: Exception) -> None:
    text = str(error)
    assert text, "an error without a message"
    assert text.isprintable(), f"more than one line: {text!r}"
    assert len(text) <= 1000, f"a message of {len(text)} characters: {text[:300]}"


def one_round(place: Path, seed: int, number: int) -> str:
    from otaro.checkpoint.folder import PackedFolder
    from otaro.engine.architecture import UnsupportedError
    from otaro.errors import OtaroError

    chance = random.Random(f"{seed} {number}")
    model = chance.choice(sorted(path.name for path in (place / "models").iterdir()))
    folder = place / "spoilt" / model
    targets = spoil_folder(folder, chance)
    late = chance.random() < 0.1  # spoilt once more, after it was checked

    def check(self: PackedFolder, *given: Any, **named: Any) -> Any:
        files = whole(self, *given, **named)
        if late:
            targets.update(spoil_folder(folder, chance))
        return files

    signed, whole = PackedFolder._check_sum, PackedFolder.check_headers
    PackedFolder.check_headers = check  # type: ignore[method-assign]
    if chance.random() < 0.8:
        PackedFolder._check_sum = lambda self, file, checksum: None  # type: ignore[method-assign]
    try:
        run_folder(folder, chance)
    except (OtaroError, UnsupportedError) as error:
        check_sentence(error)
        return type(error).__name__
    finally:
        PackedFolder._check_sum, PackedFolder.check_headers = signed, whole  # type: ignore[method-assign]
        for target in targets:
            restore(target, place / "models" / model / target.name)
    return "ran"


def once(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Reads a config that was not spoilt only the first time: it takes a third of a round."""
    known: dict[bytes, Any] = {}

    def read_config(folder: Any) -> Any:
        content = (folder.path / "config.json").read_bytes()
        if content not in known:
            config = read(folder)
            if len(known) > 100:
                return config
            known[content] = config
        return known[content]

    return read_config


def child(place: Path, seed: int, numbers: range) -> None:
    """Runs rounds and tells the outcome of each in a line."""
    import numpy
    from transformers.utils import logging

    from otaro.engine import weights

    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    numpy.seterr(all="ignore")
    if "asan" not in os.environ.get("LD_PRELOAD", ""):  # its shadow takes terabytes of addresses
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    weights.read_config = once(weights.read_config)
    faulthandler.enable()
    shutil.rmtree(place / "spoilt", ignore_errors=True)  # a child before this one may have left it spoilt
    shutil.copytree(place / "models", place / "spoilt")
    for number in numbers:
        faulthandler.dump_traceback_later(ROUND_SECONDS, exit=True)
        try:
            outcome = one_round(place, seed, number)
        except Exception as error:
            traceback.print_exc()
            outcome = f"BROKE {type(error).__name__}"
        print(number, outcome, flush=True)


# ---- the parent -----------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10**9)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first round")
    parser.add_argument("--only", type=int, help="the number of one round to run")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only is not None:
        options.first, options.rounds = options.only, 1
    end = options.first + options.rounds
    if options.child is not None:
        child(options.child, options.seed, range(options.first, end))
        return
    outcomes: Counter[str] = Counter()
    broken: list[int] = []
    start = time.monotonic()
    memory = Path("/dev/shm")  # files in memory where there is such a thing
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        place = Path(name)
        (place / "models").mkdir()
        make_models(place / "models")
        number = options.first
        while number < end and time.monotonic() < start + options.seconds:
            command = [sys.executable, __file__, "--child", name, "--seed", str(options.seed)]
            command += ["--first", str(number), "--rounds", str(end - number)]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
                assert process.stdout is not None
                for line in process.stdout:
                    outcome = line.split(maxsplit=1)[1].strip()
                    outcomes[outcome] += 1
                    if outcome.startswith("BROKE"):
                        broken.append(number)
                        print(f"round {number} broke", flush=True)
                    number += 1
                    if number % 5000 == 0:
                        print(f"{number} rounds, {time.monotonic() - start:.0f} s: {dict(outcomes)}", flush=True)
                    if time.monotonic() > start + options.seconds:
                        process.terminate()
                        break
            if process.returncode not in (0, -15):
                outcomes[f"CRASHED {process.returncode}"] += 1
                broken.append(number)
                print(f"round {number} crashed ({process.returncode})", flush=True)
                number += 1
    took = time.monotonic() - start
    print(f"{sum(outcomes.values())} rounds in {took:.0f} s, seed {options.seed}:", dict(outcomes.most_common()))
    if broken:
        raise SystemExit(f"{len(broken)} rounds broke; --only {broken[0]} --seed {options.seed} runs the first again")
    print("nothing broke")


if __name__ == "__main__":
    main()
