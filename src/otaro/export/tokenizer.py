"""A tokenizer's entries in a GGUF file: byte-level BPE ("gpt2") and SentencePiece with byte fallback ("llama")."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gguf import GGUFWriter, TokenType

from otaro.errors import OtaroError
from otaro.tokenizer import added_around, encode, load_tokenizer
from otaro.tokenizer.words import find_name

SPACE = "\u2581"


def add_tokenizer(writer: GGUFWriter, folder: Path, vocabulary: int) -> list[str]:
    """Describe the tokenizer in a folder, filled up to the size of the model's embedding.

    What llama.cpp will do otherwise, because it knows no rule for it, is returned, a sentence each.
    """
    tokenizer = load_tokenizer(folder)
    described, model = _describe(tokenizer, folder)
    added = {entry["content"]: entry for entry in described.get("added_tokens", [])}
    sentencepiece = bool(model.get("byte_fallback"))
    tokens: dict[str, int] = {**model["vocab"], **{text: entry["id"] for text, entry in added.items()}}
    texts, kinds = [f"[PAD{index}]" for index in range(vocabulary)], [TokenType.UNUSED] * vocabulary
    for text, index in tokens.items():
        if not 0 <= index < vocabulary:
            raise OtaroError(f"token {index} of {folder} is outside the model's vocabulary of {vocabulary}")
        texts[index], kinds[index] = text, _kind(text, added, sentencepiece, tokenizer.unk_token)
    merges = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    writer.add_token_list(texts)
    writer.add_token_types(kinds)
    remarks = _strips_remark(added)
    if sentencepiece:
        writer.add_tokenizer_model("llama")
        writer.add_token_scores(_scores(texts, merges, added, folder))
        first, other = _spaces(tokenizer, tokens)
        writer.add_add_space_prefix(first)
        remarks += other
    else:
        name = find_name(described.get("pre_tokenizer"), bool(model.get("ignore_merges")), model["vocab"])
        if name is None:
            raise OtaroError(
                f"{folder} cuts texts into words in a way that llama.cpp has no name for: it cannot be exported"
            )
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(name)
        writer.add_token_merges([" ".join(merge) for merge in merges])
        if described.get("normalizer") is not None:
            remarks.append("characters are not normalized before they become tokens")
    _add_special_tokens(writer, tokenizer, folder)
    return remarks


def _describe(tokenizer: Any, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tokenizer as it is used, which need not be what its file says, in the form of a tokenizer.json."""
    described: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str()) if tokenizer.is_fast else {}
    model = described.get("model", {})
    if model.get("type") != "BPE":
        raise OtaroError(f"{folder} holds no tokenizer.json of the kind BPE: only such tokenizers can be exported")
    return described, model


def _kind(text: str, added: dict[str, Any], sentencepiece: bool, unknown: str | None) -> TokenType:
    if text == unknown and (sentencepiece or text in added):
        return TokenType.UNKNOWN
    if text in added:
        return TokenType.CONTROL if added[text]["special"] else TokenType.USER_DEFINED
    if sentencepiece and len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        return TokenType.BYTE
    return TokenType.NORMAL


def _scores(texts: list[str], merges: list[Any], added: dict[str, Any], folder: Path) -> list[float]:
    """llama.cpp merges whatever two neighbours form a token, in order of its score, so all of those must be merges."""
    ranks: dict[str, int] = {}
    for left, right in merges:
        ranks.setdefault(left + right, len(ranks))
    known, allowed = set(texts), set(merges)
    for text in known.difference(added):
        for cut in range(1, len(text)):
            pair = text[:cut], text[cut:]
            if pair not in allowed and known.issuperset(pair):
                raise OtaroError(
                    f"{folder} does not merge {pair[0]!r} and {pair[1]!r}, which llama.cpp would: it cannot be exported"
                )
    return [-float(ranks.get(text, len(ranks))) for text in texts]


def _spaces(tokenizer: Any, tokens: dict[str, int]) -> tuple[bool, list[str]]:
    """Whether a text is read as if a space stood before it; llama.cpp then does the same behind special tokens."""
    special = next(iter(sorted(tokenizer.all_special_tokens, key=len)), "")
    first, spaced = encode(tokenizer, "a"), encode(tokenizer, " a")
    behind = encode(tokenizer, f"{special}a")[1:] if special else first
    names = {index: text for text, index in tokens.items()}
    begins = names[first[0]].startswith(SPACE)
    if begins and (first == spaced or first != behind):
        return True, ["every piece of text gets a space before it, behind a special token or another space too"]
    return begins, []


def _strips_remark(added: dict[str, Any]) -> list[str]:
    if any(entry["lstrip"] or entry["rstrip"] for entry in added.values()):
        return ["spaces beside special tokens stay"]
    return []


def _add_special_tokens(writer: GGUFWriter, tokenizer: Any, folder: Path) -> None:
    before, behind = added_around(tokenizer)
    if len(before) > 1 or len(behind) > 1:
        raise OtaroError(
            f"{folder} puts several tokens before or behind a text, which llama.cpp does not: not exported"
        )
    ids = {
        "bos": before[0] if before else tokenizer.bos_token_id,
        "eos": behind[0] if behind else tokenizer.eos_token_id,
        "unk": tokenizer.unk_token_id,
        "pad": tokenizer.pad_token_id,
    }
    for role, index in ids.items():
        if index is not None:
            getattr(writer, f"add_{role}_token_id")(index)
    writer.add_add_bos_token(bool(before))
    writer.add_add_eos_token(bool(behind))
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)
