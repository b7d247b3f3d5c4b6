"""What a tokenizer's files may hold, looked at before the library that runs them sees them.

A tokenizer.json is a program too: steps that replace texts and cut them up. The library that runs it (`tokenizers`)
believes it, and a few lines can make it take gigabytes or hours: steps that each make a text longer, expressions that
go over a text again and again. Models need nothing of the kind, so it is refused here. Expressions that cut a text into
words may be of any kind: how long they take is watched when they run.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from otaro.json_file import read_json

LARGEST = 64_000_000
"""Bytes of a file: a vocabulary of 262,000 tokens with its merges has 33 millions."""
LARGEST_TEMPLATE = 1_000_000
MOST_STEPS = 256
LONGEST_TEXT = 4096
"""Characters of a replacement, an expression, an added token."""
MOST_PIECES = 100
MOST_GROWTH = 100
"""How many times longer a text may become; SentencePiece's table makes one letter 33 bytes long."""
MOST_ENTRIES = 1_000_000
"""Tokens and merges of a vocabulary."""
MOST_ADDED = 100_000
MOST_LISTED = 5_000
"""Special tokens in a list of the settings, which transformers compares with each other."""
FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "tekken.json",
)
TEMPLATES = ("chat_template*", "additional_chat_templates/*")
CONSUMING = re.compile(r"(?:\[[^\[\]]+\]|\\[nrtsdwSDW]|[^\\^$|?*+()\[\]{}])(?![*?]|\{0)[^|]*", re.DOTALL)
"""Expressions that find no empty text: they begin with a letter or a class of letters, and have no other choice."""


def check_files(folder: Path) -> None:
    """ValueError or OSError, with the reason, if there is no file, or one could take much time or memory to use."""
    if not any(path.is_file() for pattern in FILES for path in folder.glob(pattern)):
        raise ValueError("it has none of their files")
    for patterns, largest in ((FILES, LARGEST), (TEMPLATES, LARGEST_TEMPLATE)):
        for path in (path for pattern in patterns for path in folder.glob(pattern)):
            if path.is_file() and path.stat().st_size > largest:
                raise ValueError(f"{path.name} has more than {largest} bytes")
    for name in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"):
        if (folder / name).is_file():
            check_settings(read_json(folder / name, LARGEST), name)
    path = folder / "tokenizer.json"
    if path.is_file():
        described = read_json(path, LARGEST)
        if not isinstance(described, dict):
            raise ValueError("tokenizer.json is not a JSON object")
        check_described(described)


def check_settings(settings: Any, name: str) -> None:
    """The same of the content of a file of settings."""
    values = [settings, *settings.values()] if isinstance(settings, dict) else [settings]
    for value in values:
        most = MOST_LISTED if isinstance(value, list) else MOST_ADDED
        if isinstance(value, list | dict) and len(value) > most:
            raise ValueError(f"{name} lists {len(value)} things")


def check_described(described: dict[str, Any]) -> None:
    """The same of the content of a tokenizer.json."""
    model = described.get("model")
    if isinstance(model, dict):
        listed = [model[name] for name in ("vocab", "merges") if isinstance(model.get(name), list | dict)]
        if sum(map(len, listed)) > MOST_ENTRIES:
            raise ValueError(f"its vocabulary has more than {MOST_ENTRIES} tokens and merges")
        _check_texts({name: value for name, value in model.items() if name not in ("vocab", "merges")})
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        steps = list(_steps(described.get(part)))
        if len(steps) > MOST_STEPS:
            raise ValueError(f"its {part} has {len(steps)} steps")
        growth = math.prod(map(_growth, steps))
        if growth > MOST_GROWTH:
            raise ValueError(f"its {part} makes texts {growth:.0f} times longer")
    added = described.get("added_tokens")
    if isinstance(added, list):
        if len(added) > MOST_ADDED:
            raise ValueError(f"it adds {len(added)} tokens")
        _check_texts(added)


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    """A part and all that lies within it."""
    waiting = [part]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            _check_texts({name: entry for name, entry in value.items() if name != "precompiled_charsmap"}, deep=False)
            if isinstance(value.get("type"), str):
                yield value
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value


def _check_texts(value: Any, *, deep: bool = True) -> None:
    """No text in it may be longer than any tokenizer needs."""
    waiting = [value]
    while waiting:
        entry = waiting.pop()
        if isinstance(entry, str) and len(entry) > LONGEST_TEXT:
            raise ValueError(f"it holds a text of {len(entry)} characters")
        if isinstance(entry, dict) and (deep or entry is value):
            waiting += [*entry, *entry.values()]
        elif isinstance(entry, list) and deep:
            waiting += entry


def _growth(step: dict[str, Any]) -> float:
    """How many times longer a step may make a text; at least 1."""
    match step:
        case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)}:
            return max(1.0, len(content) / len(pattern)) if pattern else len(content) + 1
        case {"type": "Replace", "pattern": {"Regex": str(pattern)}, "content": str(content)}:
            if not is_quick(pattern):
                raise ValueError("an expression of its normalizer or decoder may take very long")
            return max(1, len(content)) if CONSUMING.fullmatch(pattern) else len(content) + 1
        case {"type": "Prepend", "prepend": str(content)}:
            return len(content) + 1
        case {"type": "Precompiled", "precompiled_charsmap": str(encoded)}:
            return max(1.0, _longest_replacement(base64.b64decode(encoded)))
        case {"type": "Strip", "start": start, "stop": stop} if start and stop:
            raise ValueError("its decoder cuts tokens off at both ends, which fails on those that end up with nothing")
        case {"type": "NFKC" | "NFKD"}:
            return 18
        case {"type": "TemplateProcessing", "single": list(single), "pair": list(pair)}:
            special = step.get("special_tokens")
            listed = [entry.get("ids") for entry in special.values()] if isinstance(special, dict) else []
            if len(single) + len(pair) + sum(len(ids) for ids in listed if isinstance(ids, list)) > MOST_PIECES:
                raise ValueError(f"its post_processor puts more than {MOST_PIECES} tokens around a text")
            return max(
                1,
                *(
                    sum(isinstance(piece, dict) and "Sequence" in piece for piece in template)
                    for template in (single, pair)
                ),
            )
        case {"type": "ByteLevel"}:  # each byte becomes a letter, of two bytes for every second one
            return 2
    return 1


def _longest_replacement(table: bytes) -> int:
    """The longest text, in bytes, of SentencePiece's table: the size of a trie, the trie, texts that end in a zero."""
    start = 4 + int.from_bytes(table[:4], "little")
    return max(map(len, table[start:].split(b"\0")))


def is_quick(pattern: str) -> bool:
    """Whether an expression repeats one thing at most, and no group: then it takes no longer than the text's square."""
    bare = re.sub(r"\\.", "x", pattern, flags=re.DOTALL)
    bare = re.sub(r"\[\^?\]?[^\[\]]*\]", "x", bare)  # a class of characters is one thing
    if "[" in bare or "]" in bare:  # one in another
        return False
    repeated = re.findall(r"(.)(?:[*+]|\{[^{}]*\})", bare, flags=re.DOTALL)
    return len(repeated) <= 1 and ")" not in repeated
