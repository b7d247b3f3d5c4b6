"""Tokenizers of GGUF files give llama.cpp's tokens: as they are read, loaded from a packed folder, and exported."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from vocabularies import FOLDERS, expected_ids, load_expected, plain, write_folder, write_metadata, write_vocabulary

from otaro.errors import SourceError
from otaro.export.tokenizer import add_tokenizer
from otaro.sources.gguf import find_smollm2
from otaro.sources.gguf_file import GgufFile
from otaro.sources.gguf_tokenizer import GgufTokenizer, read_tokenizer
from otaro.tokenizer import encode, encode_all, load_tokenizer, render_chat
from otaro.tokenizer.words import WORDS

EXPECTED = load_expected()
TEXTS: list[str] = EXPECTED["texts"]
KINDS = {words: f"gpt2 {name}" for name, words in reversed(WORDS.items())}
"""Of all names for one way of cutting words the first."""
OTHER_NAMES = {f"gpt2 {name}" for name in WORDS} - set(KINDS.values())
MADE = [name for name in EXPECTED["files"] if name not in OTHER_NAMES and name != "smollm2"]
FEW = ["gemma4", "llama", "llama ends", "llama gemma", "llama phi-3", "gpt2 llama-bpe", "gpt2 tekken", "gpt2 few bytes"]


def write(path: Path, name: str, **changes: Any) -> Path:
    file = EXPECTED["files"][name]
    return write_vocabulary(path, EXPECTED["vocabularies"][file["vocabulary"]], {**file["metadata"], **changes})


def read(path: Path) -> GgufTokenizer:
    file = GgufFile(path)
    try:
        return read_tokenizer(file)
    finally:
        file.close()


def made(name: str, folder: Path, **changes: Any) -> GgufTokenizer:
    return read(write(folder / "made.gguf", name, **changes))


def differing(tokenizer: Any, name: str) -> dict[str, tuple[list[int], list[int]]]:
    """The texts whose tokens are not llama.cpp's."""
    found = tokenizer(TEXTS, add_special_tokens=False)["input_ids"]
    compared = zip(TEXTS, found, expected_ids(EXPECTED, name), strict=True)
    return {text: (one, other) for text, one, other in compared if one != other}


def test_the_texts_tell_every_way_of_cutting_words_from_the_others() -> None:
    assert len(TEXTS) == len(set(TEXTS)) >= 200
    found = {words: EXPECTED["files"][name]["choices"] for words, name in KINDS.items()}
    assert len(set(map(tuple, found.values()))) == len(found)
    for name, words in WORDS.items():
        file = EXPECTED["files"][f"gpt2 {name}"]
        assert file["choices"] == found[words], name
        assert (file["with_special"][0] == 0) == words.add_bos


@pytest.mark.parametrize("name", MADE)
def test_tokens_are_those_of_llama_cpp(name: str, tmp_path: Path) -> None:
    tokenizer = made(name, tmp_path).tokenizer
    assert differing(tokenizer, name) == {}
    file = EXPECTED["files"][name]
    assert tokenizer("a")["input_ids"] == file["with_special"]
    for kind, template in EXPECTED["templates"].items():
        tokenizer.chat_template = template
        assert render_chat(tokenizer, EXPECTED["chat"]) == file["chats"][kind]


def test_smollm2_has_the_tokens_of_llama_cpp() -> None:
    tokenizer = read(find_smollm2()).tokenizer
    assert differing(tokenizer, "smollm2") == {}
    assert tokenizer("a")["input_ids"] == EXPECTED["files"]["smollm2"]["with_special"]


@pytest.mark.parametrize("name", FEW)
def test_a_saved_tokenizer_is_the_same_when_it_is_loaded(name: str, tmp_path: Path) -> None:
    made(name, tmp_path).tokenizer.save_pretrained(tmp_path)
    for model_type in ("llama", "mistral", "gemma3_text", "phi3", "qwen2"):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
        assert differing(load_tokenizer(tmp_path), name) == {}, model_type
        if model_type != "qwen2":  # there transformers has rules of its own
            assert differing(AutoTokenizer.from_pretrained(tmp_path), name) == {}, model_type


@pytest.mark.parametrize("name", [name for name in MADE if name not in ("llama phi-3", "gemma4")])
def test_an_export_has_the_same_tokens(name: str, tmp_path: Path) -> None:
    made(name, tmp_path).tokenizer.save_pretrained(tmp_path / "folder")
    (tmp_path / "folder" / "config.json").write_text('{"model_type": "llama"}')
    path = tmp_path / "again.gguf"
    size = len(EXPECTED["vocabularies"][EXPECTED["files"][name]["vocabulary"]]["tokens"])
    assert write_metadata(path, lambda writer: add_tokenizer(writer, tmp_path / "folder", size + 3)) == []
    again = read(path).tokenizer
    assert differing(again, name) == {}
    assert again("a")["input_ids"] == EXPECTED["files"][name]["with_special"]
    assert len(again) == size + 3


@pytest.mark.parametrize("name", FOLDERS)
def test_the_export_of_a_folder_has_the_tokens_of_its_tokenizer(name: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path, name, EXPECTED)
    path, exact = tmp_path / "exported.gguf", FOLDERS[name][2]
    remarks = write_metadata(path, lambda writer: add_tokenizer(writer, folder, 2000))
    assert bool(remarks) != exact
    tokenizer, exported = load_tokenizer(folder), read(path).tokenizer
    texts = [text for text in TEXTS if exact or plain(text, tokenizer)]
    for special in (False, True):
        found = encode_all(exported, texts, add_special_tokens=special)
        assert found == encode_all(tokenizer, texts, add_special_tokens=special)


@pytest.mark.parametrize(
    "name", ["gemma4", "llama", "llama no space", "llama gemma", "gpt2 qwen2", "gpt2 deepseek-llm"]
)
def test_a_text_comes_back(name: str, tmp_path: Path) -> None:
    tokenizer = made(name, tmp_path).tokenizer
    for text in TEXTS:
        if "\u2581" not in text and not any(token in text for token in tokenizer.added_tokens_encoder):
            assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text


def test_an_answer_ends_at_any_token_that_llama_cpp_takes_for_an_end(tmp_path: Path) -> None:
    found = made("llama gemma", tmp_path)
    texts = found.tokenizer.convert_ids_to_tokens(found.end_tokens)
    assert texts[0] == "<eos>"
    assert set(texts) == {"<eos>", "</s>", "<end_of_turn>"}


@pytest.mark.parametrize(
    "changes, begin, end",
    [
        ({}, "<s>", None),
        ({"add_bos_token": False}, None, None),
        ({"add_eos_token": True}, "<s>", "</s>"),
        ({"bos_token_id": 2, "eos_token_id": 1}, "</s>", None),
        ({"bos_token_id": 10**9}, "<s>", None),
    ],
    ids=str,
)
def test_the_metadata_say_what_a_text_begins_and_ends_with(
    changes: dict[str, Any], begin: str | None, end: str | None, tmp_path: Path
) -> None:
    tokenizer = made("llama", tmp_path, **changes).tokenizer
    bare = encode(tokenizer, "a b")
    around = [[] if text is None else tokenizer.convert_tokens_to_ids([text]) for text in (begin, end)]
    assert encode(tokenizer, "a b", add_special_tokens=True) == around[0] + bare + around[1]


def change(vocabulary: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**vocabulary, **changes}


SENTENCEPIECE, BYTES = EXPECTED["vocabularies"]["sentencepiece"], EXPECTED["vocabularies"]["byte-level"]
COUNT = len(SENTENCEPIECE["tokens"])
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "kind": (SENTENCEPIECE, {"model": "t5"}, "a tokenizer of the kind 't5': only llama, gpt2"),
    "no kind": (SENTENCEPIECE, {}, "a tokenizer of the kind None"),
    "words": (BYTES, {"model": "gpt2", "pre": "kimi-k2"}, "into words in the way 'kimi-k2', which is not supported"),
    "flag": (SENTENCEPIECE, {"model": "llama", "add_bos_token": 1}, "add_bos_token that is neither true nor false"),
    "twice": (change(BYTES, tokens=[*BYTES["tokens"][:-1], "A"]), {"model": "gpt2"}, "has the token 'A' twice"),
    "long": (
        change(BYTES, tokens=[*BYTES["tokens"][:-1], "A" * 2000]),
        {"model": "gpt2"},
        "of 2000 characters",
    ),
    "types": (change(BYTES, types=BYTES["types"][:-1]), {"model": "gpt2"}, "no tokenizer.ggml.token_type for some"),
    "merge": (change(BYTES, merges=["A B C"]), {"model": "gpt2"}, "has the merge 'A B C'"),
    "bytes": (change(SENTENCEPIECE, tokens=["<unk>", "<s>", "</s>", "a"]), {"model": "llama"}, "has no token <0x00>"),
    "scores": (change(SENTENCEPIECE, scores=[math.nan] * COUNT), {"model": "llama"}, "score is not a number"),
    "order": (change(SENTENCEPIECE, scores=[-1000.0] * COUNT), {"model": "llama"}, "the same score: it has no order"),
    "character": (
        change(SENTENCEPIECE, tokens=[*SENTENCEPIECE["tokens"][:-1], "\u05d0\u05d1"]),
        {"model": "llama"},
        "has the token .*, but none for each of its characters",
    ),
    "empty": ({"tokens": [], "types": []}, {"model": "llama"}, "has no vocabulary"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_reproduced_is_refused(name: str, tmp_path: Path) -> None:
    vocabulary, metadata, message = REFUSED[name]
    path = write_vocabulary(tmp_path / "made.gguf", vocabulary, metadata)
    with pytest.raises(SourceError, match=message):
        read(path)
