"""A model's tokenizer: loaded from files that may come from anywhere, and run so that it comes to an end.

The libraries underneath are transformers and `tokenizers`, which is written in Rust. Whatever they make of a file that
is not what it should be is one sentence: an exception of any kind, a panic, a text that they do not get done with. What
Rust code prints besides, past Python and with the file's own words in it, is kept from the terminal.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from otaro.errors import OtaroError, first_line, foreign_code
from otaro.json_file import read_json
from otaro.tokenizer.files import LARGEST, check_files
from otaro.tokenizer.template import TemplateError, write_chat

__all__ = [
    "TemplateError",
    "added_around",
    "beginning",
    "decode",
    "encode",
    "encode_all",
    "encode_prompt",
    "load_tokenizer",
    "render_chat",
    "write_chat",
]

T = TypeVar("T")
SECONDS = 3.0
"""How long encoding may take, besides a second for every LETTERS_PER_SECOND: usual speeds are a hundred times that."""
LETTERS_PER_SECOND = 20_000
PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""What a tokenizer is that does as its tokenizer.json says, and nothing else."""
STDOUT, STDERR = 1, 2
PROBE = "Probe 1: \u00e9\u6f22\U0001f600\n"


def load_tokenizer(folder: str | Path, label: str | None = None) -> Any:
    """The tokenizer in a model's folder; no code that lies there is run. `label` is what errors call the folder."""
    from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

    from otaro.quiet import quiet

    try:
        check_files(Path(folder))
        name, options = _class_name(Path(folder)), {"local_files_only": True, "trust_remote_code": False}
        # For some kinds of models transformers puts a class of its own, with other rules, in the place of this one.
        loader = PreTrainedTokenizerFast if name in PLAIN_CLASSES else AutoTokenizer
        with foreign_code("it cannot be loaded"), quiet(), _silent(STDOUT, STDERR):
            if loader is AutoTokenizer and name is not None and (Path(folder) / "config.json").is_file():
                # It looks at the kind of model alone, but would import what belongs to that kind.
                options["config"] = PreTrainedConfig.from_pretrained(folder, **options)
            tokenizer = loader.from_pretrained(folder, **options)
            if not isinstance(tokenizer, PreTrainedTokenizerBase):  # two tokenizers in one, for instance
                raise ValueError(f"{type(tokenizer).__name__} is not the tokenizer of one text")
            decode(tokenizer, encode(tokenizer, PROBE))
    except (OtaroError, ValueError, OSError) as error:
        raise OtaroError(
            f"{label or folder} holds no tokenizer that can be read ({first_line(error)}): "
            "copy the model's tokenizer files into it"
        ) from error
    return tokenizer


def _class_name(folder: Path) -> Any:
    path = folder / "tokenizer_config.json"
    described = read_json(path, LARGEST) if path.is_file() else None
    return described.get("tokenizer_class") if isinstance(described, dict) else None


def encode(tokenizer: Any, text: str, *, add_special_tokens: bool = False) -> list[int]:
    """A text's tokens; `add_special_tokens` puts those before and behind it that the model wants there."""
    return encode_all(tokenizer, [text], add_special_tokens=add_special_tokens)[0]


def added_around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The tokens that the model wants before and behind every text: those for its beginning and its end, or none."""
    bare, whole = encode(tokenizer, "a"), encode(tokenizer, "a", add_special_tokens=True)
    for place in range(len(whole) - len(bare) + 1):
        if whole[place : place + len(bare)] == bare:
            return whole[:place], whole[place + len(bare) :]
    return [], []


def beginning(tokenizer: Any) -> list[int]:
    """The tokens that the model wants before every text: its token for the beginning (BOS), or none."""
    return added_around(tokenizer)[0]


def encode_prompt(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a text that is to be gone on from: what the model wants before it is there once, and no end."""
    begin, ids = beginning(tokenizer), encode(tokenizer, text)
    return ids if ids[: len(begin)] == begin else begin + ids


def encode_all(tokenizer: Any, texts: Sequence[str], *, add_special_tokens: bool = False) -> list[list[int]]:
    """The tokens of each of several texts."""

    def work() -> list[list[int]]:
        with foreign_code("the tokenizer fails on this text"):
            encoded = tokenizer(list(texts), add_special_tokens=add_special_tokens, verbose=False)
            return [list(ids) for ids in encoded["input_ids"]]

    if not texts:
        return []
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise OtaroError("the text has half a character in it: a surrogate without the other") from error
    with _silent(STDERR):  # a panic says so there before Python hears of it
        return _within(SECONDS + sum(map(len, texts)) / LETTERS_PER_SECOND, work)


def decode(tokenizer: Any, tokens: Sequence[int], *, special: bool = False) -> str:
    """The text of tokens, without special ones unless they are asked for."""
    with foreign_code("the tokenizer cannot write these tokens as text"):
        return str(tokenizer.decode(tokens, skip_special_tokens=not special, clean_up_tokenization_spaces=False))


def render_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> list[int]:
    """A conversation's tokens in the model's chat template, by default up to where its answer begins.

    Whether or not the template writes it, the token for the beginning is there once if the model wants it.
    """
    text = write_chat(tokenizer, messages, add_generation_prompt=add_generation_prompt, tools=tools)
    return encode_prompt(tokenizer, text)


def _within(seconds: float, work: Callable[[], T]) -> T:
    """What `work` returns or raises, if it does so in time; otherwise it is left behind in its thread."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True, name="otaro tokenizer")
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise OtaroError(f"the tokenizer did not get done with this text within {seconds:.0f} seconds")
    return results[0]


class _Silence:
    """Sends what is written to a file descriptor nowhere while anyone wants it so."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._wanted = 0
        self._kept = -1

    def begin(self) -> None:
        with self._lock:
            self._wanted += 1
            if self._wanted == 1:
                try:
                    self._kept = os.dup(self._descriptor)
                except OSError:  # there is none: a program without a terminal may have closed it
                    self._kept = -1
                    return
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._descriptor)
                os.close(nowhere)

    def end(self) -> None:
        with self._lock:
            self._wanted -= 1
            if self._wanted == 0 and self._kept >= 0:
                os.dup2(self._kept, self._descriptor)
                os.close(self._kept)


_silences = {descriptor: _Silence(descriptor) for descriptor in (STDOUT, STDERR)}


@contextlib.contextmanager
def _silent(*descriptors: int) -> Iterator[None]:
    """Nothing reaches these file descriptors, not even from code that writes to them past Python."""
    if STDOUT in descriptors and sys.stdout is not None:
        sys.stdout.flush()  # what was printed before goes out
    for descriptor in descriptors:
        _silences[descriptor].begin()
    try:
        yield
    finally:
        for descriptor in descriptors:
            _silences[descriptor].end()
