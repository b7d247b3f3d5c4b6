"""Chat templates, written by a process of their own (`worker.py`): bounded in time, in memory and in what they write.

Templates are programs that come with a model. One that never ends, or doubles a string forty times, is ended there and
is one sentence here. The process is started for the first conversation and kept for the next ones.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from otaro.errors import OtaroError

WORKER = Path(__file__).with_name("worker.py")
SECONDS = 1.0
"""Processor time of one conversation, which takes milliseconds."""
WALL_SECONDS = 10.0
"""The same by the clock, for a busy machine and for systems that do not count processor time for us."""
LONGEST = 1_000_000
"""Characters that a template may add, besides four times what the conversation has."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""What templates and data sets call a turn's reasoning."""


class TemplateError(OtaroError):
    """A chat template that cannot be used, or that does not take a conversation."""


def write_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> str:
    """The conversation as text, the same as transformers' `apply_chat_template` gives.

    `add_generation_prompt` ends it with the beginning of an answer.
    """
    try:
        template = tokenizer.get_chat_template(tools=tools)
    except ValueError as error:
        raise TemplateError("the model has no chat template, or none by default") from error
    if not isinstance(template, str):
        raise TemplateError("the model's chat template is not a text")
    variables = {
        **tokenizer.special_tokens_map,
        "messages": [_with_reasoning(message) for message in messages],
        "tools": tools,
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
    }
    return _worker.write(template, variables)


def _with_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """A turn whose reasoning has every name that a template may look for."""
    found = next((message[name] for name in REASONING if message.get(name) is not None), None)
    return dict(message) if found is None else {"thinking": found, **message, "reasoning_content": found}


class _Worker:
    """The process; one conversation at a time, whichever thread asks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def write(self, template: str, variables: dict[str, Any]) -> str:
        given = json.dumps(variables, default=lambda value: f"<{type(value).__name__}>")
        longest = LONGEST + 4 * len(given)
        request = json.dumps({"template": template, "seconds": SECONDS, "longest": longest})
        line = f'{request[:-1]}, "variables": {given}}}\n'.encode()
        with self._lock:
            answer = self._ask(line)
        if "text" in answer:
            return answer["text"]
        raise TemplateError(_sentence(answer["kind"], answer["message"]))

    def _ask(self, line: bytes) -> dict[str, str]:
        process = self._running()
        late = threading.Timer(WALL_SECONDS, process.kill)
        late.start()
        try:
            stdin, stdout = process.stdin, process.stdout
            assert stdin is not None
            assert stdout is not None
            stdin.write(line)
            stdin.flush()
            answer: dict[str, str] = json.loads(stdout.readline())
            return answer
        except (OSError, ValueError):  # it was ended: by its own limit on time, by the clock above, or by what it did
            timely = process.wait() not in (-getattr(signal, "SIGPROF", 0), -9, 1)
            self.end()
            return {"kind": "crash" if timely else "time", "message": ""}
        except BaseException:  # stopped halfway: the next answer would be to the wrong question
            self.end()
            raise
        finally:
            late.cancel()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._owner != os.getpid():  # a forked process must not talk to its parent's
            self._process, self._owner = None, os.getpid()
        if self._process is None or self._process.poll() is not None:
            self.end()
            # -P: nothing is imported from the working directory, which may be the very folder that is not trusted.
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        return self._process

    def end(self) -> None:
        process, self._process = self._process, None
        if process is not None and self._owner == os.getpid():
            process.kill()
            process.wait()
            _close(process.stdin)
            _close(process.stdout)


def _close(stream: IO[bytes] | None) -> None:
    if stream is not None:
        with contextlib.suppress(OSError):  # what was not yet sent to a process that is gone
            stream.close()


def _sentence(kind: str, message: str) -> str:
    sentences = {
        "syntax": f"the model's chat template cannot be read: {message}",
        "refusal": f"the model's chat template does not take this conversation: {message}",
        "recursion": "the model's chat template calls itself without end, or is nested too deeply",
        "memory": "the model's chat template needs too much memory",
        "length": "the model's chat template writes far more than the conversation holds",
        "time": f"the model's chat template did not come to an end within {SECONDS:.0f} second",
        "crash": "the model's chat template needs too much memory, or is nested too deeply",
        "failure": f"the model's chat template fails on this conversation: {message}",
    }
    return sentences[kind]


_worker = _Worker()
end_worker = _worker.end
"""Ends the process, which takes about 20 MB; the next conversation starts it again."""
atexit.register(end_worker)
