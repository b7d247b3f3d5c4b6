"""Files that are not what they should be: settings, headers, weights, tokenizers, templates."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Clock:
    """Processor time that went into spoiling files, which nobody else has to answer for."""

    seconds = 0.0


clock = Clock()

LARGEST = 16 << 20
"""Characters of JSON: steps within steps, each five hundred times, would fill any disk."""


ODD: tuple[Any, ...] = (
    *(0, 1, 2, 3, -1, -(2**31), 2**31 - 1, 2**31, 2**32, 2**53, 2**62, 2**63, 10**9, 10**30, 10**4000),
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
        "\ud800",
        "\u202e",
        "../../etc/passwd",
        "/dev/zero",
    ),
    *("E5M3", "E5M9", "U8", "F64", "BF16", "[" * 10000, "9" * 5000, "x" * 100_000),
    *([], [0], [1, 2, 3], [[]], [None], ["x", 1], [10**600] * 400, [2**31] * 300),
    *({}, {"a": 1}, {"rope_type": "yarn", "factor": 0}, {"content": "x", "__type": "AddedToken"}),
)


def written(value: Any) -> str:
    """As JSON, unless that grows beyond all measure."""
    parts, length = [], 0
    for part in json.JSONEncoder().iterencode(value):
        parts.append(part)
        length += len(part)
        if length > LARGEST:
            raise ValueError("too large")
    return "".join(parts)


def spoil_value(value: Any, chance: random.Random) -> Any:
    """The same JSON with one thing in it replaced, taken away, doubled or moved by a little."""
    if isinstance(value, dict) and value and chance.random() < 0.9:
        key = chance.choice(sorted(value))
        if chance.random() < 0.15:
            return {name: entry for name, entry in value.items() if name != key}
        if chance.random() < 0.1:
            return {**value, key: value[chance.choice(sorted(value))]}
        if chance.random() < 0.05:
            return {**value, chance.choice(("\ud800", "", "x" * 1000, "__class__")): value[key]}
        return {**value, key: spoil_value(value[key], chance)}
    if isinstance(value, list) and value and chance.random() < 0.8:
        place = chance.randrange(len(value))
        if chance.random() < 0.2:
            return value[:place] + value[place:][chance.choice((0, 1)) :] + value[:1]
        if chance.random() < 0.05:
            return value * chance.choice((2, 100))
        return [spoil_value(entry, chance) if i == place else entry for i, entry in enumerate(value)]
    if isinstance(value, str) and value[:2] in ('{"', "[[") and chance.random() < 0.9:  # JSON in metadata
        return written(spoil_value(json.loads(value), chance))
    if type(value) is int and chance.random() < 0.6:
        return chance.choice((value + 1, value - 1, 2 * value, value // 2, -value, value << 32, value + 2**32))
    return chance.choice(ODD)


# ---- bytes ----------------------------------------------------------------------------------------------------------


def spoil_bytes(data: bytes, chance: random.Random, first: int = 0) -> bytes:
    """Some bytes changed, or a stretch of them."""
    if not data:
        return b"\0"
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 8, 64))):
        start = chance.randrange(first if first < len(data) else 0, len(data))
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


# ---- safetensors ----------------------------------------------------------------------------------------------------


def spoil_safetensors(data: bytes, chance: random.Random) -> bytes:
    """Another header with the data as they were, or other data, most of the time."""
    length = int.from_bytes(data[:8], "little")
    if chance.random() < 0.5:
        return spoil_bytes(data, chance, 8 + length if chance.random() < 0.8 else 0)
    header = json.loads(data[8 : 8 + length])
    if chance.random() < 0.4 and "__metadata__" in header:
        header["__metadata__"] = spoil_value(header["__metadata__"], chance)
    elif chance.random() < 0.3:  # tensors that fit, but are not what they were
        one, two = (chance.choice(sorted(header)) for _ in range(2))
        header[one], header[two] = header[two], header[one]
    else:
        header = spoil_value(header, chance)
    text = written(header).encode()
    said = len(text) if chance.random() < 0.9 else chance.choice((0, 1, len(text) - 1, len(text) + 1, 2**63, 10**8))
    return said.to_bytes(8, "little") + text + data[8 + length :]


# ---- GGUF -----------------------------------------------------------------------------------------------------------


class GgufNumbers:
    """Where the numbers of a GGUF header are: counts, lengths, types, values, dimensions, offsets."""

    SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # noqa: RUF012

    def __init__(self, data: bytes) -> None:
        self._data, self._place = data, 4
        self.places: list[tuple[int, int]] = []
        """Position and number of bytes of each."""
        self._number(4)
        tensors, entries = self._number(8), self._number(8)
        for _ in range(entries):
            self._text()
            self._value(self._number(4))
        for _ in range(tensors):
            self._text()
            for _ in range(self._number(4)):
                self._number(8)
            self._number(4)
            self._number(8)
        self.end = self._place

    def _number(self, size: int) -> int:
        place, self._place = self._place, self._place + size
        self.places.append((place, size))
        return int.from_bytes(self._data[place : place + size], "little")

    def _text(self) -> None:
        self._place += self._number(8)

    def _value(self, kind: int) -> None:
        if kind == 8:
            self._text()
        elif kind == 9:
            inner, count = self._number(4), self._number(8)
            for _ in range(count):
                self._value(inner)
        else:
            self._number(self.SIZES[kind])


def spoil_gguf(data: bytes, chance: random.Random) -> bytes:
    try:
        numbers = GgufNumbers(data)
    except (KeyError, MemoryError):
        return spoil_bytes(data, chance)
    if chance.random() < 0.2:
        return spoil_bytes(data, chance, chance.choice((0, numbers.end)))
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        # Those at the beginning decide most, and arrays of a vocabulary would drown the others.
        places = numbers.places[: chance.choice((40, 120, len(numbers.places)))] + numbers.places[-80:]
        place, size = chance.choice(places)
        was = int.from_bytes(data[place : place + size], "little")
        odd = (
            0,
            1,
            2,
            3,
            8,
            9,
            300,
            was + 1,
            was - 1,
            was * 2,
            2**31,
            2**32 - 1,
            2**63,
            2**64 - 1,
            chance.getrandbits(64),
        )
        changed[place : place + size] = struct.pack("<Q", chance.choice(odd) % 2 ** (8 * size))[:size]
    if chance.random() < 0.1:  # a key or a name that is another
        texts = [b"block_count", b"token_embd", b"blk.0", b"tokenizer.ggml", b"general.architecture", b"llama"]
        text = chance.choice(texts)
        changed = bytearray(bytes(changed).replace(text, text[::-1], chance.choice((1, 100))))
    return bytes(changed)


# ---- templates ------------------------------------------------------------------------------------------------------

SNIPPETS = (
    *("{{", "}}", "{%", "%}", "{#", "{% endfor %}", "{% if x %}", "{{ messages }}", "{{ messages[99].content }}"),
    *("{{ raise_exception('no') }}", "{{ raise_exception(messages) }}", "{{ undefined.further }}", "{{ 1 / 0 }}"),
    "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{{ 'x' * a }}{% endfor %}",
    *("{{ 'x' * 10 ** 9 }}", "{{ 'x' * 10 ** 12 }}", "{{ 'x'.center(10 ** 9) }}", "{{ '%999999999d' % 1 }}"),
    "{{ ('x' * 99999).replace('x', 'y' * 99999) }}",
    "{{ ('x' * 99999).join(['y'] * 99999) }}",
    "{% set ns = namespace(a='x') %}{% for i in range(60) %}{% set ns.a = ns.a + ns.a %}{% endfor %}",
    *(
        "{{ 10 ** (10 ** 8) }}",
        "{{ [0] * 10 ** 9 }}",
        "{{ range(10 ** 9) }}",
        "{{ lipsum(100000) }}",
        "{{ 'a' | indent(10 ** 9) }}",
    ),
    *("{{ ''.__class__.__mro__ }}", "{{ cycler.__init__.__globals__ }}", "{% include 'x' %}", "{% import 'x' as y %}"),
    *(
        "{{ tools | tojson(indent=10 ** 9) }}",
        "{{ messages | tojson(indent=10 ** 9) }}",
        "{{ strftime_now('%Y' * 99999) }}",
    ),
    *("\x1b[2J\x9b\u202e", "\0", "\ud7ff", "<end>", "{{ eos_token * 1000 }}", "{{ 'a' * 999999 }}"),
    "{{ " + "(" * 2000 + "1" + ")" * 2000 + " }}",
    "{{ " + "not " * 5000 + "1 }}",
    "{{ " + "[" * 90 + "]" * 90 + " }}",
    "{% if x %}" * 500 + "{% endif %}" * 500,
)


def spoil_template(text: str, chance: random.Random) -> str:
    place = chance.randrange(len(text) + 1)
    end = min(len(text), place + chance.choice((1, 5, 50)))
    ways = (
        *[text[:place] + chance.choice(SNIPPETS) + text[place:]] * 3,
        *[chance.choice(SNIPPETS)] * 2,
        text[:place] + text[end:],
        text[:place] + text[place:end] * chance.choice((2, 1000)) + text[end:],
        text[:place],
    )
    return chance.choice(ways)


# ---- tokenizers -----------------------------------------------------------------------------------------------------

EXPRESSIONS = (
    *(
        r"\s+",
        r"(a+)+$",
        r"(\w+)+!",
        r"\w*\w*\w*(?!\w)(?<!\w)\d",
        r"(\w*)(\w*)(\w*)(?=\3!)x|",
        r"(?:.|\n)*?\b",
        "(",
        "[a",
        "",
    ),
    *(r"(?:a|a)*b", r"\X*\X*\X*x", "a{99999}", "(?<=a*)b", r"(a\g<1>?b)", "|", "^", ".*", r"[\s\S]*[\s\S]*[\s\S]*\x01"),
)


def odd_step(chance: random.Random) -> Any:
    """A part of a tokenizer, of any of the kinds there are."""
    expression = chance.choice(
        ({"Regex": chance.choice(EXPRESSIONS)}, {"String": chance.choice((" ", "", "e", "a b"))})
    )
    content = chance.choice(("", "▁", "xx", "x" * 50, "y" * 5000, "ee"))
    kinds: tuple[Callable[[], Any], ...] = (
        lambda: {"type": "Replace", "pattern": expression, "content": content},
        lambda: {"type": "Split", "pattern": expression, "behavior": "Isolated", "invert": chance.random() < 0.3},
        lambda: {"type": "Prepend", "prepend": content},
        lambda: {"type": "Strip", "content": "x", "start": 2**62, "stop": 1},
        lambda: {"type": "Strip", "strip_left": True, "strip_right": True},
        lambda: {
            "type": "Precompiled",
            "precompiled_charsmap": chance.choice(("", "AAAA", "!!", "ALQCAACE", "QUFB" * 50)),
        },
        lambda: {
            "type": chance.choice(("NFC", "NFKD", "Lowercase", "StripAccents", "Nmt", "ByteFallback", "Fuse", "x"))
        },
        lambda: {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "lowercase": True},
        lambda: {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        lambda: {"type": "Metaspace", "replacement": chance.choice(("▁", "", "xx")), "prepend_scheme": "always"},
        lambda: {"type": "Digits", "individual_digits": True},
        lambda: {"type": "WordPiece", "prefix": content, "cleanup": True},
        lambda: {"type": "CTC", "pad_token": "e", "word_delimiter_token": " ", "cleanup": True},
        lambda: {"type": "BertProcessing", "sep": ["x", 2**31], "cls": ["y", 0]},
        lambda: {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "x", "type_id": 0}}] * chance.choice((1, 1000)),
            "pair": [],
            "special_tokens": {"x": {"id": "x", "ids": [chance.choice((0, 2**31, 2**40, -1))], "tokens": ["x"]}},
        },
    )
    made = chance.choice(kinds)()
    for name in ("normalizers", "pretokenizers", "decoders", "processors"):
        if chance.random() < 0.1:
            made = {"type": "Sequence", name: [made] * chance.choice((0, 1, 2, 40, 500))}
    return made


def odd_model(vocabulary: Any, chance: random.Random) -> Any:
    listed = list(vocabulary) if isinstance(vocabulary, dict) else []
    kinds = (
        {"type": "WordLevel", "vocab": vocabulary, "unk_token": "x"},
        {
            "type": "WordPiece",
            "vocab": vocabulary,
            "unk_token": "a",
            "continuing_subword_prefix": "##" * 5000,
            "max_input_chars_per_word": 2**62,
        },
        {
            "type": "WordPiece",
            "vocab": vocabulary,
            "unk_token": "missing",
            "continuing_subword_prefix": "",
            "max_input_chars_per_word": 3,
        },
        {"type": "Unigram", "unk_id": 0, "vocab": [[text, -1.0] for text in listed], "byte_fallback": False},
        {"type": "Unigram", "unk_id": 10**6, "vocab": [[text, math.nan] for text in listed], "byte_fallback": True},
        {"type": "Unigram", "unk_id": None, "vocab": [], "byte_fallback": False},
        {"type": "BPE", "vocab": vocabulary, "merges": [["t", "zz"]]},
        {"type": "BPE", "vocab": vocabulary, "merges": ["t h", "t h e"], "unk_token": "missing", "fuse_unk": True},
        {"type": "BPE", "vocab": {"a": 2**32 - 1, "b": 0}, "merges": [], "dropout": 0.5},
        {"type": "BPE", "vocab": vocabulary, "merges": [], "dropout": 7.0, "byte_fallback": True},
        {"type": "BPE", "vocab": {}, "merges": []},
    )
    return chance.choice(kinds)


def long_template(chance: random.Random) -> dict[str, Any]:
    """Much around a text, or the text again and again."""
    count, ids = chance.choice(((3, 3), (300, 300), (20, 2000), (20000, 2)))
    special = {"SpecialToken": {"id": "x", "type_id": 0}}
    pieces = [chance.choice((special, {"Sequence": {"id": "A", "type_id": 0}}))] * count
    tokens = {"x": {"id": "x", "ids": [0] * ids, "tokens": ["x"] * ids}}
    return {"type": "TemplateProcessing", "single": pieces, "pair": pieces, "special_tokens": tokens}


def spoil_tokenizer(described: Any, chance: random.Random) -> Any:
    """A tokenizer.json with another step, another model, or with anything else in it."""
    way = chance.random()
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    if not isinstance(described, dict) or way < 0.4:
        return spoil_value(described, chance)
    if way < 0.8:
        part = chance.choice(("normalizer", "pre_tokenizer", "post_processor", "decoder"))
        return {**described, part: odd_step(chance)}
    if way < 0.9:
        vocabulary = described["model"]["vocab"] if isinstance(described.get("model"), dict) else {}
        return {**described, "model": odd_model(vocabulary, chance)}
    odd = (
        {
            "padding": {
                "strategy": {"Fixed": 10**9},
                "direction": "Right",
                "pad_id": 0,
                "pad_type_id": 0,
                "pad_token": "x",
            }
        },
        {"truncation": {"direction": "Right", "max_length": 2**63, "strategy": "LongestFirst", "stride": 2**62}},
        {"added_tokens": [{"id": i, "content": f"t{i}", "special": True} for i in range(5000)]},
        {
            "added_tokens": [
                {
                    "id": 0,
                    "content": "x" * 4000,
                    "single_word": True,
                    "lstrip": True,
                    "rstrip": True,
                    "normalized": True,
                    "special": False,
                }
            ]
        },
        {"added_tokens": [{"id": 2**31, "content": ""}]},
        {"version": "9.9"},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [byte_level] * chance.choice((2, 8, 30))}},
        {"post_processor": long_template(chance)},
    )
    return {**described, **chance.choice(odd)}


CLASSES = (
    "LlamaTokenizer",
    "GPT2Tokenizer",
    "BertTokenizer",
    "T5Tokenizer",
    "PreTrainedTokenizer",
    "Qwen2Tokenizer",
    "x",
    "ByT5Tokenizer",
    "CanineTokenizer",
    "WhisperTokenizer",
    "TokenizersBackend",
    "GemmaTokenizer",
    "MistralCommonBackend",
    "RobertaTokenizerFast",
    "XLMTokenizer",
    "CodeLlamaTokenizer",
    "RagTokenizer",
)


def spoil_tokenizer_config(described: Any, chance: random.Random) -> Any:
    if not isinstance(described, dict) or chance.random() < 0.6:
        return spoil_value(described, chance)
    odd = (
        *[{"tokenizer_class": chance.choice(CLASSES)}] * 3,
        {"auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}},
        {"auto_map": {"AutoTokenizer": "other/repository--evil.Evil"}, "tokenizer_class": "Evil"},
        {"added_tokens_decoder": {str(i): {"content": f"t{i}"} for i in range(3000)}},
        {"added_tokens_decoder": {chance.choice(("-1", "x", "1e9", str(2**40))): {"content": "x", "special": True}}},
        {"extra_special_tokens": {"image": "<image>"}},
        {"model_max_length": chance.choice((0, -1, 10**30, "x"))},
        {"chat_template": chance.choice((7, [], {"default": "x"}, [{"name": "default", "template": 3}]))},
        {"padding_side": "middle", "truncation_side": 3, "clean_up_tokenization_spaces": "x"},
        {"fix_mistral_regex": True, "add_bos_token": True, "add_eos_token": "x", "bos_token": None},
    )
    return {**described, **chance.choice(odd)}


RUNNING: tuple[dict[str, Any], ...] = (
    {"attn_implementation": "evil/kernel"},
    {"_attn_implementation": "flex_attention"},
    {"experts_implementation": "evil/kernel", "use_kernels": True},
    {"return_dict": False, "output_attentions": True},
    {"dtype": "nn", "torch_dtype": "__class__"},
    {"layer_types": ["full_attention"] * 4096},
    {"sub_configs": {"text_config": 1}, "text_config": {"model_type": "llama"}},
)
"""What a config says of how to run a model, which is not its to say."""


def spoil_config(described: Any, chance: random.Random) -> Any:
    if not isinstance(described, dict) or chance.random() < 0.9:
        return spoil_value(described, chance)
    return {**described, **chance.choice(RUNNING)}


# ---- folders --------------------------------------------------------------------------------------------------------


def spoil_file(path: Path, chance: random.Random) -> None:
    begun = time.process_time()
    try:
        _spoil_file(path, chance)
    finally:
        clock.seconds += time.process_time() - begun


def _spoil_file(path: Path, chance: random.Random) -> None:
    data = path.read_bytes()
    kind = chance.random()
    if kind < 0.03:
        path.unlink()
    elif kind < 0.04:
        path.unlink()
        path.mkdir()
    elif kind < 0.05:
        weights = sorted(path.parent.glob("*.safetensors"))
        if weights:
            shutil.copyfile(chance.choice(weights), f"{path}.new")
            Path(f"{path}.new").replace(path)
    elif kind < 0.15:
        path.write_bytes(spoil_size(data, chance))
    elif path.suffix == ".safetensors":
        path.write_bytes(spoil_safetensors(data, chance))
    elif path.suffix == ".gguf":
        path.write_bytes(spoil_gguf(data, chance))
    elif path.suffix == ".jinja":
        path.write_text(spoil_template(data.decode(), chance), errors="replace")
    elif kind < 0.25:
        path.write_bytes(spoil_bytes(data, chance))
    elif path.suffix == ".json":
        ways = {
            "tokenizer.json": spoil_tokenizer,
            "tokenizer_config.json": spoil_tokenizer_config,
            "config.json": spoil_config,
        }
        spoil = ways.get(path.name, spoil_value)
        path.write_text(written(spoil(json.loads(data), chance)))


def spoil_folder(folder: Path, chance: random.Random, often: tuple[str, ...]) -> None:
    """Spoil some files, mostly one, and those named `often` more than others."""
    names = sorted(path.name for path in folder.iterdir() if path.suffix in (".json", ".safetensors", ".jinja"))
    preferred = [name for name in names if name in often or name.endswith(often)]
    for _ in range(chance.choice((0, 1, 1, 1, 1, 1, 2, 3))):
        target = folder / chance.choice((*names, *preferred * 4))
        with contextlib.suppress(Exception):
            spoil_file(target, chance)  # what is spoilt already may not be understood a second time
    if chance.random() < 0.02:
        add_file(folder, chance)


def add_file(folder: Path, chance: random.Random) -> None:
    """A file that libraries may look for, or a pipe or a device in the place of one."""
    name = chance.choice(("adapter_config.json", "special_tokens_map.json", "tokenizer.model", "chat_template.jinja"))
    path = folder / name
    if path.is_dir():
        path.rmdir()
    path.unlink(missing_ok=True)
    ways: tuple[Callable[[], Any], ...] = (
        lambda: path.write_text(json.dumps(chance.choice(ODD))),
        lambda: path.symlink_to(chance.choice(("/dev/zero", "/dev/null", name))),
        lambda: os.mkfifo(path),
    )
    with contextlib.suppress(UnicodeEncodeError):
        chance.choice(ways)()
