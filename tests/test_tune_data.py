"""Data for tuning: what is read, what is learned, and what is said about data that cannot be used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import byte_tokenizer

from otaro.errors import OtaroError
from otaro.tune.data import IGNORED, Blocks, learn_prompts, load_blocks, make_collator

TOKENIZER = byte_tokenizer()


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def learned(blocks: Blocks, index: int = 0) -> str:
    return str(TOKENIZER.decode([label for label in blocks.labels[index] if label != IGNORED]))


def read(blocks: Blocks, index: int = 0) -> str:
    return str(TOKENIZER.decode(blocks.ids[index]))


def test_plain_text_is_cut_into_blocks(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("abcdefghijklmnopqrstuvwxyz", encoding="utf-8")
    blocks = load_blocks([path], TOKENIZER, 8)
    assert [read(blocks, index) for index in range(len(blocks))] == ["abcdefgh", "ijklmnop", "qrstuvwx"]
    assert blocks.ids == blocks.labels
    assert blocks.tokens == 24


def test_several_sources_follow_each_other(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("aaa")
    (tmp_path / "b.txt").write_text("bbb")
    assert read(load_blocks([tmp_path / "a.txt", tmp_path / "b.txt"], TOKENIZER, 8)) == "aaa<end>bbb<end>"


def test_texts_are_packed_with_an_end_between_them(tmp_path: Path) -> None:
    path = write(tmp_path / "data.jsonl", {"text": "one"}, {"text": "two"})
    blocks = load_blocks([path], TOKENIZER, 8)
    assert read(blocks) == "one<end>two<end>"
    assert learned(blocks) == "one<end>two<end>"


def test_texts_one_to_a_sequence(tmp_path: Path) -> None:
    path = write(tmp_path / "data.jsonl", {"text": "one"}, {"text": "a longer one"})
    blocks = load_blocks([path], TOKENIZER, 8, layout="padded")
    assert [read(blocks, index) for index in range(3)] == ["one<end>", "a longer", " one<end>"]
    batch = make_collator(TOKENIZER)([blocks[0], blocks[1]])
    assert batch["input_ids"].shape == (2, 8)
    assert batch["attention_mask"].tolist() == [[1] * 4 + [0] * 4, [1] * 8]
    assert batch["labels"][0, 4:].tolist() == [IGNORED] * 4


@pytest.mark.parametrize("given", ["", "the sea"])
def test_alpaca_without_a_chat_template(given: str, tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    path = write(tmp_path / "data.jsonl", {"instruction": "Describe it.", "input": given, "output": "Blue."})
    blocks = load_blocks([path], tokenizer, 512, layout="padded")
    assert learned(blocks) == "Blue.<end>"
    assert "### Instruction:\nDescribe it.\n\n### " + ("Input:\nthe sea" if given else "Response:") in read(blocks)
    assert read(blocks).endswith("### Response:\nBlue.<end>")


def test_alpaca_goes_through_the_chat_template(tmp_path: Path) -> None:
    path = tmp_path / "alpaca.json"
    path.write_text(json.dumps([{"instruction": "Name it.", "input": "H2O", "output": "Water."}]))
    tokenizer = chat_tokenizer()
    blocks = load_blocks([path], tokenizer, 512, layout="padded")
    assert tokenizer.decode(blocks.ids[0]) == "<user>Name it.\n\nH2O<end><bot>Water.<end>"
    assert learned(blocks) == "Water.<end>"


def test_an_empty_answer_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "alpaca.json"
    path.write_text(json.dumps([{"instruction": "Say nothing.", "output": " "}, {"instruction": "Hi", "output": "Ho"}]))
    blocks = load_blocks([path], chat_tokenizer(), 512, layout="padded")
    assert learned(blocks) == "Ho<end>"
    assert (len(blocks), blocks.left_out) == (1, 1)


def chat_tokenizer() -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<user>' if m['role'] == 'user' else '<bot>' if m['role'] == 'assistant' else '' }}"
        "{{ m['content'] }}<end>{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
    )
    return tokenizer


def test_only_answers_of_a_conversation_are_learned(tmp_path: Path) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Bye"},
        {"role": "assistant", "content": "See you."},
    ]
    blocks = load_blocks(
        [write(tmp_path / "chat.jsonl", {"messages": messages})], chat_tokenizer(), 512, layout="padded"
    )
    assert read(blocks) == "Be brief.<end><user>Hi<end><bot>Hello.<end><user>Bye<end><bot>See you.<end>"
    assert learned(blocks) == "Hello.<end>See you.<end>"


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_prompts_have_labels_if_asked_for(layout: Any, tmp_path: Path) -> None:
    """Padding, which has no label either, is no prompt."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    records = [{"instruction": "Describe it.", "output": answer} for answer in ("Blue.", "As blue as the sea.")]
    length = 100 if layout == "packed" else 512
    blocks = load_blocks([write(tmp_path / "data.jsonl", *records)], tokenizer, length, layout=layout)
    sequences = [blocks[index] for index in range(len(blocks))]
    plain = make_collator(tokenizer)(sequences)
    batch = learn_prompts(plain)
    assert ("attention_mask" in batch) == (layout == "padded")
    read = plain.get("attention_mask", torch.ones_like(plain["labels"])).bool()
    assert batch["labels"].tolist() == torch.where(read, plain["input_ids"], IGNORED).tolist()
    assert torch.equal(plain["input_ids"], batch["input_ids"])


def test_prompts_need_a_mask_that_tells_padding() -> None:
    batch = {"input_ids": torch.ones(1, 4, dtype=torch.long), "labels": torch.tensor([[IGNORED, 1, 1, 1]])}
    for mask in (torch.ones(1, 1, 4, 4), {"full_attention": None}):
        with pytest.raises(OtaroError, match="cannot be told from it: give one"):
            learn_prompts({**batch, "attention_mask": mask})
    without = {"input_ids": batch["input_ids"]}
    assert learn_prompts(without) == without


def test_a_template_that_rewrites_earlier_turns_teaches_the_last_answer(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}<bot>"
        "{{ m['content'] if loop.last else m['content'][:2] }}{% else %}<user>{{ m['content'] }}{% endif %}<end>"
        "{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
    )
    messages = [
        {"role": role, "content": content}
        for role, content in [("user", "a"), ("assistant", "first"), ("user", "b"), ("assistant", "second")]
    ]
    blocks = load_blocks([write(tmp_path / "chat.jsonl", {"messages": messages})], tokenizer, 512, layout="padded")
    assert read(blocks) == "<user>a<end><bot>fi<end><user>b<end><bot>second<end>"
    assert learned(blocks) == "second<end>"


def test_answers_that_do_not_fit_are_counted(tmp_path: Path) -> None:
    records = [{"instruction": "x" * size, "output": "y"} for size in (2, 90)]
    path = write(tmp_path / "data.jsonl", *records)
    blocks = load_blocks([path], chat_tokenizer(), 20, layout="padded")
    assert (len(blocks), blocks.left_out) == (1, 1)
    with pytest.raises(OtaroError, match="no answer .* within a sequence of 4 tokens"):
        load_blocks([path], chat_tokenizer(), 4, layout="padded")


def test_blocks_without_any_answer_are_refused(tmp_path: Path) -> None:
    """The last block holds the answer and is not full, so only the prompt's are left."""
    path = write(tmp_path / "data.jsonl", {"instruction": "x" * 90, "output": "y"})
    with pytest.raises(OtaroError, match="no answer .* within a sequence of 80 tokens"):
        load_blocks([path], chat_tokenizer(), 80)


@pytest.mark.parametrize(
    "content, message",
    [
        ('{"text": "a"}\n{"text": \n', "data.jsonl, line 2 is not readable JSON"),
        ('{"text": "a"}\n\n[1]\n', "data.jsonl, line 3 is not a JSON object"),
        ('[{"text": "a"},\n{"text": "b"}, 3]', "data.jsonl, record 3 is not a JSON object"),
        ("[" * 100_000, "data.jsonl is not readable JSON"),
        ('{"title": "a"}\n', "line 1 has none of the fields"),
        ('{"text": 3}\n', "line 1 has a field text that is no text"),
        ('{"instruction": "a"}\n', "instruction without an output"),
        ('{"messages": "a"}\n', "messages that are no list"),
        ('{"messages": [{"role": "user", "content": "a"}]}\n', "without an answer"),
        ("[{]", "not readable JSON"),
        ("", "holds no text"),
        ('{"text": "short"}\n', "holds 6 tokens, fewer than one sequence of 16"),
    ],
)
def test_data_that_cannot_be_used(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(content)
    with pytest.raises(OtaroError, match=message):
        load_blocks([path], TOKENIZER, 16)


def test_the_mark_that_some_editors_begin_files_with_is_no_text(tmp_path: Path) -> None:
    plain, marked = tmp_path / "plain.txt", tmp_path / "marked.txt"
    plain.write_text("the text " * 9, "utf-8")
    marked.write_text("the text " * 9, "utf-8-sig")
    assert read(load_blocks([marked], TOKENIZER, 16)) == read(load_blocks([plain], TOKENIZER, 16))


def test_text_that_cannot_be_used(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_bytes(b"abc\xff")
    with pytest.raises(OtaroError, match="position 3"):
        load_blocks([path], TOKENIZER, 2)
    path.write_text("enough text")
    with pytest.raises(OtaroError, match="200 tokens are longer than the model's 128 positions"):
        load_blocks([path], TOKENIZER, 200, longest=128)
    with pytest.raises(OtaroError, match="predict nothing"):
        load_blocks([path], TOKENIZER, 1)
    for missing in (tmp_path / "missing", "data/missing.txt", "missing.jsonl", "./missing"):
        with pytest.raises(OtaroError, match="there is no file or folder"):
            load_blocks([missing], TOKENIZER, 8)
    path.write_text(" \n")
    with pytest.raises(OtaroError, match="holds no text"):
        load_blocks([path], TOKENIZER, 2)


def test_messages_need_a_chat_template(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    path = write(tmp_path / "chat.jsonl", {"messages": [{"role": "assistant", "content": "a"}]})
    with pytest.raises(OtaroError, match="no chat template"):
        load_blocks([path], tokenizer, 8)


def test_a_folder_is_a_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    saved = datasets.Dataset.from_list([{"text": "from disk"}, {"text": "again"}])
    saved.save_to_disk(str(tmp_path / "saved"))
    assert read(load_blocks([tmp_path / "saved"], TOKENIZER, 16)) == "from disk<end>again<end>"


def test_a_folder_needs_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("otaro.tune.data.find_spec", lambda name: None)
    with pytest.raises(OtaroError, match=r"otaro-llm\[tune\]"):
        load_blocks([tmp_path], TOKENIZER, 16)
    with pytest.raises(OtaroError, match=r"otaro-llm\[tune\]"):
        load_blocks(["someone/data"], TOKENIZER, 16)


def test_batches_are_tensors_of_whole_numbers(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("abcdefghijklmnop")
    blocks = load_blocks([path], TOKENIZER, 8)
    batch = make_collator(TOKENIZER)([blocks[0], blocks[1]])
    assert {value.dtype for value in batch.values()} == {torch.int64}
