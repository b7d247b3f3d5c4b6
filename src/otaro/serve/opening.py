"""Opening a folder to be served: ready as soon as its narrowest precision is in memory, wider planes follow."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from otaro.checkpoint.folder import PackedFolder
from otaro.engine.architecture import UnsupportedError
from otaro.engine.cuda.launches import choose
from otaro.engine.engine import FLOAT16, Engine
from otaro.engine.scheduler import Scheduler
from otaro.errors import OtaroError
from otaro.ops import cpu
from otaro.precision import NARROWEST, Precision
from otaro.progress import Progress
from otaro.serve.control import AUTO, Control
from otaro.serve.service import Limits, Service
from otaro.tokenizer import load_tokenizer


def open_service(
    folder: Path,
    *,
    default: Precision | Literal["auto"] | None = None,
    floor: Precision = NARROWEST,
    resident: Precision | None = None,
    name: str | None = None,
    threads: int | None = None,
    context: int | None = None,
    kv_cache: Precision | str = FLOAT16,
    device: str = "cpu",
    limits: Limits = Limits(),
    progress: Progress | None = None,
) -> Service:
    """A packed folder, ready to be served; an error if it, or what is asked of it, cannot be used."""
    packed = PackedFolder(folder)
    for width in (resident, default, floor):
        if width is not None and width != AUTO:
            packed.check_available(width)
    # All that shall be in memory is looked at now, even though most of it is read later.
    packed.check_headers(resident or (packed.precisions or [NARROWEST])[0])
    place = choose(device)
    reason = cpu.available() if place == "cpu" else None
    if reason is not None:
        raise OtaroError(f"{folder} cannot be served: {reason}")
    try:
        engine = Engine(
            folder,
            resident,
            threads=threads,
            context=context,
            kv_cache=kv_cache,
            progressive=True,
            device=place,
            progress=progress,
        )
    except UnsupportedError as error:
        raise OtaroError(f"{folder} cannot be served, only what runs natively can: {error}") from error
    tokenizer = load_tokenizer(folder)
    control = Control(engine, name or folder.resolve().name or "model", default or engine.precision, floor)
    scheduler = Scheduler(engine, most_sequences=limits.seats)
    return Service(engine, scheduler, tokenizer, control, limits)
