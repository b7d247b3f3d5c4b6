"""A conversation in the terminal: what ``otaro chat`` does once the model is loaded."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from otaro.console import (
    CUT_OFF,
    answer_writer,
    check_outputs,
    decode_text,
    facts_table,
    given_text,
    mark,
    note,
    notes,
    size_text,
    stream,
)
from otaro.errors import OtaroError
from otaro.partial import write_atomically
from otaro.precision import Precision, join
from otaro.tokenizer import render_chat

if TYPE_CHECKING:
    from otaro.generation.request import Request, Runner

Message = dict[str, str]

COMMANDS = {
    "/precision E5M4": "run at another precision; by itself: show the one in use",
    "/system TEXT": 'tell the model what holds for every answer; by itself: show it; with "": take it back',
    "/retry": "answer the last message again, with another draw, or at the precision that is named",
    "/save FILE": "write the conversation as JSON",
    "/load FILE": "go on with a conversation from such a file",
    "/clear": "forget the conversation, but not what /system says",
    "/help": "show this",
    "/exit": "leave, as Ctrl-D does; Ctrl-C stops an answer",
}
FORM = 'as in {"messages": [{"role": "user", "content": "Hello!"}]}'
HALF_CHARACTER = re.compile("[\ud800-\udfff]")
LARGEST_FILE = 1 << 26
"""Bytes; no context holds more text."""
SEEDS = 1 << 32


class Conversation:
    """What has been said, and the loop that adds to it."""

    def __init__(
        self, runner: Runner, request: Request, system: str | None = None, *, progressive: bool = False
    ) -> None:
        if runner.tokenizer.chat_template is None:
            raise OtaroError("the model has no chat template: use otaro generate --raw")
        self._runner, self._request, self._progressive = runner, request, progressive
        self._system = system
        self._turns: list[Message] = []
        self._unanswered: str | None = None  # the last message, if no answer came
        self._retries = 0
        self._file: Path | None = None  # where the conversation came from or went to, and may go again

    def run(self) -> None:
        """Read and answer until the person leaves. A Ctrl-C by mistake costs no more than the line or the answer."""
        leaving = False
        while True:
            asking = True
            try:
                line = given_text(ask(), "this line")
                asking = leaving = False
                if line in ("/exit", "/quit"):
                    return
                if line:
                    self._act(line)
            except EOFError:
                stream("\n")
                return
            except KeyboardInterrupt:
                if asking and not sys.stdin.isatty():
                    raise
                stream("\n")
                if asking and leaving and not typed():
                    return
                leaving = asking
                note("Ctrl-C again, Ctrl-D or /exit leaves" if asking else "stopped")
            except OtaroError as error:
                note(str(error))

    def _act(self, line: str) -> None:
        # A path is not a command but something to talk about.
        match = re.fullmatch(r"(/[^\s/.]*)(?:\s+(.*))?", line, re.DOTALL)
        if match is None:
            self._answer(line, self._turns)
            return
        actions: dict[str, Callable[[str], None]] = {
            "/precision": self._set_precision,
            "/system": self._set_system,
            "/retry": self._retry,
            "/save": self._save,
            "/load": self._load,
            "/clear": self._clear,
            "/help": show_help,
        }
        name, argument = match[1].lower(), match[2] or ""
        if name not in actions:
            raise OtaroError(f"there is no command {name}: /help lists those there are")
        actions[name](argument)

    def _set_precision(self, name: str) -> None:
        if name:
            self._runner.precision = Precision(name)
        note(f"now at {self._runner.width}; there are {join(Precision)}")

    def _set_system(self, text: str) -> None:
        if not text:
            note(self._system or "there is no system text")
            return
        system = None if text in ('""', "''") else text
        # A template may refuse such a text: better now than with the next message.
        self._prompt(system, [_message("user", "?")])
        self._system = system
        note("the system text is gone" if system is None else "this holds from the next answer on")

    def _clear(self, _: str) -> None:
        self._turns, self._unanswered, self._file = [], None, None
        note("forgotten")

    def _retry(self, name: str) -> None:
        if name:
            self._set_precision(name)
        if self._unanswered is not None:
            self._answer(self._unanswered, self._turns)
            return
        if not self._turns:
            raise OtaroError("there is nothing to answer again: say something first")
        *earlier, asked, answered = self._turns
        self._retries += 1
        self._answer(asked["content"], earlier)
        if self._request.sampling.temperature == 0 and self._turns[-1] == answered:
            note("the same again: at temperature 0 an answer changes with the precision or the system text only")

    def _answer(self, text: str, earlier: list[Message]) -> None:
        """Answer a message that follows on the whole conversation, or on an earlier part of it."""
        turns = [*earlier, _message("user", text)]
        if earlier is self._turns:
            self._unanswered = text
        prompt = self._prompt(self._system, turns)
        request = self._limited(len(prompt))
        writer = answer_writer()
        pieces: list[str] = []

        def show(piece: str) -> None:
            pieces.append(piece)
            writer.push(piece)

        def keep() -> None:
            self._turns, self._unanswered = [*turns, _message("assistant", "".join(pieces))], None

        marks = (lambda width: writer.mark(f"[{width}] ", mark)) if self._progressive else None
        try:
            result = self._runner.generate(prompt, request, show, marks)
        except BaseException as error:
            stopped = isinstance(error, KeyboardInterrupt)
            if pieces:  # what was said stays, though it did not come to its end
                keep()
            if pieces or stopped:
                writer.finish()
            if not stopped:
                raise
            note("stopped")
            return
        keep()
        writer.finish()
        speed = f"{result.tokens_per_second:.1f} tokens/s"
        note(f"{result.widths_text}, {speed}, {size_text(self._runner.memory)} of memory")
        if len(prompt) + result.tokens >= self._runner.context:
            note(f"the answer ends here because there is no room for more: {self._no_room()}")
        elif request.at_most and result.tokens == request.max_new_tokens:
            note(CUT_OFF)
        self._runner.check_loading()

    def _prompt(self, system: str | None, turns: list[Message]) -> list[int]:
        """The tokens of a conversation, up to where the next answer begins."""
        messages = turns if system is None else [_message("system", system), *turns]
        return render_chat(self._runner.tokenizer, messages)

    def _limited(self, prompt: int) -> Request:
        """What to ask for after so many tokens."""
        room = self._runner.context - prompt
        tokens = self._request.limit(room)
        if tokens > room:
            new = "" if self._request.at_most else f" and {tokens} new ones"
            raise OtaroError(f"{prompt} tokens with this message{new} are too many: {self._no_room()}")
        sampling = self._request.sampling
        if sampling.seed is not None:
            # Another draw for each retry, and the same ones in the same conversation.
            sampling = replace(sampling, seed=(sampling.seed + self._retries) % SEEDS)
        return replace(self._request, max_new_tokens=tokens, sampling=sampling)

    def _no_room(self) -> str:
        context, longest = self._runner.context, self._runner.longest_context
        more = f"; --context allows up to {longest}" if longest > context else ""
        return f"the context holds {context}; /save FILE keeps the conversation, /clear begins a new one{more}"

    def _save(self, name: str) -> None:
        path = file_path(name, "/save")
        if not self._turns:
            raise OtaroError("there is nothing to save yet: say something first")
        check_outputs([path])
        if path.exists() and path != self._file:
            raise OtaroError(f"{path} is there already: choose another name")
        system = [] if self._system is None else [_message("system", self._system)]
        # One line, which is also a record that `otaro tune --data` takes.
        text = json.dumps({"messages": [*system, *self._turns]}, ensure_ascii=False) + "\n"
        try:
            write_atomically(path, lambda part: part.write_text(text, encoding="utf-8"))
        except OSError as error:
            raise OtaroError(f"{path} cannot be written: {error.strerror}") from error
        self._file = path
        note(f"{_count(len(self._turns))} in {path}")

    def _load(self, name: str) -> None:
        path = file_path(name, "/load")
        system, turns = read_messages(path)
        unanswered = turns.pop()["content"] if len(turns) % 2 else None
        tokens = len(self._prompt(system, [*turns, _message("user", unanswered or "?")]))
        self._system, self._turns, self._unanswered, self._file = system, turns, unanswered, path
        waiting = "" if unanswered is None else "; /retry answers the last one"
        count = _count(len(turns) + (unanswered is not None))
        note(f"{count} from {path}, {tokens} of {self._runner.context} tokens{waiting}")


def show_help(_: str = "") -> None:
    table = facts_table()
    for command, text in COMMANDS.items():
        table.add_row(command, text)
    notes().print(table)


def ask() -> str:
    """The next line from the person."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  line editing and history for input()
    return input("> " if sys.stdin.isatty() else "").strip()


def typed() -> str:
    """What stood on the line when it was interrupted, as far as that is known."""
    try:
        import readline
    except ImportError:
        return ""
    return readline.get_line_buffer()


def file_path(name: str, command: str) -> Path:
    name = name.strip()
    if len(name) > 1 and name[0] == name[-1] and name[0] in "\"'":
        name = name[1:-1]
    if not name:
        raise OtaroError(f"which file? write {command} talk.json")
    try:
        return Path(name).expanduser()
    except RuntimeError as error:  # ~nobody
        raise OtaroError(f"{name} cannot be found: {error}") from error


def read_messages(path: Path) -> tuple[str | None, list[Message]]:
    """The system text and the turns of a conversation in a JSON file; the first turn is the person's."""
    try:
        if not path.is_file():
            raise OtaroError(f"there is no file {path}")
        if path.stat().st_size > LARGEST_FILE:
            raise OtaroError(f"{path} is too large for a conversation: {size_text(path.stat().st_size)}")
        data = json.loads(decode_text(path.read_bytes(), str(path)))
    except OSError as error:
        raise OtaroError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise OtaroError(f"{path} is not readable JSON: {error}") from error
    messages = data.get("messages") if isinstance(data, dict) else data
    if not isinstance(messages, list) or not messages:
        raise OtaroError(f"{path} holds no conversation: write it {FORM}")
    system, turns = None, list[Message]()
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise OtaroError(f"message {number} of {path} cannot be read: write it {FORM}")
        role, content = message["role"], message["content"]
        if HALF_CHARACTER.search(content):
            raise OtaroError(f"message {number} of {path} is not UTF-8 text: it has halves of characters")
        if number == 1 and role == "system":
            system = content
            continue
        expected = ("user", "assistant")[len(turns) % 2]
        if role != expected:
            raise OtaroError(f"message {number} of {path} is from {role!r}: there it is the turn of {expected!r}")
        turns.append(_message(role, content))
    return system, turns


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _count(messages: int) -> str:
    return "1 message" if messages == 1 else f"{messages} messages"
