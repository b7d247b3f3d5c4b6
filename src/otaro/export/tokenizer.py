"""A tokenizer's entries in a GGUF file: byte-level BPE ("gpt2") and SentencePiece with byte fallback ("llama")."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gguf import GGUFWriter, SpecialVocab, TokenType

from otaro.errors import OtaroError

# How llama.cpp calls the ways of cutting a text into words before BPE. A name stands for one expression exactly: with
# another one words would be cut in other places, and the model would see other tokens.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SPLITS = {
    _CONTRACTIONS + r"\p{N}{1,3}" + _REST: "llama-bpe",
    _CONTRACTIONS + r"\p{N}" + _REST: "qwen2",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    + _REST.replace(r"[\r\n]*", r"[\r\n/]*", 1): "tekken",
}


def add_tokenizer(writer: GGUFWriter, folder: Path, vocabulary: int) -> None:
    """Describe the tokenizer in a folder, filled up to the size of the model's embedding."""
    path = folder / "tokenizer.json"
    try:
        described = json.loads(path.read_text(encoding="utf-8"))
        model = described["model"]
        tokens: dict[str, int] = model["vocab"]
        if model["type"] != "BPE" or not isinstance(tokens, dict):
            raise KeyError(model["type"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OtaroError(
            f"{folder} holds no tokenizer.json of the kind BPE: only such tokenizers can be exported"
        ) from error
    added = {entry["content"]: entry for entry in described.get("added_tokens", [])}
    byte_fallback = bool(model.get("byte_fallback"))
    texts, kinds = [f"[PAD{index}]" for index in range(vocabulary)], [TokenType.UNUSED] * vocabulary
    for text, index in {**tokens, **{text: entry["id"] for text, entry in added.items()}}.items():
        if index >= vocabulary:
            raise OtaroError(f"token {index} of {path} is outside the model's vocabulary of {vocabulary}")
        texts[index], kinds[index] = text, _kind(text, added, byte_fallback)
    writer.add_tokenizer_model("llama" if byte_fallback else "gpt2")
    if not byte_fallback:
        writer.add_tokenizer_pre(_split_name(described, path))
    writer.add_token_list(texts)
    if byte_fallback:
        writer.add_add_space_prefix(_begins_with_space(described))
        # Merges are tried in order of score, and a piece's number is its rank.
        writer.add_token_scores([-float(index) for index in range(vocabulary)])
    writer.add_token_types(kinds)
    # Writes what it found to the log; merges, special tokens and the chat template.
    SpecialVocab(folder, load_merges=not byte_fallback, n_vocab=vocabulary).add_to_gguf(writer, quiet=True)


def _kind(text: str, added: dict[str, Any], byte_fallback: bool) -> TokenType:
    if text in added:
        return TokenType.CONTROL if added[text].get("special") else TokenType.USER_DEFINED
    if byte_fallback and len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        return TokenType.BYTE
    if byte_fallback and text == "<unk>":
        return TokenType.UNKNOWN
    return TokenType.NORMAL


def _begins_with_space(described: dict[str, Any]) -> bool:
    """Whether a text is read as if a space stood before it."""
    steps = [described.get("normalizer") or {}, described.get("pre_tokenizer") or {}]
    steps += [part for step in steps for part in step.get("normalizers", []) + step.get("pretokenizers", [])]
    return any(
        step.get("type") == "Prepend" or (step.get("type") == "Metaspace" and step.get("prepend_scheme") != "never")
        for step in steps
    )


def _split_name(described: dict[str, Any], path: Path) -> str:
    try:
        name = _known_split(described["pre_tokenizer"])
    except (KeyError, TypeError, ValueError, AttributeError):
        name = None
    if name is None:
        raise OtaroError(f"{path} cuts texts into words in a way that llama.cpp has no name for: it cannot be exported")
    return name


def _known_split(pre_tokenizer: dict[str, Any]) -> str | None:
    *steps, byte_level = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    if byte_level["type"] != "ByteLevel" or byte_level["add_prefix_space"]:
        return None
    match [step["type"] for step in steps], byte_level.get("use_regex", True):
        case [], True:
            return "gpt-2"
        case ["Digits"], True:
            return "smollm" if steps[0]["individual_digits"] else None
        case ["Split"], False:
            kept = steps[0]["behavior"] == "Isolated" and not steps[0]["invert"]
            return _SPLITS.get(steps[0]["pattern"]["Regex"]) if kept else None
    return None
