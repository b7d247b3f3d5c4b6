"""One face for both ways of running a packed model: the native engine, and transformers where that cannot.

`open_runner` picks: the native engine for models it knows, on a CPU; otherwise transformers, and it says why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from transformers import GenerationConfig

from otaro.engine.architecture import UnsupportedError
from otaro.engine.engine import FLOAT16, Engine, parse_cache
from otaro.engine.sampling import Sampling
from otaro.errors import OtaroError
from otaro.generate import GenerationResult, continue_tokens, fitting
from otaro.model_config import context_length
from otaro.ops import cpu
from otaro.precision import Precision
from otaro.progress import Progress
from otaro.tokenizer import load_tokenizer

T = TypeVar("T")


@dataclass(frozen=True)
class Request:
    """What to generate, and how. With `at_most`, fewer tokens will do where the context has no room for all of them."""

    max_new_tokens: int
    sampling: Sampling
    prefill: Precision | None = None
    draft: Precision | None = None
    stop: Sequence[str] = ()
    reuse: bool = False
    at_most: bool = False

    def limit(self, room: int) -> int:
        """How many tokens to generate, 1 at least, where the context has room for so many."""
        return fitting(self.max_new_tokens, room) if self.at_most else self.max_new_tokens


class Runner(Protocol):
    """Runs one model; `tokenizer` is its own."""

    tokenizer: Any

    @property
    def precision(self) -> Precision: ...

    @precision.setter
    def precision(self, precision: Precision) -> None: ...

    @property
    def memory(self) -> int:
        """Bytes that the model takes."""

    @property
    def context(self) -> int:
        """Tokens that a text may have, prompt included."""

    @property
    def longest_context(self) -> int:
        """What `context` could be with this model."""

    def generate(
        self,
        prompt: Sequence[int],
        request: Request,
        on_text: Callable[[str], None] | None = None,
        on_width: Callable[[Precision], None] | None = None,
    ) -> GenerationResult:
        """Go on from a prompt; `on_width` hears the width of the first token, and of later ones if it changes."""

    def check_loading(self) -> None:
        """An error, once, if a part of the weights could not be read in the background."""


class NativeRunner:
    """The C++ engine."""

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
        from otaro.engine.text import generate

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


class TransformersRunner:
    """transformers' own code with packed layers."""

    def __init__(self, model: Any, tokenizer: Any, context: int | None = None) -> None:
        self.model = model
        self.tokenizer = tokenizer
        # Of the folder's settings for generation, as in the native engine, only what ends an answer counts: others
        # could ask for any number of beams, or for code from the hub.
        self.model.generation_config = GenerationConfig(eos_token_id=model.generation_config.eos_token_id)
        self.longest_context = context_length(model)
        if context is not None and context > self.longest_context:
            raise OtaroError(
                f"a context of {context} tokens is not possible: the model's own is {self.longest_context}"
            )
        self.context = context or self.longest_context

    @property
    def precision(self) -> Precision:
        precision: Precision = self.model.precision
        return precision

    @precision.setter
    def precision(self, precision: Precision) -> None:
        self.model.set_precision(precision)

    @property
    def memory(self) -> int:
        tensors = [*self.model.parameters(), *self.model.buffers()]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def generate(
        self,
        prompt: Sequence[int],
        request: Request,
        on_text: Callable[[str], None] | None = None,
        on_width: Callable[[Precision], None] | None = None,
    ) -> GenerationResult:
        for name in ("prefill", "draft"):
            if getattr(request, name) is not None:
                raise OtaroError(f"--{name} needs the native engine, which does not run this model")
        sampling = request.sampling
        settings: dict[str, Any] = {"do_sample": False}
        if sampling.temperature > 0:
            settings = {
                "do_sample": True,
                "temperature": sampling.temperature,
                "top_k": sampling.top_k,
                "top_p": sampling.top_p,
                "min_p": sampling.min_p,
            }
        return continue_tokens(
            self.model,
            self.tokenizer,
            torch.tensor([list(prompt)]),
            max_new_tokens=request.limit(self.context - len(prompt)),
            context=self.context,
            settings={**settings, "repetition_penalty": sampling.repetition_penalty},
            seed=sampling.seed,
            stop=request.stop,
            on_text=on_text,
        )

    def check_loading(self) -> None:
        """All has been read before the first token."""


def open_runner(
    folder: Path,
    precision: Precision | None,
    *,
    backend: str = "auto",
    threads: int | None = None,
    context: int | None = None,
    kv_cache: Precision | str = FLOAT16,
    progressive: bool = False,
    tokenizer: Any = None,
    progress: Progress | None = None,
    remark: Callable[[str], None],
) -> Runner:
    """The model in a folder, ready to run; `remark` is told if it is not the native engine.

    The tokenizer is the folder's, loaded if it is not given.
    """
    import otaro

    if backend not in ("auto", "native", "transformers"):
        raise OtaroError(f"there is no backend {backend}: choose auto, native or transformers")

    def native() -> Runner:
        engine = Engine(
            folder,
            precision,
            threads=threads,
            context=context,
            kv_cache=kv_cache,
            progressive=progressive,
            progress=progress,
        )
        return NativeRunner(engine, tokenizer or load_tokenizer(folder))

    runner = open_native(folder, backend, "transformers", native, remark)
    if runner is not None:
        return runner
    for option, given in (("--kv-cache", parse_cache(kv_cache) is not None), ("--progressive", progressive)):
        if given:
            raise OtaroError(f"{option} needs the native engine, which does not run this model")
    model = otaro.load(folder, precision, progress=progress)
    return TransformersRunner(model, tokenizer or load_tokenizer(folder), context)


def open_native(
    folder: Path, backend: str, other: str, make: Callable[[], T], remark: Callable[[str], None]
) -> T | None:
    """What `make` makes with the native engine, or None if `backend` is the other one, or the engine cannot.

    Then `remark` is told why; asked for the engine and nothing else, it is an error.
    """
    if backend == other:
        return None
    reason = cpu.available()
    if reason is None:
        try:
            return make()
        except UnsupportedError as error:
            reason = str(error)
    if backend == "native":
        raise OtaroError(f"{folder} does not run natively: {reason}")
    remark(f"{folder} runs through {other}: {reason}")
    return None
