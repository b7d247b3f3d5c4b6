"""The command ``otaro serve``."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from typing import Annotated

import typer

from otaro.console import note, parse_size, progress_bar, size_text
from otaro.errors import OtaroError
from otaro.generation.command import Context, Device, Folder, KvCache, Threads
from otaro.precision import NARROWEST, Precision
from otaro.serve.listening import LOCAL_NAMES, address_of, bind, is_local

SERVE_EXAMPLE = "Example: otaro serve smollm2-packed --precision E5M6, then open http://127.0.0.1:8000"
NEEDED = ("fastapi", "uvicorn", "prometheus_client")


def serve(
    folder: Folder,
    precision: Annotated[
        str | None,
        typer.Option(
            metavar="PRECISION",
            envvar="OTARO_PRECISION",
            help="The precision of requests that name none: one such as E5M6, or auto, lower under load; "
            "the widest if left out.",
        ),
    ] = None,
    auto_floor: Annotated[str, typer.Option(metavar="PRECISION", help="auto never goes below this precision.")] = str(
        NARROWEST
    ),
    resident: Annotated[
        str | None,
        typer.Option(metavar="PRECISION", help="Load no more than this precision needs; all there is if left out."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="What the model is called; the folder's name if left out.")] = None,
    host: Annotated[
        str, typer.Option(help="The address to listen on; 0.0.0.0 for all of this machine's.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 takes a free one.")] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            envvar="OTARO_API_KEY",
            metavar="KEY",
            help="Ask clients for this key; given several times, each is a client of its own.",
            show_envvar=True,
        ),
    ] = None,
    cors: Annotated[
        list[str] | None,
        typer.Option(metavar="ORIGIN", help="Let pages of this origin, such as https://example.org, send requests."),
    ] = None,
    parallel: Annotated[int, typer.Option(min=1, max=256, help="Answers written at a time.")] = 16,
    queue: Annotated[int, typer.Option(min=0, max=100_000, help="Requests that may wait; more are refused.")] = 64,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens an answer may have; what the context has room for if left out.")
    ] = None,
    max_body: Annotated[str, typer.Option(metavar="SIZE", help="The largest request, such as 2MB.")] = "2MB",
    time_limit: Annotated[float, typer.Option(min=1, help="Seconds a request may take, waiting included.")] = 600.0,
    grace: Annotated[float, typer.Option(min=0, help="Seconds answers have to end when the server stops.")] = 30.0,
    threads: Threads = None,
    context: Context = None,
    kv_cache: KvCache = "float16",
    device: Device = "cpu",
) -> None:
    """Serve a model to any OpenAI client, and on a page: many answers at once, each at its own precision."""
    missing = [module for module in NEEDED if importlib.util.find_spec(module) is None]
    if missing:
        raise OtaroError(f"{', '.join(missing)} is missing: pip install 'otaro-llm[serve]'")
    automatic = precision is not None and precision.lower() == "auto"
    default = None if precision is None or automatic else Precision(precision)
    floor, widest = Precision(auto_floor), None if resident is None else Precision(resident)
    if default is not None and widest is not None and default > widest:
        raise OtaroError(f"--precision {default} is wider than --resident {widest}: raise one or lower the other")
    keys = _checked(api_key or [], "an API key", lambda text: text.isascii() and text.isprintable() and " " not in text)
    origins = _checked(cors or [], "an origin", lambda text: "://" in text and not text.endswith("/"))
    largest = parse_size(max_body)
    if not (math.isfinite(time_limit) and math.isfinite(grace)):
        raise OtaroError("--time-limit and --grace are numbers of seconds: give finite ones")
    if name is not None and not (name.isprintable() and 0 < len(name) <= 200 and "@" not in name):
        raise OtaroError("--name must be a short name without @")

    with bind(host, port) as listening:
        from otaro.engine.cuda.launches import describe
        from otaro.serve.app import make_app
        from otaro.serve.opening import open_service
        from otaro.serve.server import log_to_stderr, run
        from otaro.serve.service import Limits

        with progress_bar() as progress:
            service = open_service(
                folder,
                default="auto" if automatic else default,
                floor=floor,
                resident=widest,
                name=name,
                threads=threads,
                context=context,
                kv_cache=kv_cache,
                device=device,
                limits=Limits(parallel, queue, max_tokens, time_limit, largest, grace),
                progress=progress,
            )
        local = is_local(listening)
        if not local and not keys:
            note("otaro: anyone who reaches this machine may use the model: --api-key asks for a key")
        app = make_app(service, keys=keys, origins=origins, hosts=[*LOCAL_NAMES, host] if local and not keys else None)
        log_to_stderr()
        note(
            f"{service.control.name} at {address_of(listening)} on {describe(service.engine.device)}, "
            f"{service.control.resident} is in memory "
            f"({size_text(service.engine.memory['weights'])}); Ctrl-C stops"
        )
        run(app, service, listening)
    note("otaro: the server has stopped")


def _checked(given: list[str], what: str, valid: Callable[[str], bool]) -> list[str]:
    """The values of an option that may be given several times."""
    for text in given:
        if not text or not valid(text):
            raise OtaroError(f"{text!r} is not {what}")
    return given
