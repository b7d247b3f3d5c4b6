"""Text in, text out: what an engine makes of prompts and conversations, and the examples of the documents."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import otaro
from otaro import Engine
from otaro.engine.sampling import Sampling
from otaro.engine.text import generate
from otaro.errors import OtaroError
from otaro.precision import Precision
from otaro.text import prompt_tokens
from otaro.tokenizer import load_tokenizer, render_chat

DOCUMENT = Path(__file__).parents[1] / "docs" / "engine.md"


@pytest.fixture(scope="module")
def engine(packed_llama: Path) -> Engine:
    return Engine(packed_llama, threads=1)


def test_a_text_is_answered_as_its_tokens_are(engine: Engine, packed_llama: Path) -> None:
    tokenizer = load_tokenizer(packed_llama)
    for raw in (False, True):
        ids = prompt_tokens(tokenizer, "hello", raw=raw)
        pieces: list[str] = []
        result = engine.generate("hello", raw=raw, max_new_tokens=9, on_text=pieces.append)
        assert result.text == "".join(pieces) == generate(engine, tokenizer, ids, max_new_tokens=9).text
        assert 0 < result.tokens <= 9
        assert result.width == Precision.E5M8


def test_a_conversation_is_answered_in_the_model_s_template(engine: Engine, packed_llama: Path) -> None:
    tokenizer = load_tokenizer(packed_llama)
    messages = [{"role": "user", "content": "hi"}]
    assert engine.chat(messages, max_new_tokens=9).text == engine.generate("hi", max_new_tokens=9).text
    longer = [*messages, {"role": "assistant", "content": "ho"}, {"role": "user", "content": "hu"}]
    sampling = Sampling(0.9, seed=3)
    expected = generate(engine, tokenizer, render_chat(tokenizer, longer), max_new_tokens=9, sampling=sampling).text
    assert engine.chat(longer, max_new_tokens=9, sampling=sampling).text == expected
    assert engine.chat(longer, max_new_tokens=9, sampling=sampling, reuse=True).text == expected


def test_without_a_number_of_tokens_an_answer_takes_what_room_there_is(packed_llama: Path) -> None:
    engine = Engine(packed_llama, threads=1)
    room = engine.context - len(prompt_tokens(engine.tokenizer, "hello", raw=True))
    assert room < 256
    assert engine.generate("hello", raw=True).tokens <= room
    with pytest.raises(OtaroError, match="do not fit the context"):
        engine.generate("hello", raw=True, max_new_tokens=room + 1)


def test_a_stop_may_be_one_text_or_several(engine: Engine) -> None:
    whole = engine.generate("hello", max_new_tokens=20).text
    stop = whole[2:4]
    for stops in (stop, [stop], ("never comes", stop)):
        assert engine.generate("hello", max_new_tokens=20, stop=stops).text == whole[: whole.index(stop)]


def test_a_text_that_was_broken_off_does_not_block_the_next(engine: Engine) -> None:
    def interrupt(_: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as kept:  # and with it the frames, as a notebook does
        engine.generate("hello", max_new_tokens=20, on_text=interrupt)
    assert engine.generate("hello", max_new_tokens=5).tokens > 0
    del kept


@pytest.mark.parametrize("prompt", [[1, 2, 3], b"bytes", None, 7])
def test_what_is_not_text_is_said(engine: Engine, prompt: Any) -> None:
    with pytest.raises(OtaroError, match="not text: use tokens"):
        engine.generate(prompt)


@pytest.mark.parametrize("messages", ["hello", [], ["hello"], {"role": "user", "content": "hi"}, None, 7])
def test_what_is_not_a_conversation_is_said(engine: Engine, messages: Any) -> None:
    with pytest.raises(OtaroError, match="messages are a list such as"):
        engine.chat(messages)


def test_the_examples_of_the_document_run(packed_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "packed").symlink_to(packed_llama)
    monkeypatch.chdir(tmp_path)
    examples = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    for example in examples:
        exec(compile(example, str(DOCUMENT), "exec"), names)
    assert names["engine"].precision == Precision.E5M8
    assert isinstance(names["answer"].text, str)
    assert [text.finish_reason for text in names["texts"]] == ["length"] * 2
    assert otaro.Engine is Engine
