"""Tokens for the beginning and the end of a text, by the model's rules, wherever a model reads one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from vocabularies import load_expected, write_folder, write_model

import otaro
from otaro.cli import main
from otaro.evaluate.perplexity import split_windows, text_tokens
from otaro.generation import chat, command
from otaro.generation.transformers import _Streamer
from otaro.text import TextStream, prompt_tokens
from otaro.tokenizer import beginning, encode, load_tokenizer, render_chat
from otaro.tune.data import IGNORED, load_blocks

EXPECTED = load_expected()
TEXT = "The quick brown fox jumps over the lazy dog. Hello, world!\n\nIt's 12 + 30 = 42, isn't it?  Yes.\n" * 4
WRITES, DOES_NOT = EXPECTED["templates"]["writes the beginning"], EXPECTED["templates"]["does not"]


@pytest.fixture(scope="module", params=["llama gemma", "llama"])
def packed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A packed GGUF model, of the kind of Gemma 3 or Llama 2."""
    folder = tmp_path_factory.mktemp("begins")
    write_model(folder / "model.gguf", request.param, EXPECTED, **{"tokenizer.chat_template": WRITES})
    otaro.pack(folder / "model.gguf", folder / "packed")
    return folder / "packed"


def test_prompts_begin_once(packed: Path) -> None:
    tokenizer = load_tokenizer(packed)
    begin = [tokenizer.bos_token_id]
    assert beginning(tokenizer) == begin
    bare = encode(tokenizer, "Hello world")
    assert prompt_tokens(tokenizer, "Hello world", raw=True) == begin + bare
    assert prompt_tokens(tokenizer, tokenizer.bos_token + "Hello world", raw=True) == begin + bare
    messages = [{"role": "user", "content": "Hello"}]
    for template, text in ((WRITES, "[INST] Hello [/INST]"), (DOES_NOT, None)):
        tokenizer.chat_template = template
        ids = render_chat(tokenizer, messages)
        assert ids[:1] == begin
        assert ids.count(begin[0]) == 1
        assert text is None or ids[1:] == encode(tokenizer, text)
        assert prompt_tokens(tokenizer, "Hello") == ids


def test_generate_and_chat_send_the_beginning(
    packed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sent: list[list[int]] = []
    opened = command._open

    def watched(*arguments: Any) -> Any:
        runner = opened(*arguments)
        generate = runner.generate

        def note(ids: Any, *rest: Any, **options: Any) -> Any:
            sent.append(list(ids))
            return generate(ids, *rest, **options)

        monkeypatch.setattr(runner, "generate", note)
        return runner

    monkeypatch.setattr(command, "_open", watched)
    lines = iter(["Hello", "Again", "/exit"])
    monkeypatch.setattr(chat, "ask", lambda: next(lines))
    assert main(["generate", str(packed), "--prompt", "Hello", "--raw", "--max-new-tokens", "2"]) == 0
    assert main(["generate", str(packed), "--prompt", "Hello", "--max-new-tokens", "2"]) == 0
    assert main(["chat", str(packed), "--max-new-tokens", "2"]) == 0
    begin = load_tokenizer(packed).bos_token_id
    assert len(sent) == 4
    assert all(ids[0] == begin and begin not in ids[1:] for ids in sent)


def test_every_window_of_a_text_begins_with_it(packed: Path) -> None:
    tokenizer = load_tokenizer(packed)
    ids = encode(tokenizer, TEXT)
    windows = split_windows(text_tokens(tokenizer, TEXT, 32), 32)
    assert windows[:, 0].tolist() == [tokenizer.bos_token_id] * (len(ids) // 31)
    assert windows[:, 1:].flatten().tolist() == ids[: len(ids) // 31 * 31]
    short = split_windows(text_tokens(tokenizer, "Hello world", 32), 32)
    assert short.tolist() == [[tokenizer.bos_token_id, *encode(tokenizer, "Hello world")]]


def test_eval_predicts_the_text_from_its_beginning(
    packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    arguments = ["--text", str(tmp_path / "text.txt"), "--window", "32", "--precisions", "E5M6", "--json", "-"]
    assert main(["eval", str(packed), *arguments]) == 0
    figures = json.loads(capsys.readouterr().out)
    tokenizer, model = load_tokenizer(packed), otaro.load(packed, "E5M6")
    ids = encode(tokenizer, TEXT)
    losses = []
    for start in range(0, len(ids) - 30, 31):
        window = torch.tensor([[tokenizer.bos_token_id, *ids[start : start + 31]]])
        with torch.no_grad():
            logits = model(window).logits[0, :-1].double()
        losses.append(torch.nn.functional.cross_entropy(logits, window[0, 1:], reduction="none"))
    assert figures["tokens"] == 31 * len(losses)
    expected = float(torch.cat(losses).mean().exp())  # the engine, unlike this, has activations of 16 bits
    assert figures["results"][0]["perplexity"] == pytest.approx(expected, rel=1e-4)


def test_without_a_beginning_a_text_is_cut_as_it_is(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_folder(tmp_path, "bytes", EXPECTED))
    assert beginning(tokenizer) == []
    assert text_tokens(tokenizer, TEXT, 32).tolist() == encode(tokenizer, TEXT)


def test_a_prompt_and_a_window_have_no_end(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_folder(tmp_path, "metaspace never", EXPECTED))
    end = tokenizer.eos_token_id
    assert encode(tokenizer, "Hello", add_special_tokens=True)[-1] == end
    assert end not in prompt_tokens(tokenizer, "Hello", raw=True)
    assert end not in text_tokens(tokenizer, TEXT, 32).tolist()


def learned(labels: list[int]) -> list[int]:
    return [label for label in labels if label != IGNORED]


@pytest.mark.parametrize("name", ["metaspace never", "bytes with a beginning", "prepend"])
def test_documents_begin_and_end(name: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_folder(tmp_path, name, EXPECTED))
    begin, end = [tokenizer.bos_token_id], [tokenizer.eos_token_id]
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "Hello world"}\n{"text": "the the"}\n')
    blocks = load_blocks([path], tokenizer, 64, layout="padded")
    documents = [encode(tokenizer, text) for text in ("Hello world", "the the")]
    assert blocks.ids == [begin + document + end for document in documents]


@pytest.mark.parametrize("name", ["prepend", "metaspace first", "metaspace never", "bytes with a beginning"])
def test_an_answer_is_learned_as_it_goes_on_from_its_question(name: str, tmp_path: Path) -> None:
    """What stands before an answer must be what a prompt is, and the answer the rest of the whole text."""
    tokenizer = load_tokenizer(write_folder(tmp_path, name, EXPECTED))
    tokenizer.chat_template = WRITES
    path = tmp_path / "data.jsonl"
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "world!"}]
    path.write_text(json.dumps({"messages": messages}) + "\n")
    blocks = load_blocks([path], tokenizer, 64, layout="padded")
    prompt = render_chat(tokenizer, messages[:1])
    answer = blocks.ids[0][len(prompt) :]
    assert blocks.ids[0][: len(prompt)] == prompt
    assert blocks.ids[0].count(tokenizer.bos_token_id) == 1
    assert learned(blocks.labels[0]) == answer
    whole = encode(tokenizer, "<s>[INST] Hello [/INST] world!</s>")
    assert blocks.ids[0] == whole


def test_tasks_begin_with_it_and_do_not_end(packed_llama: Path, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    from otaro.evaluate.backend import TorchBackend
    from otaro.evaluate.zero_shot import TorchScorer

    tokenizer = load_tokenizer(write_folder(tmp_path, "metaspace never", EXPECTED))  # wants a beginning and an end
    scorer = TorchScorer(TorchBackend(otaro.load(packed_llama)), tokenizer, batch_size=1)
    context, continuation = scorer._encode_pair("Hello", " world")
    assert context == [tokenizer.bos_token_id, *encode(tokenizer, "Hello")]
    assert context[1:] + continuation == encode(tokenizer, "Hello world")
    assert scorer._encode_pair("<s>Hello", " world") == (context, continuation)
    assert scorer.tok_encode("Hello", add_special_tokens=False) == context[1:]


@pytest.mark.parametrize("through", ["native", "transformers"])
def test_a_text_goes_on_with_the_space_that_its_token_has(through: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_folder(tmp_path, "prepend", EXPECTED))

    def write(prompt: list[int], answer: list[int]) -> str:
        if through == "native":
            stream = TextStream(tokenizer, (), prompt)
            return "".join(map(stream.push, answer)) + stream.finish()
        streamer = _Streamer(tokenizer, (), None)
        for tokens in ([prompt], *([token] for token in answer)):
            streamer.put(torch.tensor(tokens))
        streamer.end()
        return "".join(streamer.pieces)

    words = "Hello\n  world and the fox"
    ids = encode(tokenizer, words)
    begin = [tokenizer.bos_token_id]
    assert write(begin, ids) == words
    for cut in range(1, len(ids)):
        before = str(tokenizer.decode(ids[:cut]))
        assert before + write(ids[:cut], ids[cut:]) == words
        assert before + write(begin + ids[:cut], ids[cut:]) == words
