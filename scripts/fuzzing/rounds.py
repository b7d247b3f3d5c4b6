"""What a round does with a spoilt model: each kind returns how it ended, or raises what must not be raised."""

from __future__ import annotations

import contextlib
import io
import math
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from fuzzing.models import FILES, PACKED, SOURCES, VOCABULARY, copy_model
from fuzzing.spoil import spoil_file, spoil_folder

MOST = 40
"""Tokens of a context, most of the time."""
WIDTHS = ("E5M8", "E5M7", "E5M6", "E5M5", "E5M4", "E5M3")
NATIVE = ("llama", "llama3", "mistral", "qwen3")
OTHERS = ("mixtral", "gpt2")
WEIGHTS = ("config.json", "model-m3.safetensors")
WORDS = ("tokenizer.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
SOURCE = ("config.json", "model.safetensors", "index.json", ".safetensors", "tokenizer.json")


def one_round(kind: str, place: Path, chance: random.Random) -> str:
    outcome = KINDS[kind][1](place, chance)
    left = {path.name for path in (place / "work").iterdir() if ".partial" in path.name}
    assert not left, f"leftovers: {left}"
    return outcome


def choose_kind(chance: random.Random, kinds: list[str]) -> str:
    return chance.choices(kinds, [KINDS[kind][0] for kind in kinds])[0]


@contextlib.contextmanager
def unsigned(chance: random.Random, late: Callable[[], None] | None = None) -> Iterator[None]:
    """Mostly without a look at checksums: whoever can alter a file can sign it anew. `late` runs after the headers."""
    from otaro.checkpoint.folder import PackedFolder

    whole = PackedFolder.check_headers

    def check(self: PackedFolder, *given: Any, **named: Any) -> Any:
        files = whole(self, *given, **named)
        if late is not None:
            late()
        return files

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(PackedFolder, "check_headers", check))
        if chance.random() < 0.8:
            stack.enter_context(mock.patch.object(PackedFolder, "_check_sum", return_value=None))
        yield


def run_command(*arguments: str | Path, typed: str = "") -> str:
    """The command line with these arguments: it must end well, or with one sentence and code 2."""
    from otaro.cli import main

    out, errors = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(errors),
        mock.patch.object(sys, "stdin", io.StringIO(typed)),
    ):
        code = main([str(argument) for argument in arguments])
    if code == 0:
        return "ran"
    assert code == 2, f"code {code}: {errors.getvalue()}"
    *before, last = errors.getvalue().splitlines() or [""]
    assert last.startswith("otaro: error: "), errors.getvalue()
    assert not [line for line in before if "rror" in line or "Traceback" in line], errors.getvalue()
    check_sentence(last)
    return "refused"


def check_sentence(text: str) -> None:
    assert text, "an error without a message"
    assert text.isprintable(), f"more than one line: {text!r}"
    assert len(text) <= 1100, f"a message of {len(text)} characters: {text[:300]}"


# ---- the engine -----------------------------------------------------------------------------------------------------


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
    overrides = {chance.choice(names): engine.weights.loaded} if chance.random() < 0.2 else None
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


def run_together(engine: Any, chance: random.Random) -> None:
    """Several texts at once, some of them cancelled, while widths change."""
    from otaro.engine.sampling import Sampling
    from otaro.engine.scheduler import Request, Running, Scheduler
    from otaro.errors import OtaroError
    from otaro.precision import Precision

    scheduler = Scheduler(engine, most_sequences=chance.choice((1, 2, 4)), prompt_tokens=chance.choice((1, 5, 64)))
    texts: list[Running] = []
    for _ in range(chance.randrange(1, 7)):
        with contextlib.suppress(OtaroError):
            request = Request(
                odd_prompt(chance),
                chance.choice((1, 2, 5, 9, 0)),
                Sampling(**odd_sampling(chance)),
                chance.choice((None, None, *Precision)),
                end=[chance.randrange(VOCABULARY)],
                logprobs=chance.choice((None, None, 0, 3, VOCABULARY, -1)),
            )
            texts.append(scheduler.submit(request))
    for text in texts:
        if chance.random() < 0.2:
            text.cancel()
        if chance.random() < 0.2:
            engine.drop_to(chance.choice(WIDTHS))
    scheduler.close(wait=chance.random() < 0.5)
    for text in texts:
        try:
            assert all(0 <= token.id < engine.weights.model.shape.vocabulary for token in text)
        except OtaroError as error:
            check_sentence(str(error))
        assert text.finish_reason is not None


def run_engine(folder: Path, chance: random.Random) -> None:
    from otaro.engine.engine import Engine
    from otaro.engine.session import Session, Work
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
    engine._session = Session(engine.weights.model, engine.context, cache=cache)
    engine._work = Work(engine.weights.model, isa=chance.choice(cpu.isas()))
    for _ in range(chance.choice((1, 1, 2, 3))):
        try:
            (run_together if chance.random() < 0.3 else run_prompt)(engine, chance)
        except OtaroError as error:
            check_sentence(str(error))
    engine.finish_loading()


def engine(place: Path, chance: random.Random) -> str:
    """Odd prompts and settings while widths come and go, and files that change after they were checked."""
    from otaro.engine.architecture import UnsupportedError
    from otaro.errors import OtaroError

    folder = copy_model(place, PACKED, chance.choice(NATIVE))
    spoil_folder(folder, chance, WEIGHTS)
    late = chance.random() < 0.1
    try:
        with unsigned(chance, (lambda: spoil_folder(folder, chance, WEIGHTS)) if late else None):
            run_engine(folder, chance)
    except (OtaroError, UnsupportedError) as error:
        check_sentence(str(error))
        return type(error).__name__
    return "ran"


# ---- the commands ---------------------------------------------------------------------------------------------------


def odd_text(chance: random.Random) -> str:
    if chance.random() < 0.1:
        return chance.choice(("", " ", "\ud800", os.fsdecode(b"\xff\xfe"), "\0\x1b[2J", "x" * 1000))
    texts = (
        *("Hi", "Hello, world!", "a" * 30, "a" * 300, "x y " * 50, "é漢\U0001f600 \t\n", "<end><user></s>"),
        *("the the th t", "1234567890" * 5, "aaaa!" * 10, "a b\u0301 \ufdfa"),
    )
    return chance.choice(texts)


def packed_words(place: Path, chance: random.Random) -> Path:
    """A packed folder whose weights are as they were, most of the time."""
    folder = copy_model(place, PACKED, chance.choice((*NATIVE, *NATIVE, *OTHERS)))
    spoil_folder(folder, chance, WORDS)
    return folder


def generate(place: Path, chance: random.Random) -> str:
    folder = packed_words(place, chance)
    options = [option for option in ("--raw", "--json") if chance.random() < 0.3]
    if chance.random() < 0.15:
        options += ["--backend", "transformers"]
    if chance.random() < 0.2:
        options += ["--stop", odd_text(chance)]
    if chance.random() < 0.2:
        options += ["--precision", chance.choice(WIDTHS), "--temperature", "1", "--seed", "0"]
    with unsigned(chance):
        return run_command(
            *("generate", folder, "--prompt", odd_text(chance), "--max-new-tokens", "3", "--threads", "1", *options)
        )


def chat(place: Path, chance: random.Random) -> str:
    folder = packed_words(place, chance)
    typed = f"{odd_text(chance)}\n/precision E5M3\n{odd_text(chance)}\n/system {odd_text(chance)}\n/retry\n/exit\n"
    with unsigned(chance):
        return run_command("chat", folder, "--max-new-tokens", "3", "--threads", "1", typed=typed)


def describe(place: Path, chance: random.Random) -> str:
    """info, verify and cut."""
    folder = copy_model(place, PACKED, chance.choice((*NATIVE, *OTHERS)))
    spoil_folder(folder, chance, WEIGHTS)
    with unsigned(chance):
        outcomes = [run_command("info", folder, *chance.choice(((), ("--json",)))), run_command("verify", folder)]
        outcomes.append(run_command("cut", folder, place / "work" / "out", "--precision", chance.choice(WIDTHS)))
    return " ".join(outcomes)


def source(place: Path, chance: random.Random) -> Path:
    """A folder of an ordinary model, or a GGUF file."""
    if chance.random() < 0.4:
        file = copy_model(place, FILES, chance.choice(("llama.gguf", "llama3.gguf", "qwen3.gguf")))
        if chance.random() < 0.9:
            spoil_file(file, chance)
        return file
    folder = copy_model(place, SOURCES, chance.choice((*NATIVE, *OTHERS)))
    spoil_folder(folder, chance, SOURCE)
    return folder


def pack(place: Path, chance: random.Random) -> str:
    out = place / "work" / "out"
    outcome = run_command("pack", source(place, chance), out, "--precision", chance.choice(WIDTHS))
    assert out.exists() == (outcome == "ran")
    return outcome


def export(place: Path, chance: random.Random) -> str:
    folder = copy_model(place, PACKED, chance.choice(("llama", "llama3", "qwen3")))
    spoil_folder(folder, chance, chance.choice((WORDS, WEIGHTS)))
    out = place / "work" / "out.gguf"
    with unsigned(chance):
        outcome = run_command("export", folder, out, "--precision", chance.choice(WIDTHS))
    assert out.exists() == (outcome == "ran")
    return outcome


def evaluate(place: Path, chance: random.Random) -> str:
    model = chance.choice((packed_words, source))(place, chance)
    options = ["--window", "8", "--max-windows", "1", "--precisions", chance.choice(WIDTHS), "--device", "cpu"]
    with unsigned(chance):
        return run_command("eval", model, "--text", place / "text.txt", *options)


def load(place: Path, chance: random.Random) -> str:
    """`otaro.load`, through transformers."""
    import otaro
    from otaro.errors import OtaroError

    folder = copy_model(place, PACKED, chance.choice((*NATIVE, *OTHERS)))
    spoil_folder(folder, chance, (*WEIGHTS, "generation_config.json"))
    try:
        with unsigned(chance):
            otaro.load(folder, chance.choice((None, *WIDTHS)))
    except OtaroError as error:
        check_sentence(str(error))
        return type(error).__name__
    return "ran"


def tune(place: Path, chance: random.Random) -> str:
    data = place / chance.choice(("text.txt", "chat.jsonl"))
    options = ["--steps", "1", "--batch-size", "1", "--sequence-length", "8", "--method", "uniform", "--cpu"]
    return run_command("tune", source(place, chance), place / "work" / "out", "--data", data, *options)


KINDS: dict[str, tuple[float, Callable[[Path, random.Random], str]]] = {
    "engine": (45, engine),
    "generate": (18, generate),
    "chat": (5, chat),
    "describe": (8, describe),
    "pack": (10, pack),
    "export": (5, export),
    "evaluate": (4, evaluate),
    "load": (4, load),
    "tune": (1, tune),
}
"""How often each of them comes."""
