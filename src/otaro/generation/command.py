"""The commands ``otaro generate`` and ``otaro chat``: text from a packed model, natively where that is possible."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from otaro.console import (
    CUT_OFF,
    answer_writer,
    given_text,
    mark,
    note,
    parse_size,
    progress_bar,
    read_prompt,
    size_text,
)
from otaro.errors import OtaroError
from otaro.precision import Precision

if TYPE_CHECKING:
    from otaro.engine.budget import Estimate
    from otaro.generation.request import Request, Runner

GENERATE_EXAMPLE = "Example: echo 'Why is the sky blue?' | otaro generate smollm2-packed --precision E5M4 > answer.txt"
CHAT_EXAMPLE = "Example: otaro chat smollm2-packed --precision E5M4"
GENERATE_TOKENS = 256
CHAT_TOKENS = 512
CHAT_CONTEXT = 2048
"""Tokens that a conversation shall have room for where memory is limited, if need be at a narrower width."""

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="A packed folder, as otaro pack writes it.")]
Width = Annotated[
    str | None,
    typer.Option(
        "--precision",
        "--decode",
        metavar="PRECISION",
        envvar="OTARO_PRECISION",
        help="The precision to run at; the widest if left out.",
    ),
]
Prefill = Annotated[
    str | None, typer.Option(metavar="PRECISION", help="Read the prompt at this precision; the same if left out.")
]
Draft = Annotated[
    str | None,
    typer.Option(metavar="PRECISION", help="Let this precision draft tokens that the other checks several at a time."),
]
Memory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Take no more memory than this, such as 500MB, in all: run at the widest precision that fits.",
    ),
]
Temperature = Annotated[
    float, typer.Option(min=0, help="0 takes the likeliest token; above 0 draws, the more freely the higher.")
]
TopK = Annotated[int, typer.Option(min=0, help="Draw from this many likeliest tokens; 0: from all.")]
TopP = Annotated[float, typer.Option(help="Draw from the fewest tokens that together have this probability.")]
MinP = Annotated[float, typer.Option(help="Leave out tokens below this share of the likeliest one's probability.")]
Penalty = Annotated[float, typer.Option(help="Above 1: make tokens that are there already less likely.")]
Seed = Annotated[int | None, typer.Option(help="Draw the same tokens each time.", min=0, max=2**32 - 1)]
Stop = Annotated[
    list[str] | None, typer.Option(metavar="TEXT", help="End before this text; may be given several times.")
]
Threads = Annotated[int | None, typer.Option(min=1, max=1024, help="Threads to use; all processors if left out.")]
Context = Annotated[
    int | None,
    typer.Option(
        min=2, help="Tokens that a text may have, prompt included; what the model allows, at most 8192, if left out."
    ),
]
KvCache = Annotated[
    str,
    typer.Option(
        metavar="FORMAT",
        help="How keys and values are kept: float16, or in less memory as SEFP codes of a precision such as E5M8.",
    ),
]
Progressive = Annotated[
    bool,
    typer.Option(
        "--progressive", help="Answer as soon as E5M3 is loaded; wider planes join as they come, and you see it."
    ),
]
Device = Annotated[
    str, typer.Option(help="cpu, cuda (an NVIDIA GPU from Hopper on), or auto: such a GPU where there is one.")
]
Backend = Annotated[str, typer.Option(help="native, transformers, or auto: native where the model allows it.")]


def _tokens_option(default: int) -> Any:
    return typer.Option(min=1, help=f"Stop after this many tokens; {default}, if there is room, if left out.")


def generate(
    folder: Folder,
    prompt: Annotated[
        str | None, typer.Option(help="The prompt; '-' reads it from stdin, as does a pipe when this is left out.")
    ] = None,
    precision: Width = None,
    prefill: Prefill = None,
    draft: Draft = None,
    memory: Memory = None,
    max_new_tokens: Annotated[int | None, _tokens_option(GENERATE_TOKENS)] = None,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: Penalty = 1.0,
    seed: Seed = None,
    stop: Stop = None,
    raw: Annotated[bool, typer.Option("--raw", help="Go on from the prompt as it stands, no chat template.")] = False,
    threads: Threads = None,
    context: Context = None,
    kv_cache: KvCache = "float16",
    progressive: Progressive = False,
    device: Device = "cpu",
    backend: Backend = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end instead of text.")] = False,
) -> None:
    """Generate text from a prompt, streamed to stdout."""
    width = None if precision is None else Precision(precision)
    text = read_prompt(prompt)
    stop = [given_text(text, "a stop string") for text in stop or ()]
    from otaro.text import prompt_tokens

    sampling = (temperature, top_k, top_p, min_p, repetition_penalty, seed)
    request = _request(max_new_tokens, GENERATE_TOKENS, sampling, prefill, draft, stop)
    if memory is None:
        runner = _open(folder, _widest(width, request), backend, device, threads, context, kv_cache, progressive)
        ids = prompt_tokens(runner.tokenizer, text, raw=raw)
    else:
        from otaro.tokenizer.template import end_worker

        device = _counted(device)
        estimate, tokenizer = _estimate(folder, backend, threads, kv_cache, progressive)
        ids = prompt_tokens(tokenizer, text, raw=raw)
        end_worker()
        whole = len(ids) + request.max_new_tokens
        fewest = len(ids) + 1 if request.at_most else whole
        loaded, context = _fit(estimate, memory, width, request, context, whole, fewest, whole)
        runner = _open(folder, loaded, backend, device, threads, context, kv_cache, progressive, tokenizer)
    if width is not None:
        runner.precision = width
    if as_json:
        result = runner.generate(ids, request)
        print(json.dumps(result.to_json(), ensure_ascii=False))
    else:
        writer = answer_writer()
        marks = (lambda width: writer.mark(f"[{width}] ", mark)) if progressive else None
        try:
            result = runner.generate(ids, request, writer.push, marks)
        except BaseException:
            if writer.begun:
                writer.finish()
            raise
        writer.finish()
    note(
        f"{result.widths_text}: {result.tokens} tokens, {result.tokens_per_second:.1f} tokens/s, "
        f"the first after {result.first_token_seconds:.2f} s"
    )
    if request.at_most and result.tokens == request.limit(runner.context - len(ids)):
        note(CUT_OFF)
    runner.check_loading()


def chat(
    folder: Folder,
    precision: Width = None,
    prefill: Prefill = None,
    draft: Draft = None,
    memory: Memory = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="What the model is told before you speak.")] = None,
    max_new_tokens: Annotated[int | None, _tokens_option(CHAT_TOKENS)] = None,
    temperature: Temperature = 0.7,
    top_k: TopK = 0,
    top_p: TopP = 0.95,
    min_p: MinP = 0.0,
    repetition_penalty: Penalty = 1.0,
    seed: Seed = None,
    threads: Threads = None,
    context: Context = None,
    kv_cache: KvCache = "float16",
    progressive: Progressive = False,
    device: Device = "cpu",
    backend: Backend = "auto",
) -> None:
    """Talk with a model in the terminal; switch its precision as you go."""
    width = None if precision is None else Precision(precision)
    system = None if system is None else given_text(system, "the text of --system")
    sampling = (temperature, top_k, top_p, min_p, repetition_penalty, seed)
    request = _request(max_new_tokens, CHAT_TOKENS, sampling, prefill, draft, reuse=True)
    # Without --memory all planes are loaded, so that /precision can go up as well as down.
    loaded, tokenizer = None, None
    if memory is not None:
        from otaro.engine.engine import DEFAULT_CONTEXT

        device = _counted(device)
        estimate, tokenizer = _estimate(folder, backend, threads, kv_cache, progressive)
        loaded, context = _fit(estimate, memory, width, request, context, CHAT_CONTEXT, CHAT_TOKENS, DEFAULT_CONTEXT)
        width = width or loaded
    runner = _open(folder, loaded, backend, device, threads, context, kv_cache, progressive, tokenizer)
    if width is not None:
        runner.precision = width
    from otaro.generation.chat import Conversation

    conversation = Conversation(runner, request, system, progressive=progressive)
    note(f"{folder} at {runner.width}, {size_text(runner.memory)}; /help lists the commands, Ctrl-C stops an answer")
    conversation.run()


def _request(
    max_new_tokens: int | None,
    default: int,
    sampling: tuple[float, int, float, float, float, int | None],
    prefill: str | None,
    draft: str | None,
    stop: list[str] | None = None,
    *,
    reuse: bool = False,
) -> Request:
    """What is asked for; `sampling` are the fields of `Sampling`, which is imported only when it is needed."""
    from otaro.engine.sampling import Sampling
    from otaro.generation.request import Request

    return Request(
        default if max_new_tokens is None else max_new_tokens,
        Sampling(*sampling),
        None if prefill is None else Precision(prefill),
        None if draft is None else Precision(draft),
        tuple(stop or ()),
        reuse,
        at_most=max_new_tokens is None,
    )


def _counted(device: str) -> str:
    """The device whose memory can be limited."""
    import torch

    from otaro.engine.cuda.launches import check_name

    check_name(device)
    if device not in ("auto", "cpu"):
        raise OtaroError("--memory counts the memory of the CPU: leave --device out, or choose a --precision that fits")
    if device == "auto" and torch.cuda.is_available():
        note("otaro: --memory counts the memory of the CPU, so the CPU is used")
    return "cpu"


def _estimate(
    folder: Path, backend: str, threads: int | None, kv_cache: str, progressive: bool
) -> tuple[Estimate, Any]:
    """What counts the memory that a model takes, and its tokenizer, which is a part of it."""
    from otaro.engine.architecture import UnsupportedError
    from otaro.engine.budget import Estimate
    from otaro.engine.engine import parse_cache, usable_cores
    from otaro.tokenizer import load_tokenizer

    if backend == "transformers":
        raise OtaroError("--memory needs the native engine: leave --backend out")
    cache = parse_cache(kv_cache)
    try:
        estimate = Estimate(folder, threads=threads or usable_cores(), cache=cache, progressive=progressive)
    except UnsupportedError as error:
        raise OtaroError(f"--memory needs the native engine, which does not run this model: {error}") from error
    return estimate, load_tokenizer(folder)


def _fit(
    estimate: Estimate,
    memory: str,
    width: Precision | None,
    request: Request,
    context: int | None,
    wanted: int,
    fewest: int,
    most: int,
) -> tuple[Precision, int]:
    """How far to load and how long a text may be, so that all of it fits into `memory`; what was counted is said.

    The numbers of tokens are those of `Estimate.fit`, where none is asked for by `context`.
    """
    named = [other for other in (request.prefill, request.draft) if other is not None]
    sizes = [min(size, estimate.longest) for size in (wanted, fewest, most)] if context is None else [context] * 3
    budget = estimate.fit(
        parse_size(memory),
        exactly=None if width is None else max([width, *named]),
        at_least=max(named, default=None),
        wanted=sizes[0],
        fewest=sizes[1],
        most=sizes[2],
    )
    note(str(budget))
    return budget.loaded, budget.context


def _widest(width: Precision | None, request: Request) -> Precision | None:
    """How far to load: all that the request uses."""
    return None if width is None else max(filter(None, (width, request.prefill, request.draft)))


def _open(
    folder: Path,
    precision: Precision | None,
    backend: str,
    device: str,
    threads: int | None,
    context: int | None,
    kv_cache: str,
    progressive: bool,
    tokenizer: Any = None,
) -> Runner:
    from otaro.generation.runner import open_runner

    with progress_bar() as progress:
        return open_runner(
            folder,
            precision,
            backend=backend,
            threads=threads,
            context=context,
            kv_cache=kv_cache,
            progressive=progressive,
            device=device,
            tokenizer=tokenizer,
            progress=progress,
            remark=lambda text: note(f"otaro: {text}"),
        )
