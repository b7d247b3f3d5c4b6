"""The tokenizer of a GGUF file, made so that every text gets the tokens that llama.cpp gives it.

llama.cpp cuts out the special tokens that a text holds, the longest first, and works on what lies between them:

- "llama" (SentencePiece): a space is put before each piece of text if `add_space_prefix` says so, spaces become U+2581,
  and neighbours are merged as long as they form a token: the one with the highest score first, of equal ones the
  leftmost. Characters that end up alone and are no tokens become bytes.
- "gpt2" (byte-level BPE): a piece is cut into words (`otaro.tokenizer.words`), and merges are made in the order
  of the file.
- "gemma4": spaces and bytes as in the first, merges as in the second, lines for words.

In `tokenizers` each merge has a rank of its own. So scores become ranks, the longer token first where they are equal:
that grows a run of spaces from the left, as llama.cpp does. A vocabulary with which the two could still come to
different tokens is refused. What stays different: special tokens that overlap (the left one is found here), characters
newer than llama.cpp's tables of Unicode, and spaces beyond ASCII behind a special token of Phi-3.

Where the metadata are silent, llama.cpp's defaults hold.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from gguf import TokenType
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from otaro.errors import SourceError
from otaro.sources.gguf_file import GgufFile
from otaro.tokenizer.words import WORDS, Words, make_pre_tokenizer

LONGEST_TOKEN = 1024
MOST_WORK = 1 << 28
"""The squares of the tokens' lengths together: how long it takes to find all merges; a large vocabulary has 1 << 24."""
SPACE = "\u2581"
CUT_OUT = (TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN)
"""Kinds of tokens that are looked for in a text first."""
DEFAULT_IDS = {"llama": {"bos": 1, "eos": 2, "unknown": 0}, "gpt2": {"bos": 11, "eos": 11}, "gemma4": {}}
LINES = {"type": "Split", "pattern": {"Regex": r"[^\n]+|\n+"}, "behavior": "Isolated", "invert": False}
ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_END = (
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s> <|eom_id|> "
    "<EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> [e~[ "
    "<\uff5cend\u2581of\u2581sentence\uff5c> <|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD] <|fim_repo|> <|repo_name|> "
    "<fim-repo> <REPO> <reponame> <|file_sep|>"
)
_FILL_IN = (
    "<|fim_prefix|> <fim-prefix> <fim_prefix> <\uff5cfim\u2581begin\uff5c> <PRE> \u2581<PRE> <|code_prefix|> "
    "<|fim_suffix|> <fim-suffix> <fim_suffix> <\uff5cfim\u2581hole\uff5c> <SUF> \u2581<SUF> <|code_suffix|> <|suffix|> "
    "<|fim_middle|> <fim-middle> <fim_middle> <\uff5cfim\u2581end\uff5c> <MID> \u2581<MID> <|code_middle|> <|middle|> "
    "<|prefix|>"
)
END_TEXTS = set(_END.split())
"""Tokens that end an answer; they are control tokens, whatever the file says."""
CONTROL_TEXTS = END_TEXTS.union(_FILL_IN.split())
SHOWN_TEXTS = {"<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"}


@dataclass(frozen=True)
class GgufTokenizer:
    """A tokenizer of transformers, and the tokens that end an answer."""

    tokenizer: Any
    end_tokens: list[int]


def read_tokenizer(file: GgufFile) -> GgufTokenizer:
    """What the metadata describe; a SourceError if its tokens cannot be reproduced."""
    kind = file.metadata.get("tokenizer.ggml.model")
    if kind not in DEFAULT_IDS:
        known = ", ".join(DEFAULT_IDS)
        raise SourceError(f"{file.name} has a tokenizer of the kind {kind!r}: only {known} are supported")
    vocabulary = _Vocabulary(file)
    begins = _flag(file, "add_bos_token", True)
    if kind == "llama":
        described = _describe_sentencepiece(file, vocabulary, _flag(file, "add_space_prefix", True))
        described["model"]["merges"] = _merges_by_score(file, vocabulary)
    elif kind == "gemma4":
        described = _describe_sentencepiece(file, vocabulary, False) | {"pre_tokenizer": LINES}
        described["model"]["merges"] = _merges_in_order(file, vocabulary)
        begins = True
    else:
        words = _words(file)
        described = _describe_byte_level(vocabulary, words)
        described["model"]["merges"] = _merges_in_order(file, vocabulary)
        begins = _flag(file, "add_bos_token", words.add_bos)
    ids = {
        role: _token_id(file, role, DEFAULT_IDS[kind].get(role), len(vocabulary.texts))
        for role in ("bos", "eos", "unknown", "padding", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
    }
    begin = [ids["bos"]] if begins and ids["bos"] is not None else []
    end = [ids["eos"]] if _flag(file, "add_eos_token", False) and ids["eos"] is not None else []
    described |= {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(vocabulary, _strips(file)),
        "post_processor": _post_processor(vocabulary, begin, end) if begin or end else None,
    }
    cut_out = set(vocabulary.cut_out)
    template = file.metadata.get("tokenizer.chat_template")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(described, ensure_ascii=False)),
        clean_up_tokenization_spaces=False,
        chat_template=template if isinstance(template, str) else None,
        # Any other token would be made a special one by its role.
        **{name: vocabulary.texts[index] for name, role in ROLES.items() if (index := ids[role]) in cut_out},
    )
    ends = [ids[role] for role in ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")] + vocabulary.ends
    return GgufTokenizer(tokenizer, list(dict.fromkeys(index for index in ends if index is not None)))


@dataclass
class _Vocabulary:
    """Texts and kinds of all tokens, as llama.cpp corrects them."""

    file: GgufFile
    texts: list[str] = field(init=False)
    kinds: list[int] = field(init=False)
    ids: dict[str, int] = field(init=False)
    ends: list[int] = field(init=False)

    def __post_init__(self) -> None:
        texts = self.file.array("tokenizer.ggml.tokens")
        if not texts or not all(isinstance(text, str) for text in texts):
            raise SourceError(f"{self.file.name} has no vocabulary: it cannot be used without its tokenizer")
        self.texts = [text.partition("\0")[0] or f"[EMPTY_{index}]" for index, text in enumerate(texts)]
        self.ids = {text: index for index, text in enumerate(self.texts)}
        if len(self.ids) < len(self.texts):
            twice = next(text for index, text in enumerate(self.texts) if self.ids[text] != index)
            raise SourceError(f"{self.file.name} has the token {twice!r} twice in its vocabulary")
        if (longest := max(map(len, self.texts))) > LONGEST_TOKEN:
            raise SourceError(f"{self.file.name} has a token of {longest} characters in its vocabulary")
        if sum(len(text) ** 2 for text in self.texts) > MOST_WORK:
            raise SourceError(f"{self.file.name} has more text in its vocabulary than any model needs")
        self.kinds = self.numbers("token_type") or [TokenType.NORMAL] * len(self.texts)
        self._correct_kinds()

    def numbers(self, name: str) -> list[Any] | None:
        """One number for each token."""
        numbers = self.file.array(f"tokenizer.ggml.{name}")
        if numbers is not None and (len(numbers) < len(self.texts) or isinstance(numbers[0], str)):
            raise SourceError(f"{self.file.name} has no tokenizer.ggml.{name} for some of its tokens")
        return numbers

    @property
    def cut_out(self) -> list[int]:
        return [index for index in range(len(self.texts)) if self.kinds[index] in CUT_OUT]

    def _correct_kinds(self) -> None:
        ends = {text for text in END_TEXTS if text in self.ids}
        for text in CONTROL_TEXTS & self.ids.keys():
            self.kinds[self.ids[text]] = TokenType.CONTROL
        for text in SHOWN_TEXTS & self.ids.keys():
            self.kinds[self.ids[text]] = TokenType.USER_DEFINED
        calls = {"<|call|>", "<|calls|>"} & ends
        if "<|end|>" in ends and calls and {"<|return|>", "<|flush|>"} & ends:
            ends.remove("<|end|>")
            self.kinds[self.ids["<|end|>"]] = TokenType.USER_DEFINED
        if {"</s>", "<|tool_response>"} <= ends:
            ends.remove("</s>")
            self.kinds[self.ids["</s>"]] = TokenType.NORMAL
        self.ends = sorted(self.ids[text] for text in ends)


def _added_tokens(vocabulary: _Vocabulary, strips: bool) -> list[dict[str, Any]]:
    return [
        {
            "id": index,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": strips and text not in ("<unk>", "<s>", "<|endoftext|>"),
            "normalized": False,
            "special": vocabulary.kinds[index] != TokenType.USER_DEFINED,
        }
        for index, text in ((index, vocabulary.texts[index]) for index in vocabulary.cut_out)
    ]


def _describe_sentencepiece(file: GgufFile, vocabulary: _Vocabulary, prefix: bool) -> dict[str, Any]:
    missing = next((byte for byte in range(256) if f"<0x{byte:02X}>" not in vocabulary.ids), None)
    if missing is not None:
        raise SourceError(f"{file.name} has no token <0x{missing:02X}>: texts cannot fall back to bytes")
    normalizers = [{"type": "Prepend", "prepend": SPACE}] if prefix else []
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*normalizers, replace]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _model(vocabulary, byte_fallback=True),
    }


def _words(file: GgufFile) -> Words:
    name = file.metadata.get("tokenizer.ggml.pre") or "default"
    if name not in WORDS:
        raise SourceError(f"{file.name} cuts texts into words in the way {name!r}, which is not supported")
    return WORDS[name]


def _describe_byte_level(vocabulary: _Vocabulary, words: Words) -> dict[str, Any]:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "normalizer": None,
        "pre_tokenizer": make_pre_tokenizer(words, vocabulary.ids),
        "decoder": byte_level,
        "model": _model(vocabulary, ignore_merges=words.ignore_merges),
    }


def _model(vocabulary: _Vocabulary, *, byte_fallback: bool = False, ignore_merges: bool = False) -> dict[str, Any]:
    """What becomes of a word, but for the merges."""
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": byte_fallback,
        "ignore_merges": ignore_merges,
        "vocab": vocabulary.ids,
    }


def _merges_in_order(file: GgufFile, vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Those of the file; of two that are the same the first counts."""
    merges: dict[tuple[str, str], None] = {}
    for merge in file.array("tokenizer.ggml.merges") or ():
        cut = str(merge).find(" ", 1)
        left, right = str(merge)[:cut], str(merge)[cut + 1 :]
        if cut < 0 or not {left, right, left + right} <= vocabulary.ids.keys():
            raise SourceError(f"{file.name} has the merge {merge!r}, which is not one of two tokens to a third")
        merges.setdefault((left, right))
    return list(merges)


def _merges_by_score(file: GgufFile, vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Every way to make a token of two others, the best first."""
    scores = vocabulary.numbers("scores") or [0.0] * len(vocabulary.texts)
    if any(math.isnan(score) for score in scores):
        raise SourceError(f"{file.name} has a token whose score is not a number")
    ids = vocabulary.ids
    cut_out = set(vocabulary.cut_out)
    ways: list[tuple[float, int, int, str]] = []
    equal: dict[float, list[str]] = defaultdict(list)
    for index, text in enumerate(vocabulary.texts):
        cuts = [cut for cut in range(1, len(text)) if text[:cut] in ids and text[cut:] in ids]
        ways += [(-scores[index], -len(text), -cut, text) for cut in cuts]
        if index in cut_out and SPACE not in text:
            continue  # what is cut out is not there to be merged
        if cuts:
            equal[scores[index]].append(text)
        for cut in {1, len(text) - 1}.difference((0, *cuts)):
            if all(part in ids or len(part) == 1 for part in (text[:cut], text[cut:])):
                raise SourceError(f"{file.name} has the token {text!r}, but none for each of its characters")
    for texts in equal.values():
        overlap = _overlap(texts)
        if overlap is not None:
            one, other = overlap
            raise SourceError(f"{file.name} gives {one!r} and {other!r} the same score: it has no order of merges")
    return [(text[:-cut], text[-cut:]) for _, _, cut, text in sorted(ways)]


def _overlap(texts: list[str]) -> tuple[str, str] | None:
    """Two texts of which the first ends as the second begins; runs of one character go together, whatever the order."""
    runs = {text for text in texts if text == text[0] * len(text)}
    longest_runs = {text[0]: text for text in sorted(runs, key=len)}
    kept = [text for text in texts if text not in runs or longest_runs[text[0]] == text]
    begins: dict[str, list[str]] = defaultdict(list)
    for text in kept:
        for end in range(1, len(text)):
            if len(begins[text[:end]]) < 2:  # one, and another in case the first is the text itself
                begins[text[:end]].append(text)
    for text in kept:
        for start in range(1, len(text)):
            for other in begins.get(text[start:], ()):
                if other != text:
                    return text, other
    return None


def _token_id(file: GgufFile, role: str, default: int | None, count: int) -> int | None:
    """The token that has a role; a number that is no token's does not count."""
    found = file.metadata.get(f"tokenizer.ggml.{role}_token_id")
    for index in (found, default):
        if type(index) is int and 0 <= index < count:
            return index
    return None


def _flag(file: GgufFile, name: str, default: bool) -> bool:
    value = file.metadata.get(f"tokenizer.ggml.{name}", default)
    if not isinstance(value, bool):
        raise SourceError(f"{file.name} has tokenizer.ggml.{name} that is neither true nor false")
    return value


def _strips(file: GgufFile) -> bool:
    """Whether special tokens take the spaces behind them with them, which llama.cpp knows by the model's name."""
    name = str(file.metadata.get("general.name", "")).lower()
    return "phi-3" in name or "phi3" in name


def _post_processor(vocabulary: _Vocabulary, begin: list[int], end: list[int]) -> dict[str, Any]:
    def special(ids: list[int], kind: int) -> list[dict[str, Any]]:
        return [{"SpecialToken": {"id": vocabulary.texts[index], "type_id": kind}} for index in ids]

    def template(sequence: str, kind: int) -> list[dict[str, Any]]:
        return [*special(begin, kind), {"Sequence": {"id": sequence, "type_id": kind}}, *special(end, kind)]

    return {
        "type": "TemplateProcessing",
        "single": template("A", 0),
        "pair": template("A", 0) + template("B", 1),
        "special_tokens": {
            text: {"id": text, "ids": [vocabulary.ids[text]], "tokens": [text]}
            for text in (vocabulary.texts[index] for index in {*begin, *end})
        },
    }
