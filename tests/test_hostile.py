"""Folders from anywhere: whatever their files hold, a command says one sentence, soon, and in little memory."""

from __future__ import annotations

import io
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import architectures
import pytest
import torch
from conftest import byte_tokenizer
from transformers import PreTrainedTokenizerFast

import otaro
from otaro.checkpoint.writer import new_content
from otaro.cli import main
from otaro.console import given_text, terminal_text
from otaro.errors import OtaroError
from otaro.generation.transformers import continue_tokens
from otaro.partial import new_folder, partial_path
from otaro.tokenizer import TemplateError, encode, load_tokenizer, render_chat, write_chat
from otaro.tokenizer.files import check_described, is_quick

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Why is the sky <blue> & é?"},
    {"role": "assistant", "content": "It scatters. ", "reasoning": "Rayleigh"},
    {"role": "user", "content": "More?"},
]
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "<é>", "parameters": {"type": "object"}}}]


@pytest.fixture
def folder(packed_llama: Path, tmp_path: Path) -> Path:
    """A packed model that may be spoilt."""
    return Path(shutil.copytree(packed_llama, tmp_path / "packed"))


def change(path: Path, **values: Any) -> None:
    """Other values in a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def generate(folder: Path, *more: str) -> int:
    return main(["generate", str(folder), "--prompt", "hello", "--max-new-tokens", "2", "--threads", "1", *more])


def one_sentence(capture: pytest.CaptureFixture[str]) -> str:
    """What a command that failed said: one line on stderr, and nothing else."""
    said = capture.readouterr()
    assert said.out == ""
    assert said.err.startswith("otaro: error: ")
    assert said.err.count("\n") == 1
    assert said.err.strip().isprintable()
    return said.err


# ---- chat templates -------------------------------------------------------------------------------------------------

ORDINARY = {
    "loop controls": "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
    "{{ m.role }}: {{ m.content }}\n{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m['content'] | trim }}{{ eos_token }}"
    "{% endgeneration %}\n{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}",
    "namespace": "{% set ns = namespace(seen=false, n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% set ns.seen = true %}{% endfor %}{{ ns.n }}{{ ns.seen }}{{ dict(a=1)['a'] }}",
    "tools": "{% if tools %}{{ tools | tojson }}{{ tools[0] | tojson(indent=2) }}{% endif %}{{ messages[0] | tojson }}",
    "date": "{{ strftime_now('%Y') }}{{ documents }}{% macro f(x) %}[{{ x }}]{% endmacro %}{{ f(messages|length) }}",
    "blocks": "  {% if true %}\n    yes\n  {% endif %}\n{{- ' no' -}}  \n",
}


@pytest.mark.parametrize("name", ORDINARY)
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
def test_a_conversation_is_written_as_transformers_writes_it(name: str, tools: Any) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = ORDINARY[name]
    for ask in (True, False):
        expected = tokenizer.apply_chat_template(CHAT, tools=tools, tokenize=False, add_generation_prompt=ask)
        assert write_chat(tokenizer, CHAT, tools=tools, add_generation_prompt=ask) == expected
    ids = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert render_chat(tokenizer, CHAT) == ids


def test_reasoning_has_every_name_that_templates_look_for() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.reasoning_content or '-' }}{{ m.thinking or '-' }}{% endfor %}"
    )
    assert write_chat(tokenizer, CHAT) == "----RayleighRayleigh--"


def test_of_several_templates_the_right_one_is_taken() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = {"default": "plain", "tool_use": "tools"}
    assert write_chat(tokenizer, CHAT) == "plain"
    assert write_chat(tokenizer, CHAT, tools=TOOLS) == "tools"
    tokenizer.chat_template = {"other": "x"}
    with pytest.raises(TemplateError, match="no chat template, or none by default"):
        write_chat(tokenizer, CHAT)


HOSTILE = {
    "{{": "cannot be read: unexpected 'end of template'",
    "{{ raise_exception('two\nlines \x1b[2J') }}": r"does not take this conversation: two lines \x1b[2J",
    "{{ raise_exception('x' * 10000000) }}": "does not take this conversation: xxxx",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "calls itself without end",
    "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}": "nested too deeply",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}": "did not come to an end",
    "{{ 10 ** (10 ** 9) }}": "did not come to an end",
    "{{ 'x' * 10 ** 10 }}": "too much memory",
    "{{ 'x'.center(10 ** 10) }}": "too much memory",
    "{{ ('x' * 10 ** 5).replace('x', 'y' * 10 ** 5) }}": "too much memory",
    "{{ ('x' * 10 ** 5).join(['a'] * 10 ** 5) }}": "too much memory",
    "{{ '%10000000000d' % 1 }}": "too much memory",
    "{{ 'x' * 2000000 }}": "writes far more than the conversation holds",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}": "fails on this conversation: SecurityError",
    "{% set ns = namespace(__class__=1) %}": "fails on this conversation: SecurityError",
    "{{ messages[0].missing.further }}": "fails on this conversation: UndefinedError",
    "{% include '/etc/passwd' %}": "fails on this conversation: TypeError",
}


@pytest.mark.skipif(sys.platform != "linux", reason="memory is bounded there alone")
@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_a_template_that_cannot_be_used_is_one_sentence(number: int) -> None:
    source, sentence = list(HOSTILE.items())[number]
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = source
    with pytest.raises(TemplateError) as raised:
        render_chat(tokenizer, CHAT)
    assert sentence in str(raised.value)
    assert str(raised.value).isprintable()
    tokenizer.chat_template = "{{ messages | length }}"
    assert write_chat(tokenizer, CHAT) == "4"  # the next conversation is written as ever


def test_templates_see_nothing_of_the_working_directory(tmp_path: Path) -> None:
    """A user may well stand in the folder that is not trusted."""
    (tmp_path / "jinja2.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    script = "from otaro.tokenizer.template import _worker; print(_worker.write('{{ 1 + 1 }}', {}))"
    command = [sys.executable, "-P", "-c", script]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "2\n"
    assert not (tmp_path / "ran").exists()


def test_commands_say_what_is_wrong_with_a_template(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "chat_template.jinja").write_text("{% for m in messages %}")
    assert generate(folder) == 2
    assert "the model's chat template cannot be read" in one_sentence(capfd)
    assert generate(folder, "--raw") == 0


# ---- tokenizers -----------------------------------------------------------------------------------------------------


def replaced(path: Path, **values: Any) -> Callable[[Path], None]:
    return lambda folder: change(folder / path, **values)


SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}
SPOILT: dict[str, tuple[Callable[[Path], Any], str]] = {
    "cut": (lambda folder: (folder / "tokenizer.json").write_text('{"version"'), "Expecting"),
    "deep": (lambda folder: (folder / "tokenizer.json").write_text("[" * 100000), "nested too deeply"),
    "list": (lambda folder: (folder / "tokenizer.json").write_text("[]"), "not a JSON object"),
    "binary": (lambda folder: (folder / "tokenizer.json").write_bytes(b"\xff\xfe\0"), "codec can't decode"),
    "large": (lambda folder: os.truncate(folder / "tokenizer_config.json", 10**9), "has more than 64000000 bytes"),
    "many": (
        replaced(Path("tokenizer.json"), model={"type": "BPE", "vocab": {}, "merges": [0] * 1_000_001}),
        "more than 1000000 tokens and merges",
    ),
    "listed": (
        replaced(Path("tokenizer_config.json"), extra_special_tokens=["x"] * 5001),
        "tokenizer_config.json lists 5001 things",
    ),
    "model": (replaced(Path("tokenizer.json"), model=7), "cannot be loaded"),
    "vocabulary": (replaced(Path("tokenizer.json"), model={"type": "BPE", "vocab": 1, "merges": []}), "be loaded"),
    "added": (replaced(Path("tokenizer.json"), added_tokens=[{"id": "x"}]), "cannot be loaded"),
    "added text": (
        replaced(Path("tokenizer.json"), added_tokens=[{"content": "x" * 5000}]),
        "holds a text of 5000 characters",
    ),
    "template": (lambda folder: (folder / "chat_template.jinja").write_bytes(b"\xff"), "cannot be loaded"),
    "token": (replaced(Path("tokenizer_config.json"), eos_token={"a": []}), "cannot be loaded"),
    "two": (replaced(Path("tokenizer_config.json"), tokenizer_class="RagTokenizer"), "RagTokenizer is not the"),
    "config": (replaced(Path("tokenizer_config.json"), added_tokens_decoder={"x": 1}), "cannot be loaded"),
    "decoder": (
        replaced(Path("tokenizer.json"), decoder={"type": "Strip", "content": " ", "start": 1, "stop": 1}),
        "its decoder cuts tokens off at both ends",
    ),
    "panic": (
        replaced(Path("tokenizer.json"), pre_tokenizer={**SPLIT, "pattern": {"Regex": r"(\w+)+$|(\s|\s)*\d"}}),
        "the tokenizer fails on this text: Onig",
    ),
}


def test_what_code_below_python_prints_while_a_tokenizer_loads_is_not_heard(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    load = PreTrainedTokenizerFast.from_pretrained

    def noisy(*given: Any, **named: Any) -> Any:
        os.write(1, b"Ignored unknown kwarg option \x1b[2J\n")  # as Rust code does, past sys.stdout
        os.write(2, b"thread panicked\n")
        return load(*given, **named)

    monkeypatch.setattr(PreTrainedTokenizerFast, "from_pretrained", noisy)
    print("before")
    load_tokenizer(folder)
    print("behind")
    assert capfd.readouterr() == ("before\nbehind\n", "")


@pytest.mark.parametrize("name", SPOILT)
def test_a_tokenizer_that_cannot_be_used_is_one_sentence(
    folder: Path, name: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil, reason = SPOILT[name]
    monkeypatch.setattr("otaro.tokenizer.PROBE", "a" * 40 + "!")
    spoil(folder)
    with pytest.raises(OtaroError, match="holds no tokenizer that can be read") as raised:
        load_tokenizer(folder)
    assert reason in str(raised.value)
    assert capfd.readouterr().err == ""


def test_a_tokenizer_beyond_the_model_is_one_sentence(
    folder: Path, tiny_llama: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    described = json.loads((folder / "tokenizer.json").read_text())
    described["model"]["vocab"]["h"] = 5000
    plain = Path(shutil.copytree(tiny_llama, tmp_path / "plain"))
    for path in (folder, plain):
        (path / "tokenizer.json").write_text(json.dumps(described))
    (tmp_path / "text").write_text("hello " * 20)
    commands = [
        ["generate", folder, "--prompt", "hello", "--backend", "native"],
        ["generate", folder, "--prompt", "hello", "--backend", "transformers"],
        ["eval", folder, "--text", tmp_path / "text", "--precisions", "E5M3"],
        ["eval", plain, "--text", tmp_path / "text", "--precisions", "E5M3"],
        ["export", folder, tmp_path / "out.gguf", "--precision", "E5M3"],
        [
            "tune",
            plain,
            tmp_path / "out",
            "--data",
            tmp_path / "text",
            "--sequence-length",
            "8",
            "--steps",
            "1",
            "--cpu",
        ],
    ]
    for command in commands:
        assert main([str(argument) for argument in command]) == 2, command
        assert "5000" in one_sentence(capfd)


def test_a_tokenizer_that_cannot_be_exported_leaves_nothing(
    gguf_ready: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(gguf_ready, tmp_path / "packed"))
    good = (folder / "tokenizer_config.json").read_text()
    described = json.loads((folder / "tokenizer.json").read_text())
    for name, content in (
        ("tokenizer_config.json", good[:50]),
        ("tokenizer_config.json", "[1]"),
        ("tokenizer.json", json.dumps({**described, "added_tokens": [{"content": []}]})),
        ("tokenizer.json", json.dumps({**described, "added_tokens": [{"content": "a", "id": -1}]})),
    ):
        (folder / "tokenizer_config.json").write_text(good)
        (folder / name).write_text(content)
        assert main(["export", str(folder), str(tmp_path / "out.gguf"), "--precision", "E5M3"]) == 2
        one_sentence(capfd)
        assert [path.name for path in tmp_path.iterdir()] == ["packed"]


def test_what_a_caller_raises_comes_out_as_it_is(packed_llama: Path) -> None:
    class Stopped(Exception):  # noqa: N818
        pass

    def stop(text: str) -> None:
        raise Stopped(text)

    model, tokenizer = otaro.load(packed_llama), load_tokenizer(packed_llama)
    with pytest.raises(Stopped):
        continue_tokens(model, tokenizer, torch.tensor([[5]]), max_new_tokens=40, settings={}, on_text=stop)
    with pytest.raises(OtaroError, match="transformers cannot go on from this prompt"):
        continue_tokens(model, tokenizer, torch.tensor([[5]]), max_new_tokens=2, settings={"num_beams": 0})
    with pytest.raises(OtaroError, match="the prompt has no tokens"):
        continue_tokens(model, tokenizer, torch.empty(1, 0, dtype=torch.int64), max_new_tokens=2, settings={})


def test_texts_that_become_longer_and_longer_are_refused() -> None:
    double = {"type": "Replace", "pattern": {"Regex": "(?:a|b)"}, "content": "aa"}
    long = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 200}
    for steps in ([double] * 30, [long], [{"type": "ByteLevel"}] * 30):
        for part in ({"normalizer": {"type": "Sequence", "normalizers": steps}}, {"decoder": {"decoders": steps}}):
            with pytest.raises(ValueError, match="times longer"):
                check_described(part)
    ordinary = [
        {"type": "Prepend", "prepend": "▁"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"},
        {"type": "NFKC"},
    ]
    check_described({"normalizer": {"type": "Sequence", "normalizers": ordinary}})


def test_what_is_put_around_texts_is_little() -> None:
    level, text = {"type": "ByteLevel", "use_regex": False}, {"Sequence": {"id": "A", "type_id": 0}}
    special = {"SpecialToken": {"id": "x", "type_id": 0}}

    def template(pieces: list[Any], ids: int = 1) -> dict[str, Any]:
        tokens = {"x": {"id": "x", "ids": [0] * ids, "tokens": ["x"] * ids}}
        return {"type": "TemplateProcessing", "single": pieces, "pair": [text, text], "special_tokens": tokens}

    for described in (
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [level] * 22}},
        {"post_processor": template([special] * 3000)},
        {"post_processor": template([special, text], ids=3000)},
        {"post_processor": template([text] * 300_000)},
        {"post_processor": {"type": "Sequence", "processors": [template([text] * 20)] * 4}},
    ):
        with pytest.raises(ValueError, match=r"times longer|tokens around a text"):
            check_described(described)
    check_described({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [level, level]}})
    check_described({"post_processor": {"type": "Sequence", "processors": [level, template([special, text, special])]}})


def test_logits_that_are_no_numbers_are_an_error_in_transformers_too(packed_llama: Path) -> None:
    model, tokenizer = otaro.load(packed_llama), load_tokenizer(packed_llama)
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    with pytest.raises(OtaroError, match="logits are not finite"):
        continue_tokens(model, tokenizer, torch.tensor([[5]]), max_new_tokens=2, settings={})


def test_quick_expressions_are_told_from_others() -> None:
    for pattern in (r"\s+", r" {2,}", r"[^\S\n]+", "a|b", r"\p{Zs}", r"'s|'t", r"[\]*]+x"):
        assert is_quick(pattern), pattern
    for pattern in (r"(a+)+", r"a*a*", r"(a|a)*", r"\s+\w+", r"[a[b]]*c*", r"(?:x){2,}"):
        assert not is_quick(pattern), pattern


def test_an_expression_that_takes_too_long_is_one_sentence(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    slow = {**SPLIT, "pattern": {"Regex": r"\w*\w*\w*(?!\w)(?<!\w)\d"}}
    change(folder / "tokenizer.json", pre_tokenizer=slow)
    tokenizer = load_tokenizer(folder)
    monkeypatch.setattr("otaro.tokenizer.SECONDS", 0.1)
    with pytest.raises(OtaroError, match="did not get done with this text"):
        encode(tokenizer, "a" * 160)


def test_code_in_the_folder_is_never_run(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ran = folder / "ran"
    (folder / "evil.py").write_text(f"open({str(ran)!r}, 'w')\nclass Evil: pass\n")
    mapped = {
        "AutoTokenizer": ["evil.Evil", "evil.Evil"],
        "AutoConfig": "evil.Evil",
        "AutoModelForCausalLM": "evil.Evil",
    }
    change(folder / "tokenizer_config.json", auto_map=mapped)
    change(folder / "config.json", auto_map=mapped)
    assert generate(folder) == 0
    assert generate(folder, "--backend", "transformers") == 0
    capfd.readouterr()
    change(folder / "config.json", model_type="evil")
    change(folder / "tokenizer_config.json", tokenizer_class="Evil")
    assert generate(folder) == 2
    one_sentence(capfd)
    assert not ran.exists()


# ---- configs --------------------------------------------------------------------------------------------------------

CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "layers": ({"num_hidden_layers": 10**10}, "num_hidden_layers is 10000000000, which is more than 4096"),
    "labels": ({"num_labels": 10**10}, "num_labels is 10000000000"),
    "values": ({"x": [[]] * 60_000}, "holds more than 50000 values"),
    "size": ({"x": "x" * 1_000_000}, "has more than 1000000 bytes"),
    "more layers": ({"num_hidden_layers": 3}, "tensor model.layers.2"),
    "many layers": ({"num_hidden_layers": 4000}, "tensor model.layers"),
    "words": ({"hidden_size": "many"}, "config.json of packed cannot be used"),
    "infinite": ({"rms_norm_eps": float("inf"), "vocab_size": 1e400}, "config.json"),
    "nothing": ({"hidden_act": None}, ""),
    "model": ({"model_type": ["llama"]}, "config.json of packed cannot be used"),
    "weights": ({"transformers_weights": "../../other.safetensors"}, ""),
    "pickle": ({"transformers_weights": "weights.bin"}, ""),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_that_cannot_be_used_is_one_sentence(
    folder: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    values, sentence = CONFIGS[name]
    change(folder / "config.json", **values)
    (folder / "weights.bin").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    with pytest.raises(OtaroError):
        otaro.load(folder)
    if "transformers_weights" not in values:  # only transformers looks at those
        assert generate(folder) == 2
        assert sentence in one_sentence(capfd)


@pytest.mark.parametrize(
    "values",
    [
        {"attn_implementation": "evil/kernel", "experts_implementation": "evil/kernel"},  # fetched from the hub and run
        {"attn_implementation": "flex_attention"},  # compiled
        {"return_dict": False},
    ],
    ids=["kernel", "compiled", "tuples"],
)
def test_how_a_model_is_run_is_not_the_folder_s(
    folder: Path, tiny_llama: Path, tmp_path: Path, values: dict[str, Any]
) -> None:
    plain = Path(shutil.copytree(tiny_llama, tmp_path / "plain"))
    (tmp_path / "text").write_text("hello " * 20)
    for place in (folder, plain):
        change(place / "config.json", **values)
    assert otaro.load(folder).config._attn_implementation in ("eager", "sdpa")
    options = ["--window", "8", "--max-windows", "1", "--precisions", "E5M4", "--device", "cpu", "--backend", "torch"]
    for place in (folder, plain):
        assert main(["eval", str(place), "--text", str(tmp_path / "text"), *options]) == 0


def test_an_adapter_beside_the_weights_is_refused(
    folder: Path, tiny_llama: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """transformers would look for its weights, pickled ones too, and a pipe would keep it waiting for ever."""
    plain = Path(shutil.copytree(tiny_llama, tmp_path / "plain"))
    for place in (folder, plain):
        os.mkfifo(place / "adapter_config.json")
    with pytest.raises(OtaroError, match=r"holds an adapter \(adapter_config.json\): merge it"):
        otaro.load(folder)
    for command in (["generate", folder, "--prompt", "hello"], ["info", folder], ["pack", plain, tmp_path / "out"]):
        assert main([str(argument) for argument in command]) == 2
        assert "holds an adapter" in one_sentence(capfd)


def test_what_transformers_logs_of_a_config_is_not_printed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says what it cannot set, with the folder's own text in it, before it raises the same."""
    change(folder / "config.json", sub_configs="\x1b[2J")
    heard: list[logging.LogRecord] = []
    monkeypatch.setattr(logging.getLogger("transformers").handlers[0], "emit", heard.append)
    with pytest.raises(OtaroError, match="config.json of packed cannot be used"):
        otaro.load(folder)
    assert not heard


def test_a_folder_is_described_whatever_its_config_says(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for value in (7, {}, {"a": 1}, [], [["x"]], None):
        change(folder / "config.json", architectures=value)
        assert main(["info", str(folder)]) == 0


def test_an_index_of_long_names_is_one_sentence(
    tiny_llama: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plain = Path(shutil.copytree(tiny_llama, tmp_path / "plain"))
    (plain / "model.safetensors").rename(plain / "x")
    index = {"weight_map": {"a": "9" * 4000, "b": 10**4000, "c": "\0"}}
    (plain / "model.safetensors.index.json").write_text(json.dumps(index))
    assert main(["pack", str(plain), str(tmp_path / "out")]) == 2
    assert len(one_sentence(capfd)) < 1100


def test_settings_for_generation_are_not_the_folder_s(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    change(folder / "generation_config.json", num_beams=1000, penalty_alpha=0.6, top_k=4, max_length=10**9)
    assert generate(folder, "--backend", "transformers") == 0
    assert generate(folder) == 0


# ---- terminals and locales ------------------------------------------------------------------------------------------

UNRULY = "a\x1b[31mred\x1b]0;title\x07 \x9b2J\r\u202eevil\u2066 ok\tend\r\nnext é 漢 \U0001f468\u200d\U0001f469"


def test_what_controls_a_terminal_is_spelt_out() -> None:
    text = terminal_text(UNRULY)
    assert text == (
        r"a\x1b[31mred\x1b]0;title\x07 \x9b2J\r\u202eevil\u2066 ok" + "\tend\nnext é 漢 \U0001f468\u200d\U0001f469"
    )


@pytest.mark.skipif(sys.platform == "win32", reason="opens a terminal")
def test_a_terminal_gets_clean_text_and_a_pipe_gets_it_as_it_is() -> None:
    script = f"from otaro.console import stream, note; stream({UNRULY!r}); note({UNRULY!r})"
    command = [sys.executable, "-c", script]
    environment = {**os.environ, "PYTHONUTF8": "1"}
    piped = subprocess.run(command, capture_output=True, check=True, env=environment)
    assert piped.stdout.decode() == UNRULY
    assert "\x1b" not in piped.stderr.decode()
    ours, theirs = os.openpty()
    subprocess.run(command, stdout=theirs, stderr=subprocess.DEVNULL, check=True, env=environment)
    os.close(theirs)
    shown = os.read(ours, 1000).decode()
    os.close(ours)
    assert shown.replace("\r\n", "\n") == terminal_text(UNRULY)


def test_names_from_a_folder_do_nothing_to_the_terminal(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["\x1b[2JLlama\nsecond line"]
    config["quantization_config"]["source"] = "[bold]\x9b \ud800"
    (folder / "config.json").write_text(json.dumps(config))
    assert main(["info", str(folder)]) == 0
    said = capfd.readouterr().out
    assert r"\x1b[2JLlama second line" in said
    assert r"[bold]\x9b \ud800" in said


@pytest.mark.parametrize("option", ["--prompt", "--stop"])
def test_text_that_is_not_utf8_is_one_sentence(folder: Path, option: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert generate(folder, option, os.fsdecode(b"\xff\xfe")) == 2
    assert "is not UTF-8 text: the byte at position 0 cannot be read" in one_sentence(capfd)


def test_half_a_character_is_no_text() -> None:
    with pytest.raises(OtaroError, match="it is not text: it holds half a character at position 1"):
        given_text("a\ud800", "it")


@pytest.mark.skipif(sys.platform != "linux", reason="chooses a locale")
def test_a_locale_without_the_characters_needed(folder: Path) -> None:
    environment = {**os.environ, "LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    script = (
        "import sys\n"
        "from otaro.console import given_text, note, results, stream, tolerate_any_text\n"
        "tolerate_any_text()\n"
        "stream(given_text(sys.argv[1], 'it') + '\\n')\n"
        "results().print(chr(0x6f22))\n"
        "note(chr(0x6f22))\n"
    )
    said = subprocess.run([sys.executable, "-c", script, "café"], capture_output=True, check=True, env=environment)
    assert said.stdout == b"caf\\xe9\n\\u6f22\n"
    assert said.stderr == b"\\u6f22\n"
    command = [sys.executable, "-m", "otaro.cli", "generate", str(folder), "--prompt", b"caf\xe9"]
    said = subprocess.run(command, capture_output=True, check=False, env=environment)
    assert said.returncode == 2
    assert said.stderr == b"otaro: error: the prompt is not UTF-8 text: the byte at position 3 cannot be read\n"


def test_a_line_of_a_chat_that_is_not_utf8(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe\n/exit\n"), encoding="utf-8"))
    assert main(["chat", str(folder), "--threads", "1"]) == 0
    assert "this line is not UTF-8 text" in capfd.readouterr().err


# ---- disks and killed processes -------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform == "win32", reason="limits the size of files")
@pytest.mark.parametrize("limit", [2000, 50_000], ids=["header", "data"])
def test_an_export_that_does_not_fit_leaves_nothing(
    gguf_ready: Path, tmp_path: Path, limit: int, capfd: pytest.CaptureFixture[str]
) -> None:
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        code = main(["export", str(gguf_ready), str(tmp_path / "out.gguf"), "--precision", "E5M8"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert code == 2
    assert "out.gguf cannot be written: " in (said := one_sentence(capfd))
    assert "free some space or choose another folder" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(sys.platform == "win32", reason="limits the size of files")
def test_a_disk_too_full_for_a_lock_keeps_nothing(tmp_path: Path) -> None:
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with pytest.raises(OtaroError, match="cannot be written: "), partial_path(tmp_path / "out", tmp_path):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir())


def test_an_export_larger_than_the_disk_is_not_begun(
    gguf_ready: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6, 1000))
    assert main(["export", str(gguf_ready), str(tmp_path / "out.gguf"), "--precision", "E5M8"]) == 2
    assert "are free: make room first" in one_sentence(capfd)
    assert not list(tmp_path.iterdir())


WRITER = """
import sys, time
from pathlib import Path
from otaro.partial import partial_path
out = Path(sys.argv[1])
with partial_path(out, out.parent) as partial:
    partial.mkdir()
    (partial / "weights").write_text("half")
    print(partial.name, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Callable[[str], tuple[subprocess.Popen[str], Path]]]:
    """Starts a process that is in the midst of writing an output of that name."""
    processes = []

    def start(name: str) -> tuple[subprocess.Popen[str], Path]:
        command = [sys.executable, "-c", WRITER, str(tmp_path / name)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout is not None
        return process, tmp_path / process.stdout.readline().strip()

    yield start
    for process in processes:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.skipif(sys.platform == "win32", reason="no locks to tell by")
def test_what_a_killed_process_left_is_swept_and_nothing_else(tmp_path: Path, writer: Any) -> None:
    killed, left = writer("killed")
    _, alive = writer("alive")
    foreign, theirs = writer("foreign")
    for process in (killed, foreign):
        process.kill()  # kill -9
        process.wait()
    lock = theirs.with_name(f"{theirs.name}.lock")
    lock.write_text(json.dumps({"host": "another", "boot": "another"}))
    (tmp_path / ".notes.partial-1234").mkdir()  # of nobody: it has no lock
    assert (left / "weights").exists()
    with new_folder(tmp_path / "out") as partial:
        (partial / "weights").write_text("whole")
    found = {path.name for path in tmp_path.iterdir()}
    assert found == {"out", alive.name, f"{alive.name}.lock", theirs.name, lock.name, ".notes.partial-1234"}
    assert (alive / "weights").read_text() == "half"


def test_a_folder_that_is_filled_is_swept_too(tmp_path: Path, writer: Any) -> None:
    (tmp_path / "out").mkdir()
    killed, _ = writer("out/out")
    killed.kill()
    killed.wait()
    with new_content(tmp_path / "out") as partial:
        (partial / "config.json").write_text("{}")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["config.json"]


@pytest.fixture(scope="module")
def gguf_ready(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A packed model whose tokenizer can be exported."""
    place = tmp_path_factory.mktemp("gguf")
    config = architectures.config("llama")
    tokenizer = byte_tokenizer()
    config.vocab_size = len(tokenizer)
    folder = architectures.packed_model(config, place)
    tokenizer.save_pretrained(folder)
    return folder
