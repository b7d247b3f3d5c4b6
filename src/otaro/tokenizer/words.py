"""How byte-level BPE tokenizers cut a text into words before they merge bytes, by llama.cpp's names.

A GGUF file says `tokenizer.ggml.pre`, one name for a list of expressions; a tokenizer.json has the expressions
themselves. Each is applied to the pieces that the one before it left, and what lies between two finds is a piece too.
The expressions say what llama.cpp does, which is not always what a model's author wrote: it tells capitals from small
letters in ASCII only, and does not take `(?i:'s)` for the long s. Both sides must agree on every text, so a name that
is not here is refused, and so is a list of expressions that has no name.
"""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Words:
    """One way of cutting, and what goes with it.

    With `ignore_merges` a word that is a token stays whole; `add_bos` holds if the file does not say.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


def _characters(codes: str) -> str:
    """What stands in brackets for characters and ranges of them, given as hexadecimal numbers."""
    return "".join("-".join(chr(int(code, 16)) for code in part.split("-")) for part in codes.split())


_CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_CONTRACTIONS_IN_FILES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_SIGNS_AND_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_BEFORE}\p{{L}}+|\p{{N}}{{1,3}}|{_SIGNS}"
_QWEN2 = rf"{_CONTRACTIONS}|{_BEFORE}\p{{L}}+|\p{{N}}|{_SIGNS}"
_QWEN35 = rf"{_CONTRACTIONS}|{_BEFORE}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
_MINICPM5 = rf"{_CONTRACTIONS}|{_BEFORE}\p{{L}}+|\p{{N}}+|{_SIGNS}"
_SEED = rf"{_CONTRACTIONS}|{_BEFORE}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"


def _by_case(upper: str, lower: str, digits: str, end: str = "") -> str:
    """A word begins anew where a capital follows a small letter."""
    return rf"{_BEFORE}{upper}*{lower}+{end}|{_BEFORE}{upper}+{lower}*{end}|{digits}|{_SIGNS_AND_SLASHES}"


_TEKKEN = _by_case(r"[\p{L}&&[^a-z]]", r"[\p{L}&&[^A-Z]]", r"\p{N}")
_TEKKEN_IN_FILES = _by_case(r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"\p{N}")
_GPT4O = _by_case(r"[\p{L}&&[^a-z]]", r"[\p{L}&&[^A-Z]]", r"\p{N}{1,3}", f"{_CONTRACTIONS}?")

# llama.cpp takes any space beyond ASCII for a vertical tab here, so none is in a range.
_EAST_ASIAN = rf"[[{_characters('4E00-9FA5 800-4E00 AC00-D7FF')}]&&[^\s]]+"
_CHINESE_AND_JAPANESE = rf"[{_characters('4E00-9FA5 3040-309F 30A0-30FF')}]+"
_DEEPSEEK_SIGNS = rf"\s?[{_characters('21-2F 3A-7E FF01-FF0F FF1A-FF5E 2018-201F 3001-3002')}]+"
_DEEPSEEK_LETTERS = _characters(
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A 38C 38E-3A1 "
    "3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A "
    "1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 "
    "1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 "
    "212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 A640-A66D "
    "A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F 104B0-104D3 "
    "104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943"
)
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    + _SPACES
)
_BLOOM = rf" ?[^(\s|.,!?{_characters('2026 3002 FF0C 3001 964 6D4 60C')})]+"

_KINDS: dict[tuple[str, ...], Words] = {
    ("gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "mpt", "olmo", "jais", "trillion", "granite-docling"): Words(
        (_GPT2,)
    ),
    ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"): Words(
        (r"\p{N}", _GPT2)
    ),
    ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"): Words(
        (_LLAMA3,), ignore_merges=True, add_bos=True
    ),
    ("dbrx", "smaug-bpe"): Words((_LLAMA3,)),
    ("qwen2", "deepseek-r1-qwen", "kormo", "stablelm2", "megrez", "hunyuan", "solar-open", "grok-2"): Words((_QWEN2,)),
    ("qwen35",): Words((_QWEN35,)),
    ("tekken",): Words((_TEKKEN,), ignore_merges=True, add_bos=True),
    ("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"): Words((_GPT4O,)),
    ("minicpm5",): Words((r"\p{N}{1,3}", _MINICPM5), ignore_merges=True),
    ("seed-coder",): Words((_SEED,)),
    ("deepseek-llm",): Words(
        (r"[\r\n]", rf"\s?[{_DEEPSEEK_LETTERS}]+", _DEEPSEEK_SIGNS, r"\s+\z", _EAST_ASIAN, r"\p{N}+")
    ),
    ("deepseek-coder",): Words((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, r"\p{N}")),
    ("deepseek-v3", "hunyuan-dense", "joyai-llm"): Words((r"\p{N}{1,3}", _CHINESE_AND_JAPANESE, _DEEPSEEK3)),
    ("falcon",): Words((r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9][0-9][0-9]")),
    ("default",): Words((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    ("bloom", "poro-chat", "gpt3-finnish"): Words((_BLOOM,)),
    ("viking",): Words((_BLOOM, r"\p{N}")),
}
WORDS = {name: words for names, words in _KINDS.items() for name in names}
_NAMES = {(words.patterns, words.ignore_merges): names[0] for names, words in _KINDS.items()}


BYTE_CHARACTERS = [chr(code) for code in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x144))]
"""What stands for the 256 bytes in a byte-level vocabulary."""


def make_pre_tokenizer(words: Words, tokens: Container[str]) -> dict[str, Any]:
    """The steps as a tokenizer.json has them; bytes that are no tokens are dropped, and nothing is merged across."""
    steps: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in words.patterns
    ]
    steps.append({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False})
    return {"type": "Sequence", "pretokenizers": steps + _dropping(tokens)}


def _dropping(tokens: Container[str]) -> list[dict[str, Any]]:
    missing = "".join(re.escape(character) for character in BYTE_CHARACTERS if character not in tokens)
    if not missing:
        return []
    return [{"type": "Split", "pattern": {"Regex": f"[{missing}]"}, "behavior": "Removed", "invert": False}]


def find_name(pre_tokenizer: Any, ignore_merges: bool, tokens: Container[str]) -> str | None:
    """llama.cpp's name for the steps of a tokenizer.json, if it has one."""
    try:
        steps = list(pre_tokenizer.get("pretokenizers", [pre_tokenizer]))
        if steps[-1:] == _dropping(tokens):
            steps.pop()
        *steps, byte_level = steps
        if byte_level["type"] != "ByteLevel" or byte_level["add_prefix_space"]:
            return None
        patterns = [_pattern(step) for step in steps] + ([_GPT2] if byte_level.get("use_regex", True) else [])
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    return _NAMES.get((tuple(patterns), ignore_merges))


def _pattern(step: dict[str, Any]) -> str:
    if step["type"] == "Digits" and step["individual_digits"]:
        return r"\p{N}"
    if step["type"] != "Split" or step["behavior"] != "Isolated" or step["invert"]:
        raise ValueError(step["type"])
    pattern = str(step["pattern"]["Regex"])
    return _TEKKEN if pattern == _TEKKEN_IN_FILES else pattern.replace(_CONTRACTIONS_IN_FILES, _CONTRACTIONS)
