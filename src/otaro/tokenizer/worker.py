"""A process that writes conversations as chat templates have them; `otaro.tokenizer.template` starts and ends it.

A template is a program that comes with a model, from anywhere. Here it runs in jinja2's sandbox, in a process that can
be ended without harm and that may take neither much memory nor much time. Nothing but jinja2 is imported, so that it
starts quickly; the file is run by its path, so nothing of this package is either.

A request is a line of JSON: `template`, `variables` (messages, tools, special tokens and so on), `seconds` of processor
time and `longest`, the most characters to write. So is the answer: `text`, or `kind` and `message` of what went wrong.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import time
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

if sys.platform != "win32":
    import resource

MEMORY = 256 << 20
"""Bytes that a template may take beyond what the process has when it begins."""
MEMORY_ELSEWHERE = 1 << 30
"""Bytes of the whole process where the system does not tell how many that is."""
LONGEST_MESSAGE = 500


class Refusal(jinja2.exceptions.TemplateError):
    """A template does not take a conversation: it called ``raise_exception``."""


class Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks what a model wrote, for training; the text is as it would be without."""

    tags = {"generation"}  # noqa: RUF012  as jinja2 declares it

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        block = jinja2.nodes.CallBlock(self.call_method("_write"), [], [], body)
        return block.set_lineno(line)

    def _write(self, caller: Callable[[], str]) -> str:
        return caller()


class Namespace(jinja2.utils.Namespace):
    """Variables of a template; names with an underscore are Python's own and stay out of reach."""

    def __init__(*args: Any, **values: Any) -> None:  # any name may be given, `self` too
        namespace, *given = args
        jinja2.utils.Namespace.__init__(namespace)
        for name, value in dict(*given, **values).items():
            namespace[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace may not hold {name!r}")
        jinja2.utils.Namespace.__setitem__(self, name, value)


class Dict:
    """``dict`` for templates: makes one, and has no attributes that lead further."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def refuse(message: Any) -> None:
    raise Refusal(str(message)[:LONGEST_MESSAGE])


def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    # jinja2's own filter escapes what HTML would take for markup.
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


@lru_cache(maxsize=8)
def compile_template(source: str) -> jinja2.Template:
    """A template with what transformers offers to templates."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals |= {
        "raise_exception": refuse,
        "strftime_now": lambda format: datetime.now().strftime(format),
        "dict": Dict(),
        "namespace": Namespace,
    }
    return environment.from_string(source)


def write(source: str, variables: dict[str, Any], longest: int) -> dict[str, str]:
    """What a template writes, or what went wrong."""
    try:
        pieces, length = [], 0
        for piece in compile_template(source).generate(variables):
            pieces.append(piece)
            length += len(piece)
            if length > longest:
                return {"kind": "length", "message": ""}
        return {"text": "".join(pieces)}
    except jinja2.exceptions.TemplateSyntaxError as error:
        return {"kind": "syntax", "message": f"{str(error.message)[:LONGEST_MESSAGE]} (line {error.lineno})"}
    except Refusal as error:
        return {"kind": "refusal", "message": str(error)}
    except RecursionError:
        return {"kind": "recursion", "message": ""}
    except MemoryError:
        return {"kind": "memory", "message": ""}
    except Exception as error:  # a template may do anything to what it is given
        return {"kind": "failure", "message": f"{type(error).__name__}: {error}"[:LONGEST_MESSAGE]}


def limit() -> None:
    """Bound the memory of this process, and keep it from writing files and starting others."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    if sys.platform == "win32":
        return
    try:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        memory = used + MEMORY
    except (OSError, ValueError):
        memory = MEMORY_ELSEWHERE
    for name, most in (("RLIMIT_AS", memory), ("RLIMIT_FSIZE", 0), ("RLIMIT_NPROC", 0), ("RLIMIT_CORE", 0)):
        with contextlib.suppress(AttributeError, ValueError, OSError):  # not every system has all of them
            resource.setrlimit(getattr(resource, name), (most, most))


def watch(seconds: float) -> None:
    """End this process, whatever it is doing, after so much processor time; 0: do not."""
    if sys.platform != "win32":  # there, only the parent watches the time
        signal.setitimer(signal.ITIMER_PROF, seconds)


def main() -> None:
    time.localtime()  # reads the time zone's file
    limit()
    for line in sys.stdin.buffer:
        request = json.loads(line)
        watch(request["seconds"])
        answer = write(request["template"], request["variables"], request["longest"])
        watch(0)
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
