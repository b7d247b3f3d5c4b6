"""otaro chat: what is kept of a conversation and what is not, in a real terminal too."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import pty
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import byte_tokenizer

from otaro.cli import main
from otaro.engine.sampling import Sampling
from otaro.errors import OtaroError
from otaro.generation import chat
from otaro.generation.request import Request
from otaro.precision import Precision
from otaro.text import GenerationResult
from otaro.tune.data import read_examples


def letters(_: Any, messages: list[dict[str, str]]) -> list[int]:
    """A template and tokenizer in one: a token for each letter, and an answer begins after a '>'."""
    if any(message["content"] == "refused" for message in messages):
        raise OtaroError("the template refuses this")
    text = "".join(f"{message['role'][0]}:{message['content']}|" for message in messages) + ">"
    return [ord(letter) for letter in text]


class EchoRunner:
    """Answers with the number of times it was asked, and notes what it was asked; `fail` happens after one piece."""

    tokenizer = SimpleNamespace(chat_template="yes")
    precision = Precision.E5M8
    memory = 1_000_000
    context = 100
    longest_context = 1000

    def __init__(self) -> None:
        self.prompts: list[str] = []
        self.requests: list[Request] = []
        self.fail: BaseException | None = None
        self.pieces = ["answer ", "{}"]

    def generate(
        self, prompt: Sequence[int], request: Request, on_text: Any = None, on_width: Any = None
    ) -> GenerationResult:
        self.prompts.append("".join(map(chr, prompt)))
        self.requests.append(request)
        for number, piece in enumerate(self.pieces):
            if number == len(self.pieces) - 1 and self.fail is not None:
                failure, self.fail = self.fail, None
                raise failure
            on_text(piece.format(len(self.prompts)))
        return GenerationResult("", 2, 1.0, 2.0, 0.1, self.precision, {self.precision: 2})

    @property
    def width(self) -> Precision:
        return self.precision

    def check_loading(self) -> None:
        pass


Talk = Callable[..., tuple[EchoRunner, list[str]]]


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Talk:
    """Say these lines (or raise these exceptions at the prompt) and return the runner and the remarks."""

    def run(
        *lines: str | BaseException, runner: EchoRunner | None = None, request: Request | None = None, **settings: Any
    ) -> tuple[EchoRunner, list[str]]:
        said: Iterator[str | BaseException] = iter(lines)

        def ask() -> str:
            line = next(said, EOFError())
            if isinstance(line, BaseException):
                raise line
            return line

        runner = runner or EchoRunner()
        monkeypatch.setattr(chat, "ask", ask)
        monkeypatch.setattr(chat, "render_chat", letters)
        chat.Conversation(runner, request or Request(10, Sampling(0.5), at_most=True), **settings).run()
        return runner, capsys.readouterr().err.splitlines()

    return run


def test_what_was_said_is_read_again(talk: Talk) -> None:
    runner, _ = talk("one", "two")
    assert runner.prompts == ["u:one|>", "u:one|a:answer 1|u:two|>"]
    runner, _ = talk("one", "/clear", "two", system="be brief")
    assert runner.prompts == ["s:be brief|u:one|>", "s:be brief|u:two|>"]


def test_commands_that_do_not_exist_are_named_and_paths_are_messages(talk: Talk) -> None:
    runner, remarks = talk("/retri", "/Precision", "/", "/usr/bin is what?", "/etc/passwd")
    assert remarks[0] == "there is no command /retri: /help lists those there are"
    assert remarks[1].startswith("now at E5M8")
    assert remarks[2].startswith("there is no command /:")
    assert [prompt.rpartition("u:")[2] for prompt in runner.prompts] == ["/usr/bin is what?|>", "/etc/passwd|>"]
    _, remarks = talk("/help")
    assert all(any(line.startswith(command.split()[0]) for line in remarks) for command in chat.COMMANDS)


def test_the_system_text_is_set_shown_and_taken_back(talk: Talk) -> None:
    lines = ("/system", "one", "/system be  brief", "/system", "two", '/system ""', "three")
    runner, remarks = talk(*lines, system="old")
    assert [prompt[0] for prompt in runner.prompts] == ["s", "s", "u"]
    assert runner.prompts[1].startswith("s:be  brief|u:one|")
    assert remarks[0] == "old"
    assert "be  brief" in remarks
    runner, remarks = talk("/system refused", "one")
    assert "the template refuses this" in remarks
    assert runner.prompts == ["u:one|>"]


def test_retry_answers_the_last_message_with_another_draw(talk: Talk) -> None:
    request = Request(10, Sampling(0.5, seed=2**32 - 1), at_most=True)
    runner, _ = talk("one", "two", "/retry", "/retry", "three", request=request)
    assert runner.prompts[1:4] == ["u:one|a:answer 1|u:two|>"] * 3
    assert runner.prompts[4] == "u:one|a:answer 1|u:two|a:answer 4|u:three|>"
    assert [asked.sampling.seed for asked in runner.requests] == [2**32 - 1, 2**32 - 1, 0, 1, 1]
    runner, remarks = talk("/retry")
    assert (runner.prompts, remarks) == ([], ["there is nothing to answer again: say something first"])
    runner = EchoRunner()
    runner.pieces = ["always this"]
    _, remarks = talk("one", "/retry", runner=runner, request=Request(10, Sampling()))
    assert remarks[-1].startswith("the same again: at temperature 0")


def test_an_answer_that_fails_or_is_stopped_costs_nothing_else(talk: Talk) -> None:
    runner = EchoRunner()
    runner.fail = KeyboardInterrupt()
    _, remarks = talk("one", "two", runner=runner)
    assert remarks[0] == "stopped"
    assert runner.prompts[1] == "u:one|a:answer |u:two|>"  # what had been said
    runner = EchoRunner()
    runner.pieces = ["{}"]
    runner.fail = OtaroError("no memory")
    _, remarks = talk("one", "/retry", "/clear", "two", "/retry", runner=runner)
    assert remarks[0] == "no memory"
    assert runner.prompts == ["u:one|>", "u:one|>", "u:two|>", "u:two|>"]


def test_a_retry_may_name_a_precision(talk: Talk) -> None:
    runner, remarks = talk("one", "/retry E5M3")
    assert runner.precision == Precision.E5M3
    assert any("now at E5M3" in remark for remark in remarks)


def test_a_retry_that_fails_leaves_the_answer_there_was(talk: Talk) -> None:
    class Failing(EchoRunner):
        def generate(self, prompt: Sequence[int], request: Request, *rest: Any) -> GenerationResult:
            if len(self.prompts) == 1:
                self.pieces, self.fail = ["{}"], OtaroError("no memory")
            return super().generate(prompt, request, *rest)

    runner = Failing()
    talk("one", "/retry", "two", runner=runner)
    assert runner.prompts[2] == "u:one|a:answer 1|u:two|>"


def test_a_conversation_without_room_says_what_to_do_and_stays(talk: Talk) -> None:
    runner, remarks = talk("x" * 60, "y" * 30, "z")
    assert len(runner.prompts) == 2
    assert runner.requests[0].max_new_tokens == 10  # the default
    refusal = remarks[1]
    for words in (
        "108 tokens with this message are too many",
        "the context holds 100",
        "/save FILE",
        "/clear",
        "--context allows up to 1000",
    ):
        assert words in refusal
    assert runner.prompts[1].startswith("u:" + "x" * 60 + "|a:answer 1|u:z")
    # A prompt that fits is answered, with what is left.
    runner, remarks = talk("x" * 94)
    assert [asked.max_new_tokens for asked in runner.requests] == [2]
    assert "no room for more" in remarks[-1]
    # But not if more was asked for.
    runner, remarks = talk("x" * 94, request=Request(10, Sampling(0.5)))
    assert runner.requests == []
    assert "10 new ones" in remarks[0]


def test_a_conversation_is_saved_and_loaded(talk: Talk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    _, remarks = talk("grüße", "/save ~/talk.json", "two", "/save ~/talk.json", system="brief")
    path = tmp_path / "talk.json"
    assert remarks[1] == f"2 messages in {path}"
    messages = json.loads(path.read_text(encoding="utf-8"))["messages"]
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert "grüße" in path.read_text(encoding="utf-8")
    assert list(tmp_path.iterdir()) == [path]
    runner, remarks = talk("/load ~/talk.json", "three", '/save "~/talk.json"')
    assert remarks[0] == f"4 messages from {path}, 49 of 100 tokens"
    assert runner.prompts == ["s:brief|u:grüße|a:answer 1|u:two|a:answer 2|u:three|>"]
    assert len(json.loads(path.read_text(encoding="utf-8"))["messages"]) == 7
    # It is also something to tune on.
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}|{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    (example,) = read_examples(path, tokenizer)
    assert [text for text, learned in example if learned] == ["answer 1|", "answer 2|", "answer 1|"]


def test_save_leaves_other_files_alone(talk: Talk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    precious = tmp_path / "precious.json"
    precious.write_text("mine")
    _, remarks = talk(f"/save {precious}", "one", f"/save {precious}", "/save", f"/save {tmp_path}", "/save no/where")
    assert precious.read_text() == "mine"
    assert remarks[0] == "there is nothing to save yet: say something first"
    assert "is there already" in remarks[2]
    assert "which file?" in remarks[3]
    assert "it is a folder" in remarks[4]
    assert "there is no folder" in remarks[5]
    # After /clear the file that was saved is a stranger's, too.
    saved = tmp_path / "saved.json"
    _, remarks = talk("one", f"/save {saved}", "/clear", "two", f"/save {saved}")
    assert "is there already" in remarks[-1]

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    _, remarks = talk("one", f"/save {tmp_path / 'new.json'}", "two")
    assert remarks[1] == f"{tmp_path / 'new.json'} cannot be written: No space left on device"
    assert "tokens/s" in remarks[2]
    assert sorted(tmp_path.iterdir()) == [precious, saved]


@pytest.mark.parametrize(
    "content, words",
    [
        (b"", "is not readable JSON"),
        (b"\xff\xfe", "is not UTF-8"),
        (b"[" * 100_000, "is not readable JSON"),
        (b"{}", "holds no conversation"),
        (b"[]", "holds no conversation"),
        (b'{"messages": {"role": "user"}}', "holds no conversation"),
        (b'[{"role": "user"}]', "message 1"),
        (b'[{"role": "user", "content": 5}]', "message 1"),
        (b'[{"role": "user", "content": "a"}, 7]', "message 2"),
        (b'[{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]', "the turn of 'assistant'"),
        (b'[{"role": "assistant", "content": "a"}]', "the turn of 'user'"),
        (b'[{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]', "message 2"),
        (b'[{"role": "user", "content": "\\ud800"}]', "message 1"),
        (b'[{"role": "user", "content": "refused"}]', "the template refuses this"),
    ],
)
def test_bad_files_are_one_sentence_and_change_nothing(talk: Talk, tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "talk.json"
    path.write_bytes(content)
    runner, remarks = talk("one", f"/load {path}", "two")
    assert len(remarks) == 3
    assert words in remarks[1]
    assert runner.prompts[1] == "u:one|a:answer 1|u:two|>"


def test_files_that_are_none(talk: Talk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "LARGEST_FILE", 10)
    (tmp_path / "large.json").write_text("[" + " " * 20 + "]")
    os.mkfifo(tmp_path / "pipe")
    names = [tmp_path, tmp_path / "nowhere", tmp_path / "large.json", tmp_path / "pipe", "~nobody-of-this-name/x", ""]
    _, remarks = talk(*(f"/load {name}" for name in names))
    assert len(remarks) == len(names)
    for remark, words in zip(
        remarks, ("no file", "no file", "too large", "no file", "cannot be found", "which file?"), strict=True
    ):
        assert words in remark


def test_a_message_that_waits_for_an_answer_gets_it_by_retry(talk: Talk, tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    path.write_text(json.dumps([{"role": "user", "content": "one"}]))
    runner, remarks = talk(f"/load {path}", "/retry")
    assert remarks[0] == f"1 message from {path}, 7 of 100 tokens; /retry answers the last one"
    assert runner.prompts == ["u:one|>"]


def test_a_line_that_is_not_utf8_is_refused(talk: Talk) -> None:
    runner, remarks = talk("a\udcff", "/system \udcff", "b")
    places = [f"the byte at position {place} cannot be read" for place in (1, 8)]
    assert remarks[:2] == [f"this line is not UTF-8 text: {place}" for place in places]
    assert runner.prompts == ["u:b|>"]


def test_ctrl_c_in_a_pipe_ends_it(talk: Talk) -> None:
    with pytest.raises(KeyboardInterrupt):
        talk("one", KeyboardInterrupt(), "two")


def test_a_chat_with_a_model_switches_its_width(
    packed_llama: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = iter(["hello", "/precision E5M3", "again", "/precision E9", "/exit"])
    monkeypatch.setattr(chat, "ask", lambda: next(lines))
    assert main(["chat", str(packed_llama), "--max-new-tokens", "5", "--seed", "1", "--progressive"]) == 0
    remarks = capsys.readouterr().err
    for expected in ("E5M8, ", "now at E5M3", "E5M3, ", "unknown precision 'E9'", "of memory", "[E5M"):
        assert expected in remarks


class Terminal:
    """A program in a terminal of its own."""

    def __init__(self, code: str, *arguments: str, columns: int = 80) -> None:
        self.pid, self._file = pty.fork()
        if self.pid == 0:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs have it ignored, and pass that on
            os.execv(sys.executable, [sys.executable, "-c", code, *arguments])
        fcntl.ioctl(self._file, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.text = ""

    def type(self, text: str) -> None:
        os.write(self._file, text.encode())

    def interrupt(self) -> None:
        """Ctrl-C, once the program has slept for a while: just before that, Python would see it with the next one."""
        before = None
        while (now := self._sleep()) is None or now != before:
            before = now
            time.sleep(0.1)
        self.type("\x03")

    def _sleep(self) -> int | None:
        """Which of its sleeps the program is in, if any."""
        status = dict(line.split(":", 1) for line in Path(f"/proc/{self.pid}/status").read_text().splitlines())
        return int(status["voluntary_ctxt_switches"]) if status["State"].split()[0] == "S" else None

    def wait_for(self, expected: str, seconds: float = 120) -> str:
        """Read until that is shown; what came before it."""
        end = time.monotonic() + seconds
        while expected not in self.text:
            if not select.select([self._file], [], [], max(0, end - time.monotonic()))[0]:
                raise AssertionError(f"{expected!r} did not come after {self.text!r}")
            try:
                self.text += os.read(self._file, 4096).decode()
            except OSError:
                raise AssertionError(f"the program ended with {self.text!r}") from None
        before, _, self.text = self.text.partition(expected)
        return before

    def exit_code(self) -> int:
        try:
            while os.read(self._file, 4096):
                pass
        except OSError:
            pass
        os.close(self._file)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


TALK_IN_A_TERMINAL = """
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from otaro.generation import chat

def generate(prompt, request, show, marks):
    show("these are some words that are longer than a line of the terminal")
    show(" and so on")
    time.sleep(600)  # until somebody interrupts it

@dataclass
class Request:
    max_new_tokens: int = 1
    sampling: object = field(default_factory=lambda: SimpleNamespace(seed=None))
    limit = staticmethod(lambda room: 1)

chat.render_chat = lambda tokenizer, messages: [1]
tokenizer = SimpleNamespace(chat_template="yes")
chat.Conversation(SimpleNamespace(tokenizer=tokenizer, context=10, generate=generate), Request()).run()
"""


def test_ctrl_c_in_a_terminal() -> None:
    terminal = Terminal(TALK_IN_A_TERMINAL, columns=30)
    terminal.wait_for("> ")
    terminal.type("half a line")
    terminal.wait_for("half a line")
    terminal.interrupt()
    terminal.wait_for("Ctrl-C again, Ctrl-D or")
    terminal.wait_for("> ")
    # With text on the line it is cleared again, and nobody leaves.
    terminal.type("more")
    terminal.wait_for("more")
    terminal.interrupt()
    terminal.wait_for("> ")
    terminal.type("hello\n")
    terminal.wait_for("these are some words that are\r\nlonger than a line of the\r\nterminal and so")
    terminal.interrupt()
    terminal.wait_for("stopped")
    terminal.wait_for("> ")
    # What was said before is still there.
    terminal.type("/save /nowhere/talk.json\n")
    terminal.wait_for("there is no folder")
    terminal.wait_for("> ")
    terminal.interrupt()
    terminal.wait_for("leaves")
    terminal.wait_for("> ")
    terminal.interrupt()
    assert terminal.exit_code() == 0


@pytest.mark.parametrize("leaving", ["/exit\n", "\x04"])
def test_leaving_a_terminal(leaving: str) -> None:
    terminal = Terminal(TALK_IN_A_TERMINAL)
    terminal.wait_for("> ")
    terminal.type(leaving)
    assert terminal.exit_code() == 0
