"""One face for both ways of running a packed model: the native engine, and transformers where that cannot.

`open_runner` picks: the engine for models it knows, on a GPU where there is one; else transformers, and it says why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from otaro.engine.architecture import open_native
from otaro.engine.cuda.launches import CUDA, choose, describe
from otaro.engine.engine import FLOAT16, Engine, parse_cache
from otaro.engine.text import generate
from otaro.errors import OtaroError
from otaro.generation.request import Request, Runner
from otaro.precision import Precision
from otaro.progress import Progress
from otaro.text import GenerationResult
from otaro.tokenizer import load_tokenizer


class NativeRunner:
    """The engine, in C++ on a CPU or on a GPU."""

    def __init__(self, engine: Engine, tokenizer: Any) -> None:
        self.engine = engine
        self.tokenizer = tokenizer

    @property
    def precision(self) -> Precision:
        return self.engine.precision

    @precision.setter
    def precision(self, precision: Precision) -> None:
        self.engine.precision = precision

    @property
    def width(self) -> Precision:
        return self.engine.width

    @property
    def memory(self) -> int:
        memory = self.engine.memory
        return memory["weights"] + memory["cache"] + memory["work"]

    @property
    def context(self) -> int:
        return self.engine.context

    @property
    def longest_context(self) -> int:
        return int(self.engine.weights.config.max_position_embeddings)

    def generate(
        self,
        prompt: Sequence[int],
        request: Request,
        on_text: Callable[[str], None] | None = None,
        on_width: Callable[[Precision], None] | None = None,
    ) -> GenerationResult:
        return generate(
            self.engine,
            self.tokenizer,
            prompt,
            max_new_tokens=request.limit(self.context - len(prompt)),
            sampling=request.sampling,
            prefill=request.prefill,
            draft=request.draft,
            stop=request.stop,
            reuse=request.reuse,
            on_text=on_text,
            on_width=on_width,
        )

    def check_loading(self) -> None:
        self.engine.check_loading()


def open_runner(
    folder: Path,
    precision: Precision | None,
    *,
    backend: str = "auto",
    threads: int | None = None,
    context: int | None = None,
    kv_cache: Precision | str = FLOAT16,
    progressive: bool = False,
    device: str = "cpu",
    tokenizer: Any = None,
    progress: Progress | None = None,
    remark: Callable[[str], None],
) -> Runner:
    """The model in a folder, ready to run; `remark` is told if it is not the native engine, or on a GPU.

    The tokenizer is the folder's, loaded if it is not given.
    """
    if backend not in ("auto", "native", "transformers"):
        raise OtaroError(f"there is no backend {backend}: choose auto, native or transformers")
    place = choose(device, engine=backend != "transformers")
    if place == CUDA:
        remark(f"{folder} runs on {describe(place)}; --device cpu uses the CPU")

    def native() -> Runner:
        engine = Engine(
            folder,
            precision,
            threads=threads,
            context=context,
            kv_cache=kv_cache,
            progressive=progressive,
            device=place,
            progress=progress,
        )
        return NativeRunner(engine, tokenizer or load_tokenizer(folder))

    runner = open_native(folder, backend, "transformers", native, remark, place)
    if runner is not None:
        return runner
    for option, given in (("--kv-cache", parse_cache(kv_cache) is not None), ("--progressive", progressive)):
        if given:
            raise OtaroError(f"{option} needs the native engine, which does not run this model")
    from otaro.generation.transformers import TransformersRunner
    from otaro.hf import load

    model = load(folder, precision, device=CUDA if place == CUDA else None, progress=progress)
    return TransformersRunner(model, tokenizer or load_tokenizer(folder), context)
